"""A helper process: it maps KV memory and runs an agent of a transfer library over it, in place of the engine.

    python -m penstock.kv_transfer.transports.helper_process SOCKET LIFELINE

Both are inherited descriptors: a stream socket to the engine, and a pipe on which nothing is ever sent. The kernel
kills this process when the engine's end of the pipe is closed, whatever call of the library is in progress: so it
never outlives the engine. A library that aborts, as when it loses a peer, ends only this process.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from penstock.kv_transfer.transports.agents import Agent, AgentSettings
from penstock.kv_transfer.transports.flat_memory import AddressSpace, pair_segments
from penstock.kv_transfer.transports.helper_messages import (
    CODEC,
    AgentFailed,
    AgentReady,
    Landed,
    OpenAgent,
    Read,
    ServedMemory,
)
from penstock.kv_transfer.transports.mooncake_agent import MooncakeAgent
from penstock.kv_transfer.transports.nixl_agent import NixlAgent
from penstock.utils import logging
from penstock.utils.errors import ConfigError, WireError
from penstock.utils.shared_memory import attach_memory
from penstock.utils.wire import FrameReader

_logger = logging.get_logger(__name__)

_RECEIVE_BYTES = 1 << 20
_AGENTS: dict[str, Callable[[AgentSettings], Agent]] = {"mooncake": MooncakeAgent, "nixl": NixlAgent}


def make_agent(settings: AgentSettings) -> Agent:
    return _AGENTS[settings.library](settings)


def die_with(lifeline: int) -> None:
    """Makes the kernel send SIGKILL to this process when the other end of the pipe is closed."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:
        signal.raise_signal(signal.SIGKILL)  # it is already closed


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


def answers(messages: Iterator[Any]) -> Iterator[AgentReady | Landed]:
    """Yields one answer for each message. Raises what the agent raises."""
    message = next(messages, None)
    if message is None:
        return
    if not isinstance(message, OpenAgent):
        raise WireError(f"a helper expects OpenAgent first, not {type(message).__name__}")
    helper = Helper(message)
    yield AgentReady(helper.memory)
    for message in messages:
        if not isinstance(message, Read):
            raise WireError(f"a helper does not accept {type(message).__name__}")
        helper.read(message)
        yield Landed()


def received(connection: socket.socket) -> Iterator[Any]:
    reader = FrameReader(CODEC)
    while data := connection.recv(_RECEIVE_BYTES):
        yield from reader.feed(data)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A core dump would contain all of the KV memory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout = sys.stderr
    connection = socket.socket(fileno=int(sys.argv[1]))
    die_with(int(sys.argv[2]))
    try:
        for answer in answers(received(connection)):
            connection.sendall(CODEC.encode(answer))
    except Exception as error:  # noqa: BLE001 - it ends the process, and the engine is notified
        is_config = isinstance(error, ConfigError)
        if not is_config:
            _logger.warning("a helper process ends: %s: %s", type(error).__name__, error)
        reason = str(error) if is_config else f"{type(error).__name__}: {error}"
        connection.sendall(CODEC.encode(AgentFailed(reason, is_config)))
    # A library's own shutdown may wait for its peers.
    os._exit(0)


if __name__ == "__main__":
    main()
