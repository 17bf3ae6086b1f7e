"""The transports between processes: the contract, and peers that die, stop, stall, or do not have the key."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

import pytest

from penstock.kv_transfer.transports.base import DataTransport
from penstock.simulation.conformance import TransportRig, check_transport
from tests.integration.transport_process import LateTransport, Memories, RemoteTransport

KINDS = ("sockets", "shared_memory")


@contextlib.contextmanager
def remotes() -> Iterator[list[RemoteTransport]]:
    """Endpoints in other processes, which are ended with the test."""
    made: list[RemoteTransport] = []
    try:
        yield made
    finally:
        for each in made:
            each.end()


@pytest.mark.parametrize("kind", KINDS)
def test_a_transport_to_another_process_conforms(kind: str) -> None:
    with remotes() as made:

        def make() -> TransportRig:
            memories = Memories()
            made.append(RemoteTransport(kind, memories))
            right = made[-1]

            def restart() -> RemoteTransport:
                right.end()
                made.append(RemoteTransport(kind, memories))
                return made[-1]

            left = cast(DataTransport, LateTransport(kind, memories))
            return TransportRig(left, right, restart, memories.allocate)

        check_transport(make)
