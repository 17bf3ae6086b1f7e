"""What an audit has found: rows of the table, findings, and the JSON of both."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.audit.blame import Blame
from penstock.audit.compare import Difference, Verdict


class ExitCode(enum.IntEnum):
    CLEAN = 0
    CORRUPTION = 1
    NOT_AUDITED = 2


@dataclass(slots=True)
class Row:
    """The result of a case: counts of requests and of verdicts. `largest` is the largest difference, in nats, that
    rounding explains; `num_cached_tokens` is None if the server does not count prompt tokens from its cache, and
    `has_reused` says whether a compared prompt, no turn of a conversation, had any.
    """

    name: str
    num_requests: int = 0
    verdicts: dict[Verdict, int] = field(default_factory=lambda: dict.fromkeys(Verdict, 0))
    num_failed: int = 0
    largest: float = 0.0
    num_cached_tokens: int | None = None
    has_reused: bool = False
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list[str])
    note: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """A difference, or words of another prompt (then `difference` may be None).

    `witnesses` have the log probabilities of both tokens, by run; `size` is the distance of the two in nats; `wrong` is
    the answer that the scores contradict, None if they contradict neither. `body` is the request, `in_flight` are the
    names of the prompts beside it.
    """

    case: str
    prompt: str
    verdict: Verdict
    size: float | None
    difference: Difference | None
    witnesses: Mapping[str, Mapping[str, float | None]]
    wrong: str | None
    foreign_words: Mapping[str, Sequence[str]]
    blame: Blame | None
    output: str
    body: Mapping[str, Any]
    curl: str
    in_flight: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        if self.difference is not None:
            for side in ("expected", "observed"):
                token = getattr(self.difference, side)
                found["difference"][side] = None if token is None else {"text": token.text, "logprob": token.logprob}
        return found


@dataclass(slots=True)
class Report:
    """`problem` is what ended the audit early, empty if it ran to its end."""

    rows: list[Row] = field(default_factory=list[Row])
    findings: list[Finding] = field(default_factory=list[Finding])
    prompts: dict[str, str] = field(default_factory=dict[str, str])
    problem: str = ""

    @property
    def exit_code(self) -> ExitCode:
        totals = self.totals()
        if totals[Verdict.CORRUPTION]:
            return ExitCode.CORRUPTION
        is_whole = not (self.problem or totals[Verdict.UNCLEAR] or any(row.num_failed for row in self.rows))
        return ExitCode.CLEAN if is_whole and totals[Verdict.EQUAL] + totals[Verdict.ROUNDING] else ExitCode.NOT_AUDITED

    def totals(self) -> dict[Verdict, int]:
        return {verdict: sum(row.verdicts[verdict] for row in self.rows) for verdict in Verdict}

    def to_json(self) -> dict[str, Any]:
        return {
            "exit_code": int(self.exit_code),
            "problem": self.problem,
            "rows": [asdict(row) for row in self.rows],
            "findings": [each.to_json() for each in self.findings],
            "prompts": self.prompts,
        }
