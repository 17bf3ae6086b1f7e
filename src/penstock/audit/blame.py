"""Whose state a wrong output came from: the prompt under which the server itself would have written it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.audit.compare import gap
from penstock.audit.endpoint import CHAT, Ask, Endpoint, texts_of

_MAX_CANDIDATES = 12
_NUM_SCORED = 3
# In nats: by chance another prompt makes a few tokens a little more probable, but hardly 20 times.
_CLEARLY = 3.0
MAX_REQUESTS = (_MAX_CANDIDATES + 1) * _NUM_SCORED


@dataclass(frozen=True, slots=True)
class Candidate:
    """A prompt that was in flight or earlier, as the texts of its conversation."""

    name: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Blame:
    """`name` is the prompt, None if none explains the output; `evidence` says why, as a sentence's end."""

    name: str | None
    evidence: str


async def find_blame(
    endpoint: Endpoint, own: Candidate, others: Sequence[Candidate], common: str, wrong: Sequence[str], margin: float
) -> Blame:
    """Scores the first wrong tokens after `common`, the output so far, under each prompt. Raises PeerError.

    A prompt explains them if the server would emit each of them there: within `margin` of its most probable token.
    Sends at most `MAX_REQUESTS` requests.
    """
    wrong = wrong[:_NUM_SCORED]
    if not wrong or not endpoint.served.num_top or endpoint.served.path == CHAT:
        return Blame(None, "the server does not report what would tell")
    tried = list(others[:_MAX_CANDIDATES])
    if endpoint.served.has_echo:
        scores = {
            each.name: await endpoint.echoed("".join(each.parts) + common, "".join(wrong)) for each in (own, *tried)
        }
        known = {name: score for name, score in scores.items() if score is not None}
        best = max(known, key=lambda name: known[name], default=None)
        is_probable = best is not None and known[best] > -_CLEARLY * len(wrong)
        if best is None or not is_probable or known[best] - known.get(own.name, 0.0) < _CLEARLY:
            return Blame(None, f"none of {len(tried)} other prompts makes it probable, and clearly more so")
        text = f"its log probability is {known[best]:.2f} there"
        return Blame(best, f"{text}, and {known[own.name]:.2f} under its own prompt" if own.name in known else text)
    left, num_scored = tried, 0
    for position, token in enumerate(wrong):
        so_far = common + "".join(wrong[:position])
        gaps = {each.name: await _gap(endpoint, each, so_far, token) for each in left}
        explained = [each for each in left if (found := gaps[each.name]) is not None and found <= margin]
        if not explained:
            return Blame(None, f"none of {len(tried)} other prompts makes its first {position + 1} tokens probable")
        left, num_scored = explained, position + 1
        if len(left) == 1 and num_scored > 1:
            break
    if len(left) > 1:
        return Blame(None, f"{len(left)} of {len(tried)} other prompts make its first {num_scored} tokens probable")
    return Blame(left[0].name, f"the server would emit the first {num_scored} of its tokens there")


async def _gap(endpoint: Endpoint, candidate: Candidate, so_far: str, token: str) -> float | None:
    top = await endpoint.top_after(Ask(texts_of(candidate.parts, so_far), 1), None)
    return gap(top, token) if token in top else None
