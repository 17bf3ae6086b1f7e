"""The runner's parts for a GPU, also for a CPU that emulates one and for the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial

import torch

from penstock.attention.backend import AttentionBackend
from penstock.attention.select import attention_library, check_gpu_attention, make_gpu_attention
from penstock.config.engine import ExecutionConfig
from penstock.kernels.host_memory import aligned_bytes
from penstock.kernels.identity import triton_kernels
from penstock.kernels.staging import CudaCopyQueue, Stager
from penstock.kv_transfer.connector import WorkerConnector
from penstock.models.fused_decode import FusedDecoder
from penstock.models.interface import Model
from penstock.models.weights import Delivery, direct, staged
from penstock.runner.gpu.buffers import FencedCopy, StagedTableWriter
from penstock.runner.gpu.cudagraphs import make_passes
from penstock.runner.gpu.inputs import GpuInputBuilder
from penstock.runner.gpu.kv_cache_view import GpuKVCacheView
from penstock.runner.gpu.memory import CudaMemory
from penstock.runner.gpu.ngram import GpuNgramSpeculator
from penstock.runner.gpu.sampling.outputs import score
from penstock.runner.gpu.sampling.sampler import make_gpu_sampling
from penstock.runner.memory import HostMemory
from penstock.runner.parts import DeviceParts
from penstock.utils import logging
from penstock.utils.errors import ConfigError
from penstock.utils.shared_memory import SharedMemory, create_memory

logger = logging.get_logger(__name__)


def gpu_parts(device: torch.device) -> DeviceParts:
    is_cuda = device.type == "cuda"
    memory = CudaMemory(device) if is_cuda else HostMemory()
    return DeviceParts(
        memory=memory,
        runs_ahead=True,
        kernels="triton",
        device_name=torch.cuda.get_device_name(device) if is_cuda else "",
        compute_capability=_compute_capability(device) if is_cuda else None,
        collectives="nccl" if is_cuda else "gloo",
        shares_main_memory=device.type == "cpu",
        set_up=lambda execution, num_ranks: None,
        has_memory=device.type != "meta",
        arithmetic=partial(arithmetic, device),
        deliver_weights=partial(stage_weights, device) if is_cuda else lambda: nullcontext(direct),
        divides_inputs=lambda execution: not execution.deterministic,
        for_small_steps=for_small_steps,
        allocate=aligned_bytes
        if device.type == "cpu"
        else lambda count: torch.empty(count, dtype=torch.uint8, device=device),
        allocate_shared=create_memory if device.type == "cpu" else _refuse_shared_memory,
        check_attention=partial(check_gpu_attention, device),
        make_attention=partial(make_gpu_attention, device),
        make_table_writer=partial(StagedTableWriter, device),
        make_input_builder=GpuInputBuilder,
        make_sampling=make_gpu_sampling,
        score=score,
        make_ngram_speculator=GpuNgramSpeculator,
        graph_contexts=partial(graph_contexts, device),
        make_passes=partial(make_passes, memory),
        make_kv_cache_view=GpuKVCacheView,
        copy_to_host=lambda tensor: FencedCopy.of(tensor).wait,
    )


def _compute_capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def arithmetic(device: torch.device, execution: ExecutionConfig) -> str:
    """See `DeviceParts`."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"interpreted on {device}"
    mode = "deterministic" if execution.deterministic else "fastest"
    return f"{name} torch {torch.__version__} {triton_kernels()} {attention_library(execution)} attention {mode}"


@contextmanager
def stage_weights(device: torch.device) -> Iterator[Delivery]:
    """Copies weights through pinned memory that threads fill (`DeviceParts`)."""
    with closing(Stager(CudaCopyQueue(device))) as stager:
        yield partial(staged, stager)


def for_small_steps(model: Model, execution: ExecutionConfig) -> Model:
    """See `DeviceParts`."""
    if execution.deterministic:
        return model
    reason = FusedDecoder.supports(model)
    if reason:
        logger.info("steps of few tokens take the kernels of all others: %s", reason)
        return model
    return FusedDecoder(model)


def _refuse_shared_memory(num_bytes: int) -> SharedMemory:
    raise ConfigError(
        "the kv_connector needs KV memory that other processes can map, and a GPU's is not: choose another transport, "
        "for example sockets, or device=cpu"
    )


def graph_contexts(
    device: torch.device, attention: AttentionBackend, execution: ExecutionConfig, connector: WorkerConnector
) -> tuple[int, ...]:
    """See `DeviceParts`."""
    if device.type != "cuda" or execution.enforce_eager or not attention.graph_contexts:
        return ()
    if connector.layer_hooks is not None:
        logger.info("no CUDA graphs: the KV connector moves layers while a step computes them")
        return ()
    return attention.graph_contexts
