"""Engines, clients and backings on one clock, from one seed.

A tick lets clients and faults act, lets each engine execute a step in some order, advances the clock, and checks all
invariants. The world ends when every request has ended and nothing remains, or with the first `ViolationError`.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from penstock.messages.kv_transfer import TransferReport
from penstock.messages.outputs import EngineOutput
from penstock.simulation.backing import Backing, BackingContext
from penstock.simulation.backings import BACKINGS
from penstock.simulation.clients import Clients, LiveRequest
from penstock.simulation.invariants import Contents, check_engine, check_idle
from penstock.simulation.oracle import Answers
from penstock.simulation.proxies import Proxies
from penstock.simulation.ranks import InjectedError
from penstock.simulation.setup import TICK_SECONDS, Setup, engine_name
from penstock.simulation.sim_engine import ReportFaults, SimEngine, make_site
from penstock.simulation.trace import Trace, ViolationError, describe
from penstock.utils.clock import ManualClock
from penstock.utils.errors import ConfigError, EngineDeadError, RequestError, RequestFailedError

_OLD_REPORTS = 24
_EVERYTHING_EVERY = 16
_GRAMMAR_SECONDS = 60.0
_QUIET_SECONDS = 10.0


@dataclass(slots=True)
class RunResult:
    """The result of a world. `violation` is empty if no check failed; `trace` has the events that led to it."""

    digest: str
    num_ticks: int
    violation: str = ""
    trace: list[str] = field(default_factory=list[str])
    counters: dict[str, float] = field(default_factory=dict[str, float])


class World:
    """`make_backing` replaces the backing that the setup names."""

    def __init__(
        self, setup: Setup, seed: str, make_backing: Callable[[BackingContext], Backing] | None = None
    ) -> None:
        self._setup = setup
        self._rng = random.Random(seed)
        self._clock = ManualClock()
        self._trace = Trace()
        self._answers = Answers(setup.layers)
        num_tokens_ahead = max(each.num_tokens_ahead for each in setup.layers)
        self._contents = {size: Contents(size, num_tokens_ahead) for size in (setup.block_size, *setup.block_sizes)}
        self._context = BackingContext(setup, self._clock, random.Random(f"{seed} transport"))
        self._backing = (make_backing or BACKINGS[setup.backing])(self._context)
        self._numbers = {engine_name(number): number for number in range(len(setup.topologies))}
        self._old_reports = {name: deque[TransferReport](maxlen=_OLD_REPORTS) for name in self._numbers}
        self._lives = Counter[str]()
        self._engines: dict[str, SimEngine] = {}
        make_clients = Clients if setup.disaggregation is None else Proxies
        self._clients = make_clients(setup, random.Random(f"{seed} clients"), self._answers, list(self._numbers))
        self._live: dict[str, LiveRequest] = {}
        self._waiting_again: list[LiveRequest] = []
        self._counters: dict[str, float] = {}

    def run(self) -> RunResult:
        """Runs the world. Raises nothing: failures are in the result."""
        limit = self._setup.fault_ticks + self._setup.recovery_ticks
        tick = 0
        try:
            for name in self._numbers:
                self._start(name)
            while not self._is_over():
                if tick == limit:
                    what = f"{len(self._live)} requests" if self._live else "transfers"
                    raise ViolationError(f"{what} have not ended", *self._live)
                self._tick(tick)
                tick += 1
            self._check_end()
        except Exception as error:  # noqa: BLE001 - the result says what it was
            # A world may be refused as a whole; an engine that has started can start again.
            if not isinstance(error, ConfigError) or tick:
                return self._result(tick, *describe(error))
            self._count("refused")
        return self._result(tick)

    def _is_over(self) -> bool:
        everyone_is_done = self._clients.is_done and not self._live and not self._waiting_again
        if not everyone_is_done or any(engine.has_work or engine.num_holds for engine in self._engines.values()):
            return False
        return self._backing.is_settled

    def _tick(self, tick: int) -> None:
        self._trace.tick = tick
        if tick == self._setup.fault_ticks:
            self._context.has_faults = False
        self._act(tick)
        names = list(self._engines)
        self._rng.shuffle(names)
        for name in names:
            # An engine may be slower than the others.
            engine = self._engines[name]
            if engine.needs_step and not self._backing.is_stopped(name) and self._rng.random() < 0.9:
                if engine.is_idle and not (engine.core.has_transfers and self._backing.has_news(name)):
                    raise ViolationError(f"{name} requests a step although it has nothing to do")
                self._step(engine, tick)
        self._clock.advance(TICK_SECONDS)
        self._backing.tick()
        self._backing.check(self._contents[self._setup.block_size].find)

    # ---- Clients and faults ----

    def _act(self, tick: int) -> None:
        rng = self._rng
        again, self._waiting_again = self._waiting_again, []
        for each in [*again, *self._clients.arrivals(tick, self._live)]:
            self._submit(each, tick)
        for engine in self._engines.values():
            if rng.random() < self._setup.traffic.reset and engine.core.reset_prefix_cache():
                self._trace.note(engine.name, "forgets its prefix cache")
        for each in list(self._live.values()):
            if tick - each.submitted_at > self._setup.request_ticks:
                raise ViolationError(f"{each.request.request_id} has not ended in time", each.request.request_id)
            if self._wants_abort(each, tick):
                self._abort(each)
        if self._context.has_faults:
            self._strike(tick)
        pairs = self._setup.disaggregation
        if pairs is not None and tick == pairs.dead_from:
            for name in list(self._engines)[: pairs.num_prefill]:
                self._end(name, tick)
                del self._engines[name]

    def _strike(self, tick: int) -> None:
        rng, faults = self._rng, self._setup.faults
        for name in list(self._engines):
            if rng.random() < faults.crash:
                self._crash(name, tick)
            elif rng.random() < faults.worker_error:
                devices = self._engines[name].devices
                devices.before_stage = partial(_raise_in, rng.randrange(devices.config.pp))
        if rng.random() < faults.disk_loss:
            self._trace.note("world", "the disk loses its files")
            self._count("disk_losses")
            self._backing.restart()

    def _submit(self, each: LiveRequest, tick: int) -> None:
        request = each.request
        if request.request_id in self._live or tick < each.not_before:
            self._waiting_again.append(each)
            return
        if each.engine not in self._engines:
            self._waiting_again += self._clients.redirected(each)
            return
        for contents in self._contents.values():
            contents.add(each.answer, request)
        self._trace.note(each.engine, f"gets {len(request.prompt_token_ids)} tokens as", request.request_id)
        core = self._engines[each.engine].core
        try:
            core.add_request(request)
        except RequestError as error:
            raise ViolationError(f"{request.request_id} was refused: {error}", request.request_id) from error
        except RequestFailedError as error:
            message = f"{request.request_id} could not be added: {error.__cause__}"
            raise ViolationError(message, request.request_id) from error
        try:
            core.add_request(request)
        except RequestError:
            pass
        else:
            raise ViolationError("a second request with the same id was accepted", request.request_id)
        if request.grammar is not None:
            # Its compilation takes no time here, or it would depend on the machine's.
            self._engines[each.engine].scheduler.wait(_GRAMMAR_SECONDS, 0.0)
        each.submitted_at = tick
        self._live[request.request_id] = each

    def _wants_abort(self, each: LiveRequest, tick: int) -> bool:
        if each.abort_at == tick:
            return True
        rate = self._setup.traffic.abort_loading
        if not rate or not self._engines[each.engine].is_waiting_for_kv(each.request.request_id):
            return False
        return self._rng.random() < rate

    def _abort(self, each: LiveRequest) -> None:
        request_id = each.request.request_id
        self._trace.note(each.engine, "aborts", request_id)
        self._count("aborts")
        self._engines[each.engine].core.abort_requests([request_id])
        del self._live[request_id]

    # ---- Engines ----

    def _start(self, name: str) -> None:
        self._lives[name] += 1
        site = make_site(self._setup, name, self._lives[name], self._numbers[name])
        self._trace.note(name, f"begins its life {site.life}")
        parts = self._backing.attach(site)
        engine = SimEngine(site, parts, self._setup, self._answers, self._clock, self._rng, self._trace)
        engine.devices.deliver = ReportFaults(self._context, self._rng, self._old_reports[name], self._count).deliver
        self._engines[name] = engine

    def _crash(self, name: str, tick: int) -> None:
        """Kills the engine's process and starts it again."""
        self._end(name, tick)
        self._start(name)

    def _end(self, name: str, tick: int) -> None:
        """Kills the engine's process with all its requests, whose clients retry."""
        self._trace.note(name, "dies")
        self._count("crashes")
        self._collect_counters(self._engines[name])
        self._backing.crash(name)
        for each in [each for each in self._live.values() if each.engine == name]:
            del self._live[each.request.request_id]
            self._waiting_again += self._clients.again(each, tick)

    def _step(self, engine: SimEngine, tick: int) -> None:
        try:
            report = engine.core.step()
        except EngineDeadError as error:
            if isinstance(error.__cause__, InjectedError):
                self._crash(engine.name, tick)
                return
            raise ViolationError(f"{engine.name} died: {error}") from error
        for event in report.events:
            self._trace.note(engine.name, event.kind, event.request_id)
        for output in report.outputs:
            self._trace.note(
                engine.name, f"delivers {output.new_token_ids} {output.finish_reason} to", output.request_id
            )
            each = self._live[output.request_id]
            each.take(output, may_fail=self._setup.load_failure_policy == "fail" and not self._setup.loads_must_succeed)
            if output.finish_reason is not None:
                self._finish(each, output, tick)
        self._check(engine, everything=self._rng.random() < 1 / _EVERYTHING_EVERY)

    def _check(self, engine: SimEngine, *, everything: bool) -> None:
        contents = self._contents[engine.kv.block_size]
        check_engine(engine, contents, self._backing.touching(engine.name), everything=everything)

    def _finish(self, each: LiveRequest, output: EngineOutput, tick: int) -> None:
        self._count("finished" if output.error is None else "failed")
        del self._live[each.request.request_id]
        if output.error is None:
            self._waiting_again += self._clients.follow_ups(each, output, tick)
        else:
            self._waiting_again += self._clients.after_error(each, tick)

    # ---- The end ----

    def _check_end(self) -> None:
        for engine in self._engines.values():
            self._check(engine, everything=True)
            check_idle(engine)
            self._collect_counters(engine)
        # Bytes sent by dead engines have arrived by now.
        self._clock.advance(_QUIET_SECONDS)
        self._backing.tick()
        self._backing.check_idle()
        for name, value in {**self._backing.counters(), **self._clients.counters}.items():
            self._count(name, value)

    def _count(self, name: str, by: float = 1) -> None:
        self._counters[name] = self._counters.get(name, 0) + by

    def _collect_counters(self, engine: SimEngine) -> None:
        stats = engine.core.stats()
        self._count("steps", engine.num_steps)
        self._count("foreign_results", engine.num_foreign_results)
        self._count("preemptions", stats.num_preemptions)
        self._count("prefix_hit_tokens", stats.prefix_cache_hits)
        self._count("loads", stats.remote_kv.num_loads)
        self._count("failed_loads", stats.remote_kv.num_failed)
        self._count("load_timeouts", stats.remote_kv.num_timeouts)
        self._count("loaded_tokens", stats.remote_kv.num_tokens)
        self._count("drafts", stats.speculation.num_draft_tokens)
        self._count("accepted_drafts", stats.speculation.num_accepted_tokens)
        for name, value in stats.connector.items():
            self._count(name, value)

    def _result(self, tick: int, violation: str = "", subjects: tuple[str, ...] = ()) -> RunResult:
        lines = self._trace.about(subjects) if violation else []
        return RunResult(self._trace.digest(), tick, violation, lines, self._counters)


def _raise_in(dying_stage: int, stage: int) -> None:
    if stage == dying_stage:
        raise InjectedError(f"a worker of stage {stage} fails")
