"""How a rank connects to the other ranks of its engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.config.engine import EngineArgs, resolve
from penstock.config.parallel import ParallelConfig
from penstock.messages.kv_transfer import ShardId
from penstock.parallel.groups import NO_LINKS
from penstock.parallel.rank_memory import create_rank_memory
from penstock.runner.cpu.parts import cpu_parts
from penstock.utils.errors import ConfigError, EngineDeadError
from penstock.worker.messages import LoadWorker, Rendezvous
from penstock.worker.worker import meet

TWO = ParallelConfig(tp=2)
PARTS = cpu_parts()


def rank(shard: ShardId, **rendezvous: Any) -> LoadWorker:
    return LoadWorker(resolve(EngineArgs()), shard, Rendezvous(**rendezvous))


def test_a_single_rank_opens_no_connection() -> None:
    assert meet(rank((0, 0)), ParallelConfig(), PARTS) is NO_LINKS


def test_ranks_of_a_host_share_memory() -> None:
    memory = create_rank_memory(1, 2)
    links = meet(rank((0, 1), memory=memory.name, num_bytes=len(memory.view)), TWO, PARTS)
    assert (links.group.index, links.group.count) == (1, 2)
    links.close()


def test_shared_memory_that_no_longer_exists_is_an_error() -> None:
    with pytest.raises(EngineDeadError, match="cannot be mapped"):
        meet(rank((0, 0), memory="/proc/0/fd/0", num_bytes=4096), TWO, PARTS)


def test_ranks_on_gpus_cannot_use_shared_memory() -> None:
    """The engine core has found no GPU, and this rank has one."""
    with pytest.raises(ConfigError, match=r"CUDA's driver .* lists none.* set device=cpu"):
        meet(rank((0, 0), memory="/proc/0/fd/0", num_bytes=4096), TWO, replace(PARTS, shares_main_memory=False))
