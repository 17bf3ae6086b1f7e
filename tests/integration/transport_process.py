"""A transport endpoint in a separate process, driven by lines of JSON, and its proxy in a test.

python -m tests.integration.transport_process sockets|shared_memory|mooncake|nixl
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.kv_transfer.transports.agent_transport import AgentTransport
from penstock.kv_transfer.transports.agents import AgentSettings
from penstock.kv_transfer.transports.base import DataTransport, PeerId, TransferHandle
from penstock.kv_transfer.transports.shared_memory import SharedMemoryTransport
from penstock.kv_transfer.transports.sockets import SocketsTransport
from penstock.messages.kv_layout import MemoryRegion
from penstock.utils.shared_memory import SharedMemory, attach_memory, create_memory

KEY = b"the key of this cluster"


def make_transport(kind: str, memories: Sequence[SharedMemory]) -> DataTransport:
    """Returns a transport with the memories registered."""
    if kind == "sockets":
        transport: DataTransport = SocketsTransport("127.0.0.1", KEY)
    else:
        regions = [MemoryRegion(f"r{n}", len(each.view), path=each.name) for n, each in enumerate(memories)]
        if kind == "shared_memory":
            transport = SharedMemoryTransport(regions)
        else:
            settings = AgentSettings(library=kind, host="127.0.0.1", is_local=True, protocol="tcp")
            transport = AgentTransport(settings, regions, KEY)
    transport.register([memory.view for memory in memories])
    return transport


class Memories:
    """Allocates named memory, and finds it by its view."""

    def __init__(self) -> None:
        self._made: list[SharedMemory] = []

    def allocate(self, num_bytes: int) -> memoryview:
        self._made.append(create_memory(num_bytes))
        return self._made[-1].view

    def of(self, views: Sequence[memoryview]) -> list[SharedMemory]:
        return [next(each for each in self._made if each.view is view) for view in views]


class LateTransport:
    """A transport of this process that is built when its memory is known."""

    def __init__(self, kind: str, memories: Memories) -> None:
        self._kind, self._memories = kind, memories

    def register(self, regions: Sequence[memoryview]) -> None:
        self._real = make_transport(self._kind, self._memories.of(regions))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class RemoteTransport:
    """An endpoint in another process, over memory of this one. It accepts connections, but does not connect itself."""

    def __init__(self, kind: str, memories: Memories) -> None:
        self._memories = memories
        command = [sys.executable, "-m", "tests.integration.transport_process", kind]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _ask(self, action: str, *arguments: object) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([action, *arguments]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def register(self, regions: Sequence[memoryview]) -> None:
        self._ask("register", [(each.name, len(each.view)) for each in self._memories.of(regions)])

    def descriptor(self) -> bytes:
        return base64.b64decode(self._ask("descriptor"))

    def close(self) -> None:
        """Closes the endpoint; idempotent, also after the process has been killed."""
        if self.process.poll() is None:
            self._ask("close")
        self.end()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()

    def connect(self, descriptor: bytes) -> PeerId:
        raise NotImplementedError

    def submit(self, peer: PeerId, runs: np.ndarray) -> TransferHandle:
        raise NotImplementedError

    poll: Any = submit
    wait: Any = submit
    disconnect: Any = connect


def main() -> None:
    memories: list[SharedMemory] = []
    transport: DataTransport | None = None

    def register(regions: list[tuple[str, int]]) -> None:
        nonlocal transport
        memories.extend(attach_memory(name, num_bytes) for name, num_bytes in regions)
        transport = make_transport(sys.argv[1], memories)

    def descriptor() -> str:
        assert transport is not None
        return base64.b64encode(transport.descriptor()).decode()

    def close() -> None:
        if transport is not None:
            transport.close()

    actions: dict[str, Callable[..., Any]] = {each.__name__: each for each in (register, descriptor, close)}
    for line in sys.stdin:
        action, *arguments = json.loads(line)
        sys.stdout.write(json.dumps(actions[action](*arguments)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
