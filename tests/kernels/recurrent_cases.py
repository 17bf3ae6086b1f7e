"""What every recurrent kernel must do: have the same bits for every division into steps, and for any drafts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from penstock.kernels import native
from penstock.kernels.recurrent import StateRequests, StateRows

Inputs = tuple[torch.Tensor, ...]
Layer = Callable[..., torch.Tensor]
BLOCK_SIZE = 8
_SMALL = 4000


def isas(kernel: Kernel | None = None) -> list[str | None]:
    """Returns the instruction sets, and None for the reference, unless it is slow because a kernel's state is large."""
    if kernel is not None and kernel.is_only_reference:
        return [None]
    is_slow = kernel is not None and math.prod(kernel.state) > _SMALL
    return [*([] if is_slow else [None]), *native.instruction_sets()]


@dataclass(frozen=True)
class Kernel:
    """A kernel with random weights. `layers` makes it for an instruction set, None being the reference, or Triton."""

    layers: Callable[[str | None], Layer]
    widths: tuple[int, ...]  # of the inputs
    state: tuple[int, int]  # heads, and numbers of a head's state
    draft_width: int  # inputs that are kept of a draft
    is_only_reference: bool = False  # or Triton

    def inputs(self, count: int, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        return tuple(torch.randn(count, width, generator=generator).to(dtype) for width in self.widths)

    def run(self, layer: Layer, inputs: Inputs, chunks: Sequence[int]) -> Inputs:
        """Returns the outputs, and the states after whole blocks."""
        count, found = len(inputs[0]), list[torch.Tensor]()
        engine, start = Engine(self, layer, count, 0, inputs[0].dtype), 0
        for chunk in chunks:
            found.append(engine.step(rows(inputs, start, start + chunk), start))
            start += chunk
        assert start == count
        return torch.cat(found), engine.states[: count // BLOCK_SIZE].clone()


def rows(inputs: Inputs, start: int, end: int) -> Inputs:
    return tuple(each[start:end] for each in inputs)


class Engine:
    """Runs one sequence in steps; every whole block's state is kept."""

    def __init__(self, kernel: Kernel, layer: Layer, num_tokens: int, most_drafts: int, dtype: torch.dtype) -> None:
        self.layer = layer
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        self.states = torch.full((num_blocks + 1, *kernel.state), torch.nan)
        self.table = torch.arange(1, num_blocks + 1, dtype=torch.int32)[None]
        self.drafts = None
        if most_drafts:
            self.drafts = torch.full((3, most_drafts, kernel.draft_width), torch.nan, dtype=dtype)
        self.num_in_states = 0

    def step(self, inputs: Inputs, start: int, num_drafts: int = 0) -> torch.Tensor:
        count, state_rows = len(inputs[0]), StateRows(BLOCK_SIZE)
        if self.drafts is not None:
            pending, drafts = ([start - self.num_in_states], [num_drafts])
            state_rows = StateRows(
                BLOCK_SIZE,
                torch.tensor([2]),
                torch.tensor(pending, dtype=torch.int32),
                torch.tensor(drafts, dtype=torch.int32),
            )
        starts, lengths = (torch.tensor(each, dtype=torch.int32) for each in ([0, count], [start + count]))
        requests = StateRequests(self.table, starts, lengths, state_rows, self.drafts)
        self.num_in_states = start + count - num_drafts
        return self.layer(*inputs, self.states, requests)


DIVISIONS = ([1] * 45, [8, 16, 21], [3, 13, 29], [44, 1])


def check_divisions(kernel: Kernel, dtype: torch.dtype, divisions: Sequence[list[int]] = DIVISIONS) -> None:
    count = sum(divisions[0])
    inputs = kernel.inputs(count, dtype, torch.Generator().manual_seed(2))
    for isa in isas(kernel):
        layer = kernel.layers(isa)
        expected, states = kernel.run(layer, inputs, [count])
        for chunks in divisions:
            found, others = kernel.run(layer, inputs, chunks)
            assert torch.equal(found, expected), (isa, chunks)
            assert torch.equal(others, states), (isa, chunks)


def check_instruction_sets(kernel: Kernel) -> None:
    """Those with one arithmetic have the same bits."""
    inputs = kernel.inputs(13, torch.bfloat16, torch.Generator().manual_seed(3))
    first: dict[str, tuple[str, Inputs]] = {}
    for isa in native.instruction_sets():
        found = kernel.run(kernel.layers(isa), inputs, [13])
        name, expected = first.setdefault(native.ARITHMETIC[isa], (isa, found))
        assert all(map(torch.equal, found, expected)), f"{isa} and {name}"


def check_threads(kernel: Kernel, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    layer = kernel.layers(native.instruction_sets()[0])
    inputs = kernel.inputs(64, torch.bfloat16, torch.Generator().manual_seed(4))
    expected = kernel.run(layer, inputs, [64])
    for count in (1, 2, 5):
        monkeypatch.setattr(f"penstock.kernels.{module}.num_threads", lambda count=count: count)
        assert all(map(torch.equal, kernel.run(layer, inputs, [64]), expected)), count


def check_drafts(kernel: Kernel, seed: int) -> None:
    """Each step verifies drafts, of which any number is accepted; wrong drafts have other inputs."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    count, most = 40, 3
    inputs = kernel.inputs(count, torch.bfloat16, generator)
    for isa in isas(kernel):
        layer = kernel.layers(isa)
        expected, states = kernel.run(layer, inputs, [count])
        engine = Engine(kernel, layer, count + most, most, torch.bfloat16)
        start = rng.choice([1, 5, 16])
        found = [engine.step(rows(inputs, 0, start), 0)]
        while start < count:
            num_drafts = rng.randint(0, min(most, count - start - 1))
            accepted = rng.randint(0, num_drafts)
            given = tuple(each.clone() for each in rows(inputs, start, start + 1 + num_drafts))
            for each, wrong in zip(given, kernel.inputs(8, torch.bfloat16, generator), strict=True):
                each[1 + accepted :] = wrong[: num_drafts - accepted]
            found.append(engine.step(given, start, num_drafts)[: 1 + accepted])
            start += 1 + accepted
        # The last accepted drafts are in no state yet.
        complete = engine.num_in_states // BLOCK_SIZE
        assert torch.equal(torch.cat(found), expected), isa
        assert torch.equal(engine.states[:complete], states[:complete]), isa


def check_batch(kernel: Kernel) -> None:
    """Requests of a batch are independent, and padding is ignored."""
    generator, lengths = torch.Generator().manual_seed(5), [9, 1, 17]
    given = [kernel.inputs(length, torch.bfloat16, generator) for length in lengths]
    starts = torch.tensor([0, 9, 10, 27, 27], dtype=torch.int32)
    table = torch.tensor([[1, 2, 0], [3, 0, 0], [0, 4, 5], [0, 0, 0]], dtype=torch.int32)
    for isa in isas(kernel):
        layer, states = kernel.layers(isa), torch.full((5, *kernel.state), torch.nan)
        requests = StateRequests(table, starts, torch.tensor([*lengths, 0], dtype=torch.int32), StateRows(BLOCK_SIZE))
        inputs: list[Any] = [torch.cat(each) for each in zip(*given, strict=True)]
        found = layer(*inputs, states, requests).split(lengths)
        alone = [kernel.run(layer, each, [len(each[0])]) for each in given]
        assert all(torch.equal(one, other[0]) for one, other in zip(found, alone, strict=True)), isa
        assert torch.equal(states[0], alone[0][1][0]), isa
        # The third request's table has no block for its first state.
        assert torch.equal(states[3], alone[2][1][1]), isa
