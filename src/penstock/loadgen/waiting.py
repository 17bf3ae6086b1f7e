"""Waits in an event loop."""

from __future__ import annotations

import asyncio


async def wait_until(moment: float) -> None:
    """Waits until the running loop's clock reaches `moment`; returns at once if that time has passed."""
    loop = asyncio.get_running_loop()
    if moment <= loop.time():
        return
    reached = asyncio.Event()
    timer = loop.call_at(moment, reached.set)
    try:
        await reached.wait()
    finally:
        timer.cancel()
