"""How the engine core's process ends when the core breaks."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest

from penstock.engine.core_messages import CODEC, Failed
from penstock.utils.wire import FrameReader
from tests.processes import started

BREAKS = """
import os, sys
from penstock.engine import core_process
from penstock.utils.errors import EngineDeadError

class BrokenCore:
    has_work = True

    def step(self):
        raise EngineDeadError("the device is on fire")

    def shutdown(self):
        {shutdown}

    def __del__(self):
        os.abort()

core_process._start = lambda *_: BrokenCore()
sys.exit(core_process.main())
"""


@pytest.mark.parametrize(
    ("shutdown", "code"),
    [("pass", 1), ("raise RuntimeError('still on fire')", 1), ("os.abort()", -signal.SIGABRT)],
    ids=["frees", "raises", "aborts"],
)
def test_the_reason_is_sent_before_anything_is_freed(shutdown: str, code: int) -> None:
    """Torch aborts the process when it frees memory of a broken GPU."""
    ours, theirs = socket.socketpair()
    script = BREAKS.format(shutdown=shutdown)
    with ours, theirs:
        command = [sys.executable, "-c", script, str(theirs.fileno())]
        with started(command, pass_fds=(theirs.fileno(),), stderr=subprocess.DEVNULL) as process:
            theirs.close()
            received = b"".join(iter(lambda: ours.recv(1 << 16), b""))
            assert FrameReader(CODEC).feed(received) == [Failed("the device is on fire", is_config=False)]
            assert process.wait(30) == code
