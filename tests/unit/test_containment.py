"""An unexpected exception that concerns one request ends this request: it is logged, and the engine goes on."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config.engine import SchedulerConfig
from penstock.config.kv_transfer import parse_kv_transfer_config
from penstock.core.kv_cache_manager import KVCacheManager
from penstock.core.remote_kv import KVTransfer
from penstock.core.scheduler import Scheduler
from penstock.core.structured_output import StructuredOutputs
from penstock.engine.core_messages import CODEC, Refusal, Refused
from penstock.engine.core_process import CoreProcess
from penstock.engine.engine_core import EngineCore
from penstock.engine.joint_cores import JointCores
from penstock.executor.executor import Executor
from penstock.kv_transfer.connector import ConnectorEvent, LoadEnded, Match, RequestView, SchedulerConnector
from penstock.kv_transfer.factory import ConnectorContext, make_scheduler_connector
from penstock.kv_transfer.multi import MultiScheduler
from penstock.kv_transfer.null import NullSchedulerConnector
from penstock.messages.kv_cache_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from penstock.messages.kv_transfer import KVConnectorOutput, TransferId
from penstock.messages.outputs import EngineOutput, FinishReason
from penstock.messages.requests import EngineRequest
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.sampling_params import SamplingParams
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.messages.structured_outputs import GrammarSpec
from penstock.utils.child_process import Channel
from penstock.utils.errors import EngineDeadError, OverloadedError, RequestError, RequestFailedError
from penstock.utils.hosts import free_port
from penstock.utils.wire import FrameReader

GROUP = KVCacheGroup(("layer.0",), KVCacheSpec.keys_and_values(1, 1, "float32"))
CACHE = KVCacheConfig(24, 4, (GROUP,))
CONFIG = SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=4, max_model_len=20)
POISON = "poison"
MESSAGE = "the engine failed on this request; its log says why"


class BrokenConnector(NullSchedulerConnector):
    """Raises in one of its methods for the request POISON, with any exception; knows which requests it was told of."""

    def __init__(self, where: str = "", error: Exception | None = None, match: Match | None = None) -> None:
        self._where = where
        self._error = error or AssertionError("a bug")
        self._match = Match() if match is None else match
        self.known: set[str] = set()
        self.begun: list[TransferId] = []
        self.events: list[ConnectorEvent] = []

    def _break(self, where: str, request: RequestView) -> None:
        if where == self._where and request.request_id == POISON:
            raise self._error

    def on_new_request(self, request: RequestView) -> None:
        self._break("on_new_request", request)
        self.known.add(request.request_id)

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        self._break("get_num_new_matched_tokens", request)
        return self._match if request.request_id == POISON else Match()

    def update_state_after_alloc(self, request: RequestView, transfer_id: TransferId, *_: object) -> None:
        self.begun.append(transfer_id)
        self._break("update_state_after_alloc", request)

    def update_connector_output(self, output: KVConnectorOutput) -> list[ConnectorEvent]:
        events, self.events = self.events, []
        return events

    def request_finished(self, request: RequestView, *args: Any) -> Any:
        self.known.remove(request.request_id)
        return super().request_finished(request, *args)


class Device(Executor):
    """Samples the token 1 for every request whose prompt is computed."""

    def __init__(self) -> None:
        self._plan: SchedulerOutput | None = None

    def execute_model(self, plan: SchedulerOutput, engine: int = 0) -> None:
        self._plan = plan

    def sample_tokens(self, _: object, engine: int = 0) -> Future[ModelRunnerOutput]:
        assert self._plan is not None
        done: Future[ModelRunnerOutput] = Future()
        done.set_result(ModelRunnerOutput(sampled_token_ids=dict.fromkeys(self._plan.num_scheduled_tokens, (1,))))
        return done


def make_core(connector: SchedulerConnector, grammars: StructuredOutputs | None = None, depth: int = 1) -> EngineCore:
    kv = KVCacheManager(CACHE, enable_prefix_caching=True)
    device: Any = Device()
    return EngineCore(Scheduler(CONFIG, kv, grammars, KVTransfer(connector)), device, depth, debug=True)


def joint(core: EngineCore) -> JointCores:
    return JointCores([core], Device())


def make_request(request_id: str, first_token: int = 0, **params: Any) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(range(first_token, first_token + 13)),
        sampling_params=SamplingParams(kv_transfer_params=params or None),
        max_tokens=3,
        seed=0,
    )


def outputs_of(core: EngineCore, num_steps: int = 20) -> dict[str, list[EngineOutput]]:
    """Runs the core until it has no work."""
    outputs: dict[str, list[EngineOutput]] = {}
    for _ in range(num_steps):
        if not core.has_work:
            return outputs
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError(f"the core is not idle after {num_steps} steps")


def check_alive(core: EngineCore, ended: dict[str, list[EngineOutput]]) -> None:
    """Checks that the other requests got their tokens, that one more gets them, and that nothing is left behind."""
    core.add_request(make_request("last", 500))
    ended |= outputs_of(core)
    for name, of_request in ended.items():
        if name != POISON:
            assert [token for output in of_request for token in output.new_token_ids] == [1, 1, 1], name
    core.check_integrity()
    assert core.stats().num_running == core.stats().num_waiting == 0
    assert core.stats().kv_cache_usage == 0


ERRORS = [ValueError("embedded null byte"), KeyError("x"), AssertionError("a bug"), RecursionError(), MemoryError()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_request_on_which_adding_fails_is_refused(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    connector = BrokenConnector("on_new_request", error)
    others = [BrokenConnector(), BrokenConnector()]
    core = make_core(MultiScheduler({"earlier": others[0], "broken": connector, "later": others[1]}))
    core.add_request(make_request("before"))
    with pytest.raises(RequestFailedError, match=MESSAGE) as caught:
        core.add_request(make_request(POISON, 100))
    assert caught.value.__cause__ is error
    assert caplog.records[-1].exc_info, "the log has no traceback"
    check_alive(core, outputs_of(core))
    assert not any(each.known for each in (connector, *others))


@pytest.mark.parametrize("where", ["get_num_new_matched_tokens", "update_state_after_alloc"])
@pytest.mark.parametrize("error", [RequestError("no such pool", "kv_transfer_params"), OverloadedError("try again")])
def test_a_connector_may_refuse_a_request_when_it_is_matched(where: str, error: Exception) -> None:
    core = make_core(BrokenConnector(where, error, Match(8, is_async=True)))
    core.add_request(make_request("before"))
    core.add_request(make_request(POISON, 7000))
    ended = outputs_of(core)
    (failed,) = ended[POISON]
    assert (failed.finish_reason, failed.error) == (FinishReason.ERROR, str(error))
    check_alive(core, ended)


MATCHES = {"sync": Match(8), "async": Match(8, is_async=True)}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("where", "match"),
    [("get_num_new_matched_tokens", "sync"), *(("update_state_after_alloc", each) for each in MATCHES)],
)
def test_a_request_on_which_matching_or_allocating_fails_ends_with_an_error(
    where: str, match: str, depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    connector = BrokenConnector(where, match=MATCHES[match])
    core = make_core(MultiScheduler({"other": BrokenConnector(), "broken": connector}), depth=depth)
    # Several failures in one round, in front of, between and behind other requests.
    for round_number in range(3):
        core.add_request(make_request(f"before-{round_number}", 100 * round_number))
        core.add_request(make_request(POISON, 7000 + 100 * round_number))
        core.add_request(make_request(f"after-{round_number}", 3000 + 100 * round_number))
        ended = outputs_of(core)
        (failed,) = ended[POISON]
        assert (failed.finish_reason, failed.error) == (FinishReason.ERROR, MESSAGE)
        assert not failed.is_request_error
        assert caplog.records[-1].exc_info, "the log has no traceback"
        # The load has ended here: what is reported about it later has no effect.
        connector.events = [LoadEnded(each) for each in connector.begun * 2]
        check_alive(core, ended)
    assert not connector.known
    assert len(connector.begun) == (3 if where == "update_state_after_alloc" else 0)
    assert core.stats().remote_kv.num_failed == len(connector.begun)


def test_the_failure_of_an_only_request_is_reported() -> None:
    core = make_core(BrokenConnector("get_num_new_matched_tokens"), depth=2)
    core.add_request(make_request(POISON))
    assert [output.error for output in outputs_of(core, 2)[POISON]] == [MESSAGE]


class FailingGrammars:
    num_words = 1

    def __init__(self, compile_now: Callable[[GrammarSpec], Any]) -> None:
        self.compile = compile_now


def with_grammar(request: EngineRequest) -> EngineRequest:
    return replace(request, grammar=GrammarSpec("regex", "a"))


def test_a_request_that_is_refused_leaves_no_grammar() -> None:
    backend: Any = FailingGrammars(lambda _: None)
    grammars = StructuredOutputs(backend)
    core = make_core(BrokenConnector("on_new_request"), grammars)
    with pytest.raises(RequestFailedError):
        core.add_request(with_grammar(make_request(POISON)))
    assert grammars.num_compiling == 0
    grammars.wait(0)
    assert not grammars.collect()
    check_alive(core, {})


def test_a_grammar_on_which_the_compiler_fails_ends_its_request(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: GrammarSpec) -> Any:
        raise MemoryError

    backend: Any = FailingGrammars(fail)
    core = make_core(BrokenConnector(), StructuredOutputs(backend))
    core.add_request(with_grammar(make_request(POISON)))
    (failed,) = outputs_of(core)[POISON]
    assert (failed.finish_reason, failed.error) == (FinishReason.ERROR, MESSAGE)
    assert caplog.records[-1].exc_info
    check_alive(core, {})


# ---- The requests that have ended engines ----

P2P = ["P2PConnector", "NixlConnector", "MooncakeConnector"]
ROLES = ["kv_both", "kv_producer", "kv_consumer"]
HANDED_OVER = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_host": "::1", "ticket": "t"}
HANDED_OVER |= {"remote_port": 80, "remote_num_tokens": 13}
POISONS: Mapping[str, dict[str, Any]] = {
    "4301 digits": {**HANDED_OVER, "remote_port": "9" * 4301},
    "NUL in a host": {**HANDED_OVER, "remote_host": "::1%\0"},
    "NUL in an address": {"do_remote_prefill": True, "transfer_id": "x", "remote_bootstrap_addr": "http://[::1%\0]:80"},
}


@pytest.fixture
def p2p(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SchedulerConnector]:
    name, role = request.param
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    extra = {"bootstrap_port": 0} if name == "MooncakeConnector" else {}
    given = {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": extra}
    config = parse_kv_transfer_config(given)
    context = ConnectorContext(config=config, cache=CACHE, fingerprint=b"f", shards=frozenset({(0, 0)}))
    connector = make_scheduler_connector(context)
    yield connector
    connector.shutdown()


@pytest.mark.parametrize("p2p", [(name, role) for name in P2P for role in ROLES], indirect=True, ids="-".join)
@pytest.mark.parametrize("poison", POISONS)
def test_a_value_that_has_ended_an_engine_ends_its_request(p2p: SchedulerConnector, poison: str) -> None:
    ours, theirs = socket.socketpair()
    core = make_core(p2p)
    with ours, theirs:
        process = CoreProcess(joint(core), Channel(theirs, CODEC), queue.SimpleQueue())
        process._handle(make_request(POISON, **POISONS[poison]))
        (refused,) = FrameReader(CODEC).feed(ours.recv(1 << 16))
    assert isinstance(refused, Refused)
    assert refused.reason is Refusal.INVALID
    assert refused.field == "kv_transfer_params"
    assert "remote_" in refused.message
    check_alive(core, {})


@pytest.mark.parametrize("p2p", [("P2PConnector", "kv_both")], indirect=True, ids="-".join)
def test_a_load_that_fails_after_it_has_begun_is_abandoned(p2p: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = p2p._exchange.begin_load

    def begin_and_fail(*args: Any) -> None:
        begin(*args)
        raise OSError("too many open files")

    monkeypatch.setattr(p2p._exchange, "begin_load", begin_and_fail)
    monkeypatch.setattr(p2p._exchange._consumer, "_resolve", lambda address: address)
    core = make_core(p2p)
    address = {"transfer_id": "x", "remote_bootstrap_addr": f"http://127.0.0.1:{free_port()}"}
    core.add_request(make_request(POISON, do_remote_prefill=True, **address))
    (failed,) = outputs_of(core)[POISON]
    assert (failed.finish_reason, failed.error) == (FinishReason.ERROR, MESSAGE)
    check_alive(core, {})
    assert not p2p._exchange._consumer.num_loads


def test_the_front_end_is_told_that_the_engine_failed_on_a_request() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        process = CoreProcess(joint(make_core(BrokenConnector("on_new_request"))), Channel(theirs, CODEC), inbox)
        process._handle(make_request(POISON))
        assert FrameReader(CODEC).feed(ours.recv(1 << 16)) == [Refused(POISON, MESSAGE, Refusal.FAILED)]


@pytest.mark.parametrize("which", [lambda core: core, joint], ids=["core", "joint"])
def test_workers_are_freed_even_if_one_fails_while_transfers_end(which: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("a worker died")

    freed: list[object] = []
    core = make_core(NullSchedulerConnector())
    monkeypatch.setattr(Scheduler, "has_transfers", property(lambda _: True))
    monkeypatch.setattr(Device, "execute_model", fail)
    monkeypatch.setattr(Device, "shutdown", lambda self: freed.append(self))
    with pytest.raises(EngineDeadError, match="a worker died"):
        which(core).shutdown()
    assert len(freed) == 1
    which(core).shutdown()
