"""Experts that several engines share: the passes of a step, the rows of a pass, and the configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.config.engine import EngineArgs, resolve
from penstock.config.expert_parallel import parse_expert_parallel
from penstock.config.model import ModelConfig
from penstock.config.replicas import core_plans
from penstock.messages.experts import ExpertMove, ExpertOrders, RowCounts
from penstock.messages.kv_transfer import ShardId, TransferId
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.models.experts import PlacedExperts
from penstock.parallel.groups import ALONE, NullGroup, RankLinks
from penstock.runner.expert_mover import NoExpertStep
from penstock.runner.shared_experts import SharedExpertStep, expert_passes
from penstock.utils.errors import ConfigError
from penstock.worker.messages import LoadWorker
from tests.unit.rank_harness import run_ranks
from tests.unit.test_moving_experts import HIDDEN, experts_with, model

__all__ = ["model"]


def test_the_passes_of_a_step() -> None:
    assert expert_passes([RowCounts(5, 2, 0), RowCounts()]) == [(5, 0)]
    assert expert_passes([RowCounts(5, 2, 1), RowCounts(3, 0, 0)]) == [(5, 3)]
    assert expert_passes([RowCounts(5, 2, 3), RowCounts(), RowCounts(4, 4, 2)]) == [(5, 0, 4), (2, 0, 4), (2, 0, 0)]


def test_drafts_of_a_step_that_samples_nothing_are_no_pass() -> None:
    plan = SchedulerOutput(step=1, total_num_scheduled_tokens=7, num_drafts_to_propose=3)
    assert plan.row_counts == RowCounts(7, 0, 0)
    assert replace_plan(plan, num_sampling=2).row_counts == RowCounts(7, 2, 3)


def replace_plan(plan: SchedulerOutput, **changes: Any) -> SchedulerOutput:
    return SchedulerOutput(**{**{name: getattr(plan, name) for name in plan.__struct_fields__}, **changes})


class Layer:
    """Records the calls of its experts."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.expected = name, log, 0

    def expect(self, passes: list[tuple[int, ...]]) -> None:
        self.expected = len(passes)

    def run_along(self) -> bool:
        if not self.expected:
            return False
        self.expected -= 1
        self.log.append(self.name)
        return True


def test_an_idle_engine_makes_the_passes_in_the_order_of_the_others() -> None:
    log: list[str] = []
    layers: list[Any] = [Layer(name, log) for name in ("a", "b", "c")]
    step = SharedExpertStep(NoExpertStep(), ALONE, layers[:2], layers[2:])
    step.begin(SchedulerOutput(step=1, rows_by_engine=(RowCounts(), RowCounts(4, 2, 3))))
    step.skip()
    assert log == ["a", "b"]
    step.end()
    assert log == ["a", "b", "c", "c", "c"]
    step.begin(SchedulerOutput(step=2, rows_by_engine=(RowCounts(), RowCounts())))
    step.skip()
    step.end()
    assert len(log) == 5, "no engine has rows"


# Rows of each engine, in one pass after another.
PASSES = [(3, 2, 1), (0, 1, 0), (4, 0, 0), (0, 0, 9), (17, 33, 8), (1, 1, 1)]


def rows_of(step: int, engine: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 10 + engine)
    return torch.randn(count, HIDDEN, generator=generator).bfloat16()


@pytest.mark.parametrize(("num_engines", "tp"), [(2, 1), (3, 1), (2, 2)])
def test_the_rows_of_each_engine_have_the_bits_of_one_rank(model: ModelConfig, num_engines: int, tp: int) -> None:
    passes = [counts[:num_engines] for counts in PASSES]
    parallel = parse_expert_parallel(model, tp, num_engines, None, is_enabled=True, balances=False)

    class Place(NullGroup):
        """The place of a rank in its engine, in which only the experts communicate."""

        def __init__(self, index: int) -> None:
            self.index, self.count = index, tp

    @torch.inference_mode()
    def body(links: RankLinks, shard: ShardId) -> list[torch.Tensor]:
        engine, place = divmod(shard[1], tp)
        experts = experts_with(model, group=Place(place), expert_group=links.group, expert_parallel=parallel)
        routed = experts.routed
        assert isinstance(routed, PlacedExperts)
        routed.expect(passes)
        found: list[torch.Tensor] = []
        for step, counts in enumerate(passes):
            if counts[engine]:
                found.append(experts(rows_of(step, engine, counts[engine])).clone())
            else:
                assert routed.run_along()
        assert not routed.run_along()
        return found

    with torch.inference_mode():
        whole = experts_with(model)
        wanted = [
            [whole(rows_of(step, engine, counts[engine])) for step, counts in enumerate(passes) if counts[engine]]
            for engine in range(num_engines)
        ]
    for (_, rank), found in run_ranks(1, num_engines * tp, body).items():
        assert len(found) == len(wanted[rank // tp])
        assert all(map(torch.equal, found, wanted[rank // tp]))


def test_rows_that_nobody_expects_are_a_bug(model: ModelConfig) -> None:
    parallel = parse_expert_parallel(model, 1, 2, None, is_enabled=True, balances=False)

    def body(links: RankLinks, shard: ShardId) -> list[str]:
        experts = experts_with(model, expert_group=links.group, expert_parallel=parallel)
        raised: list[str] = []
        for expected in ([], [(1, 1)]):
            experts.routed.expect(expected)
            with pytest.raises(AssertionError) as caught:
                experts(rows_of(0, 0, 5))
            raised.append(str(caught.value))
        return raised

    for (_, rank), raised in run_ranks(1, 2, body).items():
        assert raised == [
            "a pass of 5 rows that no engine expects",
            f"engine {rank} has 5 rows in a pass with (1, 1)",
        ]


# ---- The configuration ----


def test_engines_divide_the_experts_together(model: ModelConfig) -> None:
    parallel = parse_expert_parallel(model, 2, 3, None, is_enabled=True, balances=False)
    assert parallel is not None
    assert (parallel.num_ranks, parallel.num_slots) == (6, 2)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=1 x data_parallel_size=5 ranks: set .* to 3"):
        parse_expert_parallel(model, 1, 5, None, is_enabled=True, balances=True)


def arguments(model: ModelConfig, **changes: Any) -> EngineArgs:
    # The folder has no weights and no tokenizer.
    found = {"model": str(model.path), "data_parallel_size": 2, "enable_expert_parallel": True, **changes}
    return EngineArgs(skip_tokenizer_init=True, **found)


def test_one_core_drives_engines_that_share_experts(model: ModelConfig) -> None:
    config = resolve(arguments(model))
    assert [plan.config for plan in core_plans(config, None)] == [config]
    assert (config.parallel.num_joint_engines, config.parallel.backend) == (2, "mp")
    # Without the flag each has a core.
    apart = resolve(arguments(model, enable_expert_parallel=False))
    assert (len(core_plans(apart, None)), apart.parallel.backend) == (2, "uniproc")


def test_ranks_of_several_engines_on_a_cluster_are_refused(model: ModelConfig) -> None:
    with pytest.raises(ConfigError, match="distributed_executor_backend=ray cannot be used with data_parallel_size=2"):
        resolve(arguments(model, distributed_executor_backend="ray"))
    assert resolve(arguments(model, distributed_executor_backend="ray", data_parallel_size=1)).parallel.dp == 1


def test_errors_name_the_engine_of_a_rank(model: ModelConfig) -> None:
    config = resolve(arguments(model))
    assert LoadWorker(config, (0, 1), dp_rank=1).name == "(0, 1) of engine 1"
    alone = replace(config, parallel=replace(config.parallel, dp=1))
    assert LoadWorker(alone, (0, 1)).name == "(0, 1)"


def test_orders_reach_every_engine_on_the_wire() -> None:
    from penstock.worker.messages import CODEC

    orders = ExpertOrders(layer="a", moves=(ExpertMove(TransferId("", 1), 0, 3),))
    plan = SchedulerOutput(step=3, expert_orders=orders, rows_by_engine=(RowCounts(1, 1, 2), RowCounts()))
    assert CODEC.copy(plan) == plan
