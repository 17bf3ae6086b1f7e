"""The messages between the engine core and a worker.

    core -> worker   LoadWorker         first, once
    worker -> core   WorkerFacts        the weights are loaded
    core -> worker   InitializeWorker   what was planned from the facts of all ranks
    worker -> core   WorkerReady        the KV cache is allocated and the connector's worker side is built

Then the steps follow: each is a SchedulerOutput and a SampleTokens, answered by one ModelRunnerOutput. The new requests
of a SchedulerOutput precede it, each as a message. A Failed may replace any answer and is the last message of its
worker.
"""

from __future__ import annotations

import msgspec

from penstock.config.engine import EngineConfig, SchedulerConfig
from penstock.kv_transfer.factory import ConnectorContext
from penstock.messages.adapters import LoraTarget
from penstock.messages.kv_cache_spec import KVCacheConfig, KVCacheSpec
from penstock.messages.kv_transfer import ConnectorSetup, HandshakePayload, ShardId
from penstock.messages.memory_budget import MemoryBudget
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import GrammarOutput, NewRequestData, SchedulerOutput
from penstock.messages.tensor_rows import TensorRows
from penstock.utils.child_process import Failed
from penstock.utils.wire import Codec


class Rendezvous(msgspec.Struct, frozen=True):
    """How the ranks of an engine connect: the name of memory shared on one host, or an address as "host:port". An
    engine with one rank has neither.
    """

    memory: str | None = None
    num_bytes: int = 0
    address: str | None = None


class LoadWorker(msgspec.Struct, frozen=True):
    """The worker chooses its device. `rendezvous` is that of the engine `dp_rank`, and `experts` that of the ranks of
    this stage in all engines, if these share experts.
    """

    config: EngineConfig
    shard: ShardId
    rendezvous: Rendezvous = Rendezvous()
    dp_rank: int = 0
    experts: Rendezvous = Rendezvous()

    @property
    def name(self) -> str:
        """The rank, as errors name it."""
        of_engine = f" of engine {self.dp_rank}" if self.config.parallel.num_joint_engines > 1 else ""
        return f"{self.shard}{of_engine}"


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's facts about its device and its loaded model. Specs are by layer name in the order of the layers, a
    drafter's under separate names; its KV at a position depends on the following `num_tokens_ahead` tokens.
    `expert_memories` are the names of the memory of a layer's experts, if experts move; those of a drafter are among
    them. `arithmetic` names the kernels: those with another name give other last bits. `read` lists what was read of
    the checkpoints. `roundings` are the ways in which layers round their inputs to 8 bits: "by row" as a W8A8
    checkpoint says, "by group" by `quantize_activations`. `lora_targets` are the projections that adapters may change,
    by name. `kernels`, `device_name`, `num_threads`, `num_weights` and `weight_bytes` are for display (`EngineInfo`).
    """

    shard: ShardId
    device: str
    kv_cache_specs: dict[str, KVCacheSpec]
    draft_kv_cache_specs: dict[str, KVCacheSpec]
    num_tokens_ahead: int
    memory: MemoryBudget
    arithmetic: str
    read: tuple[TensorRows, ...]
    kernels: str
    device_name: str
    num_threads: int
    num_weights: int = 0
    weight_bytes: int = 0
    roundings: tuple[str, ...] = ()
    lora_targets: dict[str, LoraTarget] = msgspec.field(default_factory=dict[str, LoraTarget])
    expert_memories: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict[str, tuple[str, ...]])


class InitializeWorker(msgspec.Struct, frozen=True, kw_only=True):
    """`connector` is None if KV stays in the engine, `connector_setup` if its worker sides need no further data.
    `expert_memories` are, by layer, those of all ranks of its stage in their order.
    """

    cache: KVCacheConfig
    limits: SchedulerConfig
    connector: ConnectorContext | None = None
    connector_setup: ConnectorSetup | None = None
    expert_memories: dict[str, tuple[tuple[str, ...], ...]] = {}


class WorkerReady(msgspec.Struct, frozen=True):
    """`handshake` is this rank's information for other engines, None if its connector has none. `runs_ahead`: a step is
    launched here and computed on a device, so that its result arrives later.
    """

    shard: ShardId
    handshake: HandshakePayload | None
    runs_ahead: bool


class SampleTokens(msgspec.Struct, frozen=True):
    """Samples for the step that was sent last, constrained by its grammars."""

    grammars: GrammarOutput | None = None


CODEC = Codec(
    LoadWorker,
    WorkerFacts,
    InitializeWorker,
    WorkerReady,
    NewRequestData,
    SchedulerOutput,
    SampleTokens,
    ModelRunnerOutput,
    Failed,
)
