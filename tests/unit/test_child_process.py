"""Both ends of a child process: how it starts, fails, and ends with its parent."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.utils.child_process import Channel, ChildProcess, Failed
from penstock.utils.wire import Codec
from tests.processes import started

CODEC = Codec(str, Failed)

CHILD = """
import os, signal, sys, time
from penstock.utils import child_process
from penstock.utils.child_process import Failed, Parent
from penstock.utils.errors import ConfigError, RanksLostError
from penstock.utils.wire import Codec

child_process._GRACE_SECONDS = 0.2
parent = Parent.of_this_process(Codec(str, Failed))

def say(word):
    os.write(2, (word + "\\n").encode())

def work():
    for message in parent:
        if message == "hang":
            parent.send("hanging")
            time.sleep(600)
        if message.startswith("raise "):
            exec(message)
        parent.send(message.upper())

def log(error):
    say(f"logged {error}")

sys.exit(parent.live(work, log, lambda: say("cleaned up"), lambda: say("killed others")))
"""


@pytest.fixture
def child() -> Iterator[ChildProcess]:
    made = ChildProcess(("-c", CHILD))
    yield made
    made.end()


def ask(child: ChildProcess, message: str) -> object:
    channel = Channel(child.connection, CODEC)
    channel.send(message)
    return next(iter(channel), None)


def test_it_answers_and_ends_when_its_parent_disconnects(child: ChildProcess) -> None:
    assert ask(child, "a") == "A"
    assert child.ended(0) is None
    child.connection.shutdown(socket.SHUT_RDWR)
    assert child.ended(20) == "ended with exit code 0"


def test_only_its_parent_ends_it(child: ChildProcess) -> None:
    assert ask(child, "a") == "A"
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(child.pid, number)
    assert ask(child, "b") == "B"
    child.kill()
    assert child.ended(20) == "was killed by signal 9"
    child.end()
    child.end()


@pytest.mark.parametrize(
    ("failure", "report"),
    [
        ("ValueError(7)", Failed("ValueError: 7")),
        ("ConfigError('lower it')", Failed("lower it", is_config=True)),
        ("RanksLostError('they left')", Failed("they left", is_consequence=True)),
        ("EOFError('a peer left')", Failed("EOFError: a peer left")),
        ("BrokenPipeError('a peer left')", Failed("BrokenPipeError: a peer left")),
    ],
)
def test_a_failure_is_reported(child: ChildProcess, failure: str, report: Failed) -> None:
    found = ask(child, f"raise {failure}")
    assert isinstance(found, Failed)
    assert found == Failed(report.message, report.is_config, report.is_consequence, found.traceback)
    assert ("in work" in found.traceback) == (not report.is_config)
    assert child.ended(20) == "ended with exit code 1"


@pytest.mark.parametrize(
    ("messages", "words", "has_lifeline"),
    [
        (["a"], ["cleaned up"], False),
        (["hang"], ["killed others"], False),
        (["raise ValueError(7)"], ["logged 7", "cleaned up"], False),
        (["raise ConfigError('x')"], ["cleaned up"], False),
        (["hang"], [], True),
    ],
)
def test_it_ends_with_its_parent(tmp_path: Path, messages: list[str], words: list[str], has_lifeline: bool) -> None:
    """The parent is killed when it has received the answer."""
    log = tmp_path / "log"
    code = (
        "import os, signal, sys\n"
        "from tests.unit.test_child_process import *\n"
        f"child = ChildProcess(('-c', CHILD), has_lifeline={has_lifeline})\n"
        f"for message in {messages!r}: ask(child, message)\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with log.open("wb") as stderr, started([sys.executable, "-c", code], stdout=-1, stderr=stderr) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
    deadline = time.monotonic() + 20
    while is_running(pid):
        assert time.monotonic() < deadline, "the child has outlived its parent"
        time.sleep(0.01)
    assert log.read_text().splitlines() == words


def test_its_parent_may_have_many_open_files() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    with contextlib.ExitStack() as files:
        while files.enter_context(Path(os.devnull).open()).fileno() < 1100:
            pass
        child = ChildProcess(("-c", CHILD), has_lifeline=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert ask(child, "a") == "A"
    child.end()


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("has_lifeline", [False, True])
def test_it_leaves_no_descriptor(has_lifeline: bool) -> None:
    before = os.listdir("/proc/self/fd")
    child = ChildProcess(("-c", CHILD), has_lifeline=has_lifeline)
    assert ask(child, "a") == "A"
    child.end()
    assert os.listdir("/proc/self/fd") == before
