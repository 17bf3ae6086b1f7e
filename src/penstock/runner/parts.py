"""The parts of a runner that differ between devices.

A worker asks once which device it has and gets that device's `DeviceParts` (`penstock.worker.parts`). Everything else
in this folder is the same on every device.
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
from penstock.runner.passes import EagerPasses, Passes
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling.logprobs import Score
from penstock.runner.sampling.states import SamplingStates
from penstock.runner.speculation.pick import Picker
from penstock.runner.speculation.speculator import Speculator
from penstock.runner.step_sampler import StepSampler
from penstock.utils.shared_memory import SharedMemory


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """What sampling and speculation are built from."""

    loaded: LoadedModel
    config: SchedulerConfig
    speculative: SpeculativeConfig | None
    states: RequestStates
    sampling: SamplingStates
    writer: TableWriter


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """One device's makers. Those of a runner's parts are called once per runner."""

    memory: DeviceMemory

    runs_ahead: bool
    """Whether a step is launched on the CPU and computed elsewhere."""

    kernels: str
    """The kernels in use, for people: an instruction set of the native library, `torch`, or `triton`."""

    device_name: str
    """A GPU's product name; empty for a CPU."""

    set_up: Callable[[ExecutionConfig, int], None]
    """Prepares the process, before anything is loaded, as one of so many ranks on this host."""

    has_memory: bool
    """Whether tensors hold anything; those of the meta device have shapes alone."""

    arithmetic: Callable[[ExecutionConfig], str]
    """Names the kernels that compute: with others, sums have other last bits."""

    deliver_weights: Callable[[], AbstractContextManager[Delivery]]
    """How weights get to the device, until the context ends."""

    for_small_steps: Callable[[Model, ExecutionConfig], Model]
    """The model with kernels of its own for steps of few tokens, where there are such and their sums may differ."""

    allocate: Callable[[int], torch.Tensor]
    """[bytes] uint8 for the KV cache, uninitialised and aligned as its kernels want it."""

    allocate_shared: Callable[[int], SharedMemory]
    """The same as memory that other processes can map by its name. Raises ConfigError where they cannot."""

    check_attention: Callable[[ExecutionConfig], None]
    """Raises ConfigError where the attention backend that was asked for cannot run."""

    make_attention: Callable[[SchedulerConfig, ExecutionConfig], AttentionBackend]
    """The attention backend. Raises ConfigError as `check_attention` does."""

    make_table_writer: Callable[[int], TableWriter]
    """Of how many steps the CPU may have launched whose results it does not know."""

    make_input_builder: Callable[[SchedulerConfig, BatchShapes, RequestStates, BlockTables], InputBuilder]

    make_sampling: Callable[[SamplingContext, DeviceMemory], tuple[StepSampler, Picker]]
    """What samples tokens and verifies drafts, and what picks these drafts: the two belong together.

    Raises ConfigError when the drafts' distributions do not fit into memory.
    """

    score: Score

    make_ngram_speculator: Callable[[int, int], Speculator]
    """Of the fewest and the most tokens that are looked up."""

    graph_contexts: Callable[[AttentionBackend, ExecutionConfig, WorkerConnector], tuple[int, ...]]
    """The context lengths for which steps are captured as graphs; none where graphs are not used."""

    make_passes: Callable[[EagerPasses, InputBuilder, StepSampler, BatchShapes], Passes]
    """Captures the graphs that the shapes list. Raises ConfigError when they do not fit into memory."""

    make_kv_cache_view: Callable[[KVCache], KVCacheView]
    """The cache as connectors see it."""

    copy_to_host: Callable[[torch.Tensor], HostCopy]
    """The tensor as it is when the device reaches this."""
