"""Data parallelism without engines: what each core is told, and which replica gets a request."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast

import pytest

from penstock import LLM, ConfigError, RequestError
from penstock.config.engine import EngineArgs, resolve
from penstock.config.model_path import localise
from penstock.config.replicas import core_plans
from penstock.frontend.placement import Placement
from penstock.frontend.replica import Replica


@dataclass(eq=False)
class Stand:
    """As much of a `Replica` as a choice looks at."""

    load: int = 0
    outage: Exception | None = None


def placement(*replicas: Stand) -> Placement:
    return Placement(cast("tuple[Replica, ...]", replicas))


def test_idle_replicas_take_turns() -> None:
    replicas = [Stand(), Stand(), Stand()]
    choice = placement(*replicas)
    assert [choice.choose(None) for _ in range(6)] == 2 * replicas


def test_the_one_with_the_least_work_is_chosen() -> None:
    replicas = [Stand(500), Stand(20), Stand(700)]
    choice = placement(*replicas)
    assert [choice.choose(None) for _ in range(2)] == [replicas[1], replicas[1]]


def test_one_that_does_not_serve_is_left_out() -> None:
    replicas = [Stand(0, RuntimeError("restarting")), Stand(900)]
    assert placement(*replicas).choose(None) is replicas[1]


def test_where_none_serves_one_of_them_says_why() -> None:
    replicas = [Stand(0, RuntimeError("gone"))] * 2
    assert placement(*replicas).choose(None) in replicas


def test_a_rank_that_is_asked_for_is_taken() -> None:
    replicas = [Stand(0), Stand(900)]
    assert placement(*replicas).choose(1) is replicas[1]


@pytest.mark.parametrize("rank", [-1, 2])
def test_an_unknown_rank_is_refused(rank: int) -> None:
    with pytest.raises(RequestError, match="from 0 to 1"):
        placement(Stand(), Stand()).choose(rank)


def test_one_core_keeps_its_arguments() -> None:
    args = EngineArgs(kv_transfer_config='{"kv_connector": "P2PConnector", "kv_port": 5600}')
    (plan,) = core_plans(args, None)
    assert plan.args is args
    assert not plan.environment


def test_ports_and_names_differ_from_core_to_core() -> None:
    transfer = {
        "kv_connector": "P2PConnector",
        "engine_id": "decode",
        "kv_port": 5600,
        "kv_connector_extra_config": {"bootstrap_port": 8998},
    }
    events = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "ipc:///tmp/e"}
    args = EngineArgs(data_parallel_size=2, kv_transfer_config=json.dumps(transfer), kv_events_config=events)
    plans = core_plans(args, None)
    transfers = [cast("dict[str, Any]", plan.args.kv_transfer_config) for plan in plans]
    assert [each["kv_port"] for each in transfers] == [5600, 5601]
    assert [each["kv_connector_extra_config"]["bootstrap_port"] for each in transfers] == [8998, 8999]
    assert len({each["engine_id"] for each in transfers}) == 2
    published = [cast("dict[str, Any]", plan.args.kv_events_config) for plan in plans]
    assert [each["endpoint"] for each in published] == ["tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"]
    assert len({each["replay_endpoint"] for each in published}) == 2


def test_a_port_that_is_chosen_freely_stays_so() -> None:
    args = EngineArgs(
        data_parallel_size=2,
        kv_transfer_config={"kv_connector": "P2PConnector"},
        kv_events_config={"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:0"},
    )
    second = core_plans(args, None)[1].args
    assert second.kv_transfer_config == {"kv_connector": "P2PConnector"}
    assert cast("dict[str, Any]", second.kv_events_config)["endpoint"] == "tcp://127.0.0.1:0"


@pytest.mark.parametrize(
    ("visible", "tp", "wanted"), [(None, 1, ["0", "1"]), ("4,6,7", 1, ["4", "6"]), ("4,5,6,7", 2, ["4,5", "6,7"])]
)
def test_each_core_has_gpus_of_its_own(visible: str | None, tp: int, wanted: list[str]) -> None:
    args = EngineArgs(data_parallel_size=2, tensor_parallel_size=tp, device="cuda")
    assert [plan.environment["CUDA_VISIBLE_DEVICES"] for plan in core_plans(args, visible)] == wanted


def test_too_few_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs 3 GPUs.*lists 2"):
        core_plans(EngineArgs(data_parallel_size=3), "0,1")


@pytest.mark.parametrize(("device", "visible"), [("cpu", "0"), ("auto", "")])
def test_cores_on_a_cpu_see_what_there_is(device: str, visible: str) -> None:
    assert [plan.environment for plan in core_plans(EngineArgs(data_parallel_size=2, device=device), visible)] == [
        {},
        {},
    ]


def test_cores_on_a_cpu_share_its_memory_and_its_threads() -> None:
    config = resolve(localise(EngineArgs(data_parallel_size=3)), "cpu")
    assert (config.cache.num_sharers, config.parallel.num_replicas) == (3, 3)
    on_gpus = resolve(localise(EngineArgs(data_parallel_size=3)), "cuda")
    assert (on_gpus.cache.num_sharers, on_gpus.parallel.num_replicas) == (1, 1)


def test_llm_refuses_several_engines() -> None:
    with pytest.raises(ConfigError, match="penstock serve"):
        LLM(data_parallel_size=2)
