"""The codes of quantized blocks: each instruction set writes those of the reference, and nothing beyond."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.kernels import block_codes, native
from penstock.kernels.block_codes import Planes, unpack_codes, unpack_codes_reference

# Codes of a block and its bytes, the low and the high bits: runs of whole words and of single bytes, and all widths.
LAYOUTS = {
    "four": (32, 18, Planes(2, 16, 4), Planes()),
    "eight": (32, 34, Planes(2, 32, 8), Planes()),
    "five, byte by byte": (32, 22, Planes(6, 16, 4), Planes(2, 1, 1)),
    "five": (256, 176, Planes(48, 32, 4), Planes(16, 32, 1)),
    "six": (256, 210, Planes(0, 64, 4), Planes(128, 32, 2)),
    "runs of three": (24, 13, Planes(1, 3, 4), Planes()),
}


def test_a_byte_has_codes_that_are_a_run_apart() -> None:
    out = torch.empty(1, 8, dtype=torch.uint8)
    unpack_codes_reference(np.array([[9, 0x21, 0x43, 0x65, 0x87]], np.uint8), Planes(1, 2, 4), Planes(), out)
    assert out.tolist() == [[1, 3, 2, 4, 5, 7, 6, 8]]
    # Of two bits, byte by byte, above the low ones.
    unpack_codes_reference(np.array([[0, 0, 0, 0, 0b11100100, 0b01]], np.uint8), Planes(0, 4, 4), Planes(4, 1, 2), out)
    assert out.tolist() == [[0, 16, 32, 48, 16, 0, 0, 0]]


@pytest.mark.parametrize("isa", native.instruction_sets())
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [0, 1, 7, 1000])
def test_equals_the_reference(isa: str, layout: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_codes, "library", lambda: native.library_for(isa))
    values, num_bytes, low, high = LAYOUTS[layout]
    blocks = np.random.default_rng(0).integers(0, 256, (count, num_bytes), np.uint8)
    memory = torch.full(((count + 2) * values,), 255, dtype=torch.uint8)
    found, expected = memory[values:-values].view(count, values), torch.empty(count, values, dtype=torch.uint8)
    unpack_codes(blocks, low, high, found)
    unpack_codes_reference(blocks, low, high, expected)
    assert torch.equal(found, expected)
    assert memory[:values].eq(255).all()
    assert memory[-values:].eq(255).all()
