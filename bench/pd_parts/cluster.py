"""Prefill and decode instances as separate processes, and the router in front of them in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from penstock.router.dispatcher import Limits
from penstock.router.exchange import Timeouts
from penstock.router.instances import Instance, Role, State
from penstock.router.service import Listening, RouterConfig, running

CONNECTORS = {"serial": "NixlConnector", "concurrent": "MooncakeConnector"}
START_SECONDS = 180.0
_END_SECONDS = 30.0
# Below the system's range for ports of outgoing connections, so that its ports are still free after a restart.
_PORTS = range(20000, 32000)
_METRIC = re.compile(r"^(?P<name>[\w:]+)\{(?P<labels>[^}]*)\} (?P<value>\S+)$", re.M)


def free_ports(count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        port = random.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found += [] if port in found else [port]
    return found


def descendants(pid: int) -> list[int]:
    """Returns all processes below one, outermost first."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    except OSError:
        return []
    return [each for child in map(int, children) for each in (child, *descendants(child))]


def is_gone(pid: int) -> bool:
    """Returns whether a process has ended, even if its parent has not waited for it yet."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] == "Z"


@dataclass
class Server:
    """One `penstock serve` at fixed addresses, which may be restarted repeatedly. `cores`: where it may run."""

    name: str
    flags: Sequence[str]
    log: Path
    cores: Sequence[int] = ()
    port: int = 0
    admin_port: int = 0
    process: subprocess.Popen[bytes] | None = None
    pids: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self.port, self.admin_port = free_ports(2)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "penstock.cli.main", "serve", *self.flags]
        command += ["--port", str(self.port), "--admin-port", str(self.admin_port)]
        if self.cores:
            command = ["taskset", "-c", ",".join(map(str, self.cores)), *command]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.pids = [self.process.pid]

    async def wait_ready(self, session: aiohttp.ClientSession) -> None:
        """Also records its processes."""
        assert self.process is not None
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert self.process.poll() is None, f"{self.name} has not started:\n{self.log_end()}"
            assert time.monotonic() < deadline, f"{self.name} was not ready in time:\n{self.log_end()}"
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with session.get(f"{self.url}/ready", timeout=aiohttp.ClientTimeout(5)) as response:
                    if response.status == 200:
                        break
            await asyncio.sleep(0.05)
        self.pids = [self.process.pid, *descendants(self.process.pid)]

    def victims(self, which: str) -> list[int]:
        """`server`: the HTTP process; `engine`: the engine core's; `both`."""
        return {"server": self.pids[:1], "engine": self.pids[1:], "both": self.pids}[which]

    def signal(self, which: str, number: int) -> None:
        for pid in self.victims(which):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def wait_ended(self) -> bool:
        """Returns whether all its processes have ended within the time limit; the others are killed."""
        assert self.process is not None
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline:
            self.process.poll()
            if all(map(is_gone, self.pids)):
                return True
            await asyncio.sleep(0.02)
        self.kill()
        return False

    def kill(self) -> None:
        for pid in self.pids or ([self.process.pid] if self.process else []):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    def log_end(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    async def metrics(self, session: aiohttp.ClientSession) -> dict[str, float]:
        """Returns the metrics by name; the connector's counters have its own names."""
        async with session.get(f"{self.url}/metrics", timeout=aiohttp.ClientTimeout(10)) as response:
            text = await response.text()
        found: dict[str, float] = {}
        for each in _METRIC.finditer(text):
            name = each["name"]
            if name == "penstock:kv_connector":
                labels = dict(label.split("=", 1) for label in each["labels"].split(","))
                name = labels["name"].strip('"')
            found[name] = found.get(name, 0.0) + float(each["value"])
        return found

    async def is_idle(self, session: aiohttp.ClientSession) -> bool:
        """Returns whether there is no request, no block in use and none held for others; also checks the integrity."""
        found = await self.metrics(session)
        async with session.get(f"{self.admin_url}/drain") as response:
            unfinished = (await response.json())["num_unfinished"]
        # Before its first step an engine has not counted anything yet.
        if unfinished or found["vllm:kv_cache_usage_perc"] or found.get("p2p_held", 0):
            return False
        async with session.post(f"{self.admin_url}/check_integrity") as response:
            assert response.status == 200, f"{self.name}: {await response.text()}"
        async with session.post(f"{self.admin_url}/reset_prefix_cache") as response:
            return response.status == 200


@dataclass
class Cluster:
    """`style` is how the router drives the instances, `decodes` are the names of those that decode. `options` are
    further options of the connectors, `config` of `kv_transfer_config`. Decode instances compute prompts of at most
    `max_local_prefill` tokens themselves, where that is sooner.

    `routed` starts another router.
    """

    folder: Path
    style: str = "serial"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    flags: Sequence[str] = ()
    cores: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    prefill_timeout: float = 60.0
    max_local_prefill: int = 0
    decodes: Sequence[str] = ("decode",)
    url: str = field(default="", init=False)
    _listening: Listening = field(init=False)

    def __post_init__(self) -> None:
        names = ("prefill", *self.decodes)
        kv_ports: dict[str, int] = dict(zip((*names, "bootstrap"), free_ports(len(names) + 1), strict=True))
        self.bootstrap = f"http://127.0.0.1:{kv_ports['bootstrap']}"
        self.servers: dict[str, Server] = {}
        for name in names:
            extra = dict(self.options)
            if self.style == "concurrent":
                extra["bootstrap_port"] = kv_ports["bootstrap"]
            config = {
                "kv_connector": CONNECTORS[self.style],
                "kv_role": "kv_producer" if name == "prefill" else "kv_consumer",
                "engine_id": name,
                "kv_port": kv_ports[name],
                **self.config,
                "kv_connector_extra_config": extra,
            }
            flags = [*self.flags, "--kv-transfer-config", json.dumps(config)]
            self.servers[name] = Server(name, flags, self.folder / f"{name}.log", self.cores.get(name, ()))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Starts all processes, and ends them."""
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            try:
                for server in self.servers.values():
                    server.start()
                for server in self.servers.values():
                    await server.wait_ready(session)
                async with self.routed(self.max_local_prefill) as self._listening:
                    self.url = self._listening.url
                    yield session
            finally:
                for server in self.servers.values():
                    server.signal("both", signal.SIGCONT)
                    server.signal("server", signal.SIGTERM)
                for server in self.servers.values():
                    if server.process is not None:
                        await server.wait_ended()

    @contextlib.asynccontextmanager
    async def routed(self, max_local_prefill: int) -> AsyncIterator[Listening]:
        bootstrap = self.bootstrap if self.style == "concurrent" else ""
        instances = [
            Instance(self.servers["prefill"].url, Role.PREFILL, bootstrap),
            *(Instance(self.servers[name].url, Role.DECODE) for name in self.decodes),
        ]
        limits, timeouts = Limits(max_local_prefill=max_local_prefill), Timeouts(prefill=self.prefill_timeout)
        config = RouterConfig(instances, port=0, limits=limits, timeouts=timeouts)
        async with running(config) as listening:
            yield listening

    async def wait_routed(self) -> None:
        """Waits until the router knows that every instance is ready; it queries each of them once a second."""
        deadline = time.monotonic() + START_SECONDS
        while waiting := [each.url for each in self._listening.dispatcher.pool if each.state is not State.READY]:
            assert time.monotonic() < deadline, f"the router does not consider these ready: {waiting}"
            await asyncio.sleep(0.05)


@contextlib.contextmanager
def private_folder(folder: Path) -> Iterator[None]:
    """The engines inside keep their addresses and their key in `folder`."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
