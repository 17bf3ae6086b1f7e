"""The serving half of `AgentTransport`: keeps an agent over the endpoint's memory, and tells peers how to reach it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.kv_transfer.transports.agent_protocol import FRAME_BYTES, AgentAnswer
from penstock.kv_transfer.transports.helper import HelperProcess
from penstock.kv_transfer.transports.helper_messages import ServedMemory
from penstock.kv_transfer.transports.listener import Listener
from penstock.kv_transfer.transports.socket_protocol import Hello, SocketLimits, decode, encode
from penstock.kv_transfer.transports.stream import Stream
from penstock.kv_transfer.transports.threads import ThreadGroup
from penstock.utils.errors import ConfigError, PeerError
from penstock.utils.logging import get_logger

_logger = get_logger(__name__)

_CLOSE_SECONDS = 30.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 10.0

OpenHelper = Callable[[], tuple[HelperProcess, ServedMemory]]
"""Starts a helper that serves. Raises ConfigError or PeerError."""


class AgentServer:
    """Listens as soon as it is made, and answers once it serves. Replaces an agent that has ended by another."""

    def __init__(self, host: str, key: bytes, epoch: bytes, limits: SocketLimits, lock: threading.Condition) -> None:
        self._epoch = epoch
        self._limits = limits
        self._lock = lock
        self._helper: HelperProcess | None = None
        self._memory: ServedMemory | None = None
        self._closing = threading.Event()
        self._listener = Listener(host, key, FRAME_BYTES, limits, lock, self._answer)
        self._threads = ThreadGroup(f"kv-agent-{self.port}")
        self._listener.start()

    @property
    def port(self) -> int:
        return self._listener.port

    @property
    def helper_pid(self) -> int | None:
        """Returns the id of the process that serves, None while there is none."""
        with self._lock:
            return None if self._helper is None else self._helper.pid

    def serve(self, open_helper: OpenHelper) -> None:
        """Starts to serve. Returns when the first agent serves. Raises ConfigError or PeerError."""
        helper = self._open(open_helper)
        self._threads.start(self._keep, helper, open_helper)

    def close(self) -> None:
        """Returns when the agent, which must have been killed, and all connections have ended."""
        assert self._threads.join(_CLOSE_SECONDS), f"a helper has not ended within {_CLOSE_SECONDS} seconds"
        self._listener.close(_CLOSE_SECONDS)

    def begin_to_close(self) -> None:
        """From now on an agent that ends is not replaced."""
        self._closing.set()

    def _open(self, open_helper: OpenHelper) -> HelperProcess:
        helper, memory = open_helper()
        with self._lock:
            self._helper, self._memory = helper, memory
            self._lock.notify_all()
        return helper

    def _keep(self, helper: HelperProcess | None, open_helper: OpenHelper) -> None:
        """Runs in a thread: waits for the end of an agent, disconnects peers, and starts the next agent."""
        pause = _FIRST_PAUSE_SECONDS
        while helper is not None or not self._closing.is_set():
            if helper is not None:
                how = helper.wait_for_end()
                helper.end()
                with self._lock:
                    self._helper = self._memory = None
                    self._lock.notify_all()
                self._listener.cut_all()
                helper = None
                if not self._closing.is_set():
                    _logger.warning("the process that serves KV memory %s: it is being replaced", how)
            if self._closing.wait(pause):
                return
            try:
                helper = self._open(open_helper)
                pause = _FIRST_PAUSE_SECONDS
            except (ConfigError, PeerError) as error:
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                _logger.warning("no process serves KV memory, the next attempt is in %.1f seconds: %s", pause, error)

    def _answer(self, stream: Stream) -> None:
        hello = decode(Hello, stream.receive())
        self._listener.has_introduced_itself(stream)
        if hello.epoch != self._epoch:
            stream.send(encode(AgentAnswer("this endpoint has been restarted since its descriptor was made")))
            return
        with self._lock:
            self._lock.wait_for(lambda: self._memory is not None, self._limits.connect_seconds / 2)
            memory = self._memory
        if memory is None:
            stream.send(encode(AgentAnswer("its memory is not being served; try again later")))
            return
        stream.send(encode(AgentAnswer(memory=memory)))
        # The client sends nothing more: it has closed the connection, or it violates the protocol.
        stream.wait_for_data()
