"""Stub instances, routers and engines as separate processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_START_TRIES = 600
_TRY_SECONDS = 0.1
_STUB = Path(__file__).parent / "stub.py"


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@dataclass(frozen=True, slots=True)
class RouterProcess:
    """`admin_url` is empty without administration."""

    url: str
    admin_url: str
    pid: int

    def cpu_seconds(self) -> float:
        """Returns the CPU time of its threads so far."""
        threads = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((each / "schedstat").read_text(encoding="utf-8").split()[0]) for each in threads) / 1e9


class StubProcess:
    """Stub instances in another process (`storm.Instances`)."""

    def __init__(self, process: asyncio.subprocess.Process, urls: Sequence[str]) -> None:
        self._process = process
        self.urls = urls

    async def stop(self, number: int) -> None:
        await self._command("stop", number)

    async def start(self, number: int) -> None:
        await self._command("start", number)

    async def _command(self, what: str, number: int) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what} {number}\n".encode())
        assert await self._process.stdout.readline() == b"done\n", f"{what} {number}"


@contextlib.asynccontextmanager
async def stubs(count: int, token_seconds: float) -> AsyncIterator[StubProcess]:
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, str(_STUB), str(count), str(token_seconds)]
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    try:
        yield StubProcess(process, (await process.stdout.readline()).decode().split())
    finally:
        process.kill()
        await process.wait()


@contextlib.contextmanager
def penstock_route(*flags: str) -> Iterator[RouterProcess]:
    command = [sys.executable, "-m", "penstock.cli.main", "route", "--port", "0", "--admin-port", "0", *flags]
    with _running(command) as (pid, lines):
        text = ""
        for line in lines:
            text += line
            found = re.search(r"routes (\S+)/v1 to.*Administration and status at (\S+)", text, re.DOTALL)
            if found:
                yield RouterProcess(found[1], found[2], pid)
                return
        raise SystemExit(f"the router has not started:\n{text}")


@contextlib.contextmanager
def vllm_router(urls: Sequence[str]) -> Iterator[RouterProcess | None]:
    """Yields None if it is not installed."""
    program = shutil.which("vllm-router", path=str(Path(sys.executable).parent)) or shutil.which("vllm-router")
    if program is None:
        yield None
        return
    port, metrics = free_ports(2)
    command = [program, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    command += ["--policy", "round_robin", "--worker-startup-check-interval", "1", "--worker-urls", *urls]
    with _running(command) as (pid, _):
        yield RouterProcess(f"http://127.0.0.1:{port}", "", pid)


@contextlib.contextmanager
def engine(events: str, replay: str, kv_cache_memory: str) -> Iterator[str]:
    """Starts an engine of the built-in model that publishes KV events."""
    config = {"enable_kv_cache_events": True, "endpoint": events, "replay_endpoint": replay}
    with server("--kv-cache-memory", kv_cache_memory, "--kv-events-config", json.dumps(config)) as url:
        yield url


@contextlib.contextmanager
def server(*flags: str) -> Iterator[str]:
    """Starts `penstock serve` with the built-in model."""
    with _running([sys.executable, "-m", "penstock.cli.main", "serve", "--port", "0", *flags]) as (_, lines):
        for line in lines:
            if " serves " in line:
                yield line.split(" at ")[1].split("/v1")[0]
                return
        raise SystemExit("the engine has not started")


async def wait_ready(url: str) -> None:
    for _ in range(_START_TRIES):
        with contextlib.suppress(urllib.error.URLError, OSError):
            (await asyncio.to_thread(urllib.request.urlopen, f"{url}/health", timeout=5)).close()
            return
        await asyncio.sleep(_TRY_SECONDS)
    raise SystemExit(f"{url} has not become ready")


@contextlib.contextmanager
def _running(command: Sequence[str]) -> Iterator[tuple[int, Iterator[str]]]:
    """Yields its process id, and the lines that it prints until it ends. They go through a file, read or not."""
    with tempfile.NamedTemporaryFile("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield process.pid, _lines(process, Path(log.name))
        finally:
            process.terminate()
            process.wait()


def _lines(process: subprocess.Popen[bytes], log: Path) -> Iterator[str]:
    with log.open(encoding="utf-8") as reader:
        for _ in range(_START_TRIES):
            yield from iter(reader.readline, "")
            if process.poll() is not None:
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TRY_SECONDS)
