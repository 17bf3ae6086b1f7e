"""The cost of attention on a GPU as the compiler reports it: registers, shared memory, and the chosen instructions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton

from penstock.kernels.triton.attention.plan import (
    AttentionLimits,
    AttentionPlanner,
    AttentionShape,
    DecodeTile,
    PrefillTile,
    heads_of_tile,
)
from penstock.kernels.triton.capabilities import Capabilities
from tests.grids import exhaustive
from tests.kernels.gpu_compiler import KernelCost, compile_for_gpu

pytestmark = pytest.mark.long

MAX_SHARED_BYTES = 227 * 1024
PACKAGE = "penstock.kernels.triton.attention"
QWEN3_06B, QWEN3_8B = (16, 8), (32, 8)
INSTRUCTION = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
FEW, LONG, MANY = (8, 1024), (8, 8192), (256, 4096)
BATCH = {"table_ptr": "*i32", "starts_ptr": "*i32", "seq_lens_ptr": "*i32"}
SIZES = {"scale": "fp32", "num_tokens": "i32", "num_reqs": "i32", "table_stride": "i32"}
WORKSPACE = {"parts_ptr": "*fp32:16", "stats_ptr": "*fp32:16", "counters_ptr": "*i32:16", "max_splits": "i32"}


def planner(
    heads: tuple[int, int], block_size: int, head_dim: int = 128, deterministic: bool = False, value_dim: int = 0
) -> AttentionPlanner:
    shape = AttentionShape(*heads, head_dim, block_size, torch.bfloat16, value_dim)
    return AttentionPlanner(
        shape, AttentionLimits(256, 8192, 8), "meta", deterministic, capabilities=Capabilities(tma=True)
    )


def operands(tile: PrefillTile | DecodeTile, head_dim: int, first: str) -> dict[str, str]:
    box = f"tensordesc<bf16[{tile.keys}, {head_dim}]>" if tile.use_tma else "*bf16:16"
    return {first: "*bf16:16", "cache_ptr": "*bf16:16", "box": box, "out_ptr": "*bf16:16", **BATCH, **SIZES}


def common(
    tile: PrefillTile | DecodeTile, heads: tuple[int, int], head_dim: int, block_size: int, value_dim: int = 0
) -> dict[str, Any]:
    group = heads_of_tile(heads[0] // heads[1], value_dim > 0)
    return {
        "group": group,
        "num_groups": heads[0] // group,
        "num_kv_heads": heads[1],
        "head_dim": head_dim,
        "value_dim": value_dim or head_dim,
        "dim_tile": triton.next_power_of_2(value_dim or head_dim),
        "block_size": block_size,
        "window": 0,
        "softcap": 0.0,
        "sinks_ptr": None,
        "tile_rows": tile.rows,
        "tile_keys": tile.keys,
        "split": tile.split,
        "use_tma": tile.use_tma,
        "precision": "tf32",
    }


def compiled(
    kernel: str, tile: PrefillTile | DecodeTile, signature: dict[str, str], constexprs: dict[str, Any]
) -> KernelCost:
    module = f"{PACKAGE}.{kernel.removeprefix('_')}"
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
    cost = compile_for_gpu(module, kernel, signature, constexprs, **options)
    assert cost.spilled_bytes == 0, f"{cost.registers} registers, {cost.spilled_bytes} bytes spilled"
    assert cost.shared_bytes <= MAX_SHARED_BYTES
    return cost


def prefill(
    heads: tuple[int, int], block_size: int, head_dim: int = 128, deterministic: bool = False, value_dim: int = 0
) -> KernelCost:
    tile = planner(heads, block_size, head_dim, deterministic, value_dim).plan(8, 2048, 8192).tile
    signature = {**operands(tile, head_dim, "q_ptr"), "q_stride": "i32:16"}
    return compiled("_prefill", tile, signature, common(tile, heads, head_dim, block_size, value_dim))


def decode(
    heads: tuple[int, int],
    block_size: int,
    batch: tuple[int, int],
    query_len: int = 1,
    head_dim: int = 128,
    deterministic: bool = False,
    fused: bool = False,
    value_dim: int = 0,
) -> KernelCost:
    tile = planner(heads, block_size, head_dim, deterministic, value_dim).plan(batch[0], query_len, batch[1]).tile
    assert isinstance(tile, DecodeTile)
    constexprs = common(tile, heads, head_dim, block_size, value_dim) | {
        "row_tiles": tile.row_tiles, "merge_rows": tile.merge_rows, "merges": True
    }  # fmt: skip
    if not fused:
        signature = {**operands(tile, head_dim, "q_ptr"), **WORKSPACE, "q_stride": "i32:16"}
        return compiled("_decode", tile, signature, constexprs)
    tables = {"cos_sin_ptr": "*fp32:16", "q_norm_ptr": "*bf16:16", "k_norm_ptr": "*bf16:16", "eps": "fp32"}
    signature = {**operands(tile, head_dim, "qkv_ptr"), **WORKSPACE, **tables}
    new_tile = triton.next_power_of_2(tile.max_query_len)
    constexprs = {name: value for name, value in constexprs.items() if name not in ("num_groups", "value_dim")}
    constexprs |= {"rotary_dim": head_dim, "new_tile": new_tile, "has_norm": True, "pdl": True}
    return compiled("_decode_fused", tile, signature, constexprs)


@pytest.mark.parametrize(("heads", "block_size"), [exhaustive(QWEN3_06B, 16), (QWEN3_8B, 64)])
def test_prefill_pipelines_its_loads_and_multiplies_by_warpgroup(heads: tuple[int, int], block_size: int) -> None:
    ptx = prefill(heads, block_size).ptx
    assert "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16" in ptx
    assert "cp.async.cg" in ptx
    assert ("cp.async.bulk.tensor" in ptx) == (block_size == 64)


@pytest.mark.parametrize(
    ("heads", "block_size", "batch"),
    [(QWEN3_06B, 16, FEW), exhaustive(QWEN3_8B, 32, LONG), exhaustive(QWEN3_8B, 64, MANY)],
)
def test_decode_copies_16_bytes_at_a_time(heads: tuple[int, int], block_size: int, batch: tuple[int, int]) -> None:
    ptx = decode(heads, block_size, batch).ptx
    assert INSTRUCTION in ptx
    assert "cp.async.cg" in ptx
    assert "cp.async.ca" not in ptx
    assert "atom.global.gpu.acq_rel.add" in ptx


@pytest.mark.parametrize(
    ("heads", "query_len", "batch"),
    [exhaustive(QWEN3_06B, 1, FEW), exhaustive(QWEN3_06B, 4, MANY), exhaustive(QWEN3_8B, 1, MANY), (QWEN3_8B, 8, MANY)],
)
def test_fused_decode_waits_before_it_reads_the_projection(
    heads: tuple[int, int], query_len: int, batch: tuple[int, int]
) -> None:
    ptx = decode(heads, 16, batch, query_len, fused=True).ptx
    assert ptx.index("griddepcontrol.launch_dependents") < ptx.index("ld.global")
    assert ptx.count("griddepcontrol.wait") == 2
    assert ptx.index("prefetch.global.L2") < ptx.rindex("griddepcontrol.wait") < ptx.index("cp.async")
    assert INSTRUCTION in ptx


@pytest.mark.parametrize("head_dim", [80, exhaustive(256)])
def test_other_head_sizes(head_dim: int) -> None:
    assert "wgmma" in prefill(QWEN3_06B, 16, head_dim).ptx
    decode(QWEN3_06B, 16, MANY, 4, head_dim, fused=True)


@pytest.mark.parametrize("head_dim", [128, exhaustive(256)])
def test_deterministic_tiles_use_one_instruction_in_prefill_and_decode(head_dim: int) -> None:
    for cost in (
        prefill(QWEN3_8B, 16, head_dim, deterministic=True),
        decode(QWEN3_8B, 16, MANY, 8, head_dim, deterministic=True),
    ):
        assert INSTRUCTION in cost.ptx
        assert "wgmma" not in cost.ptx


@pytest.mark.parametrize("deterministic", [False, exhaustive(True)])
def test_latents(deterministic: bool) -> None:
    """DeepSeek-V3's: 128 heads share one of 576 dimensions, of which 512 are the value."""
    options = {"head_dim": 576, "deterministic": deterministic, "value_dim": 512}
    assert INSTRUCTION in prefill((128, 1), 64, **options).ptx
    assert INSTRUCTION in decode((128, 1), 64, MANY, **options).ptx
