"""Interrupts that are deferred or end the process: no interrupt is lost or shows a traceback; other handlers remain."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from penstock.utils.interrupts import EXIT_CODE, interrupts_blocked, interrupts_held
from tests.processes import started


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_is_raised_after_the_body() -> None:
    steps: list[str] = []

    def body() -> None:
        with interrupts_held():
            interrupt()
            steps.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        body()
    assert steps == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_long_body_can_let_an_interrupt_through_once() -> None:
    with interrupts_held() as let_through:
        let_through()
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            let_through()
        let_through()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_outer_body_defers_the_interrupts_of_an_inner_one() -> None:
    steps: list[str] = []

    def body() -> None:
        with interrupts_held():
            with interrupts_held() as let_through:
                interrupt()
                let_through()
                steps.append("inner")
            steps.append("outer")

    with pytest.raises(KeyboardInterrupt):
        body()
    assert steps == ["inner", "outer"]


def test_handlers_of_the_program_remain() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        with interrupts_held():
            interrupt()
            assert came == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_do_not_change_the_handler() -> None:
    found: list[object] = []

    def look() -> None:
        with interrupts_held():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


def test_a_process_started_while_interrupts_are_blocked_receives_none() -> None:
    command = [sys.executable, "-c", "print('up', flush=True); input(); print('alive')"]
    with contextlib.ExitStack() as stack:
        with interrupts_blocked():
            process = stack.enter_context(
                started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        assert process.stdout is not None
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate("\n", timeout=30)[0] == "alive\n"


def test_blocked_interrupts_are_raised_afterwards() -> None:
    steps: list[str] = []

    def body() -> None:
        with interrupts_blocked():
            interrupt()
            time.sleep(0.01)
            steps.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        body()
    # A thread that does not block the signal receives it in place of the main thread.
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            body()
    finally:
        done.set()
        thread.join()
    assert steps == ["all of it"] * 2


def test_an_interrupt_during_startup_ends_the_program_at_once() -> None:
    program = """
import os, signal
from penstock.utils.interrupts import interrupts_end_at_once
with interrupts_end_at_once():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        print("went on")
    except BaseException:
        print("was raised")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (EXIT_CODE, "", "\n")
