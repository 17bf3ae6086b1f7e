"""A GPU's parts of the runner, also for a CPU that stands in for one and for the meta device."""

from __future__ import annotations

from functools import partial

import torch

from penstock.attention.backend import AttentionBackend
from penstock.config.engine import ExecutionConfig
from penstock.kv_transfer.connector import WorkerConnector
from penstock.runner.gpu.buffers import FencedCopy, StagedTableWriter
from penstock.runner.gpu.cudagraphs import make_passes
from penstock.runner.gpu.inputs import GpuInputBuilder
from penstock.runner.gpu.kv_cache_view import GpuKVCacheView
from penstock.runner.gpu.memory import CudaMemory
from penstock.runner.gpu.ngram import GpuNgramSpeculator
from penstock.runner.gpu.sampling.logprobs import score
from penstock.runner.gpu.sampling.sampler import make_gpu_sampling
from penstock.runner.memory import HostMemory
from penstock.runner.parts import DeviceParts
from penstock.utils import logging

logger = logging.get_logger(__name__)


def gpu_parts(device: torch.device) -> DeviceParts:
    memory = CudaMemory(device) if device.type == "cuda" else HostMemory()
    return DeviceParts(
        memory=memory,
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
