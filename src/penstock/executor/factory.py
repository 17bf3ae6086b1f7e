"""The executor that the arguments ask for."""

from __future__ import annotations

from penstock.config.engine import EngineArgs
from penstock.executor.executor import Executor
from penstock.messages.kv_transfer import ShardId

_SHARDS: tuple[ShardId, ...] = ((0, 0),)


def make_executor(args: EngineArgs) -> Executor:
    """Makes the workers of all ranks; nothing is loaded yet. The folders in `args` hold the models."""
    if args.distributed_executor_backend == "mp":
        from penstock.executor.multiproc import ProcessWorker

        return Executor([ProcessWorker(args, shard) for shard in _SHARDS])
    # Only now: it needs torch, which an engine core whose workers are elsewhere does not.
    from penstock.executor.uniproc import make_local_worker

    return Executor([make_local_worker(args, shard) for shard in _SHARDS])
