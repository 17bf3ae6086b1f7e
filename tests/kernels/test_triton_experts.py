"""Compares the products of experts in Triton with linear layers, in the interpreter or on a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from penstock.config.experts import CLAMPED, SILU
from penstock.kernels.experts import Biases, ExpertsShape, ReferenceExperts, combine_reference, group_reference
from penstock.kernels.linear import PackedLinear
from penstock.kernels.triton.experts import HeadsProduct, TritonExperts
from penstock.kernels.triton.linear.tiles import grouped
from tests.kernels.gpu_compiler import compile_for_gpu
from tests.kernels.test_experts import CASES, NUM_SLOTS, Case, identity, pairs_of, values

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3}


def stored(
    experts: TritonExperts | ReferenceExperts, shape: ExpertsShape, order: list[int], has_biases: bool = False
) -> None:
    """Puts expert i into slot order[i]."""
    for expert, slot in enumerate(order):
        make = partial(values, dtype=shape.dtype)
        gate_up = make(2 * shape.own_inner, shape.in_features, seed=10 + expert, scale=2 * shape.in_features**-0.5)
        down = make(shape.out_features, shape.inner, seed=20 + expert, scale=shape.inner**-0.5)
        biases = Biases(make(2 * shape.own_inner, seed=30 + expert), make(shape.out_features, seed=40 + expert))
        moved = Biases(biases.gate_up.to(DEVICE), biases.down.to(DEVICE)) if has_biases else None
        experts.store(slot, gate_up.to(DEVICE), down.to(DEVICE), moved)


def shape_of(case: Case, dtype: torch.dtype, activation: str = SILU) -> ExpertsShape:
    return ExpertsShape(NUM_SLOTS, case.hidden, len(case.own), case.inner, case.outputs, dtype, activation)


def make(
    case: Case, dtype: torch.dtype, has_biases: bool = False, activation: str = SILU, order: list[int] | None = None
) -> TritonExperts:
    shape = shape_of(case, dtype, activation)
    experts = TritonExperts(shape, has_biases, DEVICE)
    stored(experts, shape, list(range(NUM_SLOTS)) if order is None else order, has_biases)
    return experts


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("case", "distribution", "has_biases", "is_clamped"),
    [(0, "one", False, False), (0, "many", True, True), (1, "some", True, False), (1, "many", False, False),
     (2, "many", False, True)],
)  # fmt: skip
def test_equals_linear_layers(
    dtype: torch.dtype, case: int, distribution: str, has_biases: bool, is_clamped: bool
) -> None:
    one, ids = CASES[case], pairs_of(distribution).to(DEVICE)
    activation = CLAMPED if is_clamped else SILU
    shape, tolerance = shape_of(one, dtype, activation), TOLERANCE[dtype]
    reference = ReferenceExperts(shape, partial(PackedLinear, library=lambda: None))
    stored(reference, shape, list(range(NUM_SLOTS)), has_biases)
    experts = make(one, dtype, has_biases, activation)
    groups = experts.group(ids, identity().to(DEVICE))
    x = 3 * values(len(ids), one.hidden, dtype=dtype, seed=1).to(DEVICE)
    expected = reference.gate_up(x, groups)
    if is_clamped:
        assert (reference.gate_up(x / 3, groups).abs() < expected.abs().max()).all()
    torch.testing.assert_close(experts.gate_up(x, groups), expected, rtol=tolerance, atol=20 * tolerance)
    inputs = values(len(ids), one.inner, dtype=dtype, seed=2).to(DEVICE)
    torch.testing.assert_close(
        experts.down(inputs, groups), reference.down(inputs, groups), rtol=tolerance, atol=tolerance
    )


def chosen(tokens: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    ids = torch.rand(tokens, NUM_SLOTS, generator=random).argsort(-1)[:, :top_k].contiguous()
    return ids.to(DEVICE), torch.rand(tokens, top_k, generator=random).to(DEVICE)


def layer(experts: TritonExperts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor):
    groups = experts.group(ids, slots.to(DEVICE))
    outputs = experts.down(experts.gate_up(x, groups), groups)
    found = experts.combine(outputs, groups, weights)
    assert torch.equal(found, combine_reference(outputs, groups, weights))
    return found


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_neighbours_and_slots_change_nothing(dtype: torch.dtype) -> None:
    """The sums of a token's experts have the bits of the reference."""
    case = CASES[0]
    experts, (ids, weights) = make(case, dtype), chosen(50, 3)
    x = values(50, case.hidden, dtype=dtype, seed=1).to(DEVICE)
    whole = layer(experts, x, ids, weights, identity())
    for first, end in ((0, 1), (1, 4), (5, 40), (49, 50)):
        rows = slice(first, end)
        assert torch.equal(layer(experts, x[rows], ids[rows], weights[rows], identity()), whole[rows])
    order = [3, 6, 0, 5, 1, 2, 4]
    moved = make(case, dtype, order=order)
    assert torch.equal(layer(moved, x, ids, weights, torch.tensor(order, dtype=torch.int32)), whole)
    assert layer(experts, x[:0], ids[:0], weights[:0], identity()).shape == (0, case.outputs)


def test_experts_that_are_not_here_are_left_out() -> None:
    case = CASES[0]
    experts, (ids, _) = make(case, torch.float32), chosen(20, 3)
    x = values(20, case.hidden, dtype=torch.float32, seed=1).to(DEVICE)
    all_groups = experts.group(ids, identity().to(DEVICE))
    some = identity()
    some[[2, 5]] = -1
    groups = experts.group(ids, some.to(DEVICE))
    found, everything = experts.gate_up(x, groups), experts.gate_up(x, all_groups)
    is_here = groups.rows >= 0
    assert 0 < int(is_here.sum()) == int(groups.starts[-1]) < ids.numel()
    assert torch.equal(found[groups.rows[is_here].long()], everything[all_groups.rows[is_here].long()])


def test_pairs_are_grouped_without_waiting_for_the_device() -> None:
    """Tensors on this device cannot be read."""
    ids, slots = (torch.zeros(shape, dtype=dtype, device="meta") for shape, dtype in
                  (((5, 2), torch.int64), ((7,), torch.int32)))  # fmt: skip
    groups = group_reference(ids, slots, NUM_SLOTS)
    assert (groups.pairs.shape, groups.rows.shape, groups.starts.shape) == ((10,), (5, 2), (NUM_SLOTS + 1,))


def test_stored_weights_can_be_compared() -> None:
    case = CASES[1]
    shape, experts = shape_of(case, torch.float32), make(case, torch.float32)
    gate_up, down = (each.dense_weight() for each in experts.weights(2))
    assert torch.equal(
        down.cpu(), values(case.outputs, case.inner, dtype=torch.float32, seed=22, scale=case.inner**-0.5)
    )
    assert gate_up.shape == (2 * shape.own_inner, case.hidden)
    assert experts.arrays() == ()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [1, 5])
def test_heads(dtype: torch.dtype, heads: int) -> None:
    weight = values(heads, 70, 100, dtype=dtype, seed=0, scale=0.1).to(DEVICE)
    product = HeadsProduct(weight)
    x = values(heads, 40, 100, dtype=dtype, seed=1).to(DEVICE)
    whole, tolerance = product(x), TOLERANCE[dtype]
    expected = x.double() @ weight.double().transpose(1, 2)
    torch.testing.assert_close(whole.double(), expected, rtol=tolerance, atol=tolerance)
    for first, end in ((0, 1), (3, 17), (39, 40), (2, 2)):
        assert torch.equal(product(x[:, first:end].contiguous()), whole[:, first:end])
    assert product.dense_weight() is weight


@pytest.mark.long
@pytest.mark.parametrize("activation", ["none", "silu", "clamped"])
def test_cost_of_the_products(activation: str) -> None:
    """Of Qwen3-30B-A3B's experts."""
    tile = grouped(2048, 2)
    pointers = dict.fromkeys(("x", "weight", "out"), "*bf16:16") | dict.fromkeys(("pairs", "starts"), "*i32")
    constants = {"bias": None, "num_slots": 128, "top_k": 8, "n": 768, "k": 2048, "tile_outputs": tile.rows,
                 "tile_rows": tile.tokens, "depth": tile.depth, "activation": activation}  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
    cost = compile_for_gpu("penstock.kernels.triton.experts", "_grouped_product", pointers, constants, **options)
    assert cost.spilled_bytes == 0
    assert cost.shared_bytes <= 227 * 1024
    assert "cp.async.cg" in cost.ptx
    assert "wgmma" in cost.ptx or "mma.sync" in cost.ptx
