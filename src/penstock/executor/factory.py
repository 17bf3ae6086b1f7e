"""Chooses the executor by the arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from penstock.config.engine import EngineArgs
from penstock.executor.executor import Executor, WorkerHandle
from penstock.parallel.rank_memory import abort, create_rank_memory
from penstock.parallel.topology import shards
from penstock.worker.messages import LoadWorker, Rendezvous


def make_executor(args: EngineArgs) -> Executor:
    """Makes the workers of all ranks; nothing is loaded yet. The folders in `args` hold the models."""
    if args.executor_backend == "ray":
        # Imported here: Ray is optional and large.
        from penstock.executor.ray import make_ray_executor

        return make_ray_executor(args)
    pp, tp = args.pipeline_parallel_size, args.tensor_parallel_size
    if pp * tp == 1:
        return Executor(_make_workers(args, [LoadWorker(args, (0, 0))], None))
    memory = create_rank_memory(pp, tp)
    rendezvous = Rendezvous(memory=memory.name, num_bytes=len(memory.view))
    abort_ranks = partial(abort, memory)
    ranks = [LoadWorker(args, shard, rendezvous) for shard in shards(pp, tp)]
    return Executor(_make_workers(args, ranks, abort_ranks), abort_ranks)


def _make_workers(
    args: EngineArgs, ranks: list[LoadWorker], abort_ranks: Callable[[], None] | None
) -> list[WorkerHandle]:
    if args.executor_backend == "mp":
        from penstock.executor.multiproc import start_worker

        return [start_worker(load) for load in ranks]
    # Imported here: it needs torch, which an engine core with remote workers does not.
    from penstock.executor.uniproc import make_local_worker

    return [make_local_worker(load, abort_ranks) for load in ranks]
