"""The cost of the products on a GPU as the compiler reports it: registers, spills, shared memory, instructions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import triton

from penstock.kernels.triton.linear.tiles import Role, Tile, choose, fixed
from tests.grids import grid
from tests.kernels.gpu_compiler import KernelCost, compile_for_gpu

pytestmark = pytest.mark.long

PACKAGE = "penstock.kernels.triton.linear"
MOST_SHARED_BYTES = 227 << 10
# [N, K] of the weights, gate and up stacked.
MODELS = {
    "Qwen3-0.6B": {
        Role.QKV: (4096, 1024),
        Role.OUT: (1024, 2048),
        Role.GATE_UP: (6144, 1024),
        Role.DOWN: (1024, 3072),
        Role.HEAD: (151936, 1024),
    },
    "Qwen3-8B": {
        Role.QKV: (6144, 4096),
        Role.OUT: (4096, 4096),
        Role.GATE_UP: (24576, 4096),
        Role.DOWN: (4096, 12288),
        Role.HEAD: (151936, 4096),
    },
    "small": {
        Role.OUT: (256, 256),
        Role.GATE_UP: (1536, 256),
        Role.DOWN: (256, 768),
    },
}
EPILOGUES = {
    Role.QKV: "plain",
    Role.OUT: "residual",
    Role.GATE_UP: "silu",
    Role.DOWN: "residual",
    Role.HEAD: "plain",
}
WRITERS = {Role.QKV: Role.DOWN, Role.GATE_UP: Role.OUT}  # role that reads a stream -> role that wrote it
OPERANDS = (
    "x", "weight", "squares", "bias", "old_residual", "gain", "residual", "out", "side", "eps",
    "partials", "counters", "num_tokens",
)  # fmt: skip


def tile_of(model: str, role: Role, bucket: int, itemsize: int = 2) -> Tile:
    return choose(role, bucket, MODELS[model][role], itemsize)


def compile_product(
    model: str, role: Role, bucket: int, tma: bool = True, pdl: bool = True, dtype: str = "bf16"
) -> KernelCost:
    """Compiles the kernel as `DecodeWeight.launch` launches it."""
    itemsize = 4 if dtype == "fp32" else 2
    tile = tile_of(model, role, bucket, itemsize)
    height, k = MODELS[model][role]
    epilogue, values, floats = EPILOGUES[role], f"*{dtype}:16", "*fp32:16"
    parts = triton.cdiv(k, tile_of(model, WRITERS[role], bucket, itemsize).rows) if role in WRITERS else 0
    types = {"x": values, "weight": values, "out": values, "eps": "fp32"}
    if parts:
        types["squares"] = floats
    if epilogue == "residual":
        types |= {"old_residual": values, "gain": values, "residual": values, "side": floats}
    constants: dict[str, Any] = {
        "n": height // 2 if role is Role.GATE_UP else height, "k": k, "num_parts": parts, "tile_rows": tile.rows,
        "depth": tile.depth, "epilogue": epilogue, "pdl": pdl,
    }  # fmt: skip
    names = OPERANDS
    if bucket == 1:
        names = OPERANDS[: -len(("partials", "counters", "num_tokens"))]
        constants["stages"] = tile.stages
    else:
        if tma:
            types["weight"] = f"tensordesc<{dtype}[{tile.rows},{tile.depth}]>"
        if tile.split > 1:
            types["partials"] = floats
        types |= {"counters": "*i32:16", "num_tokens": "i32"}
        constants |= {"tile_tokens": tile.tokens, "split": tile.split, "early": tile.early, "tma": tma}
    signature = {name: types[name] for name in names if name in types}
    constants |= {name: None for name in names if name not in types}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    kernel = "gemv" if bucket == 1 else "gemm"
    return compile_for_gpu(f"{PACKAGE}.products", kernel, signature, constants, **options)


def assert_fits(cost: KernelCost) -> None:
    assert cost.spilled_bytes == 0
    assert cost.shared_bytes < MOST_SHARED_BYTES


@pytest.mark.parametrize(
    ("shape", "role"),
    grid(
        [("Qwen3-0.6B", 1), ("Qwen3-0.6B", 16), ("Qwen3-0.6B", 64), ("Qwen3-8B", 1), ("Qwen3-8B", 64)],
        list(Role),
        strength=1,
    ),
)
def test_products(shape: tuple[str, int], role: Role) -> None:
    model, bucket = shape
    cost = compile_product(model, role, bucket)
    assert_fits(cost)
    before, separator, after = cost.ptx.partition("griddepcontrol.wait")
    assert separator
    assert before.count("griddepcontrol.launch_dependents") == 1
    # Before the wait nothing is written and no result of other kernels is read; the first tile of the weight may be.
    assert not any(word in before for word in ("st.global", "atom.", "cp.async.cg"))
    if bucket == 1:
        assert "ld.global.v4" in before
        assert "mma" not in cost.ptx
    else:
        num_tiles = 2 if role is Role.GATE_UP else 1
        assert before.count("cp.async.bulk.tensor") == num_tiles * tile_of(model, role, bucket).early
        assert after.count("cp.async.bulk.tensor") >= num_tiles
        assert ("ld.global" in before) == (EPILOGUES[role] == "residual"), "a gain is read early, x is not"
        assert "cp.async.bulk.tensor" in after
        assert "cp.async.cg" in after
        assert "wgmma.mma_async.sync.aligned.m64" in after
        assert ("atom.global.gpu.acq_rel" in after) == (tile_of(model, role, bucket).split > 1)


@pytest.mark.parametrize(("role", "bucket"), [(Role.DOWN, 1), (Role.GATE_UP, 32), (Role.DOWN, 16)])
def test_products_without_hopper_features(role: Role, bucket: int) -> None:
    cost = compile_product("Qwen3-8B", role, bucket, tma=False, pdl=False)
    assert_fits(cost)
    assert not any(word in cost.ptx for word in ("griddepcontrol", "cp.async.bulk"))


@pytest.mark.parametrize("bucket", [1, 64])
def test_products_of_a_small_model(bucket: int) -> None:
    assert_fits(compile_product("small", Role.GATE_UP, bucket))


def test_products_of_float32() -> None:
    assert_fits(compile_product("small", Role.DOWN, 16, dtype="fp32"))


@pytest.mark.parametrize(("dtype", "tma"), [("bf16", False), ("bf16", True), ("fp32", True)])
def test_matmul(dtype: str, tma: bool) -> None:
    tile = fixed(4096, 4 if dtype == "fp32" else 2)
    assert tile == replace(tile, split=1), "a split sum is added up in another order"
    signature = {
        **dict.fromkeys(("x", "bias", "out"), f"*{dtype}:16"),
        "weight": f"tensordesc<{dtype}[{tile.rows},{tile.depth}]>" if tma else f"*{dtype}:16",
        "num_tokens": "i32",
    }
    sizes = {"tile_rows": tile.rows, "tile_tokens": tile.tokens, "depth": tile.depth}
    constants = {"n": 6144, "k": 4096, **sizes, "group_tiles": 16, "tma": tma}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    cost = compile_for_gpu(f"{PACKAGE}.matmul", "matmul", signature, constants, **options)
    assert_fits(cost)
    assert ("wgmma.mma_async.sync.aligned.m64n64k16" in cost.ptx) == (dtype == "bf16")
    assert ("cp.async.bulk.tensor" in cost.ptx) == tma


def test_prepare() -> None:
    values, floats = "*bf16:16", "*fp32:16"
    signature = {"ids": "*i64:16", **dict.fromkeys(("table", "gain", "x", "scaled"), values), "squares": floats}
    constants = {"vocab": 151936, "hidden": 4096, "block": 4096, "pdl": True}
    cost = compile_for_gpu(f"{PACKAGE}.products", "prepare", signature, constants, num_warps=16)
    assert_fits(cost)
    assert "griddepcontrol.wait" not in cost.ptx, "it is not launched early"
