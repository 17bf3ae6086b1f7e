"""Looks up the addresses of host names in the background.

A name server may take seconds to answer, or never answer: each name has its own thread, and delays no other.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.kv_transfer.p2p.params import Address

_MAX_ENDPOINTS = 8


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address to which a socket of this family connects."""

    family: socket.AddressFamily
    address: tuple[Any, ...]


Found = Callable[[list[Endpoint], str], None]
"""Takes the endpoints in the order in which to try them, and the reason if there are none."""


class Lookups:
    """Combines concurrent lookups of the same address."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Address, list[Found]] = {}

    def begin(self, address: Address, found: Found) -> None:
        """Begins a lookup. `found` is called later, on another thread."""
        with self._lock:
            is_first = address not in self._waiting
            self._waiting.setdefault(address, []).append(found)
        if is_first:
            try:
                threading.Thread(target=self._look_up, args=(address,), name="kv-name", daemon=True).start()
            except RuntimeError as error:
                self._tell(address, [], f"the name {address[0]} cannot be looked up: {error}")

    def _look_up(self, address: Address) -> None:
        endpoints: list[Endpoint] = []
        reason = ""
        try:
            for family, _, _, _, found in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
                if family in (socket.AF_INET, socket.AF_INET6):
                    endpoints.append(Endpoint(family, found))
        except (OSError, UnicodeError) as error:
            reason = f"the name {address[0]} has no address: {error}"
        self._tell(address, endpoints[:_MAX_ENDPOINTS], reason or f"the name {address[0]} has no address")

    def _tell(self, address: Address, endpoints: list[Endpoint], reason: str) -> None:
        with self._lock:
            waiting = self._waiting.pop(address)
        for each in waiting:
            each(endpoints, reason)
