"""The server's ports: a conflict is found before the model is loaded if possible, and names the address."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config.server import ServerArgs
from penstock.server import run
from penstock.utils.errors import ConfigError
from penstock.utils.hosts import free_port

# A server's process ends after these errors, which closes its sockets.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Collects the sockets in the test that has made them, though a server leaves less to the collector."""
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)
    gc.collect()


class LoadedError(Exception):
    """Ends a server in a test when it has loaded its model."""


async def serve(args: ServerArgs) -> None:
    await run.serve({"model": "demo"}, args, lambda _: None, lambda _: None)


def test_a_port_is_reserved_while_the_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    args = ServerArgs(port=free_port())

    async def start_again(**_: Any) -> None:
        raise AssertionError("the second server loads its model too")

    async def start(**_: Any) -> None:
        monkeypatch.setattr(run.AsyncLLM, "start", start_again)
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{args.port}: Address already in use"):
            await serve(args)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", args.port))
        raise LoadedError

    monkeypatch.setattr(run.AsyncLLM, "start", start)
    with pytest.raises(LoadedError):
        asyncio.run(serve(args))


def test_a_conflict_after_the_model_has_loaded_names_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections of an earlier server on the port are still being closed, so that it cannot be reserved."""
    other = socket.create_server(("127.0.0.1", 0))
    port = other.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)):
        other.accept()[0].close()
    other.close()
    args = ServerArgs(port=port)
    later: list[socket.socket] = []

    async def shutdown() -> None: ...

    async def start(**_: Any) -> Any:
        later.append(socket.create_server(("127.0.0.1", port)))
        return SimpleNamespace(info=None, shutdown=shutdown)

    monkeypatch.setattr(run.AsyncLLM, "start", start)
    monkeypatch.setattr(run, "_make_service", lambda *_: SimpleNamespace(args=args, metrics=None))
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
        asyncio.run(serve(args))
    later[0].close()


def test_a_host_name_that_cannot_be_encoded() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on foo\.\.bar:0: "):
        asyncio.run(serve(ServerArgs(host="foo..bar", port=0, allow_unauthenticated=True)))


def test_both_ports_cannot_be_the_same() -> None:
    for host in ("127.0.0.1", "localhost"):
        with pytest.raises(ConfigError, match="port and admin_port are both 8123: choose different ones"):
            ServerArgs(host=host, port=8123, admin_port=8123).check()
    ServerArgs(port=0, admin_port=0).check()
    ServerArgs(host="192.0.2.1", port=8123, admin_port=8123, allow_unauthenticated=True).check()
    for ports in ({"port": 65536}, {"admin_port": -1}):
        with pytest.raises(ConfigError, match="port and admin_port must be between 0 and 65535"):
            ServerArgs(**ports).check()


def test_little_is_collected_once_the_model_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def shut_down() -> None: ...

    async def start(**_: Any) -> SimpleNamespace:
        return SimpleNamespace(info=None, shutdown=shut_down)

    def make_service(*_: Any) -> None:
        raise LoadedError

    monkeypatch.setattr(run.AsyncLLM, "start", start)
    monkeypatch.setattr(run, "_make_service", make_service)
    before = gc.get_threshold()
    with pytest.raises(LoadedError):
        asyncio.run(serve(ServerArgs(port=free_port())))
    assert gc.get_freeze_count() > 0
    assert gc.get_threshold()[0] > before[0]
