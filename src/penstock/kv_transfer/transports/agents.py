"""The interface of a transfer library for `AgentTransport`, and the list of libraries.

An agent lives in a helper process (`helper_process.py`). It either serves registered memory to other agents, or reads
the memory of one peer into it. It need not survive a failure, nor report when bytes of a failed transfer
have stopped moving: the process is then ended and replaced.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from penstock.utils.errors import ConfigError


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`host` is the address at which peers reach this endpoint; `is_local`: only peers on this host can.

    `backends` are NIXL's, `protocol` is Mooncake's.
    """

    library: str
    host: str
    is_local: bool = False
    backends: tuple[str, ...] = ("UCX",)
    protocol: str = "rdma"


class Agent(Protocol):
    """Made from `AgentSettings`, and called by one thread. Raises what its library raises."""

    max_pieces: int
    """The maximum number of pieces in one call of `read`."""

    def register(self, regions: Sequence[tuple[int, int]]) -> None:
        """Makes memory reachable, by the address and number of bytes of each region. Called once."""
        ...

    def descriptor(self) -> bytes:
        """Returns what another agent needs to reach this one."""
        ...

    def connect(self, descriptor: bytes) -> None:
        """Sets the peer. Called once, and not for an agent that serves."""
        ...

    def read(self, pieces: np.ndarray) -> None:
        """Reads [n, 3] int64 of local address, address in the peer's process, bytes. Returns when all have landed."""
        ...


@dataclass(frozen=True, slots=True)
class Library:
    """One of `modules` must be installed. `packages` are Debian packages that the wheel needs but does not contain."""

    modules: tuple[str, ...]
    packages: tuple[str, ...] = ()


LIBRARIES: Mapping[str, Library] = {
    "mooncake": Library(("mooncake",), ("libibverbs1", "librdmacm1", "libnl-3-200", "libnl-route-3-200")),
    "nixl": Library(("nixl_cu12", "nixl_cu13")),
}


def check_installed(library: str) -> None:
    """Raises ConfigError, with instructions, unless the library is installed. Imports nothing."""
    if all(importlib.util.find_spec(module) is None for module in LIBRARIES[library].modules):
        raise ConfigError(
            f"transport={library} needs a library that is not installed: pip install 'penstock[{library}]', or choose "
            "transport=sockets"
        )


def why_not_loaded(library: str, error: ImportError) -> str:
    """Returns what to do about a library that is installed but cannot be imported."""
    packages = LIBRARIES[library].packages
    also = f", and on Debian: apt-get install {' '.join(packages)}" if packages else ""
    return f"the library for transport={library} cannot be loaded ({error}): pip install 'penstock[{library}]'{also}"


def helper_environment(settings: AgentSettings) -> dict[str, str]:
    """Returns the settings that libraries read only from the environment; the user's own take precedence."""
    if settings.library == "mooncake":
        # Mooncake's own choice between TCP and RDMA ignores the configured protocol.
        forced = {"MC_FORCE_TCP": "1"} if settings.protocol == "tcp" else {}
        return {"MC_LOG_LEVEL": "ERROR", **forced}
    return {"UCX_NET_DEVICES": "lo"} if settings.is_local else {}
