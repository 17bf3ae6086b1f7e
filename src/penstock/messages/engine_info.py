"""An engine's configuration, fixed when it is ready; shown at the start, in /version, /metrics and the dashboard."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.messages.adapters import LoraTarget


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`kernels` is the kernel set in use: an instruction set of the native library (`native.ARITHMETIC` lists them), or
    torch, or triton. `device_name` is a GPU's product name, empty for a CPU; `num_threads` is the number of threads of
    each rank on a CPU. `kv_cache_bytes` is the sum over all ranks, each of which stores its part of every block, and
    `kv_cache_dtype` that of the stored numbers; `state_cache_bytes` is the sum of the `num_states` states of recurrent
    layers, kept every `checkpoint_interval` tokens. `load_seconds` is the time from the first worker's start to the end
    of the warm-up. `shares_kv`: other engines can load KV from it, and it from them. `pooling` describes in words what
    a pooling engine returns. `shares_experts`: the data parallel engines divide the experts among them. `wrapper` is
    the model type of a multimodal model whose text part is served. `weights` names the formats in which the
    checkpoint's weights are, and what makes layers round their inputs, if they do; `num_weights` and their bytes in
    memory are sums over all ranks. Engines with the same `fingerprint` generate the same tokens: it covers the weights,
    the model's configuration and the arithmetic. `max_loras` is how many adapters run at once, `lora_bytes` the memory
    on all ranks that is kept free for those in memory, and `lora_targets` are the projections that adapters may change,
    by name.
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
    kv_cache_dtype: str
    load_seconds: float
    state_cache_bytes: int = 0
    num_states: int = 0
    checkpoint_interval: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    shares_kv: bool = False
    shares_experts: bool = False
    pooling: str | None = None
    wrapper: str = ""
    weights: str = ""
    num_weights: int = 0
    weight_bytes: int = 0
    fingerprint: str = ""
    max_loras: int = 0
    lora_bytes: int = 0
    lora_targets: dict[str, LoraTarget] = msgspec.field(default_factory=dict[str, LoraTarget])

    def shown(self) -> dict[str, Any]:
        """Returns what describes the engine to people."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if name != "lora_targets"}

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size
