"""A request as the engine core receives it: tokens, not text."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from penstock.messages.adapters import NO_SLOT, Adapter
from penstock.messages.sampling_params import SamplingParams
from penstock.messages.structured_outputs import GrammarSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One completion to generate. `n > 1` has already been split into that many requests.

    `output_token_ids` have been generated before, perhaps elsewhere, and count as output: `max_tokens` includes them.
    `sampling_params` is resolved: `max_tokens` and `seed` are set. `eos_token_ids` are the
    model's end-of-sequence tokens, empty when the request ignores them; `stop_token_ids` are the request's own.
    `second_text_start` is where the second text of a pair begins, 0 where there is none. `dp_rank` is the engine's that
    computes it, among those of its core. With an `adapter`, its LoRA is part of the model.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    max_tokens: int
    seed: int
    output_token_ids: tuple[int, ...] = ()
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    cache_salt: str | None = None
    grammar: GrammarSpec | None = None
    second_text_start: int = 0
    dp_rank: int = 0
    adapter: Adapter | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def kv_scope(self) -> bytes:
        """Requests share KV only if this is equal: the adapter's digest after a byte that no text has, and the salt."""
        salt = (self.cache_salt or "").encode()
        return salt if self.adapter is None else b"\xff" + self.adapter.digest + salt


class RowRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The data that a worker needs for a request besides its tokens; the fields are those of `EngineRequest`, and the
    slot that its adapter has while it runs.
    """

    request_id: str
    num_prompt_tokens: int
    sampling_params: SamplingParams
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    second_text_start: int = 0
    adapter_slot: int = NO_SLOT
