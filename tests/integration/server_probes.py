"""Requests to a running server, and checks of its state and its processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.integration.raw_http import call, connect, eventually
from tests.integration.server_process import ServerProcess

COMPLETIONS = "/v1/completions"


def endless(**fields: Any) -> dict[str, Any]:
    """Returns a request that is still running when its test ends."""
    return {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "stream": True, **fields}


def num_unfinished(server: ServerProcess) -> int:
    return call(server.admin_url, "GET", "/drain").json()["num_unfinished"]


def wait_for(server: ServerProcess, num: int, seconds: float = 10.0) -> None:
    """Waits until the engine has `num` unfinished completions."""
    eventually(lambda: num_unfinished(server) == num, seconds)


def check_idle(server: ServerProcess) -> None:
    """Asserts that nothing is left of any request."""
    wait_for(server, 0)
    assert call(server.admin_url, "POST", "/check_integrity").json() == {"whole": True}
    # The step that was in flight when the last request was aborted may not be processed yet.
    eventually(lambda: call(server.admin_url, "POST", "/reset_prefix_cache").status == 200, 2)
    assert call(server.admin_url, "POST", "/reset_prefix_cache?reset_external=true").status == 409, "no connector"


def is_gone(pid: int) -> bool:
    """Tells whether the process has ended; one that has not been waited for yet counts as ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] == "Z"


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops the process within the `with` block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def resident_bytes(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def send_dashboard_request(server: ServerProcess) -> socket.socket:
    """Opens an event stream of the dashboard and waits until it begins."""
    connection = connect(server.url)
    connection.sendall(b"GET /dashboard/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    return connection


def ends_with_error(events: Iterator[Any]) -> dict[str, Any]:
    """Reads a stream to its end, an error event and `[DONE]`; returns the error."""
    *_, error, done = events
    assert done == "[DONE]"
    return error["error"]
