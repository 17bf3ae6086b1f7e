"""Low-rank adapters: equal to their formula, and the same bits whatever the other rows are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.kernels import native
from penstock.kernels.lora import LoraLayer, LowRank, RowSlots
from penstock.kernels.native import NativeLibrary, library_for, num_threads, set_num_threads
from penstock.kernels.quantized import quantize_absmax, quantize_rows
from penstock.layers.linear import Linear

ISAS: list[str | None] = [None, *native.instruction_sets()]
# Inputs, the outputs of the projections, the ranks of one adapter's parts (0: it has none) and of another's.
CASES = [
    (96, (48,), (8,), (5,)),
    (83, (64, 16, 16), (16, 3, 0), (4, 4, 4)),
    (300, (50, 50), (0, 33), (64, 1)),
    (17, (7,), (1,), (0,)),
]


def using(isa: str | None) -> Callable[[], NativeLibrary | None]:
    return lambda: None if isa is None else library_for(isa)


def make_parts(num_inputs: int, sizes: Sequence[int], ranks: Sequence[int], seed: int) -> list[LowRank | None]:
    generator = torch.Generator().manual_seed(seed)
    return [
        None
        if not rank
        else LowRank(
            torch.randn(rank, num_inputs, generator=generator) / num_inputs**0.5,
            torch.randn(size, rank, generator=generator),
            0.5 + rank / 8,
        )
        for size, rank in zip(sizes, ranks, strict=True)
    ]


def order_of(num_outputs: int) -> torch.Tensor:
    return torch.randperm(num_outputs, generator=torch.Generator().manual_seed(5))


def make_layer(case: int, dtype: torch.dtype, isa: str | None, is_ordered: bool = False) -> tuple[LoraLayer, RowSlots]:
    num_inputs, sizes, *ranks = CASES[case]
    rows = RowSlots(64)
    layer = LoraLayer(rows, 3, num_inputs, sizes, order_of(sum(sizes)) if is_ordered else None, using(isa))
    for slot, of_adapter in zip((0, 2), ranks, strict=True):
        layer.load(slot, make_parts(num_inputs, sizes, of_adapter, slot), dtype)
    return layer, rows


def inputs(case: int, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    num_inputs, sizes, *_ = CASES[case]
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, num_inputs + 9, generator=generator).to(dtype)[:, :num_inputs]
    return x, torch.randn(count, sum(sizes), generator=generator).to(dtype)


def added(layer: LoraLayer, rows: RowSlots, slots: Sequence[int], x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    rows.set(np.asarray(slots, np.int32))
    out = out.clone()
    layer.add(x, out)
    return out


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_equals_the_formula(case: int, is_ordered: bool, isa: str | None) -> None:
    layer, rows = make_layer(case, torch.float32, isa, is_ordered)
    num_inputs, sizes, *ranks = CASES[case]
    slots = [0, 2, 2, -1, 1, 0, 0, 0, 0, 2, 0]
    x, out = inputs(case, len(slots), torch.float32)
    expected = out.clone()
    for slot, of_adapter in zip((0, 2), ranks, strict=True):
        parts = make_parts(num_inputs, sizes, of_adapter, slot)
        change = torch.cat(
            [
                torch.zeros(len(x), size) if part is None else part.scale * (x @ part.down.T) @ part.up.T
                for size, part in zip(sizes, parts, strict=True)
            ],
            1,
        )
        chosen = torch.tensor(slots) == slot
        expected[chosen] += (change[:, order_of(sum(sizes))] if is_ordered else change)[chosen]
    found = added(layer, rows, slots, x, out)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[3:5], out[3:5])  # no adapter, and an empty slot


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_row_depends_on_its_adapter_alone(case: int, dtype: torch.dtype) -> None:
    slots = [0, 0, 2, -1, 0, 0, 0, 0, 0, 2, 2, 1, 0, 2, 2, 2, 0]
    x, out = inputs(case, len(slots), dtype)
    results: dict[str, list[torch.Tensor]] = {}
    for isa in ISAS:
        layer, rows = make_layer(case, dtype, isa)
        together = added(layer, rows, slots, x, out)
        for row, slot in enumerate(slots):
            alone = added(layer, rows, [slot], x[row : row + 1], out[row : row + 1])
            assert torch.equal(alone[0], together[row]), (isa, row)
        threads = num_threads()
        for count in (1, 2):
            set_num_threads(count)
            assert torch.equal(added(layer, rows, slots, x, out), together)
        set_num_threads(threads)
        if isa is not None:
            results.setdefault("native", []).append(together)
    # The order of the sums is one in all instruction sets.
    assert all(torch.equal(each, results["native"][0]) for each in results.get("native", []))


def test_an_adapter_reads_inputs_that_are_not_rounded() -> None:
    """It reads one input alone, which the layer rounds to zero beside a large one."""
    weight = replace(quantize_absmax(torch.zeros(16, 32).bfloat16(), 4, 32), quantizes_inputs="by group")
    layer, rows = Linear(weight), RowSlots(2)
    layer.adapters = LoraLayer(rows, 1, 32, (16,))
    down = torch.zeros(1, 32)
    down[0, 3] = 1
    layer.adapters.load(0, [LowRank(down, torch.ones(16, 1), 1.0)], torch.bfloat16)
    rows.set(np.zeros(2, np.int32))
    x = torch.zeros(2, 32).bfloat16()
    x[:, 0], x[:, 3] = 1000, 0.5
    assert not quantize_rows(x)[0][:, 3].any()
    assert torch.equal(layer(x), torch.full((2, 16), 0.5).bfloat16())


@pytest.mark.parametrize("isa", ISAS)
def test_a_slot_is_replaced_and_cleared(isa: str | None) -> None:
    layer, rows = make_layer(1, torch.bfloat16, isa)
    x, out = inputs(1, 2, torch.bfloat16)
    first, second = (added(layer, rows, [slot, slot], x, out) for slot in (0, 2))
    num_inputs, sizes, _, other = CASES[1]
    layer.load(0, make_parts(num_inputs, sizes, other, 2), torch.bfloat16)
    assert torch.equal(added(layer, rows, [0, 0], x, out), second)
    assert not torch.equal(first, second)
    layer.clear(0)
    assert torch.equal(added(layer, rows, [0, 0], x, out), out)
    layer.load(2, [None] * len(sizes), torch.bfloat16)
    assert torch.equal(added(layer, rows, [2, 2], x, out), out)


@pytest.mark.parametrize("is_ordered", [False, True])
def test_the_memory_of_a_slot(is_ordered: bool) -> None:
    sizes, rank = (50, 50), 7
    order = order_of(sum(sizes)) if is_ordered else None
    layer = LoraLayer(RowSlots(4), 1, 30, sizes, order, using(native.instruction_sets()[0]))
    layer.load(0, make_parts(30, sizes, (rank, rank), 1), torch.bfloat16)
    assert layer.slot_bytes(rank, torch.bfloat16) == sum(each.nbytes for each in layer._memory[0])  # pyright: ignore
