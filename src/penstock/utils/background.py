"""Background threads that must not delay urgent work."""

from __future__ import annotations

import contextlib
import os


def give_way() -> None:
    """Lets the calling thread run only when the processor is otherwise idle (SCHED_IDLE on Linux; no effect elsewhere).
    This is permanent: use it as the initializer of a thread pool.
    """
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
