"""Interrupts that are held back: none is lost, none comes in the middle, and other programs' handlers stay."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from penstock.utils.interrupts import interrupts_held


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_one_comes_after_the_body() -> None:
    steps: list[str] = []

    def body() -> None:
        with interrupts_held():
            interrupt()
            steps.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        body()
    assert steps == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_long_body_lets_it_through_once() -> None:
    with interrupts_held() as let_through:
        let_through()
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            let_through()
        let_through()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_outer_body_holds_for_the_inner_one() -> None:
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


def test_handlers_of_the_program_stay() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        with interrupts_held():
            interrupt()
            assert came == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_change_nothing() -> None:
    found: list[object] = []

    def look() -> None:
        with interrupts_held():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
