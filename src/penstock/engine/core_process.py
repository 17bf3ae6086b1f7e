"""The engine core in a separate process, which receives and sends messages over a socket.

    python -m penstock.engine.core_process FD

`FD` is an inherited stream socket to the front end. The process ends when that socket does, so it never outlives the
front end; it ignores SIGINT and SIGTERM, which a terminal or a supervisor sends to both, because only the front end
knows which requests must still finish. One thread reads; the main thread executes steps and writes.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from penstock.config.engine import EngineArgs
from penstock.engine.build import build_engine
from penstock.engine.core_messages import (
    CODEC,
    AbortRequests,
    CheckIntegrity,
    Failed,
    GetBlockMap,
    Ready,
    Refusal,
    Refused,
    Reply,
    ResetPrefixCache,
)
from penstock.engine.engine_core import EngineCore
from penstock.messages.requests import EngineRequest
from penstock.utils import logging
from penstock.utils.errors import (
    ConfigError,
    EngineDeadError,
    OverloadedError,
    RequestError,
    RequestFailedError,
    WireError,
)
from penstock.utils.wire import FrameReader

logger = logging.get_logger(__name__)

_RECEIVE_BYTES = 1 << 16
_GRACE_SECONDS = 10.0
_CRASHED = 1


class _Hangup:
    """In the inbox: the stream has ended."""


class _WorkerDied:
    """In the inbox: a worker has died, which may be noticed while no step runs."""


class _Waker:
    """In the inbox, at most once at a time: an event of a KV transfer, which may occur while no step runs."""

    def __init__(self, inbox: queue.SimpleQueue[Any]) -> None:
        self._inbox = inbox
        self._is_waiting = False

    def wake(self) -> None:
        """May be called from any thread."""
        if not self._is_waiting:
            self._is_waiting = True
            self._inbox.put(self)

    def clear(self) -> None:
        """Called when it has been taken out: later events are put into the inbox again."""
        self._is_waiting = False


class CoreProcess:
    """Runs one engine core with an inbox that another thread fills."""

    def __init__(self, core: EngineCore, connection: socket.socket, inbox: queue.SimpleQueue[Any]) -> None:
        self._core = core
        self._connection = connection
        self._inbox = inbox

    def run(self) -> None:
        """Serves until the front end disconnects. Raises EngineDeadError if the core fails."""
        while self._take_messages():
            if self._core.patience is not None:
                report = self._core.step(waits=False)
                # The last step before the engine idles reports the KV connector's latest counts.
                is_last = self._core.patience != 0
                if report.num_tokens or report.outputs or report.events or report.kv_events or is_last:
                    self._send(report)

    def _take_messages(self) -> bool:
        """Handles received messages, waiting only if there is nothing else to do; returns False at the end of the
        stream.
        """
        while (patience := self._core.patience) != 0 or not self._inbox.empty():
            try:
                message = self._inbox.get(timeout=patience)
            except queue.Empty:
                return True
            if isinstance(message, _Hangup):
                return False
            self._handle(message)
        return True

    def _handle(self, message: Any) -> None:
        match message:
            case EngineRequest():
                self._add(message)
            case AbortRequests(request_ids):
                self._core.abort_requests(request_ids)
                # The requests are gone now, and there may be no further step that would report them.
                self._send(self._core.report())
            case ResetPrefixCache(call, reset_connector):
                reply = Reply(call, self._core.reset_prefix_cache(reset_connector))
                # Reports the removed blocks before the reply.
                self._send(self._core.report())
                self._send(reply)
            case GetBlockMap(call, max_cells):
                self._send(Reply(call, self._core.block_map(max_cells)))
            case CheckIntegrity(call):
                self._send(self._check_integrity(call))
            case _Waker():
                message.clear()
            case _WorkerDied():
                self._core.check_workers()
            case _:
                raise WireError(f"the engine core takes no {type(message).__name__}")

    def _add(self, request: EngineRequest) -> None:
        try:
            self._core.add_request(request)
        except RequestError as error:
            self._send(Refused(request.request_id, str(error), Refusal.INVALID, error.field))
        except OverloadedError as error:
            self._send(Refused(request.request_id, str(error), Refusal.OVERLOADED))
        except RequestFailedError as error:
            self._send(Refused(request.request_id, str(error), Refusal.FAILED))

    def _check_integrity(self, call: int) -> Reply:
        try:
            self._core.check_integrity()
        except AssertionError as error:
            return Reply(call, False, str(error))
        return Reply(call)

    def _send(self, message: Any) -> None:
        self._connection.sendall(CODEC.encode(message))


def read_into(inbox: queue.SimpleQueue[Any], connection: socket.socket, reader: FrameReader) -> None:
    """Reads messages until the stream ends."""
    try:
        while data := connection.recv(_RECEIVE_BYTES):
            for message in reader.feed(data):
                inbox.put(message)
    except (OSError, WireError) as error:
        logger.error("the front end's messages cannot be read: %s", error)
    inbox.put(_Hangup())


def _start(connection: socket.socket, inbox: queue.SimpleQueue[Any]) -> EngineCore | None:
    """Builds the core and reports it; None if the front end disconnected, or the arguments cannot work."""
    args = inbox.get()
    if not isinstance(args, EngineArgs):
        return None
    try:
        engine = build_engine(args)
    except ConfigError as error:
        connection.sendall(CODEC.encode(Failed(str(error), is_config=True)))
        return None
    # Objects that exist now are permanent: exclude them, such as the pool's blocks, from garbage collection, which
    # would take longer than a step.
    gc.collect()
    gc.freeze()
    core = engine.core
    core.watch_workers(lambda: inbox.put(_WorkerDied()))
    engine.connector.set_waker(_Waker(inbox).wake)
    connection.sendall(CODEC.encode(Ready(engine.info, engine.limits)))
    return core


def _exit_with_front_end(ended: threading.Event, reading: threading.Thread, kill_workers: Callable[[], None]) -> None:
    """Ends the process if the front end has disconnected and the running step does not end."""
    reading.join()
    if not ended.wait(_GRACE_SECONDS):
        # A stopped worker would not notice the end of its connection.
        kill_workers()
        signal.raise_signal(signal.SIGKILL)


def _crash(error: Exception, connection: socket.socket, core: EngineCore | None) -> NoReturn:
    """Reports the error and ends the process without cleanup: torch aborts when memory of a failed GPU is freed."""
    cause = error if isinstance(error, EngineDeadError) else f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):
        connection.sendall(CODEC.encode(Failed(str(cause), is_config=False)))
        # The front end does not wait for the following, which must not exceed the grace period.
        connection.shutdown(socket.SHUT_RDWR)
    if core is not None:
        with contextlib.suppress(Exception):
            core.shutdown()
    sys.stderr.flush()
    os._exit(_CRASHED)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Output of libraries must not mix with that of the front end.
    sys.stdout = sys.stderr
    connection = socket.socket(fileno=int(sys.argv[1]))
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    ended = threading.Event()
    reading = threading.Thread(target=read_into, args=(inbox, connection, FrameReader(CODEC)), daemon=True)
    reading.start()
    core: EngineCore | None = None

    def kill_workers() -> None:
        if core is not None:
            core.kill_workers()

    threading.Thread(target=_exit_with_front_end, args=(ended, reading, kill_workers), daemon=True).start()
    try:
        core = _start(connection, inbox)
        if core is not None:
            CoreProcess(core, connection, inbox).run()
        return 0
    except (BrokenPipeError, ConnectionResetError):
        return 0
    except Exception as error:
        logger.exception("the engine core stops")
        _crash(error, connection, core)
    finally:
        if core is not None:
            core.shutdown()
        ended.set()


if __name__ == "__main__":
    sys.exit(main())
