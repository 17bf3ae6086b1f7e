"""Connects a rank with the others of its engine."""

from __future__ import annotations

from penstock.config.parallel import ParallelConfig
from penstock.messages.kv_transfer import ShardId
from penstock.parallel.groups import NO_LINKS, RankLinks
from penstock.parallel.shared_memory import shared_links
from penstock.runner.parts import DeviceParts
from penstock.utils.errors import ConfigError, EngineDeadError
from penstock.utils.shared_memory import attach_memory
from penstock.worker.messages import Rendezvous


def meet(rendezvous: Rendezvous, parallel: ParallelConfig, shard: ShardId, parts: DeviceParts) -> RankLinks:
    """Returns the rank's connections to the others. Raises EngineDeadError if their memory no longer exists, and
    ConfigError for memory that the device cannot use.
    """
    if parallel.num_ranks == 1:
        return NO_LINKS
    if rendezvous.memory is not None and not parts.shares_main_memory:
        raise ConfigError(
            "torch sees a GPU and CUDA's driver (libcuda.so.1) lists none, so the ranks would exchange tensors through "
            "main memory, which ranks on GPUs cannot: set device=cpu, or repair the driver's installation"
        )
    if rendezvous.memory is not None:
        try:
            memory = attach_memory(rendezvous.memory, rendezvous.num_bytes)
        except OSError as error:
            raise EngineDeadError(f"the memory that the ranks share cannot be mapped: {error}") from error
        return shared_links(memory, parallel.pp, parallel.tp, shard)
    # Imported here: ranks on one host need no torch.distributed.
    from penstock.parallel.distributed import distributed_links

    assert rendezvous.address is not None, f"{parallel} without a rendezvous"
    return distributed_links(rendezvous.address, parallel.pp, parallel.tp, shard, parts.collectives)
