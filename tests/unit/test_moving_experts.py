"""Experts that move between ranks, which are threads here: no placement and no moment of a move changes a bit."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.expert_parallel import EPLBConfig, ExpertParallelConfig, parse_expert_parallel
from penstock.config.experts import CLAMPED
from penstock.config.model import ModelConfig, load_model_config
from penstock.core.expert_placement import Target, experts_of, next_round
from penstock.kernels import native
from penstock.kernels.experts import Biases, ExpertsShape, NativeExperts, make_experts
from penstock.messages.experts import ExpertMove, ExpertOrders
from penstock.messages.kv_transfer import ShardId, TransferId, TransferReport, TransferStatus
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.models.experts import Experts, PlacedExperts
from penstock.models.sources.source import ALL, Part
from penstock.models.weights import Weights
from penstock.parallel.groups import RankLinks
from penstock.runner.expert_mover import ExpertMover, copy_expert
from penstock.utils.errors import ConfigError
from penstock.utils.shared_memory import create_memory
from tests.unit.rank_harness import run_ranks

NUM_EXPERTS, HIDDEN, INNER = 12, 96, 72
NAME = "layer.mlp"
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": INNER,
    "norm_topk_prob": True,
    "torch_dtype": "bfloat16",
}


class RandomSource:
    """A `WeightSource` in which a tensor depends on its name."""

    def read(self, name: str, shape: Sequence[int], part: Part = ALL) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(map(ord, name)) * len(name))
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).bfloat16()[part]

    def has(self, name: str) -> bool:
        return "mlp.gate." in name or "mlp.experts.0.gate_proj" in name

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return load_model_config(folder)


def experts_with(model: ModelConfig, **weights: Any) -> Experts:
    whole = Weights(RandomSource(), torch.bfloat16, torch.device("cpu"), **weights)
    with torch.inference_mode():
        return Experts(model, whole / "layer")


def parallel_of(num_ranks: int, redundant: int) -> ExpertParallelConfig:
    return ExpertParallelConfig(
        num_experts=NUM_EXPERTS, num_redundant=redundant, num_ranks=num_ranks, balancing=EPLBConfig()
    )


def random_target(parallel: ExpertParallelConfig, chance: random.Random) -> Target:
    names = chance.sample(range(NUM_EXPERTS), NUM_EXPERTS)
    initial = experts_of(parallel.initial_placement(), parallel.num_ranks)
    ranks = [frozenset(names[expert] for expert in rank) for rank in initial]
    return tuple(chance.sample(ranks, len(ranks)))


@dataclass
class Moves:
    """Orders for one step after another; None before a step that waits for the moves."""

    parallel: ExpertParallelConfig
    seed: int
    steps: list[ExpertOrders | str | None] = field(default_factory=list[Any])

    def __post_init__(self) -> None:
        chance, placement, number = random.Random(self.seed), self.parallel.initial_placement(), 0
        for _ in range(3):
            target = random_target(self.parallel, chance)
            while True:
                after, copies = next_round(placement, target)
                if not copies:
                    break
                moves = tuple(
                    ExpertMove(TransferId("", number + i), each.source, each.target) for i, each in enumerate(copies)
                )
                number += len(moves)
                # Steps without orders run while copies are made.
                self.steps += [ExpertOrders(layer=NAME, moves=moves), *[None] * chance.randrange(3)]
                self.steps += ["wait", ExpertOrders(layer=NAME, placement=after), *[None] * chance.randrange(2)]
                placement = after

    @property
    def num_moves(self) -> int:
        return sum(len(each.moves) for each in self.steps if isinstance(each, ExpertOrders))


def inputs_of(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(1 + step * 7 % 40, HIDDEN, generator=generator).bfloat16()


def run(model: ModelConfig, moves: Moves) -> list[list[torch.Tensor]]:
    """Returns what every rank computes in every step."""
    memories: dict[int, tuple[str, ...]] = {}

    @torch.inference_mode()
    def body(links: RankLinks, shard: ShardId) -> list[torch.Tensor]:
        experts = experts_with(model, group=links.group, expert_parallel=moves.parallel)
        assert isinstance(experts.routed, PlacedExperts)
        memories[shard[1]] = tuple(memory.name for memory in experts.routed.memories)
        links.group.barrier()
        mover = ExpertMover({NAME: experts.routed}, {NAME: [names for _, names in sorted(memories.items())]}, shard)
        outputs: list[torch.Tensor] = []
        reports: list[TransferReport] = []
        num_ordered = 0
        for step, orders in enumerate(moves.steps):
            if orders == "wait":
                while len(reports) < num_ordered:
                    reports += mover.end().reports
                links.group.barrier()
                continue
            assert not isinstance(orders, str)
            mover.begin(SchedulerOutput(step=step, expert_orders=orders))
            own = shard[1] * moves.parallel.num_buffers
            if orders is not None:
                num_ordered += sum(own <= move.target < own + moves.parallel.num_buffers for move in orders.moves)
            outputs.append(experts(inputs_of(step)).clone())
            reports += mover.end().reports
        mover.shutdown()
        assert {report.status for report in reports} <= {TransferStatus.DONE}
        assert {report.shard for report in reports} <= {shard}
        links.group.barrier()
        return outputs

    return list(run_ranks(1, moves.parallel.num_ranks, body).values())


@torch.inference_mode()
def expected(model: ModelConfig, moves: Moves) -> list[torch.Tensor]:
    whole = experts_with(model)
    return [whole(inputs_of(step)) for step, orders in enumerate(moves.steps) if orders != "wait"]


def differs(model: ModelConfig, moves: Moves) -> bool:
    wanted = expected(model, moves)
    return not all(all(map(torch.equal, found, wanted)) for found in run(model, moves))


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = native.num_threads()
    native.set_num_threads(1)
    yield
    native.set_num_threads(before)


needs_native = pytest.mark.skipif(native.library() is None, reason="experts move only with the native library")


@needs_native
@pytest.mark.parametrize(
    ("num_ranks", "redundant"), [(2, 0), (2, 2), (2, 12), (3, 0), (3, 3), (3, 6), (4, 0), (4, 4), (4, 20)]
)
@pytest.mark.parametrize("seed", range(2))
def test_no_placement_and_no_moment_of_a_move_changes_a_bit(
    model: ModelConfig, num_ranks: int, redundant: int, seed: int
) -> None:
    moves = Moves(parallel_of(num_ranks, redundant), seed)
    assert moves.num_moves > (4 if redundant < NUM_EXPERTS * (num_ranks - 1) else -1)
    assert not differs(model, moves)


# ---- Planted bugs ----


@needs_native
def test_a_replica_chosen_by_each_rank_is_noticed(monkeypatch: pytest.MonkeyPatch, model: ModelConfig) -> None:
    """sglang#32962: without redundant experts it has no effect."""

    def choose(self: PlacedExperts, ids: torch.Tensor) -> torch.Tensor:
        copies = (torch.arange(len(ids))[:, None] + self.rank) % self._counts[ids]
        return self._buffers[ids, copies]

    monkeypatch.setattr(PlacedExperts, "_choose", choose)
    moves = Moves(parallel_of(2, 0), 0)
    moves.steps[:] = [None] * 8
    assert not differs(model, moves)
    moves.parallel = parallel_of(2, 12)
    assert differs(model, moves)


@needs_native
def test_a_switch_before_the_copy_is_noticed(monkeypatch: pytest.MonkeyPatch, model: ModelConfig) -> None:
    monkeypatch.setattr("penstock.runner.expert_mover.copy_expert", lambda *arguments: None)
    assert differs(model, Moves(parallel_of(2, 0), 0))


@dataclass
class Layer:
    """A rank's experts with biases, in memory that other ranks can map."""

    seed: int
    names: list[str] = field(default_factory=list[str])
    num_bytes: int = 0

    def __post_init__(self) -> None:
        self.memories: list[Any] = []
        shape = ExpertsShape(2, HIDDEN, INNER, INNER, HIDDEN, torch.bfloat16, CLAMPED)
        made = make_experts(shape, has_biases=True, allocate=self._allocate)
        assert isinstance(made, NativeExperts)
        self.experts = made
        for slot in range(2):
            values = partial(torch.randn, generator=torch.Generator().manual_seed(self.seed * 2 + slot))
            biases = Biases(values(2 * INNER).bfloat16(), values(HIDDEN).bfloat16())
            self.experts.store(slot, values(2 * INNER, HIDDEN).bfloat16(), values(HIDDEN, INNER).bfloat16(), biases)

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        self.memories.append(create_memory(num_bytes))
        self.names.append(self.memories[-1].name)
        self.num_bytes += num_bytes
        return torch.frombuffer(self.memories[-1].view, dtype=torch.uint8)

    def compute(self, slot: int) -> torch.Tensor:
        groups = self.experts.group(torch.full((4, 1), slot), torch.arange(2, dtype=torch.int32))
        return self.experts.down(self.experts.gate_up(torch.ones(4, HIDDEN, dtype=torch.bfloat16), groups), groups)


def moved_bits_are_equal() -> bool:
    source, target = Layer(0), Layer(1)
    kept = target.compute(0)
    copy_expert(target.experts.arrays(), source.names[: len(target.experts.arrays())], 0, 1)
    assert torch.equal(target.compute(0), kept)
    return torch.equal(target.compute(1), source.compute(0))


@needs_native
def test_everything_of_an_expert_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(0)
    assert sum(array.nbytes for array in layer.experts.arrays()) == layer.num_bytes
    assert moved_bits_are_equal()
    arrays = NativeExperts.arrays
    monkeypatch.setattr(NativeExperts, "arrays", lambda self: arrays(self)[:2])
    assert not moved_bits_are_equal(), "biases were left behind, and the outputs are the same"


@needs_native
def test_memory_of_another_size_is_not_copied() -> None:
    """Its experts are packed in another way: their bytes would be other weights."""
    target = Layer(1)
    kept, *others = (create_memory(array.nbytes + 64) for array in target.experts.arrays())
    with pytest.raises(OSError, match=f"has {len(kept.view)} bytes, and the memory of this rank {len(kept.view) - 64}"):
        copy_expert(target.experts.arrays(), [memory.name for memory in (kept, *others)], 0, 1)


# ---- Counts and failures ----


def mover_of_one(model: ModelConfig, names: Sequence[str] = ()) -> tuple[ExpertMover, Experts]:
    experts = experts_with(model, expert_parallel=parallel_of(1, 0))
    assert isinstance(experts.routed, PlacedExperts)
    memories = names or [memory.name for memory in experts.routed.memories]
    return ExpertMover({NAME: experts.routed}, {NAME: [memories]}, (1, 0)), experts


@needs_native
def test_tokens_are_counted_but_not_those_of_the_warm_up(model: ModelConfig) -> None:
    mover, experts = mover_of_one(model)

    @torch.inference_mode()
    def step(number: int, is_warm_up: bool) -> dict[str, np.ndarray]:
        mover.begin(SchedulerOutput(step=number, is_warm_up=is_warm_up))
        experts(inputs_of(number))
        return mover.end().loads

    assert step(1, is_warm_up=True) == {}
    for number in (2, 3):
        (load,) = step(number, is_warm_up=False).values()
        assert load.dtype == np.int32
        assert load.shape == (NUM_EXPERTS,)
        assert load.sum() == 3 * len(inputs_of(number))
    mover.shutdown()


@needs_native
def test_a_copy_from_a_rank_that_has_ended_fails(model: ModelConfig) -> None:
    mover, _ = mover_of_one(model, ["/proc/0/fd/0"] * 2)
    move = ExpertMove(TransferId("", 1), source=0, target=NUM_EXPERTS)
    mover.begin(SchedulerOutput(step=1, expert_orders=ExpertOrders(layer=NAME, moves=(move,))))
    # Another stage has this layer.
    mover.begin(SchedulerOutput(step=2, expert_orders=ExpertOrders(layer="other", moves=(move,))))
    mover.shutdown()
    assert mover.end().reports == (TransferReport(TransferId("", 1), (1, 0), TransferStatus.FAILED),)
    assert mover.end().reports == ()


def test_a_piece_that_took_long_delays_the_next_one_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may be stopped for minutes within it: moves go on when it continues."""
    mover, pauses = ExpertMover({}, {}, (0, 0)), list[float]()
    monkeypatch.setattr(mover._is_over, "wait", pauses.append)
    for seconds in (0.001, 60.0):
        mover._pause(seconds)
    assert pauses == [pytest.approx(0.019), 1.0]


def test_experts_without_the_native_library_do_not_move(monkeypatch: pytest.MonkeyPatch, model: ModelConfig) -> None:
    monkeypatch.setattr("penstock.models.experts.has_gpu_kernels", lambda device: True)
    with pytest.raises(ConfigError, match="enable_eplb needs the native library"):
        experts_with(model, expert_parallel=parallel_of(1, 0))


# ---- The configuration ----


def parse(
    model: ModelConfig,
    tp: int = 2,
    dp: int = 1,
    eplb_config: Any = None,
    is_enabled: bool = True,
    balances: bool = True,
) -> ExpertParallelConfig | None:
    return parse_expert_parallel(model, tp, dp, eplb_config, is_enabled=is_enabled, balances=balances)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"is_enabled": False}, "enable_eplb needs enable_expert_parallel"),
        ({"balances": False, "eplb_config": {}}, "eplb_config needs enable_eplb"),
        ({"tp": 1}, "enable_eplb needs tensor_parallel_size or data_parallel_size of at least 2"),
        ({"dp": 4}, "tensor_parallel_size=2 x data_parallel_size=4 ranks: set num_redundant_experts .* to 4"),
        ({"eplb_config": "[]"}, "eplb_config"),
        ({"eplb_config": "{"}, "eplb_config"),
        ({"eplb_config": {"window": 1}}, "window"),
        ({"eplb_config": {"window_size": 0}}, "window_size"),
        ({"eplb_config": {"step_interval": 0}}, "step_interval"),
        ({"eplb_config": {"num_redundant_experts": -1}}, "num_redundant_experts"),
        ({"tp": 5}, "the 12 experts of a layer cannot .* set num_redundant_experts in eplb_config to 3"),
        ({"eplb_config": {"num_redundant_experts": 3}}, "and num_redundant_experts=3 cannot .* to 4"),
        ({"eplb_config": {"num_nodes": 0}}, "num_nodes"),
        ({"eplb_config": {"num_nodes": 3}}, "num_nodes=3 in eplb_config does not divide the 2 ranks"),
        ({"eplb_config": {"num_nodes": 2, "num_redundant_experts": 2}}, "at most 0 with 12 experts .* on 2 nodes"),
        ({"eplb_config": {"num_redundant_experts": 14}}, "at most 12 with 12 experts and tensor_parallel_size=2"),
    ],
)
def test_refusals(model: ModelConfig, given: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        parse(model, **given)


def test_a_model_without_experts_is_refused(model: ModelConfig) -> None:
    dense = replace(model, experts=None)
    with pytest.raises(ConfigError, match=f"{Path(model.path)} has none"):
        parse(dense)
    assert parse(dense, is_enabled=False, balances=False) is None


def test_slots_and_buffers(model: ModelConfig) -> None:
    fixed = parse(model, balances=False)
    moving = parse(model, eplb_config='{"num_redundant_experts": 6, "window_size": 5}')
    assert fixed is not None
    assert moving is not None
    assert (fixed.balancing, fixed.num_slots, fixed.num_buffers) == (None, 6, 6)
    assert model.experts is not None
    grouped = parse(replace(model, experts=replace(model.experts, num_groups=4)))
    assert grouped is not None
    assert (fixed.num_groups, grouped.num_groups) == (1, 4)
    assert moving.balancing == EPLBConfig(window_size=5, num_redundant_experts=6)
    # One spare buffer for every eight slots.
    assert (moving.num_slots, moving.num_buffers) == (9, 11)
