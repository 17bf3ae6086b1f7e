"""The tests for authors of connectors and transports, which Penstock's own must pass too.

`check_connector` takes what `BACKINGS` holds, a function from a `BackingContext` to a `Backing`, and runs worlds of the
catalogue over it with both parts held against their protocols. `check_transport` takes a function that makes two fresh
endpoints. Both raise AssertionError that says what to look at.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from penstock.kv_transfer.transports.base import CopyRun, DataTransport, Operation, PeerId, TransferState
from penstock.simulation.backing import Backing, BackingContext
from penstock.simulation.checked import CheckedBacking
from penstock.simulation.scenarios import SCENARIOS
from penstock.simulation.world import World
from penstock.utils.errors import PeerError

# Those that ask nothing of the store that other connectors may not have. Not every connector joins engines that are
# split differently: `other_split` is for those that do.
CONNECTOR_SCENARIOS = (
    "shared_store_with_drafts",
    "handoff",
    "id_reuse",
    "late_completions",
    "repeated_completions",
    "abort_while_loading",
    "abort_storm",
    "preemption_during_loads",
    "preemption_during_saves",
    "sliding_windows",
    "tenants",
    "crash",
    "reports_of_an_old_life",
    "everything",
)

_SECONDS = 30.0
_SIZE = 256
_PATTERN = bytes(range(_SIZE))


def check_connector(
    make: Callable[[BackingContext], Backing],
    scenarios: Sequence[str] = CONNECTOR_SCENARIOS,
    num_seeds: int = 10,
    *,
    same_split: bool = True,
) -> None:
    """Runs `num_seeds` worlds of each scenario. With `same_split` all engines of a world have as many ranks."""
    for name in scenarios:
        for seed in range(num_seeds):
            rng = random.Random(f"{name} {seed}")
            setup = SCENARIOS[name].draw(rng)
            if same_split:
                setup = setup.with_one_split()
            result = World(
                setup, f"{name} {seed} world", lambda context: cast(Backing, CheckedBacking(make(context)))
            ).run()
            trace = "\n".join(result.trace)
            assert not result.violation, f"{name}, seed {seed}, tick {result.num_ticks}: {result.violation}\n{trace}"


@dataclass(frozen=True, slots=True)
class TransportRig:
    """Two fresh endpoints with nothing registered. `restart_right` ends the right one, not in an orderly way, and
    returns its next life. Whatever is in the way of connecting is the factory's to arrange.
    """

    left: DataTransport
    right: DataTransport
    restart_right: Callable[[], DataTransport]


class _Pair:
    """The rig with memory on both sides: the left's is empty, the right's has a pattern."""

    def __init__(self, rig: TransportRig) -> None:
        self.rig = rig
        self.left, self.right = rig.left, rig.right
        self.near, self.far = bytearray(_SIZE), bytearray(_PATTERN)
        self.left.register("near", memoryview(self.near))
        self.right.register("far", memoryview(self.far))
        self.peer: PeerId = self.left.connect(self.right.descriptor())

    def move(self, operation: Operation, runs: Sequence[CopyRun], notify: bytes = b"") -> TransferState:
        """Submits and waits for the end."""
        handle = self.left.submit(operation, self.peer, runs, notify)
        waited = 0.0
        while not self.left.poll(handle).is_settled and waited < _SECONDS:
            self.left.wait([handle], 0.1)
            waited += 0.1
        state = self.left.poll(handle)
        assert state.is_settled, f"a transfer has not ended in {_SECONDS} seconds: {state}"
        assert self.left.poll(handle) is state, "a transfer changes its mind"
        return state

    def close(self) -> None:
        self.left.close()
        self.right.close()
        self.left.close()


def check_transport(make: Callable[[], TransportRig]) -> None:
    """The contract of `transports/base.py`, where no faults are scripted."""
    for check in (
        _check_reads_and_writes,
        _check_nothing_else_changes,
        _check_notifications,
        _check_refusals,
        _check_restart,
        _check_disconnect,
        _check_close,
    ):
        pair = _Pair(make())
        try:
            check(pair)
        finally:
            pair.close()


def _check_reads_and_writes(pair: _Pair) -> None:
    assert pair.left.connect(pair.right.descriptor()) == pair.peer, "connecting twice makes another peer"
    assert pair.move(Operation.READ, [CopyRun("near", 0, "far", 0, _SIZE)]) is TransferState.DONE
    assert pair.near == _PATTERN, "a read brought other bytes"
    pair.near[:] = _PATTERN[::-1]
    assert pair.move(Operation.WRITE, [CopyRun("near", 0, "far", 0, _SIZE)]) is TransferState.DONE
    assert pair.far == _PATTERN[::-1], "a write brought other bytes"
    assert pair.move(Operation.READ, []) is TransferState.DONE, "a transfer of nothing does not end"


def _check_nothing_else_changes(pair: _Pair) -> None:
    runs = [CopyRun("near", 200, "far", 3, 5), CopyRun("near", 7, "far", 100, 1), CopyRun("near", 64, "far", 0, 0)]
    expected = bytearray(_SIZE)
    expected[200:205] = _PATTERN[3:8]
    expected[7] = _PATTERN[100]
    assert pair.move(Operation.READ, runs) is TransferState.DONE
    assert pair.near == expected, "a read of some runs changed something else, or missed one"
    assert pair.far == _PATTERN, "a read changed its source"


def _check_notifications(pair: _Pair) -> None:
    pair.near[:8] = b"the data"
    assert pair.move(Operation.WRITE, [CopyRun("near", 0, "far", 0, 8)], b"hello") is TransferState.DONE
    handle = pair.left.submit(Operation.READ, pair.peer, [])
    for _ in range(20):
        news = pair.right.notifications()
        if news:
            assert {each.message for each in news} == {b"hello"}, news
            assert pair.far[:8] == b"the data", "a notification came before its bytes"
            return
        pair.left.wait([handle], 0.1)
    raise AssertionError("a notification never came, and nothing was lost")


def _check_refusals(pair: _Pair) -> None:
    good = CopyRun("near", 0, "far", 0, 8)
    for descriptor in (b"", b"\xff\x00 nonsense", b"x" * 10_000):
        _refuses(lambda descriptor=descriptor: pair.left.connect(descriptor), f"descriptor {descriptor[:20]!r}")
    _refuses(lambda: pair.left.submit(Operation.READ, "nobody", [good]), "an unknown peer")
    for run in (
        CopyRun("near", 0, "elsewhere", 0, 8),
        CopyRun("elsewhere", 0, "far", 0, 8),
        CopyRun("near", _SIZE - 4, "far", 0, 8),
        CopyRun("near", 0, "far", _SIZE - 4, 8),
        CopyRun("near", 0, "far", -8, 8),
        CopyRun("near", 0, "far", 0, -1),
    ):
        # A transport that asks the peer first says so with the transfer's end.
        try:
            state = pair.move(Operation.READ, [good, run])
        except PeerError:
            continue
        assert state is TransferState.FAILED_SETTLED, f"{run} is out of bounds, and ended as {state}"
    assert pair.far == _PATTERN, "a refused transfer wrote"
    assert pair.move(Operation.READ, [good]) is TransferState.DONE, "a refusal has broken the connection"


def _check_restart(pair: _Pair) -> None:
    stale = pair.right.descriptor()
    again = pair.rig.restart_right()
    memory = bytearray(b"\xaa" * _SIZE)
    again.register("far", memoryview(memory))
    try:
        state = pair.move(Operation.READ, [CopyRun("near", 0, "far", 0, 8)])
    except PeerError:
        state = TransferState.FAILED_SETTLED
    assert state is TransferState.FAILED_SETTLED, "a peer of another life was read"
    assert pair.near == bytes(_SIZE), "bytes of another life landed"
    _refuses(lambda: pair.left.connect(stale), "the descriptor of a life that has ended")
    pair.peer = pair.left.connect(again.descriptor())
    assert pair.move(Operation.READ, [CopyRun("near", 0, "far", 0, 8)]) is TransferState.DONE
    assert pair.near[:8] == b"\xaa" * 8
    again.close()


def _check_disconnect(pair: _Pair) -> None:
    handles = [pair.left.submit(Operation.READ, pair.peer, [CopyRun("near", 0, "far", 0, _SIZE)]) for _ in range(3)]
    pair.left.disconnect(pair.peer)
    waited = 0.0
    while not all(pair.left.poll(handle).is_settled for handle in handles) and waited < _SECONDS:
        pair.left.wait(handles, 0.1)
        waited += 0.1
    assert all(pair.left.poll(handle).is_settled for handle in handles), "a disconnected transfer does not settle"
    pair.near[:] = bytes(_SIZE)
    pair.left.wait(handles, 0.2)
    assert pair.near == bytes(_SIZE), "bytes landed behind the end of a transfer"
    pair.peer = pair.left.connect(pair.right.descriptor())
    assert pair.move(Operation.READ, [CopyRun("near", 0, "far", 0, _SIZE)]) is TransferState.DONE


def _check_close(pair: _Pair) -> None:
    pair.left.submit(Operation.READ, pair.peer, [CopyRun("near", 0, "far", 0, _SIZE)])
    pair.left.close()
    before = bytes(pair.near)
    pair.far[:] = bytes(_SIZE)
    pair.right.notifications()
    assert pair.near == before, "bytes landed behind the end of the endpoint"


def _refuses(action: Callable[[], object], what: str) -> None:
    try:
        action()
    except PeerError:
        return
    raise AssertionError(f"{what} was taken")
