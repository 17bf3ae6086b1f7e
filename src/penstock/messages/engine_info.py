"""What an engine is and runs on: fixed when it is ready, shown at start, in /version, /metrics and the dashboard."""

from __future__ import annotations

import msgspec


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`kernels` is the kernel set in use: an instruction set of the native library (amx, avx512, avx2, generic), or
    torch, or triton. `device_name` is a GPU's product name, empty for a CPU; `num_threads` is what each rank of a
    CPU computes with.

    `kv_cache_bytes` is of all ranks, each of which stores its part of every block; `load_seconds` is from the first
    worker's start to the warm-up's end. `pooling` says in words what a pooling engine answers with.
    """

    dtype: str
    device: str
    device_name: str
    kernels: str
    num_threads: int
    max_model_len: int
    num_blocks: int
    block_size: int
    kv_cache_bytes: int
    load_seconds: float
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    pooling: str | None = None

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size
