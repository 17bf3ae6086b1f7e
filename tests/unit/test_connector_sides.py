"""The two sides of a connector: construction from messages in different processes, roles, and optional abilities."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, call

import msgspec
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from examples.example_connector import ExampleConnector
from penstock.config.kv_transfer import parse_kv_transfer_config
from penstock.kv_transfer import multi
from penstock.kv_transfer.connector import NO_MATCH, PENDING, Match
from penstock.kv_transfer.factory import ConnectorContext, make_scheduler_connector, make_worker_connector
from penstock.kv_transfer.multi import MultiConnector, MultiHandshake, MultiMetadata, MultiScheduler, MultiWorker
from penstock.kv_transfer.null import NullSchedulerConnector, NullWorkerConnector
from penstock.kv_transfer.offload.messages import OffloadSetup, StateChunks
from penstock.kv_transfer.p2p import connector as p2p_connector
from penstock.kv_transfer.topology.chunks import ChunkFormat
from penstock.messages.kv_cache_spec import NULL_BLOCK, KVCacheConfig, KVCacheGroup, KVCacheSpec
from penstock.messages.kv_layout import MemoryRegion
from penstock.messages.kv_transfer import (
    NO_OUTPUT,
    ConnectorSetup,
    HandshakePayload,
    KVConnectorOutput,
    ShardId,
    TransferId,
    TransferReport,
    TransferStatus,
)
from penstock.messages.outputs import FinishReason
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.simulation.oracle import OracleMemory, cache_config, make_layers
from penstock.utils.errors import ConfigError
from penstock.utils.shared_memory import attach_memory
from penstock.utils.wire import Codec, register_kind

ONE = frozenset({(0, 0)})
LOAD = TransferId("r", 0, part=1)
CACHE = cache_config(make_layers((0,), 2, has_drafter=False), 8, 4, num_heads=2)


def context(shards: frozenset[ShardId] = ONE, cache: KVCacheConfig = CACHE, **config: Any) -> ConnectorContext:
    return ConnectorContext(config=parse_kv_transfer_config(config), cache=cache, fingerprint=b"f" * 16, shards=shards)


OFFLOADING: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 16, "load_policy": "always"},
}
# The connector of `examples/example_connector.py`.
EXAMPLE: dict[str, Any] = {"kv_connector": "ExampleConnector", "kv_connector_module_path": "examples.example_connector"}


class Setup(msgspec.Struct):
    context: ConnectorContext
    setup: ConnectorSetup | None


def test_context_and_setup_of_the_sides_survive_the_wire() -> None:
    both = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [OFFLOADING]}}
    sent = context(**both)
    part = make_scheduler_connector(sent)
    message = Setup(sent, part.worker_setup())
    assert Codec(Setup).copy(message) == message
    part.shutdown()


def test_a_worker_in_another_process_maps_the_memory_of_the_tier(tmp_path: Path) -> None:
    part: Any = make_scheduler_connector(context(**OFFLOADING))
    setup = part.worker_setup()
    assert isinstance(setup, OffloadSetup)
    code = """
import sys
import msgspec
from penstock.kv_transfer.offload.messages import OffloadSetup
from penstock.kv_transfer.p2p import connector as p2p_connector
from penstock.kv_transfer.offload.region import OffloadRegion
setup = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=OffloadSetup)
region = OffloadRegion.attach(setup.memory, setup.chunk_bytes)
region.chunk(region.num_chunks - 1)[:] = b"w" * setup.chunk_bytes
assert bytes(region.chunk(0)[:3]) == b"abc"
"""
    part._region.chunk(0)[:3] = b"abc"
    subprocess.run([sys.executable, "-c", code], input=msgspec.msgpack.encode(setup), check=True)
    assert bytes(part._region.chunk(part._region.num_chunks - 1)) == b"w" * setup.chunk_bytes
    part.shutdown()


@pytest.mark.parametrize("is_there", [True, False], ids=["another file", "no file"])
def test_a_worker_on_another_host_is_told_where_to_run(tmp_path: Path, is_there: bool) -> None:
    """There the memory's name, of a process and its descriptor, is that of nothing or of something else."""
    part = make_scheduler_connector(context(**OFFLOADING))
    setup = part.worker_setup()
    assert isinstance(setup, OffloadSetup)
    other = tmp_path / "other"
    if is_there:
        other.write_bytes(b"a log")
    elsewhere = replace(setup, memory=replace(setup.memory, path=str(other)))
    with pytest.raises(ConfigError, match="all ranks must run on the host of the engine core"):
        make_worker_connector(context(**OFFLOADING), (0, 0), elsewhere)
    part.shutdown()


def test_the_tiers_know_after_what_time_a_request_gives_up() -> None:
    part: Any = make_scheduler_connector(context(**OFFLOADING, kv_load_timeout=0.5))
    assert part._rules.load_timeout == 0.5
    part.shutdown()


@pytest.mark.parametrize(("num_states", "share"), [(25, 0.5), (75, 0.75), (0, 0.0)])
def test_the_memory_of_the_tier_is_divided_as_the_cache_is(num_states: int, share: float) -> None:
    # A block has 2 KiB, and a state 8.
    specs = (KVCacheSpec.keys_and_values(4, 16, "float32"), KVCacheSpec.states(4, 512, 0, 4))
    groups = tuple(KVCacheGroup((f"layer{number}",), spec) for number, spec in enumerate(specs))
    cache = KVCacheConfig(100, 4, groups, num_states=num_states)
    chunks = ChunkFormat(cache)
    assert chunks.chunk_bytes < 2200 < 8192 < chunks.state_bytes < 8300
    least = chunks.chunk_bytes + chunks.state_bytes
    for num_bytes in (least - 1, least, least + 1000, 2 * least, 1 << 20):
        options = {**OFFLOADING, "kv_connector_extra_config": {"cpu_bytes_to_use": num_bytes}}
        if num_bytes < least:
            with pytest.raises(ConfigError, match=f"at least {least}"):
                make_scheduler_connector(context(cache=cache, **options))
            continue
        part: Any = make_scheduler_connector(context(cache=cache, **options))
        states = part.worker_setup().states
        of_blocks = part._region.num_chunks * chunks.chunk_bytes
        assert states == StateChunks(1, max(1, int(num_bytes * share) // chunks.state_bytes), chunks.state_bytes)
        of_states = states.num_chunks * chunks.state_bytes
        assert num_bytes - chunks.chunk_bytes < of_blocks + of_states <= num_bytes
        part.shutdown()


def test_shared_memory_ends_with_its_creator() -> None:
    code = "from penstock.utils.shared_memory import create_memory; print(create_memory(4096).name)"
    name = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    with pytest.raises(OSError, match="/proc/"):
        attach_memory(name, 4096)


# ---- Roles ----


class TwoWay(NullSchedulerConnector):
    def __init__(self) -> None:
        self.saved: list[int] = []

    def get_num_new_matched_tokens(self, request: object, num_computed_tokens: int) -> Match:
        return Match(4, is_async=True)

    def on_blocks_complete(self, request: object, block_ids: object, first: int, end: int) -> None:
        self.saved += range(first, end)

    def counters(self) -> Mapping[str, float]:
        return {"num_saved": len(self.saved)}


class TwoWayConnector:
    @staticmethod
    def make_scheduler_connector(context: ConnectorContext) -> TwoWay:
        return TwoWay()

    @staticmethod
    def make_worker_connector(
        context: ConnectorContext, shard: ShardId, setup: ConnectorSetup | None
    ) -> NullWorkerConnector:
        assert setup is None
        return NullWorkerConnector()


TWO_WAY: dict[str, Any] = {"kv_connector": "TwoWayConnector", "kv_connector_module_path": __name__}


@pytest.mark.parametrize(("role", "loads", "saves"), [("kv_both", 1, 1), ("kv_producer", 0, 1), ("kv_consumer", 1, 0)])
def test_the_role_decides_whether_a_connector_loads_and_saves(role: str, loads: int, saves: int) -> None:
    child = {**TWO_WAY, "name": "child"}
    of_parent = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [child]}}
    of_child = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [{**child, "kv_role": role}]},
    }
    # The role of a child's own object wins, whatever its parent's is.
    others = [{**of_child, "kv_role": other} for other in ("kv_producer", "kv_consumer")]
    for config in ({**TWO_WAY, "kv_role": role}, {**of_parent, "kv_role": role}, of_child, *others):
        part = make_scheduler_connector(context(**config))
        request: Any = SimpleNamespace(request_id="r")
        assert part.get_num_new_matched_tokens(request, 0).num_tokens == 4 * loads
        part.on_blocks_complete(request, ((1, 2),), 0, 2)
        assert sum(part.counters().values()) == 2 * saves


def test_children_inherit_the_load_timeout() -> None:
    children = [OFFLOADING, {**OFFLOADING, "name": "patient", "kv_load_timeout": 60.0}]
    config = context(
        kv_connector="MultiConnector", kv_load_timeout=5.0, kv_connector_extra_config={"connectors": children}
    ).config
    waits = {name: child.kv_load_timeout for name, child in MultiConnector.children(config).items()}
    assert waits == {"OffloadingConnector": 5.0, "patient": 60.0}


@pytest.mark.parametrize("make", [MultiScheduler, MultiWorker], ids=["scheduler", "worker"])
def test_every_child_is_shut_down_also_if_one_raises(make: Callable[[Any], MultiScheduler | MultiWorker]) -> None:
    ended: list[str] = []

    def child(name: str, error: Exception | None = None) -> Any:
        def shutdown() -> None:
            ended.append(name)
            if error is not None:
                raise error

        return SimpleNamespace(shutdown=shutdown, layer_hooks=None, needs_shared_memory=False)

    parts = make({"first": child("first"), "broken": child("broken", OSError("gone")), "last": child("last")})
    with pytest.raises(OSError, match="gone"):
        parts.shutdown()
    assert sorted(ended) == ["broken", "first", "last"]


def test_at_most_one_child_answers_requests() -> None:
    nixl, mooncake = ({"kv_connector": name, "kv_port": 0} for name in ("NixlConnector", "MooncakeConnector"))
    several = context(kv_connector="MultiConnector", kv_connector_extra_config={"connectors": [nixl, mooncake]})
    with pytest.raises(ConfigError, match="NixlConnector and MooncakeConnector in MultiConnector would each answer"):
        make_scheduler_connector(several)


def test_a_child_has_no_children() -> None:
    """A report names one child: those of an inner connector would be lost, and no load or store of it would end."""
    inner = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [OFFLOADING]}}
    several = context(kv_connector="MultiConnector", kv_connector_extra_config={"connectors": [inner]})
    with pytest.raises(ConfigError, match="list its connectors in the outer one"):
        make_scheduler_connector(several)


def test_children_are_ended_if_one_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have begun to listen."""
    ended = Mock()
    monkeypatch.setattr(NullSchedulerConnector, "shutdown", ended)
    build = Mock(side_effect=[NullSchedulerConnector(), NullSchedulerConnector(), ConfigError("the third")])
    monkeypatch.setattr(multi, "make_scheduler_connector", build)
    children = [{**OFFLOADING, "name": name} for name in "abcd"]
    several = context(kv_connector="MultiConnector", kv_connector_extra_config={"connectors": children})
    with pytest.raises(ConfigError, match="the third"):
        MultiConnector.make_scheduler_connector(several)
    assert ended.call_count == 2


def test_invalid_engine_ids_are_refused() -> None:
    for engine_id in ("", "a\nb", "x" * 129):
        with pytest.raises(ConfigError, match="engine_id"):
            context(**OFFLOADING, engine_id=engine_id)
    assert context(**OFFLOADING, engine_id="decode-1").config.engine_id == "decode-1"


# ---- Handshakes ----


@register_kind
class Hello(HandshakePayload, msgspec.Struct, frozen=True, tag=True):
    number: int


class TensorRanksOnly(NullSchedulerConnector):
    def __init__(self) -> None:
        self.payloads: dict[int, HandshakePayload | None] = {}

    def set_xfer_handshake_metadata(self, payloads: Mapping[int, HandshakePayload | None]) -> None:
        self.payloads = dict(payloads)


class PipelineAware(NullSchedulerConnector):
    def __init__(self) -> None:
        self.payloads: dict[ShardId, HandshakePayload | None] = {}

    def set_xfer_handshake_metadata_pp_aware(self, payloads: Mapping[ShardId, HandshakePayload | None]) -> None:
        self.payloads = dict(payloads)


STAGES = {(0, 0): Hello(1), (1, 0): Hello(2)}


def test_a_connector_without_support_for_pipeline_ranks_refuses_them(tmp_path: Path) -> None:
    example = ExampleConnector.make_scheduler_connector(
        context(**EXAMPLE, kv_connector_extra_config={"shared_storage_path": str(tmp_path)})
    )
    for part in (NullSchedulerConnector(), TensorRanksOnly(), example):
        with pytest.raises(ConfigError, match="pipeline_parallel_size"):
            part.set_xfer_handshake_metadata_pp_aware(STAGES)
    part = TensorRanksOnly()
    part.set_xfer_handshake_metadata_pp_aware({(0, 0): Hello(1), (0, 1): Hello(2)})
    assert part.payloads == {0: Hello(1), 1: Hello(2)}


class Baseless:
    """A connector whose scheduler side does not derive from the null part."""

    @staticmethod
    def make_scheduler_connector(given: ConnectorContext) -> Any:
        return Baseless()


def test_a_scheduler_side_needs_the_base_class_with_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    given = context(kv_connector="Baseless", kv_connector_module_path=__name__)
    with pytest.raises(ConfigError, match="Baseless must derive from NullSchedulerConnector"):
        make_scheduler_connector(given)


def test_a_part_takes_a_waker_if_it_has_its_own_method() -> None:
    class Waking(NullSchedulerConnector):
        def set_waker(self, callback: Any) -> None: ...

    assert (NullSchedulerConnector().takes_waker, Waking().takes_waker) == (False, True)
    assert MultiScheduler({"a": NullSchedulerConnector(), "b": Waking()}).takes_waker
    assert not MultiScheduler({"a": NullSchedulerConnector()}).takes_waker


def test_handshakes_reach_every_child() -> None:
    aware, unaware = PipelineAware(), TensorRanksOnly()
    payloads = {shard: MultiHandshake({"aware": hello, "other": None}) for shard, hello in STAGES.items()}
    MultiScheduler({"aware": aware}).set_xfer_handshake_metadata_pp_aware(payloads)
    assert aware.payloads == STAGES
    with pytest.raises(ConfigError, match="TensorRanksOnly"):
        MultiScheduler({"aware": aware, "other": unaware}).set_xfer_handshake_metadata_pp_aware(payloads)


# ---- The choice at match time ----


class Vanishing(NullSchedulerConnector):
    """Has `match` for every request."""

    def __init__(self, match: Match) -> None:
        self.match = match
        self.begun: list[TransferId] = []

    def get_num_new_matched_tokens(self, request: object, num_computed_tokens: int) -> Match:
        return self.match

    def update_state_after_alloc(self, request: Any, transfer_id: TransferId, *_: object) -> None:
        self.begun.append(transfer_id)


def test_the_chosen_child_is_remembered_until_allocation() -> None:
    children = {"first": Vanishing(NO_MATCH), "second": Vanishing(Match(4)), "third": Vanishing(Match(4))}
    multi, request = MultiScheduler(cast(Any, children)), cast(Any, SimpleNamespace(request_id="r"))
    assert multi.get_num_new_matched_tokens(request, 0) == multi.get_num_new_matched_tokens(request, 0) == Match(4)
    children["first"].match, children["second"].match = Match(4), NO_MATCH
    multi.update_state_after_alloc(request, LOAD, ((1,),), 0, 4)
    assert [child.begun for child in children.values()] == [[], [LOAD], []]
    multi.get_num_new_matched_tokens(request, 0)
    multi.request_finished(request, (), FinishReason.LENGTH)
    assert not multi._chosen
    multi.get_num_new_matched_tokens(request, 0)
    for child in children.values():
        child.match = NO_MATCH
    assert multi.get_num_new_matched_tokens(request, 0) == NO_MATCH
    assert not multi._chosen, "a child that has lost its match does not load"


def test_a_child_that_is_looking_is_waited_for() -> None:
    children = {"first": Vanishing(PENDING), "second": Vanishing(Match(4))}
    multi, request = MultiScheduler(cast(Any, children)), cast(Any, SimpleNamespace(request_id="r"))
    assert multi.get_num_new_matched_tokens(request, 0) == PENDING
    children["first"].match = Match(8)
    assert multi.get_num_new_matched_tokens(request, 0) == Match(8)


# ---- Calls that reach every child ----


def test_the_scheduler_side_reaches_every_child() -> None:
    children = {name: Mock() for name in ("first", "second", "third")}
    multi = MultiScheduler(cast(Any, children))
    for busy in (("second",), ("first", "third"), ()):
        for name, child in children.items():
            child.has_pending_work = name in busy
            child.wait.reset_mock()
        assert multi.has_pending_work == bool(busy)
        multi.wait(3.0)
        waiting = busy or tuple(children)
        expected = [[call(3.0 / len(waiting))] if name in waiting else [] for name in children]
        assert [child.wait.mock_calls for child in children.values()] == expected, "they share the time"
    for answers in ((True, False, True), (False, True, True), (True, True, True)):
        for child, answer in zip(children.values(), answers, strict=True):
            child.reset_cache.return_value = answer
        assert multi.reset_cache() == all(answers)
    multi.check_integrity()
    multi.shutdown()
    for child in children.values():
        assert child.reset_cache.call_count == 3
        child.check_integrity.assert_called_once_with()
        child.shutdown.assert_called_once_with()


def test_the_worker_side_reaches_every_child() -> None:
    children = {name: Mock(get_finished=Mock(return_value=NO_OUTPUT)) for name in ("first", "second")}
    worker, metadata = MultiWorker(cast(Any, children)), {name: object() for name in children}
    worker.register_kv_caches(view := cast(Any, object()))
    worker.begin_step(MultiMetadata(cast(Any, metadata)))
    worker.start_load_kv()
    worker.layer_hooks.wait_for_layer_load("layer")
    worker.layer_hooks.save_kv_layer("layer")
    worker.get_finished(frozenset({"r"}))
    worker.wait_for_save()
    worker.end_step()
    worker.shutdown()
    for name, child in children.items():
        assert child.mock_calls == [
            call.register_kv_caches(view),
            call.begin_step(metadata[name]),
            call.start_load_kv(),
            call.layer_hooks.wait_for_layer_load("layer"),
            call.layer_hooks.save_kv_layer("layer"),
            call.get_finished(frozenset({"r"})),
            call.wait_for_save(),
            call.end_step(),
            call.shutdown(),
        ]


def test_children_may_use_the_same_transfer_ids() -> None:
    reports = {
        name: TransferReport(LOAD, (0, 0), status)
        for name, status in (("first", TransferStatus.DONE), ("second", TransferStatus.FAILED))
    }
    workers = {name: Mock(get_finished=Mock(return_value=KVConnectorOutput((each,)))) for name, each in reports.items()}
    output = MultiWorker(cast(Any, workers)).get_finished(frozenset())
    strange = (
        TransferReport(LOAD, (0, 0), TransferStatus.DONE),
        TransferReport(replace(LOAD, child="third"), (0, 0), TransferStatus.DONE),
    )
    children = {name: Mock(update_connector_output=Mock(return_value=())) for name in reports}
    MultiScheduler(cast(Any, children)).update_connector_output(KVConnectorOutput((*output.reports, *strange)))
    for name, child in children.items():
        child.update_connector_output.assert_called_once_with(KVConnectorOutput((reports[name],)))


@pytest.fixture
def example(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """Yields both sides of a connector that has saved the two blocks of a request."""
    given = context(**EXAMPLE, kv_connector_extra_config={"shared_storage_path": str(tmp_path)})
    scheduler, worker = make_scheduler_connector(given), make_worker_connector(given, (0, 0), None)
    worker.register_kv_caches(OracleMemory(CACHE, (0, 0), range(2)))
    scheduler.on_blocks_complete(REQUEST, ((1, 2),), 0, 2)
    worker.begin_step(scheduler.build_connector_meta(SchedulerOutput(step=1)))
    worker.end_step()
    yield scheduler, worker
    scheduler.shutdown()


REQUEST: Any = SimpleNamespace(request_id="r", block_hashes=[b"a" * 32, b"b" * 32], num_tokens=9)


def test_a_file_that_vanishes_after_its_match_is_a_failed_load(example: tuple[Any, Any], tmp_path: Path) -> None:
    scheduler, worker = example
    assert scheduler.get_num_new_matched_tokens(REQUEST, 0).num_tokens == 8
    (second,) = [path for path in tmp_path.rglob("*.safetensors") if path.name.startswith((b"b" * 32).hex())]
    second.unlink()
    scheduler.update_state_after_alloc(REQUEST, LOAD, ((3, 4),), 0, 8)
    worker.begin_step(scheduler.build_connector_meta(SchedulerOutput(step=2)))
    worker.start_load_kv()
    output = worker.get_finished(frozenset())
    worker.end_step()
    assert [report.status for report in output.reports] == [TransferStatus.FAILED]
    (ended,) = scheduler.update_connector_output(output)
    assert [(bad.start, bad.end) for bad in ended.bad_ranges] == [(4, 8)]
    scheduler.check_integrity()


def load(example: tuple[Any, Any], step: int) -> TransferReport:
    """Loads both blocks; returns the rank's report."""
    scheduler, worker = example
    scheduler.update_state_after_alloc(REQUEST, replace(LOAD, part=step), ((3, 4),), 0, 8)
    worker.begin_step(scheduler.build_connector_meta(SchedulerOutput(step=step)))
    worker.start_load_kv()
    output = worker.get_finished(frozenset())
    worker.end_step()
    assert len(scheduler.update_connector_output(output)) == 1
    return output.reports[0]


def test_a_failed_load_does_not_affect_the_next_one(example: tuple[Any, Any], tmp_path: Path) -> None:
    for path in tmp_path.rglob("*.safetensors"):
        path.rename(path.with_suffix(".away"))
    assert load(example, 2).status is TransferStatus.FAILED
    for path in tmp_path.rglob("*.away"):
        path.rename(path.with_suffix(".safetensors"))
    assert load(example, 3).status is TransferStatus.DONE


def test_a_file_with_other_layers_is_a_failed_load(example: tuple[Any, Any], tmp_path: Path) -> None:
    for path in tmp_path.rglob("*.safetensors"):
        tensors = load_file(path)
        save_file({f"other.{name}": each for name, each in tensors.items()}, path)
    report = load(example, 2)
    assert report.status is TransferStatus.FAILED
    assert [(bad.start, bad.end) for bad in report.bad_ranges] == [(0, 4), (4, 8)]


def test_a_file_becomes_visible_when_it_is_complete(
    example: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, it has another name, and no file remains if it cannot be completed."""
    scheduler, worker = example
    before = set(tmp_path.rglob("*.safetensors"))
    sizes = {path.stat().st_size for path in before}

    def fail(source: str, target: Path) -> None:
        assert not target.exists()
        assert {Path(source).stat().st_size} == sizes
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", fail)
    other: Any = SimpleNamespace(request_id="other", block_hashes=[b"c" * 32], num_tokens=5)
    scheduler.on_blocks_complete(other, ((5,),), 0, 1)
    worker.begin_step(scheduler.build_connector_meta(SchedulerOutput(step=2)))
    worker.end_step()
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before
    assert scheduler.get_num_new_matched_tokens(other, 0) == NO_MATCH


def test_blocks_without_kv_are_not_saved(example: tuple[Any, Any]) -> None:
    scheduler, _ = example
    other: Any = SimpleNamespace(request_id="other", block_hashes=[b"c" * 32, b"d" * 32], num_tokens=9)
    scheduler.on_blocks_complete(other, ((NULL_BLOCK, 5),), 0, 2)
    assert scheduler.build_connector_meta(SchedulerOutput(step=2)).saves == ((5, (b"d" * 32).hex()),)


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 8),
        ({"fingerprint": b"g" * 16}, 0),
        ({"shards": frozenset({(0, 0), (0, 1)})}, 0),
        ({"shards": frozenset({(0, 0), (1, 0)})}, 0),
    ],
)
def test_engines_share_files_if_weights_and_ranks_are_the_same(
    changes: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    given = context(**EXAMPLE, kv_connector_extra_config={"shared_storage_path": str(tmp_path)})
    scheduler = make_scheduler_connector(replace(given, **changes))
    assert scheduler.get_num_new_matched_tokens(REQUEST, 0).num_tokens == expected


def test_a_block_is_found_when_every_rank_has_saved_its_part(tmp_path: Path) -> None:
    shards = frozenset({(0, 0), (0, 1)})
    extra = {"shared_storage_path": str(tmp_path)}
    given = context(shards, **EXAMPLE, kv_connector_extra_config=extra)
    scheduler = make_scheduler_connector(given)
    scheduler.on_blocks_complete(REQUEST, ((1, 2),), 0, 2)
    metadata = scheduler.build_connector_meta(SchedulerOutput(step=1))
    for shard, expected in (((0, 1), 0), ((0, 0), 8)):
        worker = make_worker_connector(given, shard, None)
        worker.register_kv_caches(OracleMemory(CACHE, shard, range(shard[1], shard[1] + 1)))
        worker.begin_step(metadata)
        assert scheduler.get_num_new_matched_tokens(REQUEST, 0).num_tokens == expected
    alone = make_scheduler_connector(context(**EXAMPLE, kv_connector_extra_config=extra))
    assert alone.get_num_new_matched_tokens(REQUEST, 0) == NO_MATCH, "a single rank has more heads than either of them"


def test_layers_that_the_model_does_not_run_are_loaded_at_once(tmp_path: Path) -> None:
    """No hook is called for the layers of a drafter."""
    cache = cache_config(make_layers((0,), 1, has_drafter=True), 8, 4, num_heads=2)
    extra = {"shared_storage_path": str(tmp_path)}
    given = context(cache=cache, **EXAMPLE, kv_connector_extra_config=extra)
    pair = make_scheduler_connector(given), make_worker_connector(given, (0, 0), None)
    memory = OracleMemory(cache, (0, 0), range(2))
    content = memoryview(bytes(range(memory.stride("draft.0"))))
    memory.write_layer("draft.0", 1, content)
    pair[1].register_kv_caches(memory)
    pair[0].on_blocks_complete(REQUEST, ((1, 2),), 0, 2)
    pair[1].begin_step(pair[0].build_connector_meta(SchedulerOutput(step=1)))
    pair[1].end_step()
    assert load(pair, 2).status is TransferStatus.DONE
    memory.read_layer("draft.0", 3, memoryview(found := bytearray(memory.stride("draft.0"))))
    assert found == content


@pytest.mark.parametrize("windows", [(4,), (0, 8)])
def test_the_example_refuses_sliding_windows(windows: tuple[int, ...], tmp_path: Path) -> None:
    cache = cache_config(make_layers(windows, 1, has_drafter=False), 8, 4, num_heads=2)
    extra = {"shared_storage_path": str(tmp_path)}
    with pytest.raises(ConfigError, match="without sliding windows"):
        make_scheduler_connector(context(cache=cache, **EXAMPLE, kv_connector_extra_config=extra))


# ---- Options of the P2PConnector ----


def p2p(**options: Any) -> ConnectorContext:
    return context(kv_connector="P2PConnector", kv_port=0, kv_load_timeout=5.0, kv_connector_extra_config=options)


@pytest.mark.parametrize("is_attested", [True, False])
def test_options_reach_the_parts_of_the_p2p_connector(is_attested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {name: Mock(wraps=getattr(p2p_connector, name)) for name in ("Producer", "Consumer", "Exchange")}
    for name, part in made.items():
        monkeypatch.setattr(p2p_connector, name, part)
    given = {} if is_attested else {"attestation": "off"}
    make_scheduler_connector(p2p(hold_seconds=7, lease_seconds=3, **given)).shutdown()
    rules, settings = made["Producer"].call_args.args[2], made["Exchange"].call_args.args[0]
    assert (rules.hold_seconds, rules.lease_seconds, rules.park_seconds) == (7, 3, 5.0)
    assert (rules.is_attested, settings.requires_digests, settings.ignored) == (is_attested, is_attested, frozenset())


@pytest.mark.parametrize("transport", ["sockets", "shared_memory"])
def test_other_engines_need_a_name_for_memory_that_they_map(transport: str) -> None:
    given = p2p(transport=transport)
    part = make_scheduler_connector(given)
    worker = make_worker_connector(given, (0, 0), part.worker_setup())
    assert worker.needs_shared_memory == (transport == "shared_memory")
    part.shutdown()


@pytest.mark.parametrize("option", ["hold_seconds", "lease_seconds"])
@pytest.mark.parametrize("value", [0, -1, 86401, True, "1", float("nan")])
def test_durations_are_checked(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{option} of P2PConnector must be seconds above 0"):
        make_scheduler_connector(p2p(**{option: value}))


# ---- Layouts ----


def test_a_layout_locates_the_bytes_of_a_block() -> None:
    cache = cache_config(make_layers((0, 8), 2, has_drafter=True), 8, 4, num_heads=1)
    memory = OracleMemory(cache, (0, 1), range(1, 2))
    for number, words in enumerate(memory.words.values()):
        for index in range(len(words)):
            words[index] = number * 1000 + index
    assert Codec(type(memory.layout)).copy(memory.layout) == memory.layout
    regions = {region.name: region for region in memory.layout.regions}
    for group in range(2):
        layers = memory.layout.layers_of(group)
        assert memory.layout.block_bytes(group) == sum(layer.block_bytes for layer in layers)
        for layer, part in zip(layers, memory.block_parts(group, 3), strict=True):
            start = layer.offset + 3 * layer.strides[layer.axes.index("block")]
            assert part == memoryview(memory.regions[layer.region])[start : start + layer.block_bytes]
            assert layer.heads == (1, 2)
            assert isinstance(regions[layer.region], MemoryRegion)
