"""Threads that work for later and must not hold up what is wanted now."""

from __future__ import annotations

import contextlib
import os


def give_way() -> None:
    """Lets the calling thread run only where no other wants the processor (Linux's SCHED_IDLE; elsewhere as before).

    For its whole life: it is what a pool of threads calls in each of them first.
    """
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
