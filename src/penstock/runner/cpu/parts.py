"""The runner's parts for a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from penstock.attention.native import NativeAttention
from penstock.config.engine import ExecutionConfig, SchedulerConfig
from penstock.kernels import native
from penstock.kernels.host_memory import aligned_bytes
from penstock.kernels.identity import cpu_kernels
from penstock.models.weights import direct
from penstock.runner.cpu.inputs import TorchInputBuilder
from penstock.runner.cpu.kv_cache_view import HostKVCacheView
from penstock.runner.cpu.ngram import NgramSpeculator
from penstock.runner.cpu.step_sampler import make_torch_sampling
from penstock.runner.memory import HostMemory
from penstock.runner.parts import DeviceParts
from penstock.runner.sampling.logprobs import PendingLogprobs, token_logprobs
from penstock.utils.errors import ConfigError
from penstock.utils.logging import get_logger
from penstock.utils.machine import numa_nodes
from penstock.utils.shared_memory import create_memory

_logger = get_logger(__name__)


def cpu_parts() -> DeviceParts:
    library = native.library()
    return DeviceParts(
        memory=HostMemory(),
        runs_ahead=False,
        kernels="torch" if library is None else library.isa,
        device_name="",
        compute_capability=None,
        collectives="gloo",
        shares_main_memory=True,
        set_up=_set_up,
        has_memory=True,
        arithmetic=lambda execution: cpu_kernels(),
        deliver_weights=lambda: nullcontext(direct),
        divides_inputs=lambda execution: False,
        for_small_steps=lambda model, execution: model,
        allocate=aligned_bytes,
        allocate_shared=create_memory,
        check_attention=_check_attention,
        make_attention=_make_attention,
        make_table_writer=lambda depth: HostTableWriter(),
        make_input_builder=TorchInputBuilder,
        make_sampling=make_torch_sampling,
        score=_score,
        make_ngram_speculator=NgramSpeculator,
        graph_contexts=lambda attention, execution, connector: (),
        make_passes=lambda eager, inputs, sampler, shapes: eager,
        make_kv_cache_view=HostKVCacheView,
        copy_to_host=lambda tensor: tensor.clone().numpy,
    )


def _set_up(execution: ExecutionConfig, num_ranks: int) -> None:
    given = execution.num_threads
    count = native.share_cores(num_ranks) if given is None else native.set_num_threads(given)
    num_nodes = len(numa_nodes())
    if num_nodes > 1:
        _logger.warning(
            "The cores of this process are on %d NUMA nodes, and every step reads weights across them: "
            "--data-parallel-size %d runs an engine on each node, and numactl or taskset binds a single one",
            num_nodes,
            num_nodes,
        )
    # Torch only has small operations left, for which waiting for a descheduled thread would take longer.
    torch.set_num_threads(count if native.library() is None else 1)


def _check_attention(execution: ExecutionConfig) -> None:
    name = execution.attention_backend
    if name not in ("auto", "native"):
        raise ConfigError(f"attention_backend={name} does not run on a CPU: choose auto or native")


def _make_attention(config: SchedulerConfig, execution: ExecutionConfig) -> NativeAttention:
    _check_attention(execution)
    return NativeAttention()


def _score(logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> PendingLogprobs:
    rows = token_logprobs(logits, chosen, [num_top] * len(chosen))
    return lambda: rows


class HostTableWriter:
    """Writes tables directly (`TableWriter`)."""

    def write(self, table: torch.Tensor, row: int, start: int, values: Sequence[int] | Sequence[float]) -> None:
        assert 0 <= start <= start + len(values) <= table.shape[1], (start, len(values), table.shape)
        table[row, start : start + len(values)] = torch.as_tensor(values, dtype=table.dtype)

    def apply(self) -> None: ...
