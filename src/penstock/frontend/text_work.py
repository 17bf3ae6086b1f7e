"""Runs the rendering and tokenization of texts: short ones at once, long ones on a thread, large ones one at a time."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from penstock.tokenizer.tokenizer import LARGE_CHARACTERS
from penstock.utils.errors import OverloadedError

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Passing a shorter text to a thread would take longer than the work.
_LONG_CHARACTERS = 4096
_MAX_WAITING = 16


class TextWork:
    """Keeps the event loop free, and limits the memory that tokenizing takes: a hundred times the size of a text."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._num_waiting = 0

    async def run(self, num_characters: int, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Returns or raises the result of `work`. Raises OverloadedError if too many large texts already wait."""
        if num_characters < _LONG_CHARACTERS:
            return work(*args, **kwargs)
        if num_characters < LARGE_CHARACTERS:
            return await asyncio.to_thread(work, *args, **kwargs)
        if self._num_waiting >= _MAX_WAITING:
            raise OverloadedError(f"{self._num_waiting} large prompts already wait to be tokenized: try again later")
        self._num_waiting += 1
        try:
            async with self._turn:
                return await self._to_the_end(functools.partial(work, *args, **kwargs))
        finally:
            self._num_waiting -= 1

    @staticmethod
    async def _to_the_end(work: Callable[[], _T]) -> _T:
        """Waits for the thread even if the caller is cancelled, because its memory is in use until then."""
        running = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait((running,))
            raise
