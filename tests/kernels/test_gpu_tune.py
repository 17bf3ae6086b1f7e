"""The settings of `bench/gpu_tune.py` and its checks of their results, in Triton's interpreter: times need a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.kernels.triton.attention.plan import AttentionShape
from penstock.kernels.triton.capabilities import Capabilities
from penstock.kernels.triton.linear import decode, tiles
from penstock.kernels.triton.linear.tiles import Role, Tile

BENCH = Path(__file__).parents[2] / "bench"
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU stands in for the GPU")

PLAIN = Capabilities()
HEADS = AttentionShape(4, 2, 32, 16, torch.float16)
SHAPES = {
    Role.QKV: (96, 64),
    Role.OUT: (64, 512),
    Role.GATE_UP: (128, 64),
    Role.DOWN: (64, 512),
    Role.HEAD: (200, 64),
}


@pytest.fixture(autouse=True)
def bench_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    torch.manual_seed(0)


def linear(role: Role, num_tokens: int) -> Any:
    from gpu_parts.tune_linear import LinearCell

    return LinearCell("tiny", role, SHAPES[role], num_tokens, torch.float16)


def attention(kind: str, batch: int, context: int, queries: int) -> Any:
    from gpu_parts import tune_attention

    return getattr(tune_attention, kind)("tiny", HEADS, batch, context, queries)


def run(cell: Any, setting: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
    operands = cell.make(torch.device("cpu"), 2)
    return operands, cell.chain(operands, setting, PLAIN)()


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("role", Role)
def test_settings_of_products_are_used_and_checked(
    role: Role, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = linear(role, num_tokens)
    setting = Tile(16, 1, 32, 2, 2) if num_tokens == 1 else Tile(32, 16, 32, 4, 2, split=2, early=False)
    if role not in (Role.OUT, Role.DOWN):
        setting = replace(setting, split=1)
    used: list[Tile] = []
    launch = decode.DecodeWeight.launch

    def watched(self: decode.DecodeWeight, x: torch.Tensor, *args: Any) -> None:
        used.append(self.tile(len(x)))
        launch(self, x, *args)

    monkeypatch.setattr(decode.DecodeWeight, "launch", watched)
    operands, outputs = run(cell, setting)
    assert used == [setting] * 2
    assert decode.choose is tiles.choose
    assert cell.error(operands, outputs) < cell.tolerance()
    # A tile that was not computed is detected, whichever output it is in.
    for number, output in enumerate(outputs):
        wrong = [tensor.clone() for tensor in outputs]
        wrong[number].view(len(output), -1)[-1, -16:] = 0
        assert cell.error(operands, tuple(wrong)) > cell.tolerance()


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("kind", "case"),
    [("DecodeCell", (2, 70, 1)), ("PrefillCell", (2, 40, 40)), ("DeterministicCell", (2, 70, 1)),
     ("DeterministicCell", (1, 40, 40))],
)  # fmt: skip
def test_settings_of_attention_are_checked(kind: str, case: tuple[int, int, int]) -> None:
    cell = attention(kind, *case)
    for setting in cell.candidates()[:2]:
        operands, outputs = run(cell, setting)
        assert cell.error(operands, outputs) < 2e-3
        wrong = outputs[0].clone()
        wrong[-1, -32:] = 0
        assert cell.error(operands, (wrong,)) > cell.tolerance()


@dataclass(frozen=True)
class Settings:
    """A cell with the given settings and a short chain."""

    num_layers = 2
    cell: Any
    settings: tuple[Any, ...]
    chain_of: Callable[..., Any]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cell, name)

    def candidates(self) -> tuple[Any, ...]:
        return self.settings

    def chain(self, operands: Any, setting: Any, capabilities: Capabilities) -> Any:
        return self.chain_of(self.cell, operands, setting, capabilities)


def test_settings_with_wrong_results_are_excluded() -> None:
    from gpu_parts.tuning import measure

    calls: list[str] = []

    def chain(cell: Any, operands: Any, setting: str, capabilities: Capabilities) -> Any:
        def drifting() -> tuple[torch.Tensor, ...]:
            calls.append(setting)
            return (right()[0] * (1 + 1e-3 * len(calls)),)

        right = cell.chain(operands, Tile(32, 16, 32, 4, 2, early=False), capabilities)
        if setting == "fails":
            raise RuntimeError("out of resources: shared memory")
        return {"drifts": drifting, "wrong": lambda: (right()[0] * 2,)}.get(setting, right)

    settings = ("present", "wrong", "drifts", "fails", "right")
    with_tolerance = replace(linear(Role.QKV, 2), dtype=torch.float16)
    found = measure(Settings(with_tolerance, settings, chain), "cpu", PLAIN)
    problems = {result.setting: result.problem for result in found.results}
    assert problems["present"] == problems["right"] == ""
    assert problems["wrong"].startswith("WRONG: error")
    assert "WRONG" in problems["drifts"]
    assert problems["fails"].startswith("RuntimeError: out of resources")
    assert "2 of 5 settings are right" in found.table()
    assert "<- present" in found.table()
    assert json.loads(json.dumps(found.line()))["results"][0]["us"] > 0


def test_cells_and_their_settings() -> None:
    import gpu_tune

    cells = gpu_tune.cells()
    assert len({cell.name for cell in cells}) == len(cells)
    assert all(cell.work[0] > 0 and cell.num_layers > 1 for cell in cells)
    for cell in cells:
        settings = cell.candidates()
        assert len(set(settings)) == len(settings) > 5, cell.name
    by_name = {cell.name: cell.candidates() for cell in cells}
    assert by_name["qwen3-0.6b qkv 16 tokens"][0] == tiles.choose(Role.QKV, 16, (4096, 1024), 2)
    # The settings that the first measurements compare.
    assert Tile(32, 16, 128, 4, 4) in by_name["qwen3-0.6b gate_up 16 tokens"]
    out = by_name["qwen3-0.6b out 16 tokens"]
    assert {1, 2, 4} <= {tile.split for tile in out}
    assert {True, False} == {tile.early for tile in out}
    assert not all(split.merges for split in by_name["decode attention qwen3-0.6b 8 x 1 of 256"])
    assert {True, False} == {t.use_tma for t in by_name["prefill attention qwen3-0.6b 8 x 2048 of 2048 blocks of 64"]}
    assert Tile(128, 128, 64, 8, 3) in by_name["deterministic qwen3-0.6b qkv 2048 tokens"]


@pytest.mark.long
def test_compiles_ahead_without_a_gpu(tmp_path: Path) -> None:
    """Finds the kernels that a GPU would launch by their names in Triton's cache."""
    pytest.importorskip("penstock.runner.gpu.ahead")
    code = """
import gpu_tune
from gpu_parts import tuning
cells = {cell.name: cell for cell in gpu_tune.cells()}
for name in ("qwen3-0.6b out 16 tokens", "decode attention qwen3-0.6b 8 x 1 of 256"):
    tuning.compile_ahead(cells[name], cells[name].candidates()[0], 90)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(BENCH), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.rglob("*.cubin")} == {"gemm.cubin", "_decode_fused.cubin"}
