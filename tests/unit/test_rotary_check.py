"""Every start checks its rotary tables before the first request."""

from __future__ import annotations

import math

import pytest
import torch

from penstock.cli.main import main
from penstock.config.rope import RopeConfig
from penstock.layers import rotary
from penstock.layers.rotary import rotary_table
from penstock.utils.errors import ConfigError

DEFAULT = RopeConfig(theta=10000.0, rope_type="default", scaling={})
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
ROPES = {
    "default": DEFAULT,
    "linear": RopeConfig(theta=10000.0, rope_type="linear", scaling={"factor": 4.0}),
    "llama3": RopeConfig(theta=500000.0, rope_type="llama3", scaling=LLAMA3),
    "yarn": RopeConfig(theta=1e6, rope_type="yarn", scaling={"factor": 4.0, "original_max_position_embeddings": 1024}),
    "yarn not truncated": RopeConfig(
        theta=1e6,
        rope_type="yarn",
        scaling={"factor": 4.0, "original_max_position_embeddings": 1024, "truncate": False},
    ),
}


@pytest.mark.parametrize("name", list(ROPES))
@pytest.mark.parametrize(("head_dim", "num_positions"), [(64, 2048), (128, 9001), (2, 100), (80, 1), (10_000, 5)])
def test_correct_tables_pass(name: str, head_dim: int, num_positions: int) -> None:
    table = rotary_table(ROPES[name], head_dim, num_positions)
    assert table.shape == (num_positions, head_dim)


def test_a_factor_of_yarn_s_own_amplitude() -> None:
    """Of DeepSeek's distillation into Qwen3, which makes the amplitude 1. An amplitude that is stated comes first."""
    yarn, attn_factor = ROPES["yarn"].scaling, 0.8782488562869419
    assert float(rotary_table(ROPES["yarn"], 64, 1)[0, 0]) == pytest.approx(1 / attn_factor)
    mscales = {"mscale": 1.0, "mscale_all_dim": 0.5}
    for given, amplitude in (
        ({}, 1.0),
        ({"attention_factor": 1.5}, 1.5),
        (mscales, 1 / (1 + 0.05 * math.log(4))),
        ({"attn_factor": None}, 1 / attn_factor),
    ):
        rope = RopeConfig(theta=1e6, rope_type="yarn", scaling={**yarn, "attn_factor": attn_factor, **given})
        assert float(rotary_table(rope, 64, 1)[0, 0]) == pytest.approx(amplitude)


def test_a_table_is_the_same_for_any_number_of_threads() -> None:
    before = torch.get_num_threads()
    try:
        tables = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            tables.append(rotary_table(DEFAULT, 64, 5000))
    finally:
        torch.set_num_threads(before)
    angles = torch.arange(5000, dtype=torch.float32)[:, None] / 10000.0 ** (torch.arange(0, 64, 2) / 64)
    assert torch.equal(tables[0], tables[1])
    assert torch.equal(tables[0], tables[2])
    torch.testing.assert_close(tables[0], torch.cat((angles.cos(), angles.sin()), -1), rtol=0, atol=2e-3)


def plant(monkeypatch: pytest.MonkeyPatch, row: int, column: int, bit: int) -> None:
    """Flips a bit of a table after its rows have been computed; the check computes them again without the fault."""
    cat, has_planted = torch.cat, []

    def faulty(parts: object, dim: int = 0) -> torch.Tensor:
        table = cat(parts, dim=dim)  # pyright: ignore[reportArgumentType, reportCallIssue]
        if dim == -1 and len(table) > row and not has_planted:
            table.view(torch.int32)[row, column] ^= 1 << bit
            has_planted.append(row)
        return table

    monkeypatch.setattr(rotary.torch, "cat", faulty)


@pytest.mark.parametrize(("row", "column", "bit"), [(0, 0, 0), (7, 3, 0), (1234, 63, 1), (2047, 40, 22), (500, 5, 31)])
def test_any_wrong_bit_of_a_short_table_is_found(
    monkeypatch: pytest.MonkeyPatch, row: int, column: int, bit: int
) -> None:
    plant(monkeypatch, row, column, bit)
    with pytest.raises(ConfigError, match=f"the rotary table is wrong: row {row} came out otherwise"):
        rotary_table(DEFAULT, 64, 2048)


@pytest.mark.parametrize("bit", [31, 30, 22])
@pytest.mark.parametrize("column", [3, 63, 64, 127])
def test_a_wrong_entry_of_a_long_table_is_found(monkeypatch: pytest.MonkeyPatch, column: int, bit: int) -> None:
    """Most rows of a long table are compared only up to rounding."""
    plant(monkeypatch, 10_001, column, bit)
    with pytest.raises(ConfigError, match="the rotary table is wrong"):
        rotary_table(DEFAULT, 128, 32768)


def test_a_table_with_shifted_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rotary._rows

    def shifted(positions: torch.Tensor, inv_freq: torch.Tensor, amplitude: float) -> torch.Tensor:
        return rows(positions + (positions >= 1000), inv_freq, amplitude)

    monkeypatch.setattr(rotary, "_rows", shifted)
    with pytest.raises(ConfigError, match="does not follow from row"):
        rotary_table(DEFAULT, 64, 2048)


def test_wrong_frequencies_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the table and the rows that it is compared with are computed from the frequencies."""
    monkeypatch.setattr(torch.Tensor, "__rpow__", lambda exponents, theta: torch.pow(theta * 1.001, exponents))
    with pytest.raises(ConfigError, match="31 of its 32 frequencies are wrong"):
        rotary_table(DEFAULT, 64, 2048)


def test_an_engine_does_not_start_on_a_wrong_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def faulty(rope: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
        plant(monkeypatch, 3, 5, 0)
        return rotary_table(rope, head_dim, num_positions)

    monkeypatch.setattr(rotary, "rotary_table", faulty)
    assert main(["generate", "--prompt", "x", "--max-tokens", "1"]) == 2
    assert "the rotary table is wrong: row 3 came out otherwise" in capsys.readouterr().err
