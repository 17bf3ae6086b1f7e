"""`OffloadingConnector`: KV that the engine has no room for goes to host memory, and from there to a folder on disk.

Options, in `kv_connector_extra_config`:

    cpu_bytes_to_use    bytes of host memory, 1 GiB by default
    eviction_policy     "lru" or "arc"
    disk_path           folder of the disk tier; there is none without it
    disk_bytes_to_use   its limit, 16 GiB by default
    attestation         "all", "sampled" or "off": which blocks have a digest
    offload_policy      "chunk", "request" or "none" for requests without a policy
    load_policy         "measured": load if that has been faster than computing; "always"
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from penstock.config.options import Limits, Must, Text, convert_options, one_of
from penstock.kv_transfer.digest import Attestation
from penstock.kv_transfer.factory import ConnectorContext
from penstock.kv_transfer.offload.cost_model import LoadCostModel
from penstock.kv_transfer.offload.manager import OffloadingManager
from penstock.kv_transfer.offload.messages import OffloadSetup, StateChunks
from penstock.kv_transfer.offload.policies import ARCPolicy, CachePolicy, LRUPolicy
from penstock.kv_transfer.offload.region import OffloadRegion
from penstock.kv_transfer.offload.scheduler import OffloadingScheduler, OffloadPolicy, OffloadRules
from penstock.kv_transfer.offload.tiers.disk import DiskTier, DiskTierConfig
from penstock.kv_transfer.offload.worker import OffloadingWorker
from penstock.kv_transfer.topology.chunks import ChunkFormat
from penstock.messages.kv_cache_spec import KVCacheConfig
from penstock.messages.kv_transfer import ConnectorSetup, ShardId
from penstock.utils.clock import SystemClock
from penstock.utils.errors import ConfigError

_Bytes = Annotated[int, Limits(gt=0), Must("a number of bytes")]


@dataclass(frozen=True, slots=True)
class OffloadingOptions:
    """The connector's options, as the module's docstring describes them."""

    cpu_bytes_to_use: _Bytes = 1 << 30
    eviction_policy: Literal["lru", "arc"] = "lru"
    disk_path: Annotated[Text | None, Must("a folder")] = None
    disk_bytes_to_use: _Bytes = 16 << 30
    attestation: Annotated[str, one_of(*Attestation)] = "all"
    offload_policy: Annotated[str, one_of(*OffloadPolicy)] = "chunk"
    load_policy: Literal["measured", "always"] = "measured"


class OffloadingConnector:
    """See the module's docstring."""

    @staticmethod
    def make_scheduler_connector(context: ConnectorContext) -> OffloadingScheduler:
        """Builds the scheduler's part. Raises ConfigError for invalid options."""
        given = context.config.kv_connector_extra_config
        options = convert_options(OffloadingOptions, given, "of OffloadingConnector")
        region = _make_region(context.cache, options.cpu_bytes_to_use)
        states = region.states

        def make_policy(num_chunks: int) -> CachePolicy:
            return LRUPolicy() if options.eviction_policy == "lru" else ARCPolicy(num_chunks)

        state_policy = None if states is None else make_policy(states.num_chunks)
        policy = make_policy(region.num_chunks)
        tiers: list[DiskTier] = []
        if options.disk_path is not None:
            disk = DiskTierConfig(Path(options.disk_path), options.disk_bytes_to_use)
            tiers.append(DiskTier(disk, context.fingerprint, region))
        return OffloadingScheduler(
            cache=context.cache,
            shards=context.shards,
            region=region,
            manager=OffloadingManager(region.num_chunks, policy, tiers, states=states, state_policy=state_policy),
            rules=OffloadRules(
                attestation=Attestation(options.attestation),
                policy=OffloadPolicy(options.offload_policy),
                costs=LoadCostModel() if options.load_policy == "measured" else None,
                load_timeout=context.config.kv_load_timeout,
            ),
            clock=SystemClock(),
            epoch=f"{context.config.engine_id}/{uuid.uuid4().hex}",
        )

    @staticmethod
    def make_worker_connector(
        context: ConnectorContext, shard: ShardId, setup: ConnectorSetup | None
    ) -> OffloadingWorker:
        """Builds a rank's part. Raises ConfigError if the rank is not on the host of the tiers."""
        assert isinstance(setup, OffloadSetup), setup
        try:
            region = OffloadRegion.attach(setup.memory, setup.chunk_bytes, setup.states)
        except (OSError, ValueError) as error:  # on another host, nothing or something else has this name
            raise ConfigError(
                f"rank {shard} cannot map the memory of the OffloadingConnector ({error}): all ranks must run on the "
                "host of the engine core"
            ) from None
        return OffloadingWorker(region, shard, ChunkFormat(context.cache), context.rank_heads)


def _make_region(cache: KVCacheConfig, num_bytes: int) -> OffloadRegion:
    """Divides the memory between blocks of tokens and states of recurrent layers as the engine's own cache is divided,
    with room for one of each at least.
    """
    chunks = ChunkFormat(cache)
    if chunks.state_group is None:
        return OffloadRegion(num_bytes // chunks.chunk_bytes, chunks.chunk_bytes)
    wanted = num_bytes * cache.num_states * cache.bytes_per_state // (cache.num_bytes * chunks.state_bytes)
    most = (num_bytes - chunks.chunk_bytes) // chunks.state_bytes
    if most < 1:
        least = chunks.chunk_bytes + chunks.state_bytes
        raise ConfigError(f"cpu_bytes_to_use must be at least {least}, one KV block and one state of recurrent layers")
    num_states = min(max(1, wanted), most)
    states = StateChunks(chunks.state_group, num_states, chunks.state_bytes)
    num_chunks = (num_bytes - num_states * chunks.state_bytes) // chunks.chunk_bytes
    return OffloadRegion(num_chunks, chunks.chunk_bytes, states)
