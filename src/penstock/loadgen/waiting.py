"""Waiting in an event loop."""

from __future__ import annotations

import asyncio


async def wait_until(moment: float) -> None:
    """Waits for the running loop's clock, and not at all for what is past."""
    loop = asyncio.get_running_loop()
    if moment <= loop.time():
        return
    reached = asyncio.Event()
    timer = loop.call_at(moment, reached.set)
    try:
        await reached.wait()
    finally:
        timer.cancel()
