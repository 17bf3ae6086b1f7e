"""The requests of an audit, case by case, and what they cost: made before the first of them is sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.audit.prompts import Prompt, PromptMaker

_LINES = 12
_NUM_TURNS = 3
_NUM_CONVERSATIONS = 2
_NUM_LONG = 2
_CUTS = tuple(number / 16 for number in range(2, 16))
_SHARES = (0.3, 0.8)
_DONOR_CUTS = (0.35, 0.6, 0.85)
_MAX_FILLER_TOKENS = 1024
_NOT_NEW = "prompts were cached before: another --seed makes new ones"
_NOT_EVICTED = "prompts were still cached: raise --pressure-tokens"
_ROOM = 0.75
"""Of the server's longest context, the share that a long prompt may take: its length is only estimated."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much to send. Lengths in tokens; `pressure_tokens` is the size of what is sent to evict cached KV."""

    num_prompts: int
    max_tokens: int
    long_tokens: int
    pressure_tokens: int


@dataclass(frozen=True, slots=True)
class Planned:
    """One request. The first answer to a prompt is its reference, the others are compared with it.

    `is_kept` is False for requests that only prepare others: their answers are not compared. With `continues_at`, a
    share from 0 to 1, the prompt includes the beginning of the reference, and the rest is compared.
    """

    prompt: Prompt
    max_tokens: int
    is_streamed: bool = False
    is_kept: bool = True
    continues_at: float | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Requests that are sent one after the other, or all at once."""

    requests: tuple[Planned, ...]
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table. `is_against`: sent to the second server; `waits_for_restart`: after a pause;
    `note_if_reused` is for the user if prompts were found in the server's cache.
    """

    name: str
    steps: tuple[Step, ...]
    is_against: bool = False
    waits_for_restart: bool = False
    note_if_reused: str = ""

    @property
    def requests(self) -> Iterator[Planned]:
        return (planned for step in self.steps for planned in step.requests)


class Planner:
    """Makes the cases for a server that divides text into tokens of `characters_per_token` on average."""

    def __init__(self, maker: PromptMaker, size: Size, characters_per_token: float, max_model_len: int | None) -> None:
        self._maker = maker
        self._size = size
        self._per_token = characters_per_token
        self._num_fillers = 0
        self.short = [maker.document(f"prompt {number}", _LINES) for number in range(1, size.num_prompts + 1)]
        line_tokens = len(self.short[0].own) / _LINES / self._per_token
        limit = size.long_tokens if max_model_len is None else int(max_model_len * _ROOM) - size.max_tokens
        self._long_lines = max(_LINES, int(min(size.long_tokens, limit) / line_tokens))
        self._filler_lines = min(self._long_lines, max(1, int(_MAX_FILLER_TOKENS / line_tokens)))
        self.long = [maker.document(f"long prompt {number}", self._long_lines) for number in range(1, _NUM_LONG + 1)]
        self.conversations = [self._conversation(prompt) for prompt in self.short[:_NUM_CONVERSATIONS]]

    def cases(self, *, has_second: bool, has_restart: bool) -> list[Case]:
        """Returns the cases in the order in which they are sent; the first makes the references."""
        turns = [turn for conversation in self.conversations for turn in conversation]
        every = [*self.short, *self.long, *turns]
        alone = self._each(every)
        cases = [
            Case("alone", (alone,), note_if_reused=_NOT_NEW),
            Case("repeated", (alone,)),
            Case("streamed", (self._each(every, is_streamed=True),)),
            Case("continued in the middle", self._continuations()),
            Case("in company", (self._each([*self.short, *self.long, *self.short], at_once=True),) * 2),
            Case("after pressure", (self._filler(), self._each(self.short, at_once=True)), note_if_reused=_NOT_EVICTED),
            Case("after a shared prefix", self._shared_prefixes()),
            Case("prefix split at many places", self._splits()),
            Case("turns of a conversation", self._turns()),
            Case("long prompts", (self._filler(), self._each(self.long), self._each([*self.long, *self.short], True))),
        ]
        if has_second:
            cases.append(Case("the second server", (alone, self._each(self.short, at_once=True)), is_against=True))
        if has_restart:
            cases.append(Case("after a restart", (alone,), waits_for_restart=True))
        return cases

    def num_tokens(self, prompt: Prompt) -> int:
        """About how many tokens a prompt has."""
        before = 0 if prompt.parent is None else self.num_tokens(prompt.parent) + self._size.max_tokens
        return before + round(len(prompt.own) / self._per_token)

    def _each(self, prompts: Sequence[Prompt], at_once: bool = False, *, is_streamed: bool = False) -> Step:
        return Step(tuple(Planned(each, self._size.max_tokens, is_streamed) for each in prompts), at_once)

    def _conversation(self, first: Prompt) -> list[Prompt]:
        turns = [first]
        for number in range(2, _NUM_TURNS + 1):
            turns.append(self._maker.turn(turns[-1], number, _LINES))
        return turns[1:]

    def _continuations(self) -> tuple[Step, ...]:
        """Prompts that include the beginning of an answer: what one step computed each, another computes at once."""
        return tuple(
            Step(tuple(Planned(each, self._size.max_tokens, continues_at=share) for each in (*self.short, *self.long)))
            for share in _SHARES
        )

    def _filler(self) -> Step:
        """Prompts that nothing else begins with, to take the place of what is cached."""
        prompts: list[Prompt] = []
        num_tokens = 0
        while num_tokens < self._size.pressure_tokens:
            self._num_fillers += 1
            prompts.append(self._maker.document(f"filler {self._num_fillers}", self._filler_lines))
            num_tokens += self.num_tokens(prompts[-1])
        return Step(tuple(Planned(each, 1, is_kept=False) for each in prompts), at_once=True)

    def _shared_prefixes(self) -> tuple[Step, ...]:
        """Other requests compute the beginnings first, then at the same time."""
        donors = [
            Planned(self._maker.beginning(prompt, share), 4, is_kept=False)
            for prompt in self.short
            for share in _DONOR_CUTS
        ]
        compared = self._each(self.short)
        return (
            self._filler(),
            Step(tuple(donors), at_once=True),
            compared,
            self._filler(),
            Step((*donors, *compared.requests), at_once=True),
        )

    def _splits(self) -> tuple[Step, ...]:
        """Each prompt grows from one cut to the next, so that every request finds the one before in the cache."""
        steps = [self._filler()]
        for prompt in (self.short[-1], self.long[-1]):
            cuts = [Planned(self._maker.beginning(prompt, share), 1, is_kept=False) for share in _CUTS]
            steps.append(Step((*cuts, *self._each([prompt]).requests)))
        return tuple(steps)

    def _turns(self) -> tuple[Step, ...]:
        """The turns from the last to the first, and in order: their references have been computed in order."""
        turns = [turn for conversation in self.conversations for turn in conversation]
        return (self._filler(), self._each(turns[::-1]), self._each(turns), self._each(turns, at_once=True))
