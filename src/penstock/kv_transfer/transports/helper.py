"""A helper process, for the engine, and their messages, with one answer for each request.

OpenAgent  ->
           <-  ServedMemory, or Failed
Read       ->
           <-  Landed, or Failed; after a failure the helper ends
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np

from penstock.config import env
from penstock.kv_transfer.transports.agents import AgentSettings
from penstock.kv_transfer.transports.flat_memory import NamedRegion
from penstock.utils.child_process import Channel, ChildProcess, Failed
from penstock.utils.errors import ConfigError, PeerError, WireError
from penstock.utils.wire import Codec

_PROGRAM = ("-m", "penstock.kv_transfer.transports.helper_process")

_Answer = TypeVar("_Answer")


class ServedMemory(msgspec.Struct, frozen=True):
    """An agent's descriptor, and the address and number of bytes of each of its regions."""

    agent: bytes
    regions: tuple[tuple[int, int], ...]


class OpenAgent(msgspec.Struct, frozen=True):
    """With a `peer` the agent reads its memory into the regions. Without one it serves them."""

    settings: AgentSettings
    regions: tuple[NamedRegion, ...]
    peer: ServedMemory | None


class Read(msgspec.Struct, frozen=True):
    runs: np.ndarray  # [n, 3] int64, checked


class Landed(msgspec.Struct, frozen=True):
    """The last byte has landed."""


CODEC = Codec(OpenAgent, ServedMemory, Read, Landed, Failed)


class HelperProcess(ChildProcess):
    """One thread sends requests, and calls `end`: after that, nothing that the process began moves."""

    def __init__(self, defaults: dict[str, str]) -> None:
        """`defaults` are values of environment variables that the user has not set. Raises PeerError."""
        try:
            super().__init__(_PROGRAM, env.for_child(defaults=defaults), has_lifeline=True)
        except OSError as error:
            raise PeerError(f"a helper process cannot be started: {error}") from error
        self._channel = Channel(self.connection, CODEC)
        self._answers = iter(self._channel)

    def open(self, message: OpenAgent, seconds: float) -> ServedMemory:
        """Opens an agent. Raises PeerError, or ConfigError if the configuration or the installation must change."""
        self.connection.settimeout(seconds)
        memory = self._ask(message, ServedMemory)
        self.connection.settimeout(None)
        return memory

    def read(self, runs: np.ndarray) -> None:
        """Returns when all bytes of the runs, [n, 3] int64, have landed. After a PeerError they may still land."""
        self._ask(Read(runs), Landed)

    def _ask(self, message: Any, kind: type[_Answer]) -> _Answer:
        try:
            self._channel.send(message)
            answer = next(self._answers, None)
        except TimeoutError:
            raise PeerError("a helper process has not answered in time") from None
        except (OSError, WireError) as error:
            raise PeerError(f"a helper process has ended: {error}") from error
        if answer is None:
            raise PeerError("a helper process has ended")
        if isinstance(answer, Failed):
            raise (ConfigError if answer.is_config else PeerError)(answer.message)
        if not isinstance(answer, kind):
            raise PeerError(f"a helper process has answered with {type(answer).__name__}")
        return answer
