"""Clients: draw requests and their arrival, check how they end, and check every token that they receive."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from penstock.messages.outputs import EngineOutput, FinishReason
from penstock.messages.requests import EngineRequest
from penstock.messages.sampling_params import SamplingParams
from penstock.router.reported_stream import ReportedStream
from penstock.simulation.oracle import VOCAB_SIZE, Answer, Answers, adapter_seed
from penstock.simulation.ranks import FOREIGN_KV
from penstock.simulation.setup import Setup
from penstock.simulation.trace import ViolationError
from penstock.simulation.transcripts import transcript
from penstock.utils.stream_reports import ReportKind, report_line


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request in an engine. `abort_at` is a tick, -1 for never; `next_engine` continues it when it has ended. It
    arrives in tick `not_before` at the earliest.
    """

    request: EngineRequest
    answer: Answer
    expected: list[int]
    engine: str
    abort_at: int
    next_engine: str = ""
    not_before: int = 0
    submitted_at: int = 0
    received: list[int] = field(default_factory=list[int])
    stream: ReportedStream = field(default_factory=ReportedStream)

    def take(self, output: EngineOutput, *, may_fail: bool) -> None:
        """Checks what the engine has delivered. Raises ViolationError for a wrong token, end or error.

        If it `may_fail`, a failed load may end it with an error.
        """
        name = self.request.request_id
        if FOREIGN_KV in output.new_token_ids:
            raise ViolationError(f"{name} got drafts from KV of another request", name)
        is_last = output.finish_reason is not None
        self.received += read_data(self.stream.feed(report(output.new_token_ids, is_last=is_last), is_last))
        if self.received != self.expected[: len(self.received)]:
            at = next(i for i, token in enumerate(self.received) if [token] != self.expected[i : i + 1])
            raise ViolationError(f"{name} got a wrong token at position {at} of its output", name)
        match output.finish_reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                if self.received != self.expected:
                    raise ViolationError(
                        f"{name} ended after {len(self.received)} of {len(self.expected)} tokens", name
                    )
            case FinishReason.ERROR:
                if not may_fail or "kv_load_failure_policy" not in (output.error or ""):
                    raise ViolationError(f"{name} ended with an error: {output.error}", name)
            case FinishReason.ABORT:
                raise ViolationError(f"{name} was aborted although no client asked for it", name)
            case None:
                pass


def report(token_ids: Sequence[int], *, is_last: bool) -> bytes:
    """Returns the event in which a server reports these tokens of a stream."""
    line = report_line(ReportKind.LAST if is_last else ReportKind.TOKENS, token_ids)
    return line + f"data: {json.dumps(list(token_ids))}\n\n".encode()


def read_data(events: bytes) -> list[int]:
    """Returns the tokens that a client reads from events."""
    return [token for event in events.split(b"\n\n")[:-1] for token in json.loads(event.removeprefix(b"data: "))]


class Clients:
    """Draws requests. `names` are the engines."""

    def __init__(self, setup: Setup, rng: random.Random, answers: Answers, names: list[str]) -> None:
        self._setup = setup
        self._traffic = setup.traffic
        self._rng = rng
        self._answers = answers
        self._names = names
        self._stems = [self._random_tokens(self._traffic.max_stem) for _ in range(self._traffic.num_stems)]
        self._used_ids: list[str] = []
        self._num_drawn = 0
        self.counters = Counter[str]()

    @property
    def is_done(self) -> bool:
        """Whether all requests have been drawn."""
        return self._num_drawn >= self._traffic.num_requests

    def arrivals(self, tick: int, live: dict[str, LiveRequest]) -> list[LiveRequest]:
        """Returns the requests that arrive in this tick."""
        if self.is_done or self._rng.random() >= self._traffic.arrival:
            return []
        self._num_drawn += 1
        return [self._draw(tick, live)]

    def again(self, lost: LiveRequest, tick: int) -> list[LiveRequest]:
        """Returns the retry of a request that was lost with its engine."""
        abort_at = self._abort_at(tick)
        if self._traffic.continues and lost.received:
            return [self._continued(lost, abort_at)]
        return [LiveRequest(lost.request, lost.answer, lost.expected, lost.engine, abort_at, lost.next_engine)]

    def _continued(self, lost: LiveRequest, abort_at: int) -> LiveRequest:
        """Returns the rest of an answer, of whose next event the client may have received a part."""
        event = report(lost.expected[len(lost.received) :], is_last=False)
        assert not lost.stream.feed(event[: self._rng.randrange(len(event))], False), "half an event is none"
        lost.stream.restart()
        self.counters["continued"] += 1
        request = replace(lost.request, output_token_ids=tuple(lost.stream.token_ids[0]))
        engine = self._rng.choice(self._names)
        return LiveRequest(
            request, lost.answer, lost.expected, engine, abort_at, received=lost.received, stream=lost.stream
        )

    def after_error(self, failed: LiveRequest, tick: int) -> list[LiveRequest]:
        """Returns the retry of a request that ended with an error, if its client retries."""
        return []

    def redirected(self, each: LiveRequest) -> list[LiveRequest]:
        """Returns the replacement of a request whose engine is down for good."""
        raise AssertionError(f"{each.engine} is gone, and {each.request.request_id} is for it")

    def follow_ups(self, done: LiveRequest, output: EngineOutput, tick: int) -> list[LiveRequest]:
        """Returns the requests that follow a successful one: after a prefill in one engine, the whole request in
        another.
        """
        if not done.next_engine:
            return []
        request = self._with_output(done.request, self._traffic.max_output)
        expected = self._expected(request, done.answer)
        return [LiveRequest(request, done.answer, expected, done.next_engine, self._abort_at(tick))]

    def _draw(self, tick: int, live: dict[str, LiveRequest]) -> LiveRequest:
        rng, traffic = self._rng, self._traffic
        prompt = tuple(self._prompt())
        # Other scenarios draw nothing for it.
        adapter = rng.choice(traffic.adapters) if len(traffic.adapters) > 1 else None
        answer = self._answers.of(prompt, adapter_seed(adapter))
        max_tokens = min(rng.randrange(1, traffic.max_output + 1), self._setup.max_model_len - len(prompt))
        stop: frozenset[int] = frozenset()
        if rng.random() < traffic.stop:
            stop = frozenset([rng.choice(answer.output(max_tokens))])
        request = EngineRequest(
            request_id=self._request_id(live),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(
                temperature=0.0, max_tokens=max_tokens, num_speculative_tokens=rng.choice([None, None, None, 0, 2])
            ),
            max_tokens=max_tokens,
            seed=0,
            stop_token_ids=stop,
            priority=rng.randrange(3),
            cache_salt=rng.choice(traffic.salts),
            adapter=adapter,
        )
        if rng.random() < traffic.grammars:
            request = replace(request, grammar=transcript(self._expected(request, answer)))
        engine = rng.choice(self._names)
        if not traffic.handoff:
            return LiveRequest(request, answer, self._expected(request, answer), engine, self._abort_at(tick))
        request = self._with_output(request, 1)
        other = rng.choice([name for name in self._names if name != engine])
        return LiveRequest(request, answer, self._expected(request, answer), engine, self._abort_at(tick), other)

    def _with_output(self, request: EngineRequest, max_tokens: int) -> EngineRequest:
        most = min(max_tokens, self._setup.max_model_len - len(request.prompt_token_ids))
        params = SamplingParams(temperature=0.0, max_tokens=most)
        return replace(request, sampling_params=params, max_tokens=most, stop_token_ids=frozenset(), priority=0)

    def _prompt(self) -> list[int]:
        rng, traffic = self._rng, self._traffic
        stem = rng.choice(self._stems)
        # Prefix caches tend to fail at whole blocks, and at one token more or less.
        size = self._setup.block_size
        length = rng.choice([rng.randrange(len(stem) + 1), rng.randrange(len(stem) // size + 1) * size])
        suffix = rng.choice([0, 0, 1, rng.randrange(traffic.max_suffix + 1)])
        prompt = stem[:length] + self._random_tokens(suffix)
        return prompt or self._random_tokens(1)

    def _request_id(self, live: dict[str, LiveRequest]) -> str:
        free = [name for name in self._used_ids if name not in live]
        if free and self._rng.random() < self._traffic.reuse:
            return self._rng.choice(free)
        self._used_ids.append(f"r{len(self._used_ids)}")
        return self._used_ids[-1]

    def _random_tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(VOCAB_SIZE) for _ in range(count)]

    def _abort_at(self, tick: int) -> int:
        if self._rng.random() < self._traffic.abort:
            return tick + self._rng.randrange(30)
        return -1

    @staticmethod
    def _expected(request: EngineRequest, answer: Answer) -> list[int]:
        tokens = answer.output(request.max_tokens)
        stops = [index for index, token in enumerate(tokens) if token in request.stop_token_ids]
        return tokens[: stops[0] + 1] if stops else tokens
