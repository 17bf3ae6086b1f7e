"""How a rank finds the others of its engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.config.parallel import ParallelConfig
from penstock.parallel.groups import NO_LINKS
from penstock.parallel.rank_memory import create_rank_memory
from penstock.runner.cpu.parts import cpu_parts
from penstock.utils.errors import ConfigError, EngineDeadError
from penstock.worker.meeting import meet
from penstock.worker.messages import Rendezvous

TWO = ParallelConfig(tp=2)
PARTS = cpu_parts()


def test_a_single_rank_meets_nobody() -> None:
    assert meet(Rendezvous(), ParallelConfig(), (0, 0), PARTS) is NO_LINKS


def test_ranks_of_a_host_share_memory() -> None:
    memory = create_rank_memory(1, 2)
    links = meet(Rendezvous(memory=memory.name, num_bytes=len(memory.view)), TWO, (0, 1), PARTS)
    assert (links.group.index, links.group.count) == (1, 2)
    links.close()


def test_memory_that_is_gone() -> None:
    with pytest.raises(EngineDeadError, match="cannot be mapped"):
        meet(Rendezvous(memory="/proc/0/fd/0", num_bytes=4096), TWO, (0, 0), PARTS)


def test_gpus_share_no_main_memory() -> None:
    """The engine core has counted none, and yet this rank sees one."""
    with pytest.raises(ConfigError, match=r"CUDA's driver .* lists none.* set device=cpu"):
        meet(Rendezvous(memory="/proc/0/fd/0", num_bytes=4096), TWO, (0, 0), replace(PARTS, shares_main_memory=False))
