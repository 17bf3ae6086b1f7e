"""A transport over a transfer library, such as NIXL or Mooncake, which runs in helper processes.

The KV memory has a name, so that a helper can map it. One helper serves it to peers for as long as the endpoint lives,
and is replaced when it ends; for each peer that this endpoint is connected to there is another one, which reads from
that peer. No library is trusted to cancel a transfer: one that is not DONE is over when the helper that began it has
ended, which the kernel confirms. So a transfer that fails, and a `disconnect`, end the helper for that peer, and no
other; the next `connect` starts a new one. A library that aborts, as some do when a peer dies at the wrong moment, ends
a helper and not the engine.

A transfer that fails is FAILED_UNSETTLED until its helper has ended, and then FAILED_SETTLED.

Endpoints have an authenticated control connection. The answer to its hello tells a peer which agent serves now, and its
end means the end of that agent; nothing else is sent. What the libraries themselves send is neither authenticated nor
encrypted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import numpy as np

from penstock.kv_transfer.transports.agents import AgentSettings, helper_environment
from penstock.kv_transfer.transports.base import PeerId
from penstock.kv_transfer.transports.flat_memory import AddressSpace, check_registered, named_regions
from penstock.kv_transfer.transports.helper import HelperProcess, OpenAgent, ServedMemory
from penstock.kv_transfer.transports.listener import listen_on
from penstock.kv_transfer.transports.peers import Lane, Peer, PeerTransport
from penstock.kv_transfer.transports.socket_protocol import (
    EPOCH_BYTES,
    Address,
    Answer,
    SocketLimits,
    dial,
    encode,
)
from penstock.kv_transfer.transports.stream import Stream
from penstock.messages.kv_layout import MemoryRegion
from penstock.utils.errors import ConfigError, PeerError
from penstock.utils.logging import get_logger

_logger = get_logger(__name__)

_OPEN_SECONDS = 120.0  # to load a library and to register the memory
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 10.0


class AgentAddress(Address, frozen=True, tag="agent", forbid_unknown_fields=True):
    """The descriptor of one life of an endpoint, in which one agent may follow another."""

    library: str

    @property
    def peer_id(self) -> PeerId:
        return f"{self.library}:{self.host}:{self.port}#{self.epoch.hex()}"


class AgentAnswer(Answer, frozen=True, tag="answer"):
    memory: ServedMemory | None = None


class _Reader(Lane):
    def __init__(self, helper: HelperProcess) -> None:
        self._helper = helper

    def read(self, runs: np.ndarray) -> bool:
        self._helper.read(runs)
        return True

    def stop(self) -> None:
        self._helper.kill()

    def end(self) -> None:
        self._helper.end()


class AgentTransport(PeerTransport[AgentAddress]):
    """One life of one endpoint (`DataTransport`). `regions` have the paths by which registered regions can be mapped.

    Raises ConfigError if the host has no such address, or a region has no path.
    """

    def __init__(
        self, settings: AgentSettings, regions: Sequence[MemoryRegion], key: bytes, limits: SocketLimits | None = None
    ) -> None:
        self._settings = settings
        self._regions = named_regions(regions, settings.library)
        self._helpers: set[HelperProcess] = set()
        self._serving: HelperProcess | None = None
        self._served: ServedMemory | None = None
        limits = limits or SocketLimits()
        listening = listen_on(settings.host, limits)
        address = AgentAddress(settings.host, listening.getsockname()[1], os.urandom(EPOCH_BYTES), settings.library)
        super().__init__(listening, address, key, limits)

    @property
    def serving_pid(self) -> int | None:
        """Returns the process id of the helper that serves the memory to peers, None while there is none."""
        with self._lock:
            return None if self._serving is None else self._serving.pid

    def register(self, regions: Sequence[memoryview]) -> None:
        """Raises ConfigError if the library cannot be loaded, or cannot be used as it is configured: the endpoint is
        then closed, because its threads would keep the memory."""
        check_registered(regions, self._regions)
        super().register(regions)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._threads.start(self._keep_serving, self._open_server())
            on_failure.pop_all()

    def close(self) -> None:
        with self._lock:
            self._closing.set()
            for helper in self._helpers:
                helper.kill()
        super().close()

    def _connect(self, address: AgentAddress) -> None:
        if address.library != self._settings.library:
            raise PeerError(f"{address.peer_id} uses the {address.library} transport, not {self._settings.library}")
        control, answer = dial(address, AgentAnswer, self._key, self._limits.connect_seconds)
        try:
            if answer.memory is None:
                raise PeerError("its answer names no memory")
            helper, _ = self._open_helper(answer.memory)
        except (ConfigError, PeerError) as error:
            control.close()
            raise PeerError(f"no helper process for {address.peer_id}: {error}") from error
        self._begin(Peer(address, AddressSpace(answer.memory.regions).num_bytes, control), _Reader(helper))

    def _open_helper(self, peer: ServedMemory | None) -> tuple[HelperProcess, ServedMemory]:
        """Starts a helper that serves or, with a `peer`, one for that peer. Raises ConfigError or PeerError."""
        with self._lock:
            self._threads.check_open()
            helper = HelperProcess(helper_environment(self._settings))
            self._helpers = {each for each in self._helpers if each.ended(0) is None} | {helper}
        try:
            return helper, helper.open(OpenAgent(self._settings, self._regions, peer), _OPEN_SECONDS)
        except (ConfigError, PeerError):
            helper.end()
            raise

    # ---- Serving ----

    def _open_server(self) -> HelperProcess:
        helper, memory = self._open_helper(None)
        with self._lock:
            self._serving, self._served = helper, memory
            self._lock.notify_all()
        return helper

    def _keep_serving(self, helper: HelperProcess | None) -> None:
        """Runs in a thread: waits for the end of the helper that serves, disconnects peers, and starts the next one."""
        while helper is not None:
            how = helper.ended(None)
            helper.end()
            with self._lock:
                self._serving = self._served = None
            self._listener.cut_all()
            if not self._closing.is_set():
                _logger.warning("the process that serves KV memory %s: it is being replaced", how)
            helper = self._next_server()

    def _next_server(self) -> HelperProcess | None:
        """Tries until one serves; None when the endpoint closes."""
        pause = _FIRST_PAUSE_SECONDS
        while not self._closing.wait(pause):
            try:
                return self._open_server()
            except (ConfigError, PeerError) as error:
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                _logger.warning("no process serves KV memory, the next attempt is in %.1f seconds: %s", pause, error)
        return None

    def _serve(self, stream: Stream) -> None:
        with self._lock:
            self._lock.wait_for(lambda: self._served is not None, self._limits.connect_seconds / 2)
            memory = self._served
        if memory is None:
            stream.send(encode(AgentAnswer("its memory is not being served; try again later")))
            return
        stream.send(encode(AgentAnswer(memory=memory)))
        # The client sends nothing more: it has closed the connection, or it violates the protocol.
        stream.wait_for_data()
