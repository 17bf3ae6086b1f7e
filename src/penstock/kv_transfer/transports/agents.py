"""What a transfer library must do for `AgentTransport`, and which libraries there are.

An agent lives in a helper process (`helper_process.py`). It either serves registered memory to other agents, or moves
bytes between it and the memory of one peer. It need not survive a failure, nor tell when bytes of a failed transfer
have ceased to move: then the process ends, and another one takes its place.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from penstock.kv_transfer.transports.base import Operation
from penstock.utils.errors import ConfigError


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`host` is the address by which peers reach this one; `is_local`: only peers on this host do.

    `backends` are NIXL's, `protocol` is Mooncake's.
    """

    library: str
    host: str
    is_local: bool = False
    backends: tuple[str, ...] = ("UCX",)
    protocol: str = "rdma"


class Agent(Protocol):
    """Made from `AgentSettings`. One thread calls it. It raises whatever its library raises."""

    max_pieces: int
    """Of one call of `move`."""

    def register(self, regions: Sequence[tuple[int, int]]) -> None:
        """Makes memory reachable: of each region, its address and its number of bytes. To be called once."""
        ...

    def descriptor(self) -> bytes:
        """What another agent needs to reach this one."""
        ...

    def connect(self, descriptor: bytes) -> None:
        """Names the peer. To be called once, and not by an agent that serves."""
        ...

    def move(self, operation: Operation, pieces: np.ndarray) -> None:
        """Moves [n, 3] int64 of local address, address in the peer's process, bytes; returns when all have landed."""
        ...


@dataclass(frozen=True, slots=True)
class Library:
    """One of `modules` must be there. `packages` are Debian's, which a wheel does not bring along."""

    modules: tuple[str, ...]
    packages: tuple[str, ...] = ()


LIBRARIES: Mapping[str, Library] = {
    "mooncake": Library(("mooncake",), ("libibverbs1", "librdmacm1", "libnl-3-200", "libnl-route-3-200")),
    "nixl": Library(("nixl_cu12", "nixl_cu13")),
}


def check_installed(library: str) -> None:
    """Raises ConfigError that says how to install it. Imports nothing."""
    if all(importlib.util.find_spec(module) is None for module in LIBRARIES[library].modules):
        raise ConfigError(
            f"transport={library} needs a library that is not installed: pip install 'penstock[{library}]', or choose "
            "transport=sockets"
        )


def why_not_loaded(library: str, error: ImportError) -> str:
    """What to do about a library that is installed and cannot be imported."""
    packages = LIBRARIES[library].packages
    also = f", and on Debian: apt-get install {' '.join(packages)}" if packages else ""
    return f"the library for transport={library} cannot be loaded ({error}): pip install 'penstock[{library}]'{also}"


def helper_environment(settings: AgentSettings) -> dict[str, str]:
    """Settings that the libraries only take from the environment; a user's own have precedence."""
    if settings.library == "mooncake":
        # Its own choice between TCP and RDMA does not ask which protocol was configured.
        forced = {"MC_FORCE_TCP": "1"} if settings.protocol == "tcp" else {}
        return {"MC_LOG_LEVEL": "ERROR", **forced}
    return {"UCX_NET_DEVICES": "lo"} if settings.is_local else {}
