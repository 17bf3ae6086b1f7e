"""Runs the rows one after the other, each on its own engine, and compares every token with the plain run. The plain run
executes one request at a time, synchronously, with its whole prompt and without a cache. Only its requests and tokens
stay in memory, so there is one engine at a time.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.config.engine import EngineArgs, EngineConfig, resolve
from penstock.engine.build import build_engine
from penstock.engine.engine_core import EngineCore
from penstock.frontend.front_end import build_front_end
from penstock.messages.outputs import FinishReason
from penstock.messages.requests import EngineRequest
from penstock.models.mtp import has_mtp
from penstock.models.sources.opening import open_weights
from penstock.utils.clock import SystemClock
from penstock.utils.errors import ConfigError, EngineDeadError
from penstock.verify.rows import Row, Seen, make_rows, plain_arguments
from penstock.verify.workload import Case, make_cases
from penstock.worker.parts import choose_device

REFERENCE = "plain run"

Progress = Callable[[str, int, int], None]
"""Receives the row, the number of its finished requests, and their total number."""


@dataclass(slots=True)
class Answer:
    """The output of a request so far. `ending` is its finish reason or its error."""

    token_ids: list[int] = field(default_factory=list[int])
    ending: str = ""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of a request's output, at `position`, where None means its end. `num_differing` requests of
    the row differ; `case` is the first of them.
    """

    case: Case
    position: int
    expected: int | None
    got: int | None
    ending: str
    num_differing: int


@dataclass(frozen=True, slots=True)
class RowResult:
    """`is_shown`: every event that the row tests has occurred. `problem`: its engine could not be built, or died."""

    name: str
    arguments: Mapping[str, Any]
    num_requests: int
    num_tokens: int
    happened: str
    is_shown: bool
    seconds: float
    difference: Difference | None = None
    problem: str = ""

    @property
    def agrees(self) -> bool:
        return self.difference is None and not self.problem


def verify(
    args: EngineArgs, prompts: Sequence[str], max_tokens: int, is_quick: bool, on_progress: Progress
) -> Iterator[RowResult]:
    """Yields the plain run, then every row as it ends. Raises ConfigError or RequestError for invalid arguments."""
    config = choose_device(resolve(args))
    if config.speculative is not None and config.speculative.synthetic_acceptance_rates:
        raise ConfigError("rejection_sample_method=synthetic in speculative_config changes tokens on purpose")
    front_end = build_front_end(config, config.scheduler)
    cases = make_cases(front_end, prompts, config.model.vocab_size, max_tokens, is_quick)
    arguments = plain_arguments(args, config, cases)
    plain = Row(REFERENCE, arguments, ())
    result, expected = _run_row(plain, cases, None, on_progress)
    yield result
    if result.problem:
        return
    for row in make_rows(args, config, cases, _has_mtp(config)):
        chosen = [index for index, case in enumerate(cases) if row.takes(case)]
        yield _run_row(row, [cases[i] for i in chosen], [expected[i] for i in chosen], on_progress)[0]


def _has_mtp(config: EngineConfig) -> bool:
    with closing(open_weights(config.model.path, config.load_format, quantization=config.model.quantization)) as source:
        return has_mtp(config.model, source)


def _run_row(
    row: Row, cases: Sequence[Case], expected: Sequence[Answer] | None, on_progress: Progress
) -> tuple[RowResult, list[Answer]]:
    """Runs a row; without `expected` it is the reference, which runs one request at a time."""
    clock, seen = SystemClock(), Seen()
    started = clock.now()
    num_tokens, problem, difference = 0, "", None
    answers: list[Answer] = []
    try:
        with _Engine(row) as engine:
            for run in range(row.repeat):
                answers = engine.run(cases, seen, expected is not None, on_progress, run)
                num_tokens += sum(len(answer.token_ids) for answer in answers)
                difference = difference or _compare(cases, expected or answers, answers)
                if row.forgets:
                    engine.forget()
        # All rows would agree on requests that fail in each of them. A vocabulary may lack what a grammar needs.
        pairs = zip(cases, answers, strict=True)
        failed = [each.ending for case, each in pairs if each.ending != FinishReason.LENGTH and not case.is_structured]
        problem = f"{len(failed)} of {len(cases)} requests failed: {failed[0]}" if failed and expected is None else ""
    except (ConfigError, EngineDeadError) as error:
        problem = str(error)
    signs = [sign(seen) for sign in row.signs]
    result = RowResult(
        name=row.name,
        arguments=row.arguments,
        num_requests=len(cases) * row.repeat,
        num_tokens=num_tokens,
        happened=", ".join(text for text, _ in signs if text),
        is_shown=all(happened for _, happened in signs),
        seconds=clock.now() - started,
        difference=difference,
        problem=problem,
    )
    return result, answers


def _compare(cases: Sequence[Case], expected: Sequence[Answer], answers: Sequence[Answer]) -> Difference | None:
    pairs = [(c, e, a) for c, e, a in zip(cases, expected, answers, strict=True) if e != a]
    if not pairs:
        return None
    case, right, wrong = pairs[0]
    longest = max(len(right.token_ids), len(wrong.token_ids))
    padded = [answer.token_ids + [None] * (longest + 1 - len(answer.token_ids)) for answer in (right, wrong)]
    position = next((i for i, (a, b) in enumerate(zip(*padded, strict=True)) if a != b), longest)
    return Difference(case, position, padded[0][position], padded[1][position], wrong.ending, len(pairs))


class _Engine:
    """A row's engine core, stepped directly so that every step can be inspected."""

    def __init__(self, row: Row) -> None:
        self._row = row

    def __enter__(self) -> _Engine:
        engine = build_engine(resolve(EngineArgs.from_kwargs(**self._row.arguments)))
        self._core, self._limits = engine.core, engine.limits
        return self

    def __exit__(self, *_: object) -> None:
        self._core.shutdown()
        del self._core
        # Free the memory for the next engine.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def forget(self) -> None:
        """Empties the prefix cache."""
        while self._core.has_work or self._core.has_transfers:
            self._core.step()
        assert self._core.reset_prefix_cache(), "blocks are held at idle"

    def run(
        self, cases: Sequence[Case], seen: Seen, is_together: bool, on_progress: Progress, run: int
    ) -> list[Answer]:
        """Runs all cases to their ends, and adds the observed events to `seen`."""
        longest = max(case.num_tokens for case in cases)
        if longest > self._limits.max_model_len:
            raise ConfigError(f"requests of {longest} tokens do not fit max_model_len={self._limits.max_model_len}")
        done, total = run * len(cases), self._row.repeat * len(cases)
        answers = {case.request.request_id: Answer() for case in cases}
        num_at_once = self._limits.max_num_queued_requests if is_together else 1
        for num_ended in drive(self._core, [case.request for case in cases], num_at_once, answers, seen):
            on_progress(self._row.name, done + num_ended, total)
        self._core.check_integrity()
        stats = self._core.stats()
        seen.num_preemptions = stats.num_preemptions
        seen.num_hit_tokens = stats.prefix_cache_hits
        seen.num_loaded_tokens = stats.remote_kv.num_tokens
        seen.speculation = stats.speculation
        seen.num_replayed = stats.num_graph_replays
        constrained = [case.request for case in cases if case.is_structured]
        seen.num_structured = sum(bool(answers[each.request_id].token_ids) for each in constrained)
        seen.num_cut = sum(len(case.request.prompt_token_ids) > self._limits.max_num_batched_tokens for case in cases)
        return list(answers.values())


def drive(
    core: EngineCore, requests: Sequence[EngineRequest], num_at_once: int, answers: Mapping[str, Answer], seen: Seen
) -> Iterator[int]:
    """Steps until all requests have ended; yields the number of finished ones after every step."""
    pending, num_running, num_ended = deque(requests), 0, 0
    while pending or num_running:
        while pending and num_running < num_at_once:
            core.add_request(pending.popleft())
            num_running += 1
        report = core.step()
        seen.max_running = max(seen.max_running, report.stats.num_running)
        seen.num_overlapped += core.num_in_flight > 0
        for output in report.outputs:
            answer = answers[output.request_id]
            answer.token_ids.extend(output.new_token_ids)
            if output.finish_reason is not None:
                answer.ending = output.error or output.finish_reason
                num_running -= 1
                num_ended += 1
        yield num_ended
    while core.has_work or core.has_rows_to_free:
        core.step()
