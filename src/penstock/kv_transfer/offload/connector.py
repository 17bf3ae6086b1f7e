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
from pathlib import Path
from typing import Any

from penstock.kv_transfer.digest import Attestation
from penstock.kv_transfer.factory import ConnectorContext
from penstock.kv_transfer.offload.cost_model import LoadCostModel
from penstock.kv_transfer.offload.manager import OffloadingManager
from penstock.kv_transfer.offload.messages import OffloadSetup
from penstock.kv_transfer.offload.policies import ARCPolicy, CachePolicy, LRUPolicy
from penstock.kv_transfer.offload.region import OffloadRegion
from penstock.kv_transfer.offload.scheduler import OffloadingScheduler, OffloadPolicy, OffloadRules
from penstock.kv_transfer.offload.tiers.disk import DiskTier, DiskTierConfig
from penstock.kv_transfer.offload.worker import OffloadingWorker
from penstock.kv_transfer.options import Check, is_text, read_options
from penstock.kv_transfer.topology.chunks import ChunkFormat
from penstock.messages.kv_transfer import ConnectorSetup, ShardId
from penstock.utils.clock import SystemClock
from penstock.utils.errors import ConfigError

_DEFAULTS = {
    "cpu_bytes_to_use": 1 << 30,
    "eviction_policy": "lru",
    "disk_path": None,
    "disk_bytes_to_use": 16 << 30,
    "attestation": "all",
    "offload_policy": "chunk",
    "load_policy": "measured",
}


def _one_of(*choices: str) -> Check:
    return lambda value: value in choices, f"one of {', '.join(choices)}"


_BYTES: Check = (
    lambda value: isinstance(value, int) and not isinstance(value, bool) and value > 0,
    "a number of bytes",
)


class OffloadingConnector:
    """See the module's docstring."""

    @staticmethod
    def make_scheduler_connector(context: ConnectorContext) -> OffloadingScheduler:
        """Builds the scheduler's part. Raises ConfigError for invalid options."""
        options = _read_options(context)
        chunk_bytes = ChunkFormat(context.cache).chunk_bytes
        region = OffloadRegion(options["cpu_bytes_to_use"] // chunk_bytes, chunk_bytes)
        num_chunks = region.num_chunks
        policy: CachePolicy = LRUPolicy() if options["eviction_policy"] == "lru" else ARCPolicy(num_chunks)
        tiers: list[DiskTier] = []
        if options["disk_path"] is not None:
            disk = DiskTierConfig(Path(options["disk_path"]).expanduser(), options["disk_bytes_to_use"])
            tiers.append(DiskTier(disk, context.fingerprint, region))
        return OffloadingScheduler(
            cache=context.cache,
            shards=context.shards,
            region=region,
            manager=OffloadingManager(num_chunks, policy, tiers),
            rules=OffloadRules(
                attestation=Attestation(options["attestation"]),
                policy=OffloadPolicy(options["offload_policy"]),
                costs=LoadCostModel() if options["load_policy"] == "measured" else None,
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
            region = OffloadRegion.attach(setup.memory, setup.chunk_bytes)
        except OSError as error:
            raise ConfigError(
                f"rank {shard} cannot map the memory of the OffloadingConnector ({error}): all ranks must run on the "
                "host of the engine core"
            ) from None
        return OffloadingWorker(region, shard, ChunkFormat(context.cache), context.rank_heads)


def _read_options(context: ConnectorContext) -> dict[str, Any]:
    return read_options(
        "OffloadingConnector",
        context.config.kv_connector_extra_config,
        _DEFAULTS,
        cpu_bytes_to_use=_BYTES,
        eviction_policy=_one_of("lru", "arc"),
        disk_path=(is_text, "a folder"),
        disk_bytes_to_use=_BYTES,
        attestation=_one_of(*Attestation),
        offload_policy=_one_of(*OffloadPolicy),
        load_policy=_one_of("measured", "always"),
    )
