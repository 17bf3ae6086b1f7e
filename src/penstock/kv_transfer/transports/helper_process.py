"""A helper process: it maps KV memory and runs an agent of a transfer library over it, in place of the engine.

    python -m penstock.kv_transfer.transports.helper_process SOCKET LIFELINE

Both are inherited (`utils/child_process.py`). The kernel kills this process when the lifeline is closed, whatever call
of the library is in progress. A library that aborts, as when it loses a peer, ends only this process.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from penstock.kv_transfer.transports.agents import Agent, AgentSettings
from penstock.kv_transfer.transports.flat_memory import AddressSpace, pair_segments
from penstock.kv_transfer.transports.helper import CODEC, AgentReady, Landed, OpenAgent, Read, ServedMemory
from penstock.kv_transfer.transports.mooncake_agent import MooncakeAgent
from penstock.kv_transfer.transports.nixl_agent import NixlAgent
from penstock.utils import logging
from penstock.utils.child_process import Parent
from penstock.utils.errors import WireError
from penstock.utils.shared_memory import attach_memory

_logger = logging.get_logger(__name__)

_AGENTS: dict[str, Callable[[AgentSettings], Agent]] = {"mooncake": MooncakeAgent, "nixl": NixlAgent}


def make_agent(settings: AgentSettings) -> Agent:
    return _AGENTS[settings.library](settings)


class Helper:
    """One agent over the memory that it was opened with."""

    def __init__(self, message: OpenAgent) -> None:
        self._memories = [attach_memory(region.path, region.num_bytes) for region in message.regions]
        regions = tuple((memory.address, len(memory.view)) for memory in self._memories)
        self._local = AddressSpace(regions)
        self._agent = make_agent(message.settings)
        self._agent.register(regions)
        self.memory = ServedMemory(self._agent.descriptor(), regions)
        self._remote = AddressSpace()
        if message.peer is not None:
            self._remote = AddressSpace(message.peer.regions)
            self._agent.connect(message.peer.agent)

    def read(self, message: Read) -> None:
        pieces = joined(pair_segments(self._local, self._remote, message.runs))
        size = self._agent.max_pieces
        for start in range(0, len(pieces), size):
            self._agent.read(pieces[start : start + size])


def joined(pieces: np.ndarray) -> np.ndarray:
    """Returns the same copies, [n, 3] int64 of two addresses and bytes, in as few pieces as their order allows."""
    if len(pieces) < 2:
        return pieces
    is_first = np.ones(len(pieces), bool)
    is_first[1:] = (pieces[1:, :2] != pieces[:-1, :2] + pieces[:-1, 2:]).any(1)
    sizes = np.add.reduceat(pieces[:, 2], np.flatnonzero(is_first))
    return np.column_stack([pieces[is_first, :2], sizes])


def serve(engine: Parent) -> None:
    """Answers the messages of the engine. Raises what the agent raises."""
    messages = iter(engine)
    message = next(messages, None)
    if message is None:
        return
    if not isinstance(message, OpenAgent):
        raise WireError(f"a helper expects OpenAgent first, not {type(message).__name__}")
    helper = Helper(message)
    engine.send(AgentReady(helper.memory))
    for message in messages:
        if not isinstance(message, Read):
            raise WireError(f"a helper does not accept {type(message).__name__}")
        helper.read(message)
        engine.send(Landed())


def _log(error: Exception) -> None:
    _logger.warning("a helper process ends: %s: %s", type(error).__name__, error)


def main() -> None:
    engine = Parent.of_this_process(CODEC)
    engine.live(lambda: serve(engine), _log)
    # A library's own shutdown may wait for its peers.
    os._exit(0)


if __name__ == "__main__":
    main()
