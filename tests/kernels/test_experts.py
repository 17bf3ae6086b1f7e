"""The grouped products of experts: each element is what a linear layer of its expert computes, in any batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from penstock.config.experts import CLAMPED, SILU
from penstock.config.families import GELU_TANH, SQUARED_RELU
from penstock.kernels import native
from penstock.kernels.experts import (
    ACTIVATIONS,
    Biases,
    ExpertsShape,
    GroupedExperts,
    Groups,
    combine_reference,
    group_reference,
    make_experts,
)
from penstock.kernels.linear import PackedLinear
from tests.grids import grid

ISAS = (*native.instruction_sets(), "torch")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NUM_SLOTS = 7


@dataclass(frozen=True)
class Case:
    """[H, I, O] with whole panels and with tails, and the inner features that this rank has."""

    hidden: int
    inner: int
    outputs: int
    own: range


CASES = (Case(96, 64, 96, range(64)), Case(130, 44, 33, range(44)), Case(64, 96, 40, range(35, 80)))
# Rows of every slot: one each, some slots without any, all in one, more than a block and more than a thread packs.
DISTRIBUTIONS = {
    "one": (0, 0, 0, 1, 0, 0, 0),
    "some": (1, 0, 2, 3, 0, 0, 5),
    "many": (17, 0, 33, 7, 40, 1, 12),
    "skewed": (0, 1, 0, 0, 620, 0, 2),
}


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = native.num_threads()
    native.set_num_threads(2)
    yield
    native.set_num_threads(before)


def values(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def library_of(isa: str) -> Callable[[], native.NativeLibrary | None]:
    return lambda: None if isa == "torch" else native.library_for(isa)


class Layer:
    """Experts in slots, and for comparison a linear layer for each weight."""

    def __init__(
        self, isa: str, dtype: torch.dtype, case: Case, has_biases: bool = False, activation: str = SILU
    ) -> None:
        own = len(case.own)
        shape = ExpertsShape(NUM_SLOTS, case.hidden, own, case.inner, case.outputs, dtype, activation)
        self.experts: GroupedExperts = make_experts(shape, has_biases, library_of(isa))
        self.linears: list[tuple[PackedLinear, PackedLinear]] = []
        self.dense: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.activate = ACTIVATIONS[activation]
        rows = shape.gate_up_features
        for slot in range(NUM_SLOTS):
            gate_up = values(rows, case.hidden, dtype=dtype, seed=10 + slot, scale=2 * case.hidden**-0.5)
            down = values(case.outputs, case.inner, dtype=dtype, seed=20 + slot, scale=case.inner**-0.5)
            biases = None
            if has_biases:
                sizes = (rows, case.outputs)
                biases = Biases(*(values(size, dtype=dtype, seed=30 + slot + size) for size in sizes))
            self.experts.store(slot, gate_up, down, biases)
            self.dense.append((gate_up, down))
            self.linears.append(
                (
                    PackedLinear(gate_up, biases and biases.gate_up, library=library_of(isa)),
                    PackedLinear(down, biases and biases.down, library=library_of(isa)),
                )
            )

    def expected_gate_up(self, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        rows, spans = x[groups.pairs.long() // groups.rows.shape[1]], itertools.pairwise(groups.starts.tolist())
        return torch.cat(
            [self.activate(gate_up(rows[a:b])) for (gate_up, _), (a, b) in zip(self.linears, spans, strict=True)]
        )

    def expected_down(self, activated: torch.Tensor, groups: Groups) -> torch.Tensor:
        starts = groups.starts.tolist()
        return torch.cat(
            [
                self.linears[slot][1](activated[starts[slot] : starts[slot + 1]].contiguous())
                for slot in range(NUM_SLOTS)
            ]
        )


def identity() -> torch.Tensor:
    return torch.arange(NUM_SLOTS, dtype=torch.int32)


def pairs_of(distribution: str, seed: int = 0) -> torch.Tensor:
    """Returns ids [T, 1] in random order with as many rows of every expert as the distribution has."""
    counts = torch.tensor(DISTRIBUTIONS[distribution])
    ids = torch.repeat_interleave(torch.arange(NUM_SLOTS), counts)
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))].view(-1, 1)


def uses_this_process_set(isa: str) -> bool:
    """Whether `silu_and_mul`, which takes this process's set, computes as the experts of this one do."""
    found = native.library()
    return isa == (found.isa if found else "torch")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("case", "distribution", "has_biases"), grid(CASES, tuple(DISTRIBUTIONS), (False, True)))
def test_equals_a_linear_layer_of_each_expert(
    isa: str, dtype: torch.dtype, case: Case, distribution: str, has_biases: bool
) -> None:
    layer, ids = Layer(isa, dtype, case, has_biases), pairs_of(distribution)
    x = values(len(ids), case.hidden, dtype=dtype, seed=1)
    groups = layer.experts.group(ids, identity())
    activated = layer.experts.gate_up(x, groups)
    if uses_this_process_set(isa):
        assert torch.equal(activated, layer.expected_gate_up(x, groups))
    else:
        torch.testing.assert_close(activated, layer.expected_gate_up(x, groups), rtol=2e-2, atol=2e-3)
    inputs = values(len(ids), case.inner, dtype=dtype, seed=2)
    assert torch.equal(layer.experts.down(inputs, groups), layer.expected_down(inputs, groups))


@pytest.mark.parametrize("isa", native.instruction_sets())
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_neighbours_change_nothing(isa: str, dtype: torch.dtype) -> None:
    case = Case(256, 512, 256, range(512))
    layer, top_k = Layer(isa, dtype, case), 3
    ids = torch.rand(90, NUM_SLOTS, generator=torch.Generator().manual_seed(3)).argsort(-1)[:, :top_k].contiguous()
    weights = values(90, top_k, dtype=torch.float32, seed=4)
    x = values(90, case.hidden, dtype=dtype, seed=1)

    def run(rows: slice, threads: int) -> torch.Tensor:
        native.set_num_threads(threads)
        groups = layer.experts.group(ids[rows].contiguous(), identity())
        activated = layer.experts.gate_up(x[rows].contiguous(), groups)
        outputs = layer.experts.down(activated, groups)
        return layer.experts.combine(outputs, groups, weights[rows].contiguous())

    whole = run(slice(0, 90), 2)
    assert torch.equal(run(slice(0, 90), 1), whole)
    assert torch.equal(run(slice(0, 90), 3), whole)
    for first, end in ((0, 1), (1, 3), (5, 22), (40, 90), (89, 90)):
        assert torch.equal(run(slice(first, end), 2), whole[first:end])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_slot_of_an_expert_changes_nothing(isa: str, dtype: torch.dtype) -> None:
    layer = Layer(isa, dtype, CASES[0])
    moved = make_experts(
        ExpertsShape(NUM_SLOTS, CASES[0].hidden, CASES[0].inner, CASES[0].inner, CASES[0].outputs, dtype),
        library=library_of(isa),
    )
    slots = torch.tensor([3, 6, 0, 5, 1, 2, 4], dtype=torch.int32)
    for expert, slot in enumerate(slots.tolist()):
        moved.store(slot, *layer.dense[expert])
    ids = torch.rand(20, NUM_SLOTS, generator=torch.Generator().manual_seed(3)).argsort(-1)[:, :2].contiguous()
    x, weights = values(20, CASES[0].hidden, dtype=dtype, seed=1), values(20, 2, dtype=torch.float32, seed=4)
    found = []
    for experts, table in ((layer.experts, identity()), (moved, slots)):
        groups = experts.group(ids, table)
        outputs = experts.down(experts.gate_up(x, groups), groups)
        found.append(experts.combine(outputs, groups, weights))
    assert torch.equal(*found)


@pytest.mark.parametrize("isa", native.instruction_sets())
@pytest.mark.parametrize("count", [0, 1, 8, 1000])
def test_groups_agree_with_the_reference(isa: str, count: int) -> None:
    layer = Layer(isa, torch.float32, CASES[1])
    ids = torch.randint(11, (count, 4), generator=torch.Generator().manual_seed(count))
    # Experts 3 and 8 are in no slot here.
    slots = torch.tensor([4, 0, 6, -1, 2, 1, 3, 5, -1, 4, 0], dtype=torch.int32)
    found, expected = layer.experts.group(ids, slots), group_reference(ids, slots, NUM_SLOTS)
    num_rows = int(expected.starts[-1])
    assert torch.equal(found.starts, expected.starts)
    assert torch.equal(found.rows, expected.rows)
    assert torch.equal(found.pairs[:num_rows], expected.pairs[:num_rows])
    assert count == 0 or 0 < num_rows < ids.numel()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_are_combined_in_float32_and_rounded_once(isa: str, dtype: torch.dtype) -> None:
    layer = Layer(isa, dtype, CASES[1])
    ids = torch.rand(50, NUM_SLOTS, generator=torch.Generator().manual_seed(3)).argsort(-1)[:, :5].contiguous()
    groups = layer.experts.group(ids, identity())
    outputs, weights = values(250, 33, dtype=dtype, seed=1), values(50, 5, dtype=torch.float32, seed=2)
    found = layer.experts.combine(outputs, groups, weights)
    exact = (outputs[groups.rows.long()].double() * weights.double()[..., None]).sum(1)
    assert found.dtype == dtype
    # Half a unit in the last place, and in float32 the sum's own roundings.
    unit = torch.finfo(dtype).eps * exact.abs().clamp(min=1)
    assert ((found.double() - exact).abs() <= unit * (4 if dtype == torch.float32 else 0.51)).all()
    assert torch.equal(combine_reference(outputs, groups, weights).isfinite(), found.isfinite())


def test_the_order_of_the_sum_is_that_of_the_choices() -> None:
    layer = Layer(ISAS[0], torch.float32, CASES[1])
    groups = layer.experts.group(torch.tensor([[5, 1, 3], [1, 5, 3]]), identity())
    weights = torch.ones(2, 3)
    outputs = torch.empty(6, 1)
    for pair, value in enumerate((1e8, 1.0, -1e8, 1.0, 1e8, -1e8)):
        outputs[groups.rows.view(-1)[pair]] = value
    # 1e8 + 1 - 1e8 is 0 in float32, and so is 1 + 1e8 - 1e8; but 1e8 - 1e8 + 1 would be 1.
    assert layer.experts.combine(outputs, groups, weights).tolist() == [[0.0], [0.0]]
    swapped = outputs.clone()
    swapped[groups.rows[0, 1]], swapped[groups.rows[0, 2]] = outputs[groups.rows[0, 2]], outputs[groups.rows[0, 1]]
    assert layer.experts.combine(swapped, groups, weights).tolist()[0] == [1.0]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_clamped_activation(isa: str, dtype: torch.dtype) -> None:
    case = CASES[1]
    layer, ids = Layer(isa, dtype, case, has_biases=True, activation=CLAMPED), pairs_of("many")
    # Large inputs, so that both limits are reached.
    x = values(len(ids), case.hidden, dtype=dtype, seed=1, scale=4)
    groups = layer.experts.group(ids, identity())
    found, expected = layer.experts.gate_up(x, groups), layer.expected_gate_up(x, groups)
    unlimited = Layer(isa, dtype, case, has_biases=True).experts.gate_up(x, groups)
    assert expected.abs().max() <= 56 < unlimited.abs().max()
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_as_activation(isa: str, dtype: torch.dtype) -> None:
    layer, ids = Layer(isa, dtype, CASES[1], activation=GELU_TANH), pairs_of("many")
    x = values(len(ids), CASES[1].hidden, dtype=dtype, seed=1)
    groups = layer.experts.group(ids, identity())
    found, expected = layer.experts.gate_up(x, groups), layer.expected_gate_up(x, groups)
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    others = Layer(isa, dtype, CASES[1]).experts.gate_up(x, groups)
    assert (others - expected).abs().max() > 10 * tolerance


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("case", "distribution"), grid(CASES, ("one", "some", "many"), strength=1))
def test_experts_without_a_gate(isa: str, dtype: torch.dtype, case: Case, distribution: str) -> None:
    """A squared ReLU has the same bits in every set of instructions."""
    layer, ids = Layer(isa, dtype, case, case is CASES[1], SQUARED_RELU), pairs_of(distribution)
    x = values(len(ids), case.hidden, dtype=dtype, seed=1)
    groups = layer.experts.group(ids, identity())
    activated = layer.experts.gate_up(x, groups)
    assert activated.shape == (len(ids), len(case.own))
    assert torch.equal(activated, layer.expected_gate_up(x, groups))
    inputs = values(len(ids), case.inner, dtype=dtype, seed=2)
    assert torch.equal(layer.experts.down(inputs, groups), layer.expected_down(inputs, groups))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("activation", [SILU, SQUARED_RELU])
def test_weights_come_back(isa: str, dtype: torch.dtype, case: Case, activation: str) -> None:
    layer = Layer(isa, dtype, case, activation=activation)
    for slot, dense in enumerate(layer.dense):
        for stored, weight in zip(layer.experts.weights(slot), dense, strict=True):
            assert torch.equal(stored.dense_weight(), weight)


@pytest.mark.parametrize("isa", ISAS)
def test_a_nan_stays_in_its_row(isa: str) -> None:
    case, ids = CASES[1], pairs_of("many")
    layer = Layer(isa, torch.bfloat16, case)
    x = values(len(ids), case.hidden, dtype=torch.bfloat16, seed=1)
    groups = layer.experts.group(ids, identity())
    expected = layer.experts.down(layer.experts.gate_up(x, groups), groups)
    x[::3] = torch.nan
    found = layer.experts.down(layer.experts.gate_up(x, groups), groups)
    is_nan = groups.pairs.long() % 3 == 0
    assert torch.equal(found[~is_nan], expected[~is_nan])
    assert found[is_nan].isnan().all()


def test_zero_rows_give_an_empty_result() -> None:
    layer = Layer(ISAS[0], torch.bfloat16, CASES[0])
    groups = layer.experts.group(torch.empty(0, 2, dtype=torch.int64), identity())
    activated = layer.experts.gate_up(torch.empty(0, 96, dtype=torch.bfloat16), groups)
    outputs = layer.experts.down(activated, groups)
    assert layer.experts.combine(outputs, groups, torch.empty(0, 2)).shape == (0, 96)
