"""Chooses the executor by the configuration."""

from __future__ import annotations

from collections.abc import Callable

from penstock.config import env
from penstock.config.engine import EngineConfig
from penstock.config.gpus import gpus_of_ranks, show_gpus
from penstock.executor.executor import Executor, WorkerHandle
from penstock.executor.remote import start_worker
from penstock.parallel.rank_memory import abort, create_rank_memory
from penstock.parallel.topology import shards
from penstock.utils.errors import ConfigError
from penstock.utils.hosts import free_port
from penstock.utils.machine import count_gpus
from penstock.utils.shared_memory import SharedMemory
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
    parallel = config.parallel
    num_engines, num_ranks = parallel.num_joint_engines, parallel.num_joint_engines * parallel.num_ranks
    if num_ranks == 1:
        return Executor(_make_workers(config, [LoadWorker(config, (0, 0))], None))
    gpus = gpus_of_ranks(config.device, parallel, env.visible_gpus(), count_gpus)
    if gpus and num_engines > 1:
        raise ConfigError("enable_expert_parallel divides experts among ranks on a CPU only: set device=cpu")
    if gpus or not shares_memory:
        return _make_distributed(config, gpus)
    memories: list[SharedMemory] = []

    def share(pp: int, tp: int) -> Rendezvous:
        memories.append(create_rank_memory(pp, tp, num_ranks))
        return Rendezvous(memory=memories[-1].name, num_bytes=len(memories[-1].view))

    def abort_ranks() -> None:
        for memory in memories:
            abort(memory)

    return Executor(_make_workers(config, _ranks(config, share), abort_ranks), abort_ranks, num_engines=num_engines)


def _ranks(config: EngineConfig, meet: Callable[[int, int], Rendezvous]) -> list[LoadWorker]:
    """Returns all ranks, engine after engine. `meet` makes a place for pp x tp ranks to meet: those of an engine do,
    and if several engines share experts, those of each stage do in all of them.
    """
    pp, tp, num_engines = config.parallel.pp, config.parallel.tp, config.parallel.num_joint_engines
    engines = [meet(pp, tp) if pp * tp > 1 else Rendezvous() for _ in range(num_engines)]
    stages = [meet(1, num_engines * tp) if num_engines > 1 else Rendezvous() for _ in range(pp)]
    return [
        LoadWorker(config, shard, engine, dp_rank, stages[shard[0]])
        for dp_rank, engine in enumerate(engines)
        for shard in shards(pp, tp)
    ]


def _make_distributed(config: EngineConfig, gpus: list[str]) -> Executor:
    """Starts a process for each rank, with its GPU if there are `gpus`; they connect through torch.distributed.

    There is no abort: gloo notices that the connections of a dead rank end, but NCCL does not, so the executor kills
    the other ranks.
    """
    ranks = _ranks(config, lambda pp, tp: Rendezvous(address=f"127.0.0.1:{free_port()}"))
    environments = [show_gpus([gpu]) for gpu in gpus] or [{}] * len(ranks)
    workers = [start_worker(rank, environment=own) for rank, own in zip(ranks, environments, strict=True)]
    return Executor(workers, num_engines=config.parallel.num_joint_engines)


def _make_workers(
    config: EngineConfig, ranks: list[LoadWorker], abort_ranks: Callable[[], None] | None
) -> list[WorkerHandle]:
    if config.parallel.backend == "mp":
        return [start_worker(load) for load in ranks]
    # Imported here: it needs torch, which an engine core with remote workers does not.
    from penstock.executor.uniproc import make_local_worker

    return [make_local_worker(load, abort_ranks) for load in ranks]
