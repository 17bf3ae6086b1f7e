"""The parts of a runner that differ between devices.

A worker determines its device once and gets that device's `DeviceParts` (`penstock.worker.parts`). Everything else in
this folder is the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from penstock.attention.backend import AttentionBackend
from penstock.config.engine import ExecutionConfig, SchedulerConfig
from penstock.config.speculative import SpeculativeConfig
from penstock.kv_transfer.connector import WorkerConnector
from penstock.kv_transfer.view import KVCacheView
from penstock.models.interface import Model
from penstock.models.weights import Delivery
from penstock.runner.batch_shapes import BatchShapes
from penstock.runner.block_tables import BlockTables
from penstock.runner.buffers import HostCopy, TableWriter
from penstock.runner.input_batch import InputBuilder
from penstock.runner.kv_cache import KVCache
from penstock.runner.loaded_model import LoadedModel
from penstock.runner.memory import DeviceMemory
from penstock.runner.passes import EagerPasses, Passes, StepSampler
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling.logprobs import Score
from penstock.runner.sampling.states import SamplingStates
from penstock.runner.speculation.draft import Picker
from penstock.runner.speculation.speculator import Speculator
from penstock.utils.shared_memory import SharedMemory


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """The objects from which sampling and speculation are built."""

    loaded: LoadedModel
    config: SchedulerConfig
    speculative: SpeculativeConfig | None
    states: RequestStates
    sampling: SamplingStates
    writer: TableWriter


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """One device's factories. Those of a runner's parts are called once per runner."""

    memory: DeviceMemory

    runs_ahead: bool
    """Whether a step is launched on the CPU and computed on a device."""

    kernels: str
    """The kernels in use, for display: an instruction set of the native library, `torch`, or `triton`."""

    device_name: str
    """A GPU's product name; empty for a CPU."""

    compute_capability: int | None
    """That of the GPU for which kernels are compiled while the weights load, 90 for 9.0; None without a GPU."""

    collectives: str
    """The backend of torch.distributed for the device's tensors, one of `penstock.parallel.distributed.BACKENDS`."""

    shares_main_memory: bool
    """Whether ranks on one host can exchange tensors through main memory."""

    set_up: Callable[[ExecutionConfig, int], None]
    """Prepares the process before loading, as one of this number of ranks on the host."""

    has_memory: bool
    """Whether tensors have memory; those of the meta device only have shapes."""

    arithmetic: Callable[[ExecutionConfig], str]
    """Names the computing kernels: with others, sums have other last bits."""

    deliver_weights: Callable[[], AbstractContextManager[Delivery]]
    """Copies weights to the device, until the context ends."""

    divides_inputs: Callable[[ExecutionConfig], bool]
    """Whether ranks divide layers by inputs where they have these in parts, which is faster and changes last bits."""

    for_small_steps: Callable[[Model, ExecutionConfig], Model]
    """Returns the model with special kernels for steps of few tokens, if there are any and their sums may differ."""

    allocate: Callable[[int], torch.Tensor]
    """Allocates [bytes] uint8 for the KV cache, uninitialised and aligned for its kernels."""

    allocate_shared: Callable[[int], SharedMemory]
    """Allocates the same as memory that other processes can map by its name. Raises ConfigError if they cannot."""

    check_attention: Callable[[ExecutionConfig], None]
    """Raises ConfigError if the requested attention backend cannot run."""

    make_attention: Callable[[SchedulerConfig, ExecutionConfig], AttentionBackend]
    """Builds the attention backend. Raises ConfigError as `check_attention` does."""

    make_table_writer: Callable[[int], TableWriter]
    """Takes the maximum number of launched steps whose results the CPU does not know."""

    make_input_builder: Callable[[SchedulerConfig, BatchShapes, RequestStates, BlockTables], InputBuilder]

    make_sampling: Callable[[SamplingContext, DeviceMemory], tuple[StepSampler, Picker]]
    """Builds the sampler, which also verifies drafts, and the picker of these drafts: the two belong together.

    Raises ConfigError if the drafts' distributions do not fit into memory."""

    score: Score

    make_ngram_speculator: Callable[[int, int], Speculator]
    """Takes the minimum and the maximum number of tokens to look up."""

    graph_contexts: Callable[[AttentionBackend, ExecutionConfig, WorkerConnector], tuple[int, ...]]
    """Returns the context lengths for which steps are captured as graphs; empty without graphs."""

    make_passes: Callable[[EagerPasses, InputBuilder, StepSampler, BatchShapes], Passes]
    """Captures the graphs that the shapes list. Raises ConfigError if they do not fit into memory."""

    make_kv_cache_view: Callable[[KVCache], KVCacheView]
    """Returns the cache as connectors see it."""

    copy_to_host: Callable[[torch.Tensor], HostCopy]
    """Copies the tensor's content at this point of the device's stream."""
