"""Runs the cases of a plan against a server, compares each answer with its reference, and examines differences."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.audit import blame
from penstock.audit.answers import Answer
from penstock.audit.blame import Blame, Candidate, find_blame
from penstock.audit.compare import (
    Difference,
    Judgement,
    Top,
    Verdict,
    drift,
    emits_most_probable,
    first_difference,
    foreign_words,
    gap,
    judge,
)  # fmt: skip
from penstock.audit.endpoint import CHAT, Ask, Endpoint, texts_of
from penstock.audit.plan import Case, Planned, Step
from penstock.audit.prompts import Prompt
from penstock.audit.report import Finding, Report, Row
from penstock.utils.clock import Clock
from penstock.utils.errors import ConfigError, PeerError

_MAX_SCORED = 24
_MAX_BLAMED = 3
# Two servers may score each difference, and echo may be asked for two tokens.
MAX_EXTRA_REQUESTS = 4 * _MAX_SCORED + _MAX_BLAMED * blame.MAX_REQUESTS
_MAX_FAILURES_IN_A_ROW = 5
_MAX_FAILURES_SHOWN = 3
REFERENCE, THIS = "the reference", "this answer"
_NOT_GREEDY = "tokens are not the most probable ones: the server has a penalty or samples; choices prove nothing"
_AGAIN, _SECOND = "scored again", "scored by the second server"


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the audit tells its caller: `on_request` after each planned request, `on_row` after each case. `pause`
    waits until the user has restarted the server.
    """

    on_request: Callable[[str], None]
    on_row: Callable[[Row], None]
    pause: Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Observed:
    """One answer, the reference that it is compared with, which may be itself, and what was beside it."""

    planned: Planned
    ask: Ask
    answer: Answer
    reference: Answer
    in_flight: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Compared:
    """What the comparison of an answer with its reference has shown."""

    judgement: Judgement
    difference: Difference | None
    witnesses: Mapping[str, Top]
    reference: Answer
    foreign_words: Mapping[str, list[str]]


class _StoppedError(PeerError):
    """The server has failed too often."""


class Audit:
    """`report` grows while the audit runs, and is valid whenever it is stopped."""

    def __init__(self, server: Endpoint, second: Endpoint | None, margin: float, clock: Clock, hooks: Hooks) -> None:
        self.report = Report()
        self._server = server
        self._second = second
        self._margin = margin
        self._clock = clock
        self._hooks = hooks
        self._references: dict[str, Answer] = {}
        self._asked: dict[str, Prompt] = {}
        self._is_greedy = True
        self._num_failures_in_a_row = 0
        self._num_scored = self._num_blamed = 0

    async def run(self, cases: Sequence[Case]) -> Report:
        try:
            for case in cases:
                await self._run_case(case)
        except (_StoppedError, ConfigError) as error:
            self.report.problem = str(error)
        return self.report

    async def _run_case(self, case: Case) -> None:
        if case.waits_for_restart:
            await self._hooks.pause()
            await self._server.wait_until_up()
        endpoint = self._second if case.is_against and self._second is not None else self._server
        row = Row(case.name)
        self.report.rows.append(row)
        started = self._clock.now()
        try:
            for step in case.steps:
                observed = await self._run_step(step, endpoint, row)
                for each in observed:
                    await self._compare(each, endpoint, row)
        finally:
            row.seconds = self._clock.now() - started
            if row is self.report.rows[0] and not emits_most_probable(self._references.values(), self._margin):
                self._is_greedy = False
                row.note = _NOT_GREEDY
            elif row.has_reused and case.note_if_reused:
                row.note = case.note_if_reused
            self._hooks.on_row(row)

    # ---- Requests ----

    async def _run_step(self, step: Step, endpoint: Endpoint, row: Row) -> list[_Observed]:
        if step.at_once:
            found = await asyncio.gather(*(self._request(each, step, endpoint, row) for each in step.requests))
        else:
            found = [await self._request(each, step, endpoint, row) for each in step.requests]
        if self._num_failures_in_a_row >= _MAX_FAILURES_IN_A_ROW:
            await self._stop_if_dead(endpoint, row)
        return [each for each in found if each is not None]

    async def _request(self, planned: Planned, step: Step, endpoint: Endpoint, row: Row) -> _Observed | None:
        prompt = planned.prompt
        in_flight = tuple(each.prompt.name for each in step.requests if each is not planned) if step.at_once else ()
        row.num_requests += 1
        try:
            if self._num_failures_in_a_row >= _MAX_FAILURES_IN_A_ROW and not step.at_once:
                await self._stop_if_dead(endpoint, row)
            ask = Ask(self._parts(prompt), planned.max_tokens, planned.is_streamed)
            reference = self._references.get(prompt.name)
            if planned.continues_at is not None:
                ask, reference = self._continuation(ask, reference, planned.continues_at)
                if reference is None:
                    row.num_requests -= 1
                    return None
            self._asked[prompt.name] = prompt
            answer = await endpoint.generate(ask)
            if planned.is_kept and reference is None and not answer.text:
                raise PeerError("the answer is empty: there is nothing to compare")
        except _StoppedError:
            raise
        except PeerError as error:
            row.num_failed += 1
            self._num_failures_in_a_row += 1
            if len(row.failures) < _MAX_FAILURES_SHOWN:
                row.failures.append(f"{prompt.name}: {error}")
            return None
        finally:
            self._hooks.on_request(row.name)
        self._num_failures_in_a_row = 0
        if answer.num_cached_tokens is not None:
            row.num_cached_tokens = (row.num_cached_tokens or 0) + answer.num_cached_tokens
        if not planned.is_kept:
            return None
        row.has_reused |= prompt.parent is None and bool(answer.num_cached_tokens)
        # Here and not when it is compared: the next request of the step may be its conversation's next turn.
        reference = reference or self._references.setdefault(prompt.name, answer)
        if planned.continues_at is not None and answer.num_prompt_tokens != reference.num_prompt_tokens:
            row.note = "some texts are divided into other tokens as prompts, and were not compared"
            return None
        return _Observed(planned, ask, answer, reference, in_flight)

    async def _stop_if_dead(self, endpoint: Endpoint, row: Row) -> None:
        """Raises _StoppedError if the server is gone, or only fails."""
        reason = f"{self._num_failures_in_a_row} requests in a row failed, the last ones in the case {row.name!r}"
        if not await endpoint.is_up():
            raise _StoppedError(f"{endpoint.url} does not answer any more: {reason}")
        if self._num_failures_in_a_row >= 4 * _MAX_FAILURES_IN_A_ROW:
            raise _StoppedError(f"{endpoint.url} fails: {reason}")

    def _parts(self, prompt: Prompt) -> tuple[str, ...]:
        """The texts of a conversation up to this turn. Raises PeerError if an earlier turn has no answer."""
        if prompt.parent is None:
            return (prompt.own,)
        if prompt.parent.name not in self._references:
            raise PeerError("the turn before it has no answer")
        return (*self._parts(prompt.parent), self._references[prompt.parent.name].text, prompt.own)

    def _continuation(self, ask: Ask, reference: Answer | None, share: float) -> tuple[Ask, Answer | None]:
        """Returns the request for the rest of an answer after its first `share` of tokens, and that rest, None if it is
        not known in tokens.
        """
        if reference is None or self._server.served.path == CHAT or len(reference.tokens) < 2:
            return ask, None
        count = max(1, int(len(reference.tokens) * share))
        common = "".join(token.text for token in reference.tokens[:count])
        if not reference.text.startswith(common):
            return ask, None
        ids = _prompt_ids(reference, count)
        rest = replace(
            reference,
            text=reference.text[len(common) :],
            tokens=reference.tokens[count:],
            num_prompt_tokens=None if reference.num_prompt_tokens is None else reference.num_prompt_tokens + count,
            prompt_ids=ids,
        )
        return Ask(texts_of(ask.parts, common), len(rest.tokens), prompt_ids=ids), rest

    # ---- Comparison ----

    async def _compare(self, observed: _Observed, endpoint: Endpoint, row: Row) -> None:
        answer, reference = observed.answer, observed.reference
        if reference is answer:
            if foreign := self._foreign_words(observed):
                found = _Compared(Judgement(Verdict.CORRUPTION), None, {}, answer, foreign)
                self.report.findings.append(await self._finding(observed, row, endpoint, found))
                row.verdicts[Verdict.CORRUPTION] += 1
            return
        row.largest = max(row.largest, min(drift(reference, answer), self._margin))
        difference = first_difference(reference, answer, self._margin)
        if difference is None:
            row.verdicts[Verdict.EQUAL] += 1
            return
        witnesses = await self._witnesses(difference, reference, observed, endpoint)
        judgement = judge(difference, witnesses.values(), self._margin, is_greedy=self._is_greedy)
        foreign = self._foreign_words(observed)
        if foreign:
            judgement = Judgement(Verdict.CORRUPTION, judgement.size)
        elif judgement.verdict is Verdict.UNCLEAR and self._is_greedy:
            judgement = await self._judge_by_echo(difference, observed, judgement)
        if judgement.verdict is Verdict.ROUNDING:
            row.largest = max(row.largest, judgement.size or 0.0)
        found = _Compared(judgement, difference, witnesses, reference, foreign)
        self.report.findings.append(await self._finding(observed, row, endpoint, found))
        row.verdicts[judgement.verdict] += 1

    async def _witnesses(
        self, difference: Difference, reference: Answer, observed: _Observed, endpoint: Endpoint
    ) -> dict[str, Top]:
        """Returns the log probabilities at a difference: of both answers, and of a new request for the common output.

        The new request is sent to both servers, if there are two.
        """
        witnesses: dict[str, Top] = {}
        for name, token in ((REFERENCE, difference.expected), (THIS, difference.observed)):
            if token is not None:
                witnesses[name] = token.top
        may_ask = self._num_scored < _MAX_SCORED and self._server.served.path != CHAT
        if difference.position is None or not may_ask:
            return witnesses
        self._num_scored += 1
        count = None
        if reference.num_prompt_tokens is not None:
            count = reference.num_prompt_tokens + difference.position
        ids = _prompt_ids(reference, difference.position)
        ask = Ask(texts_of(observed.ask.parts, difference.common), 1, prompt_ids=ids)
        for name, each in ((_AGAIN, self._server), (_SECOND, endpoint)):
            if name == _AGAIN or each is not self._server:
                try:
                    witnesses[name] = await each.top_after(ask, count)
                except PeerError:
                    continue
        return witnesses

    async def _judge_by_echo(self, difference: Difference, observed: _Observed, before: Judgement) -> Judgement:
        """Asks for the scores of both tokens as parts of a prompt, where one is not among the most probable."""
        one, other = difference.expected, difference.observed
        if not self._server.served.has_echo or one is None or other is None or one.text == other.text:
            return before
        try:
            text = "".join(observed.ask.parts) + difference.common
            scores = [await self._server.echoed(text, token.text) for token in (one, other)]
        except PeerError:
            return before
        if scores[0] is None or scores[1] is None:
            return before
        size = abs(scores[0] - scores[1])
        return Judgement(Verdict.CORRUPTION if size > self._margin else Verdict.ROUNDING, size)

    def _foreign_words(self, observed: _Observed) -> dict[str, list[str]]:
        others = {name: each.words for name, each in self._asked.items()}
        return foreign_words(observed.answer.text, "".join(observed.ask.parts), others)

    # ---- Report ----

    async def _finding(self, observed: _Observed, row: Row, endpoint: Endpoint, compared: _Compared) -> Finding:
        prompt, difference = observed.planned.prompt, compared.difference
        is_corrupt = compared.judgement.verdict is Verdict.CORRUPTION
        wrong = self._wrong(compared) if is_corrupt else None
        found_blame = await self._blame(observed, compared, wrong) if is_corrupt else None
        names = [prompt.name, *observed.in_flight, *([found_blame.name] if found_blame and found_blame.name else ())]
        self.report.prompts |= {name: "".join(self._parts(self._asked[name])) for name in names if name in self._asked}
        tokens = {"expected": difference.expected, "observed": difference.observed} if difference else {}
        return Finding(
            case=row.name,
            prompt=prompt.name,
            verdict=compared.judgement.verdict,
            size=compared.judgement.size,
            difference=difference,
            witnesses={
                run: {side: None if token is None else top.get(token.text) for side, token in tokens.items()}
                for run, top in compared.witnesses.items()
            },
            wrong=wrong,
            foreign_words=compared.foreign_words,
            blame=found_blame,
            output=observed.answer.text,
            body=endpoint.body(observed.ask),
            curl=endpoint.curl(observed.ask),
            in_flight=observed.in_flight,
        )

    def _wrong(self, compared: _Compared) -> str | None:
        """Which of the two answers the new request contradicts, None if it contradicts neither."""
        top, difference = compared.witnesses.get(_AGAIN), compared.difference
        if difference is None or not top:
            return None
        one, other = difference.expected, difference.observed
        if one is not None and other is not None and one.is_same(other):
            far = [abs((token.logprob or 0.0) - top.get(token.text, min(top.values()))) for token in (one, other)]
        else:
            far = [0.0 if token is None else gap(top, token.text) for token in (one, other)]
        if max(far) <= self._margin:
            return None
        return REFERENCE if far[0] > far[1] else THIS

    async def _blame(self, observed: _Observed, compared: _Compared, wrong: str | None) -> Blame | None:
        foreign, difference = compared.foreign_words, compared.difference
        if foreign:
            name = max(foreign, key=lambda each: (len(foreign[each]), each in observed.in_flight))
            return Blame(name, f"its words are in the output: {', '.join(foreign[name][:4])}")
        if difference is None or difference.position is None or self._num_blamed >= _MAX_BLAMED:
            return None
        self._num_blamed += 1
        own = observed.planned.prompt
        names = dict.fromkeys((*observed.in_flight, *reversed(self._asked)))
        # Prompts that share words are parts of one text: they explain each other's outputs.
        others = [
            Candidate(name, self._parts(self._asked[name]))
            for name in names
            if name in self._asked and not self._asked[name].words & own.words
        ]
        answer = compared.reference if wrong == REFERENCE else observed.answer
        tokens = [token.text for token in answer.tokens[difference.position :]]
        own_candidate = Candidate(own.name, observed.ask.parts)
        try:
            return await find_blame(self._server, own_candidate, others, difference.common, tokens, self._margin)
        except PeerError as error:
            return Blame(None, f"the server failed when it was asked: {error}")


def _prompt_ids(reference: Answer, num_tokens: int) -> tuple[int, ...]:
    """The token ids of a prompt and of the first `num_tokens` of its answer; none if the server returns no ids."""
    ids = [token.token_id for token in reference.tokens[:num_tokens] if token.token_id is not None]
    return (*reference.prompt_ids, *ids) if reference.prompt_ids and len(ids) == num_tokens else ()
