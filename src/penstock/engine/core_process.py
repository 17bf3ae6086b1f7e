"""The engine core in a separate process, which receives and sends messages over a socket.

    python -m penstock.engine.core_process FD

`FD` is an inherited stream socket to the front end (`utils/child_process.py`): only the front end knows which requests
must still finish. One thread reads; the main thread executes steps and writes.
"""

from __future__ import annotations

import gc
import queue
import sys
import threading
from typing import Any

import msgspec

from penstock.config.engine import EngineConfig
from penstock.engine.build import build_engines
from penstock.engine.core_messages import (
    CODEC,
    AbortRequests,
    CheckIntegrity,
    ForgetAdapter,
    GetBlockMap,
    GetExpertMap,
    Ready,
    Refusal,
    Refused,
    Reply,
    ResetPrefixCache,
)
from penstock.engine.engine_core import EngineCore
from penstock.engine.joint_cores import JointCores
from penstock.messages.requests import EngineRequest
from penstock.utils import logging
from penstock.utils.child_process import Channel, Parent
from penstock.utils.errors import OverloadedError, RequestError, RequestFailedError, WireError

logger = logging.get_logger(__name__)


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
    """Runs the engine cores with an inbox that another thread fills."""

    def __init__(self, joint: JointCores, front_end: Channel, inbox: queue.SimpleQueue[Any]) -> None:
        self._joint = joint
        self._cores = joint.cores
        self._send = front_end.send
        self._inbox = inbox

    def run(self) -> None:
        """Serves until the front end disconnects. Raises EngineDeadError if the core fails."""
        while self._take_messages():
            if self._joint.patience is not None:
                reports = self._joint.step(waits=False)
                # The last step before the engine idles reports the KV connector's latest counts.
                is_last = self._joint.patience != 0
                # All report if one has something to report: experts are counted in the first engine for all.
                if is_last or any(each.num_tokens or each.outputs or each.events or each.kv_events for each in reports):
                    for report in reports:
                        self._send(report)

    def _take_messages(self) -> bool:
        """Handles received messages, waiting only if there is nothing else to do; returns False at the end of the
        stream.
        """
        while (patience := self._joint.patience) != 0 or not self._inbox.empty():
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
                for dp_rank, core in enumerate(self._cores):
                    core.abort_requests(request_ids)
                    # The requests are gone now, and there may be no further step that would report them.
                    self._send(msgspec.structs.replace(core.report(dp_rank), aborted=request_ids))
            case ResetPrefixCache(call, reset_connector, dp_rank):
                reply = Reply(call, self._cores[dp_rank].reset_prefix_cache(reset_connector))
                # Reports the removed blocks before the reply.
                self._send(self._cores[dp_rank].report(dp_rank))
                self._send(reply)
            case ForgetAdapter(call, digest, dp_rank):
                self._send(Reply(call, self._cores[dp_rank].forget_adapter(digest)))
            case GetBlockMap(call, max_cells, dp_rank):
                self._send(Reply(call, self._cores[dp_rank].block_map(max_cells)))
            case GetExpertMap(call):
                # The first engine's scheduler balances the experts of all.
                self._send(Reply(call, self._cores[0].expert_map()))
            case CheckIntegrity(call, dp_rank):
                self._send(self._check_integrity(call, self._cores[dp_rank]))
            case _Waker():
                message.clear()
            case _WorkerDied():
                self._joint.check_workers()
            case _:
                raise WireError(f"the engine core takes no {type(message).__name__}")

    def _add(self, request: EngineRequest) -> None:
        try:
            self._cores[request.dp_rank].add_request(request)
        except RequestError as error:
            self._send(Refused(request.request_id, str(error), Refusal.INVALID, error.field))
        except (OverloadedError, RequestFailedError) as error:
            reason = Refusal.OVERLOADED if isinstance(error, OverloadedError) else Refusal.FAILED
            self._send(Refused(request.request_id, str(error), reason))

    def _check_integrity(self, call: int, core: EngineCore) -> Reply:
        try:
            core.check_integrity()
        except AssertionError as error:
            return Reply(call, False, str(error))
        return Reply(call)


def read_into(inbox: queue.SimpleQueue[Any], front_end: Channel) -> None:
    """Reads messages until the stream ends."""
    try:
        for message in front_end:
            inbox.put(message)
    except (OSError, WireError) as error:
        logger.error("the front end's messages cannot be read: %s", error)
    inbox.put(_Hangup())


def _start(front_end: Channel, inbox: queue.SimpleQueue[Any]) -> JointCores | None:
    """Builds the cores and reports them; None if the front end disconnected. Raises ConfigError."""
    config = inbox.get()
    if not isinstance(config, EngineConfig):
        return None
    joint = build_engines(config)
    # Objects that exist now are permanent: exclude them, such as the pool's blocks, from garbage collection, which
    # would take longer than a step.
    gc.collect()
    gc.freeze()
    joint.cores.watch_workers(lambda: inbox.put(_WorkerDied()))
    for dp_rank, engine in enumerate(joint.engines):
        engine.connector.set_waker(_Waker(inbox).wake)
        front_end.send(Ready(engine.info, engine.limits, dp_rank))
    return joint.cores


def main() -> int:
    front_end = Parent.of_this_process(CODEC)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=read_into, args=(inbox, front_end), daemon=True).start()
    cores: JointCores | None = None

    def work() -> None:
        nonlocal cores
        cores = _start(front_end, inbox)
        if cores is not None:
            CoreProcess(cores, front_end, inbox).run()

    def shut_down() -> None:
        if cores is not None:
            cores.shutdown()

    def kill_workers() -> None:
        # A stopped worker would not notice the end of its connection.
        if cores is not None:
            cores.kill_workers()

    code = front_end.live(work, lambda _: logger.exception("the engine core stops"), shut_down, kill_workers)
    # Torch aborts if another thread frees the model when the interpreter ends: `live` has one that may still run.
    cores = None
    return code


if __name__ == "__main__":
    sys.exit(main())
