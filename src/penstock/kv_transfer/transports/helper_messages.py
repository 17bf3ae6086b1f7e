"""The messages between an engine and a helper process, with one answer for each request.

OpenAgent  ->
           <-  AgentReady, or Failed
Read       ->
           <-  Landed, or Failed; after a failure the helper ends
"""

from __future__ import annotations

import msgspec
import numpy as np

from penstock.kv_transfer.transports.agents import AgentSettings
from penstock.kv_transfer.transports.flat_memory import NamedRegion
from penstock.utils.child_process import Failed
from penstock.utils.wire import Codec


class ServedMemory(msgspec.Struct, frozen=True):
    """An agent's descriptor, and the address and number of bytes of each of its regions."""

    agent: bytes
    regions: tuple[tuple[int, int], ...]


class OpenAgent(msgspec.Struct, frozen=True):
    """With a `peer` the agent reads its memory into the regions. Without one it serves them."""

    settings: AgentSettings
    regions: tuple[NamedRegion, ...]
    peer: ServedMemory | None


class AgentReady(msgspec.Struct, frozen=True):
    memory: ServedMemory


class Read(msgspec.Struct, frozen=True):
    runs: np.ndarray  # [n, 3] int64, checked


class Landed(msgspec.Struct, frozen=True):
    """The last byte has landed."""


CODEC = Codec(OpenAgent, AgentReady, Read, Landed, Failed)
