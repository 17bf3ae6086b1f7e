"""Runs a `penstock` process in a real terminal, types into it, and reads its output."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

import pytest

PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]
CTRL_C, CTRL_D = b"\x03", b"\x04"
PATIENCE_S = 120
INTERRUPT_SECONDS = 5


class Terminal:
    """The process is in the foreground of the terminal, so that Ctrl-C reaches it and its children."""

    def __init__(self, controller: int, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.shown = b""
        self._controller = controller
        self._unread = b""

    def type(self, keys: bytes) -> None:
        os.write(self._controller, keys)

    def read_until(self, wanted: bytes) -> bytes:
        """Returns the terminal's output up to `wanted`, which is consumed."""
        while wanted not in self._unread:
            assert self._receive(PATIENCE_S), f"waited for {wanted!r} after {self._unread!r}"
        before, self._unread = self._unread.split(wanted, 1)
        return before

    def say(self, line: bytes) -> None:
        """Types a line at the prompt of the chat."""
        self.read_until(b"> ")
        self.type(line + b"\n")

    def discard_line(self) -> None:
        """Types Ctrl-C at the prompt until there is a new prompt, which is left unread.

        Python's input loses an interrupt that arrives between two of its waits for a key, until the next key.
        """
        for _ in range(PATIENCE_S // INTERRUPT_SECONDS):
            self.type(CTRL_C)
            while self._receive(INTERRUPT_SECONDS):
                if b"> " in self._unread:
                    return
        pytest.fail(f"no prompt after Ctrl-C: {self._unread!r}")

    def wait(self, timeout: float = PATIENCE_S) -> int:
        """Returns the exit code; all output is in `shown`."""
        while self._receive(timeout):
            pass
        return self.process.wait(timeout)

    def _receive(self, timeout: float) -> bool:
        if not select.select([self._controller], [], [], timeout)[0]:
            return False
        try:
            data = os.read(self._controller, 1 << 16)
        except OSError:  # the last process has left the terminal
            return False
        self.shown += data
        self._unread += data
        return bool(data)


@contextlib.contextmanager
def in_terminal(command: Sequence[str], env: Mapping[str, str] | None = None) -> Iterator[Terminal]:
    """Runs a command in a new terminal."""
    controller, end = pty.openpty()
    # A new session takes the first terminal that it opens as its own.
    take_terminal = "import os, sys; os.close(os.open(os.ttyname(0), os.O_RDWR)); os.execvp(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", take_terminal, *command],
        stdin=end,
        stdout=end,
        stderr=end,
        start_new_session=True,
        env={**os.environ, "TERM": "dumb", **(env or {})},
    )
    os.close(end)
    try:
        yield Terminal(controller, process)
    finally:
        process.kill()
        process.wait()
        os.close(controller)
