"""Data parallelism without engines: the arguments of each core, and the choice of a replica for a request."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from penstock import LLM, AsyncLLM, ConfigError, EngineDeadError, RequestError, SamplingParams, StructuredOutputsParams
from penstock.config.engine import EngineArgs, EngineConfig, SchedulerConfig, resolve
from penstock.config.kv_transfer import KVTransferConfig
from penstock.config.replicas import core_plans
from penstock.engine.core_messages import CODEC, Ready
from penstock.frontend.core_restarts import RestartingCore
from penstock.frontend.input_processor import InputProcessor, ProcessedRequest
from penstock.frontend.output_processor import ProcessedOutputs
from penstock.frontend.placement import Placement
from penstock.frontend.replica import Replica, RequestStream
from penstock.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from penstock.messages.outputs import EngineOutput
from penstock.messages.requests import EngineRequest
from penstock.messages.stats import SchedulerStats, StepReport
from penstock.utils import machine
from penstock.utils.clock import SystemClock


@dataclass(eq=False)
class StubReplica:
    """The attributes of a `Replica` that placement reads."""

    load: int = 0
    outage: Exception | None = None
    last_chosen: int = 0


def placement(*replicas: StubReplica) -> Placement:
    return Placement(cast("tuple[Replica, ...]", replicas), is_prefix_aware=False)


def request(
    num_tokens: int = 4, cache_salt: str | None = None, params: SamplingParams | None = None
) -> ProcessedRequest:
    prompt = {"prompt_token_ids": list(range(num_tokens)), "cache_salt": cache_salt}
    processor = InputProcessor(tokenizer=None, vocab_size=5000, max_model_len=5000, eos_token_ids=frozenset(), seed=0)
    return processor.process(secrets.token_hex(4), prompt, params or SamplingParams(max_tokens=1))


def test_idle_replicas_take_turns() -> None:
    replicas = [StubReplica(), StubReplica(), StubReplica()]
    choice = placement(*replicas)
    assert [choice.choose(request(), None).replica for _ in range(6)] == 2 * replicas


def test_the_replica_with_the_least_work_is_chosen() -> None:
    replicas = [StubReplica(500), StubReplica(20), StubReplica(700)]
    choice = placement(*replicas)
    assert [choice.choose(request(), None).replica for _ in range(2)] == [replicas[1], replicas[1]]


def test_a_replica_that_does_not_serve_is_left_out() -> None:
    replicas = [StubReplica(0, RuntimeError("restarting")), StubReplica(900)]
    assert placement(*replicas).choose(request(), None).replica is replicas[1]


def test_when_no_replica_serves_one_is_chosen_to_give_the_reason() -> None:
    replicas = [StubReplica(0, RuntimeError("gone"))] * 2
    assert placement(*replicas).choose(request(), None).replica in replicas


def test_a_requested_rank_is_chosen() -> None:
    replicas = [StubReplica(0), StubReplica(900)]
    assert placement(*replicas).choose(request(), 1).replica is replicas[1]


@pytest.mark.parametrize("rank", [-1, 2])
def test_an_unknown_rank_is_refused(rank: int) -> None:
    with pytest.raises(RequestError, match="from 0 to 1"):
        placement(StubReplica(), StubReplica()).choose(request(), rank)


def test_any_json_schema_can_be_sent_to_the_engine_core() -> None:
    schema = {"type": "integer", "maximum": 10**30}
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    (child,) = request(params=params).children
    assert child.grammar is not None
    assert str(10**30) in child.grammar.text
    assert CODEC.encode(child)


# ---- Prefix-aware placement ----


class SilentCore:
    """Accepts requests; a test passes its reports to `emit`."""

    outage = None
    death = None

    def __init__(self) -> None:
        self.died = asyncio.Event()
        self.client = self
        self.emit: Callable[[Any], None] = lambda _: None
        self.aborted: tuple[str, ...] = ()

    def add_handler(self, handler: Callable[[Any], None]) -> None:
        self.emit = handler

    def add_request(self, request: EngineRequest) -> None: ...

    def abort_requests(self, request_ids: tuple[str, ...]) -> None:
        self.aborted += request_ids

    def confirm(self) -> None:
        """Reports that the aborted requests are gone."""
        self.emit(msgspec.structs.replace(report(), aborted=self.aborted))
        self.aborted = ()


def replica(core: SilentCore, dp_rank: int = 0) -> Replica:
    limits = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=5000)
    ready = SimpleNamespace(info=None, limits=limits, dp_rank=dp_rank)
    return Replica(cast("RestartingCore", core), cast("Ready", ready), None, (), lambda: None)


def report(*events: KVEvent) -> StepReport:
    stats = SchedulerStats(0, 0, 0.0, 0, 0, 0)
    return StepReport(outputs=(), events=(), num_tokens=0, stats=stats, kv_events=events)


def stored(num_blocks: int, cache_salt: str | None = None, **more: Any) -> BlockStored:
    """Returns the event for the beginning of `request`'s prompt, in blocks of 16 tokens."""
    return BlockStored(
        block_hashes=tuple(number.to_bytes(32, "big") for number in range(num_blocks)),
        parent_block_hash=None,
        token_ids=tuple(range(16 * num_blocks)),
        block_size=16,
        extra_keys=((cache_salt,), *[None] * (num_blocks - 1)) if cache_salt else None,
        **more,
    )


class Pair:
    """Two replicas, whose cores have cached nothing."""

    def __init__(self, is_prefix_aware: bool = True) -> None:
        self.cores = (SilentCore(), SilentCore())
        self.replicas = tuple(map(replica, self.cores))
        self.placement = Placement(self.replicas, is_prefix_aware)

    def choose(self, wanted: ProcessedRequest) -> tuple[int, int]:
        """Returns the rank, and how many tokens it is expected to have cached."""
        place = self.placement.choose(wanted, None)
        return self.replicas.index(place.replica), place.num_cached

    def ranks(self, wanted: ProcessedRequest) -> list[int]:
        return [self.choose(wanted)[0] for _ in range(4)]

    def occupy(self, rank: int, num_tokens: int) -> RequestStream:
        return self.replicas[rank].submit(request(num_tokens), 0.0, None)


def test_a_conversation_stays_with_the_replica_that_has_it_cached() -> None:
    pair = Pair()
    pair.cores[1].emit(report(stored(50)))
    assert [pair.choose(request(1000)) for _ in range(4)] == [(1, 800)] * 4
    assert sorted(pair.ranks(request(10))) == [0, 0, 1, 1], "less than a block"


def test_a_conversation_leaves_a_replica_with_much_more_work() -> None:
    pair = Pair()
    pair.cores[1].emit(report(stored(50)))
    stream = pair.occupy(1, 543)
    assert pair.choose(request(1000)) == (1, 800), "a load of 799 tokens is less than 800 cached tokens"
    stream.close()
    pair.occupy(1, 545)
    assert pair.choose(request(1000)) == (0, 0)


def test_a_request_that_cannot_be_sent_leaves_nothing_behind() -> None:
    class FullCore(SilentCore):
        num_sent = 0

        def add_request(self, request: EngineRequest) -> None:
            self.num_sent += 1
            if self.num_sent > 1:
                raise OverflowError("it cannot be encoded")

    only = replica(FullCore())
    with pytest.raises(OverflowError):
        only.submit(request(params=SamplingParams(n=2)), 0.0, None)
    assert (only.num_unfinished, only.load, only.idle.is_set()) == (0, 0, True)
    assert only.seconds_without_progress == 0


def test_cached_tokens_do_not_count_as_work() -> None:
    pair = Pair()
    pair.cores[1].emit(report(stored(50)))
    place = pair.placement.choose(request(1000), None)
    stream = place.replica.submit(request(1000), 0.0, None, place.num_cached)
    assert pair.replicas[1].load == 200 + 256
    stream.close()
    pair.cores[1].confirm()
    assert pair.replicas[1].load == 0


def tokens(wanted: ProcessedRequest, *token_ids: int) -> StepReport:
    """Returns the report of a step that computed these tokens of a request."""
    return msgspec.structs.replace(
        report(), outputs=(EngineOutput(request_id=wanted.request_id, new_token_ids=token_ids),)
    )


def test_an_aborted_request_counts_until_the_core_has_done_so() -> None:
    """A core that hangs confirms nothing: it would seem to be idle, and be chosen for further requests."""

    async def main() -> None:
        pair, wanted = Pair(), request(1000)
        stream = pair.replicas[0].submit(wanted, -60.0, None)
        stream.close()
        assert pair.choose(request(10)) == (1, 0)
        assert pair.replicas[0].seconds_without_progress > 60
        assert (pair.replicas[0].num_unfinished, pair.replicas[0].idle.is_set()) == (0, True)
        waiting = asyncio.create_task(pair.replicas[0].until_gone(wanted))
        pair.cores[0].emit(tokens(wanted, 5))
        await asyncio.wait((waiting,), timeout=0.01)
        assert not waiting.done(), "its tokens may still be on their way"
        pair.replicas[0].submit(request(), SystemClock().now(), None).close()
        assert pair.replicas[0].seconds_without_progress > 60, "another request is no progress"
        pair.cores[0].confirm()
        await asyncio.wait_for(waiting, 5)
        assert pair.replicas[0].load == 0
        assert pair.replicas[0].seconds_without_progress == 0
        again = pair.replicas[0].submit(wanted, 0.0, None)
        await asyncio.wait_for(pair.replicas[0].until_gone(wanted), 1)
        pair.cores[0].emit(tokens(wanted, 7))
        assert again.output.outputs[0].token_ids == [7]

    asyncio.run(main())


def test_a_completion_that_a_stop_string_ended_counts_until_the_core_has_aborted_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core, wanted = SilentCore(), request()
    only = replica(core)
    stream, name = only.submit(wanted, 0.0, None), wanted.request_id
    results = iter([ProcessedOutputs([stream.output], [(name, "stop")], [name]), ProcessedOutputs([], [], [])])
    monkeypatch.setattr(only._outputs, "process", lambda _: next(results))
    core.emit(tokens(wanted, 9))
    assert core.aborted == (name,)
    assert only.load > 0
    stream.close()
    assert core.aborted == (name,), "once is enough"
    core.confirm()
    assert only.load == 0


def test_administration_leaves_engines_out_that_are_dead_for_good() -> None:
    living, dead = (SimpleNamespace(death=death) for death in (None, EngineDeadError("it broke")))
    for replicas, wanted in (((living, dead), [living]), ((dead, dead), (dead, dead))):
        assert AsyncLLM._living.fget(cast(Any, SimpleNamespace(replicas=replicas))) == wanted


def test_a_core_that_has_died_confirms_nothing() -> None:
    core = SilentCore()
    only = replica(core)
    only.submit(request(), 0.0, None).close()
    only.submit(request(), 0.0, None)
    core.emit(EngineDeadError("it broke"))
    assert (only.num_unfinished, only.load, only.idle.is_set()) == (0, 0, True)
    assert only.seconds_without_progress == 0


def test_without_the_policy_only_the_load_counts() -> None:
    pair = Pair(is_prefix_aware=False)
    pair.cores[1].emit(report(stored(50)))
    assert pair.ranks(request(1000)) == [0, 1, 0, 1]


def test_a_restarted_core_has_nothing_cached() -> None:
    pair = Pair()
    pair.cores[1].emit(report(stored(50)))
    pair.cores[1].emit(EngineDeadError("it broke"))
    assert pair.ranks(request(1000)) == [0, 1, 0, 1]
    pair.cores[1].emit(report(stored(2)))
    assert pair.choose(request(1000)) == (1, 32)


def test_removed_and_cleared_blocks_are_not_cached() -> None:
    pair = Pair()
    pair.cores[1].emit(report(stored(50)))
    pair.cores[1].emit(report(BlockRemoved(block_hashes=stored(50).block_hashes[2:])))
    assert pair.choose(request(1000)) == (1, 32)
    pair.cores[1].emit(report(AllBlocksCleared()))
    assert pair.ranks(request(1000)) == [0, 1, 0, 1]


def test_blocks_of_other_salts_other_media_and_windows_do_not_count() -> None:
    pair = Pair()
    pair.cores[1].emit(report(stored(50, medium="CPU"), stored(50, kv_cache_spec_sliding_window=64, group_idx=1)))
    assert pair.ranks(request(1000)) == [0, 1, 0, 1]
    pair.cores[1].emit(report(stored(50, "mine")))
    assert [pair.choose(request(1000, salt))[1] for salt in ("mine", None, "yours", "mine")] == [800, 0, 0, 800]


def test_replicas_of_one_core_take_their_own_reports_and_mark_their_requests() -> None:
    sent: list[EngineRequest] = []
    cores = [SilentCore(), SilentCore()]
    pair = [replica(core, rank) for rank, core in enumerate(cores)]
    for core in cores:
        core.add_request = sent.append
    for rank, usage in ((0, 0.25), (1, 0.75)):
        stats = SchedulerStats(0, 0, usage, 0, 0, 0)
        for core in cores:
            core.emit(StepReport(outputs=(), events=(), num_tokens=0, stats=stats, dp_rank=rank))
    assert [each.stats.kv_cache_usage for each in pair] == [0.25, 0.75]
    for each in pair:
        each.submit(request(10), 0.0, None)
    assert [each.dp_rank for each in sent] == [0, 1]


def test_a_policy_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="data_parallel_policy must be one of least-loaded, prefix-aware, got 'best'"):
        resolve(EngineArgs(data_parallel_policy="best"))


def test_prefix_aware_needs_a_prefix_cache() -> None:
    args = EngineArgs(data_parallel_size=2, data_parallel_policy="prefix-aware", enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="needs enable_prefix_caching"):
        resolve(args)


@pytest.mark.parametrize(
    ("policy", "size", "wanted"), [("least-loaded", 2, False), ("prefix-aware", 1, False), ("prefix-aware", 2, True)]
)
def test_cores_report_cached_blocks_only_if_placement_uses_them(policy: str, size: int, wanted: bool) -> None:
    assert resolve(EngineArgs(data_parallel_size=size, data_parallel_policy=policy)).is_prefix_aware is wanted


# ---- The configuration of each core ----


def configs_of_two(transfer: Any = None, events: Any = None) -> list[EngineConfig]:
    args = EngineArgs(data_parallel_size=2, kv_transfer_config=transfer, kv_events_config=events)
    return [plan.config for plan in core_plans(resolve(args), None)]


def transfers_of_two(transfer: Any) -> list[KVTransferConfig]:
    return [cast("KVTransferConfig", config.kv_transfer) for config in configs_of_two(transfer)]


def test_one_core_keeps_its_configuration() -> None:
    config = resolve(EngineArgs(kv_transfer_config='{"kv_connector": "P2PConnector", "kv_port": 5600}'))
    (plan,) = core_plans(config, None)
    assert plan.config is config
    assert not plan.environment


def test_ports_and_names_differ_from_core_to_core() -> None:
    transfer = {
        "kv_connector": "P2PConnector",
        "engine_id": "decode",
        "kv_port": 5600,
        "kv_connector_extra_config": {"bootstrap_port": 8998},
    }
    events = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "ipc:///tmp/e"}
    configs = configs_of_two(json.dumps(transfer), events)
    transfers = [cast("KVTransferConfig", config.kv_transfer) for config in configs]
    assert [each.kv_port for each in transfers] == [5600, 5601]
    assert [each.kv_connector_extra_config["bootstrap_port"] for each in transfers] == [8998, 8999]
    assert [each.engine_id for each in transfers] == ["decode-0", "decode-1"]
    published = [config.kv_events for config in configs]
    assert [each.endpoint for each in published] == ["tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"]
    assert len({each.replay_endpoint for each in published}) == 2


@pytest.mark.parametrize(("first", "second"), [(5557, 5558), (5558, 5557)])
def test_ports_of_kv_events_that_would_meet_are_refused(first: int, second: int) -> None:
    events = {"endpoint": f"tcp://127.0.0.1:{first}", "replay_endpoint": f"tcp://127.0.0.1:{second}"}
    with pytest.raises(ConfigError, match=f"at least data_parallel_size=2 apart, got {first} and {second}"):
        configs_of_two(events=events)
    assert core_plans(resolve(EngineArgs(kv_events_config=events)), None), "one engine takes them as they are"


@pytest.mark.parametrize("replay", [5559, 5555, 0])
def test_ports_of_kv_events_that_do_not_meet(replay: int) -> None:
    events = {"endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": f"tcp://127.0.0.1:{replay}"}
    published = [config.kv_events.replay_endpoint for config in configs_of_two(events=events)]
    assert published == [f"tcp://127.0.0.1:{replay + (replay and rank)}" for rank in range(2)]


@pytest.mark.parametrize("extra", [{}, {"kv_connector_extra_config": {"transport": "sockets"}}])
def test_the_default_bootstrap_port_differs_from_core_to_core(extra: dict[str, Any]) -> None:
    transfers = transfers_of_two({"kv_connector": "MooncakeConnector", **extra})
    given = [dict(each.kv_connector_extra_config) for each in transfers]
    assert [each.pop("bootstrap_port") for each in given] == [8998, 8999]
    assert given == [extra.get("kv_connector_extra_config", {})] * 2


def test_ports_and_names_of_children_differ_from_core_to_core() -> None:
    """What the connector will refuse is left as it is."""
    children = [
        {"kv_connector": "MooncakeConnector", "kv_port": 5600, "engine_id": "a"},
        {"kv_connector": "P2PConnector", "kv_port": 0, "engine_id": 5},
        {"kv_connector": "MooncakeConnector", "kv_port": True, "kv_connector_extra_config": 5},
    ]
    extra = {"connectors": [*children, "no object"]}
    transfers = transfers_of_two({"kv_connector": "MultiConnector", "kv_connector_extra_config": extra})
    first, second = (each.kv_connector_extra_config["connectors"] for each in transfers)
    assert (first[0]["kv_port"], second[0]["kv_port"]) == (5600, 5601)
    assert (first[0]["engine_id"], second[0]["engine_id"]) == ("a-0", "a-1")
    ports = [each[0]["kv_connector_extra_config"]["bootstrap_port"] for each in (first, second)]
    assert ports == [8998, 8999]
    assert first[1:] == second[1:] == [*children[1:], "no object"]


def test_the_default_endpoint_of_events_differs_from_core_to_core() -> None:
    configs = configs_of_two(events={"enable_kv_cache_events": True})
    assert [config.kv_events.endpoint for config in configs] == ["tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"]


def test_automatically_chosen_ports_and_names_stay_automatic() -> None:
    first, second = configs_of_two(
        {"kv_connector": "P2PConnector"}, {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:0"}
    )
    one, other = cast("KVTransferConfig", first.kv_transfer), cast("KVTransferConfig", second.kv_transfer)
    assert (other.kv_port, other.kv_connector_extra_config) == (0, {})
    assert one.engine_id != other.engine_id
    assert second.kv_events.endpoint == "tcp://127.0.0.1:0"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_port": 65535}, r"kv_port in kv_transfer_config must be a port from 0 .* to 65535, got 65536"),
        ({"engine_id": 127 * "x"}, "engine_id in kv_transfer_config must be printable text of at most 128 characters"),
    ],
)
def test_a_port_or_name_that_does_not_suit_the_other_cores_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        transfers_of_two({"kv_connector": "P2PConnector", **given})


def test_an_endpoint_without_a_port_above_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"endpoint in kv_events_config must be .*, got 'tcp://127.0.0.1:65536'"):
        configs_of_two(events={"endpoint": "tcp://127.0.0.1:65535"})


@pytest.mark.parametrize(
    ("visible", "tp", "wanted"), [(None, 1, ["0", "1"]), ("4,6,7", 1, ["4", "6"]), ("4,5,6,7", 2, ["4,5", "6,7"])]
)
def test_each_core_has_gpus_of_its_own(visible: str | None, tp: int, wanted: list[str]) -> None:
    config = resolve(EngineArgs(data_parallel_size=2, tensor_parallel_size=tp, device="cuda"))
    assert [plan.environment["CUDA_VISIBLE_DEVICES"] for plan in core_plans(config, visible)] == wanted


def test_too_few_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs 3 GPUs.*lists 2"):
        core_plans(resolve(EngineArgs(data_parallel_size=3)), "0,1")


@pytest.mark.parametrize(("device", "visible"), [("cpu", "0"), ("auto", "")])
def test_cores_on_a_cpu_get_no_environment_of_their_own(device: str, visible: str) -> None:
    config = resolve(EngineArgs(data_parallel_size=2, device=device))
    assert [plan.environment for plan in core_plans(config, visible)] == [{}, {}]


def test_cores_on_a_cpu_share_its_memory_and_its_threads() -> None:
    config = resolve(EngineArgs(data_parallel_size=3))
    assert config.on_device("cpu").cache.num_sharers == 3
    assert config.on_device("cuda").cache.num_sharers == 1


def test_llm_refuses_several_engines() -> None:
    with pytest.raises(ConfigError, match="penstock serve"):
        LLM(data_parallel_size=2)


NODES = [{0, 1, 2, 3}, {8, 9, 10, 11}]


@pytest.mark.parametrize(
    ("size", "nodes", "wanted"),
    [
        (2, NODES, [{0, 1, 2, 3}, {8, 9, 10, 11}]),
        (4, NODES, [{0, 1}, {2, 3}, {8, 9}, {10, 11}]),
        (3, NODES, [{0, 1}, {2, 3}, {8, 9, 10, 11}]),
        (2, [{0}, {1}, {2}], [{0}, {1, 2}]),
        (2, [{0, 1, 2, 3}], [set(), set()]),
        (2, [], [set(), set()]),
        (3, [{0}, {1}], [set(), set(), set()]),
    ],
)
def test_engines_are_bound_to_nodes(size: int, nodes: list[set[int]], wanted: list[set[int]]) -> None:
    plans = core_plans(resolve(EngineArgs(data_parallel_size=size, device="cpu")), None, nodes)
    assert [set(plan.cores) for plan in plans] == wanted
    threads = [plan.config.execution.num_threads for plan in plans]
    assert threads == [len(cores) or None for cores in wanted]


def test_threads_of_bound_engines() -> None:
    args = EngineArgs(data_parallel_size=2, tensor_parallel_size=2, device="cpu")
    assert [plan.config.execution.num_threads for plan in core_plans(resolve(args), None, NODES)] == [2, 2]
    given = replace(args, num_threads=1)
    assert [plan.config.execution.num_threads for plan in core_plans(resolve(given), None, NODES)] == [1, 1]


def test_a_process_is_bound_to_its_cores() -> None:
    before = os.sched_getaffinity(0)
    only = {min(before)}
    with machine.bound_to(only):
        found = subprocess.run(
            [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"],
            capture_output=True,
            text=True,
            check=True,
        )
    assert found.stdout.strip() == str(only)
    assert os.sched_getaffinity(0) == before
    with machine.bound_to(()):
        assert os.sched_getaffinity(0) == before


def test_numa_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, cores in (("0", "0-2\n"), ("1", "4,6-7\n"), ("10", "9\n"), ("2", "\n")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cores)
    monkeypatch.setattr(machine, "NUMA_NODES", tmp_path)
    monkeypatch.setattr(machine, "allowed_cores", lambda: set(range(1, 10)))
    assert machine.numa_nodes() == [{1, 2}, {4, 6, 7}, {9}]
    monkeypatch.setattr(machine, "NUMA_NODES", tmp_path / "none")
    assert machine.numa_nodes() == []
