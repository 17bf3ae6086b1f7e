"""A real `penstock serve` in a separate process, for tests that use it as clients do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

START_SECONDS = 120
ADMIN_KEY = "admin-secret-key"
# The memory of the machine would hold so many KV blocks that checking them after each step takes longer than the step.
MEMORY = ("--kv-cache-memory", "512MiB")
SET_MEMORY = {"--kv-cache-memory", "--num-gpu-blocks-override", "--gpu-memory-utilization", "--model"}


@dataclass
class ServerProcess:
    """`url` ends before `/v1`; `admin_url` belongs to the administration port; `log` grows with standard error."""

    process: subprocess.Popen[str]
    url: str = ""
    admin_url: str = ""
    log: list[str] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def core_pid(self) -> int:
        """The engine core's process, a child of the server's."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text(encoding="utf-8").split()
        (core,) = [int(child) for child in children]
        return core

    def terminate(self, timeout: float = 60) -> int:
        """Sends SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)


@contextlib.contextmanager
def serve(*flags: str, env: dict[str, str] | None = None) -> Iterator[ServerProcess]:
    """Starts `penstock serve` on free ports and waits until it serves; with client keys, the admin key is ADMIN_KEY.

    The built-in model gets the flags of MEMORY unless others say how large the KV cache is.
    """
    is_built_in = not flags or flags[0].startswith("--")
    flags = (*MEMORY, *flags) if is_built_in and not SET_MEMORY & {*flags} else flags
    env = env or {}
    if "--api-key" in flags or "PENSTOCK_API_KEY" in env:
        env = {"PENSTOCK_ADMIN_API_KEY": ADMIN_KEY, **env}
    command = [sys.executable, "-m", "penstock.cli.main", "serve", "--port", "0", "--admin-port", "0", *flags]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, **env}
    )
    server = ServerProcess(process)
    is_up = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            server.log.append(line)
            if " serves " in line:
                server.url = line.split(" at ")[1].split("/v1")[0]
            if line.startswith("Administration"):
                server.admin_url = line.split(" at ")[1].strip()
                is_up.set()
        is_up.set()

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    try:
        assert is_up.wait(START_SECONDS), "the server did not start"
        assert server.admin_url, "".join(server.log)
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reading.join(10)
        assert process.stderr is not None
        process.stderr.close()
