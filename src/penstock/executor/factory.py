"""Chooses the executor by the configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from penstock.config import env
from penstock.config.engine import EngineConfig
from penstock.config.gpus import gpus_of_ranks, show_gpus
from penstock.executor.executor import Executor, WorkerHandle
from penstock.executor.remote import start_worker
from penstock.parallel.rank_memory import abort, create_rank_memory
from penstock.parallel.topology import shards
from penstock.utils.hosts import free_port
from penstock.utils.machine import count_gpus
from penstock.worker.messages import LoadWorker, Rendezvous


def make_executor(config: EngineConfig, shares_memory: bool = True) -> Executor:
    """Makes the workers of all ranks; nothing is loaded yet.

    Without `shares_memory`, the processes of several ranks on a CPU connect like ranks on GPUs. Raises ConfigError if
    there are too few GPUs, or no room on the cluster.
    """
    if config.parallel.backend == "ray":
        # Imported here: Ray is optional and large.
        from penstock.executor.ray import make_ray_executor

        return make_ray_executor(config)
    pp, tp = config.parallel.pp, config.parallel.tp
    if pp * tp == 1:
        return Executor(_make_workers(config, [LoadWorker(config, (0, 0))], None))
    gpus = gpus_of_ranks(config.device, config.parallel, env.visible_gpus(), count_gpus)
    if gpus or not shares_memory:
        return _make_distributed(config, gpus)
    memory = create_rank_memory(pp, tp)
    rendezvous = Rendezvous(memory=memory.name, num_bytes=len(memory.view))
    abort_ranks = partial(abort, memory)
    ranks = [LoadWorker(config, shard, rendezvous) for shard in shards(pp, tp)]
    return Executor(_make_workers(config, ranks, abort_ranks), abort_ranks)


def _make_distributed(config: EngineConfig, gpus: list[str]) -> Executor:
    """Starts a process for each rank, with its GPU if there are `gpus`; they connect through torch.distributed.

    There is no abort: gloo notices that the connections of a dead rank end, but NCCL does not, so the executor kills
    the other ranks.
    """
    rendezvous = Rendezvous(address=f"127.0.0.1:{free_port()}")
    ranks = [LoadWorker(config, shard, rendezvous) for shard in shards(config.parallel.pp, config.parallel.tp)]
    environments = [show_gpus([gpu]) for gpu in gpus] or [{}] * len(ranks)
    return Executor([start_worker(rank, environment=own) for rank, own in zip(ranks, environments, strict=True)])


def _make_workers(
    config: EngineConfig, ranks: list[LoadWorker], abort_ranks: Callable[[], None] | None
) -> list[WorkerHandle]:
    if config.parallel.backend == "mp":
        return [start_worker(load) for load in ranks]
    # Imported here: it needs torch, which an engine core with remote workers does not.
    from penstock.executor.uniproc import make_local_worker

    return [make_local_worker(load, abort_ranks) for load in ranks]
