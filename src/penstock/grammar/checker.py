"""Compiles every grammar once in a separate process before it is sent to the engine core.

A malicious grammar can exhaust or crash only that process, and fails only one request. The process is started on first
use, killed if a grammar takes longer than the deadline, and started again for the next one. Results are cached, so a
grammar in regular use is checked once, and a malicious one kills the process once a minute at most.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from penstock.grammar.checker_process import CODEC, Start, Verdict
from penstock.messages.structured_outputs import GrammarSpec
from penstock.utils.child_process import ChildProcess, Failed
from penstock.utils.errors import OverloadedError, RequestError
from penstock.utils.wire import FrameReader

_MAX_REMEMBERED = 1024
_MAX_WAITING = 64
_START_SECONDS = 60.0
_MEMORY_BYTES = 2 << 30
_CPU_SECONDS = 0.25
_GIVEN_UP_SECONDS = 60.0
_RECEIVE_BYTES = 1 << 16


class GrammarChecker:
    """Asyncio only; belongs to the event loop on which it is first used.

    `tokenizer_json`, `vocab_size` and `eos_token_ids` are those of `LLGuidanceBackend`. `deadline_seconds` bounds the
    check of one grammar, without its time in the queue.
    """

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int], deadline_seconds: float = 5.0
    ) -> None:
        self._start = Start(tokenizer_json, vocab_size, tuple(eos_token_ids), _MEMORY_BYTES, _CPU_SECONDS)
        self._deadline_seconds = deadline_seconds
        self._process: _Process | None = None
        self._turn = asyncio.Lock()
        self._verdicts: OrderedDict[GrammarSpec, Verdict] = OrderedDict()
        self._running: dict[GrammarSpec, asyncio.Task[Verdict]] = {}

    @property
    def pid(self) -> int | None:
        """The id of the checking process; None if none is running."""
        return None if self._process is None else self._process.pid

    async def check(self, spec: GrammarSpec) -> None:
        """Returns when the grammar may be sent to the engine core. Raises RequestError with the reason if it may not,
        OverloadedError if too many others wait or the checker is shut down meanwhile.
        """
        verdict = self._verdicts.get(spec)
        if verdict is None:
            verdict = await self._wait(self._task(spec))
        else:
            self._verdicts.move_to_end(spec)
        if verdict.reason is not None:
            raise RequestError(verdict.reason, "structured_outputs")

    async def shutdown(self) -> None:
        """Ends the process and all checks. Idempotent; a later check would start a new process."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._kill()

    async def _wait(self, task: asyncio.Task[Verdict]) -> Verdict:
        try:
            # Others may wait for the same check, so cancelling one of them does not cancel the check.
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise OverloadedError("the engine is shutting down") from None
            raise

    def _task(self, spec: GrammarSpec) -> asyncio.Task[Verdict]:
        if spec not in self._running:
            if len(self._running) >= _MAX_WAITING:
                raise OverloadedError(f"{_MAX_WAITING} grammars are waiting to be compiled; try again later")
            task = self._running[spec] = asyncio.create_task(self._check(spec))
            task.add_done_callback(lambda done: self._finish(spec, done))
        return self._running[spec]

    def _finish(self, spec: GrammarSpec, task: asyncio.Task[Verdict]) -> None:
        del self._running[spec]
        if not task.cancelled() and task.exception() is None:
            self._verdicts[spec] = task.result()
            if len(self._verdicts) > _MAX_REMEMBERED:
                self._verdicts.popitem(last=False)

    async def _check(self, spec: GrammarSpec) -> Verdict:
        async with self._turn:
            # One crash may have another cause than this grammar; two in a row do not.
            for _ in range(2):
                process = await self._started()
                try:
                    return await asyncio.wait_for(process.ask(spec), self._deadline_seconds)
                except (OSError, asyncio.CancelledError) as error:
                    await self._kill()
                    if isinstance(error, asyncio.CancelledError):
                        raise
                    if isinstance(error, TimeoutError):
                        return self._give_up(spec, f"cannot be compiled within {self._deadline_seconds:g} seconds")
            return self._give_up(spec, "cannot be compiled: it kills the compiler")

    def _give_up(self, spec: GrammarSpec, why: str) -> Verdict:
        """Refuses a grammar for a while; the reason may have been a busy machine."""
        asyncio.get_running_loop().call_later(_GIVEN_UP_SECONDS, self._verdicts.pop, spec, None)
        return Verdict(f"the grammar {why}; if the machine was busy, try again in a minute")

    async def _started(self) -> _Process:
        """Returns the process when it is ready. Raises OverloadedError if it does not start, RequestError if it never
        can.
        """
        if self._process is None:
            try:
                self._process = await _Process.open()
                await asyncio.wait_for(self._process.ask(self._start), _START_SECONDS)
            except BaseException as error:
                await self._kill()
                if isinstance(error, OSError):  # TimeoutError is a subclass.
                    raise OverloadedError(f"the grammar checker does not start: {error or 'it is too slow'}") from None
                raise
        return self._process

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.kill()


class _Process:
    """One child process and the connection to it."""

    def __init__(self, process: ChildProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._frames = FrameReader(CODEC)

    @classmethod
    async def open(cls) -> _Process:
        process = ChildProcess(("-m", "penstock.grammar.checker_process"), has_lifeline=True)
        return cls(process, *await asyncio.open_unix_connection(sock=process.connection))

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, message: Any) -> Any:
        """Returns the answer to `message`. Raises OSError if the process has ended, and RequestError if every one would
        end.
        """
        self._writer.write(CODEC.encode(message))
        await self._writer.drain()
        while data := await self._reader.read(_RECEIVE_BYTES):
            for answer in self._frames.feed(data):
                if not isinstance(answer, Failed):
                    return answer
                if answer.is_config:
                    raise RequestError(answer.message, "structured_outputs")
                raise ConnectionResetError(answer.message)
        raise ConnectionResetError("the process ended")

    async def kill(self) -> None:
        """Kills the process and waits for its end."""
        self._process.kill()
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        await asyncio.to_thread(self._process.end)
