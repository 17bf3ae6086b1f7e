"""Conformance tests for connectors and transports, including Penstock's own.

`check_connector` takes a function from a `BackingContext` to a `Backing`, as in `BACKINGS`, and runs worlds of the
catalogue with it, with both parts checked against their protocols. `check_transport` takes a function that makes two
fresh endpoints. Both raise AssertionError with a description of the failure.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from penstock.kv_transfer.transports.base import DataTransport, PeerId, TransferHandle, TransferState
from penstock.simulation.backing import Backing, BackingContext
from penstock.simulation.checked import CheckedBacking
from penstock.simulation.scenarios import SCENARIOS
from penstock.simulation.setup import Setup
from penstock.simulation.world import World
from penstock.utils.errors import PeerError

# Scenarios of engines that share what they have saved, without parameters of requests. `other_split` is only for
# connectors that join engines with different splits.
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
_SETTLED = {state for state in TransferState if state.is_settled}
_SIZE = 5000
_SPLIT = 1801
_PATTERN = random.Random("pattern").randbytes(_SIZE)
_WHOLE = np.array([[0, 0, _SIZE]], np.int64)


def check_connector(
    make: Callable[[BackingContext], Backing],
    scenarios: Sequence[str] = CONNECTOR_SCENARIOS,
    num_seeds: int = 10,
    *,
    same_split: bool = True,
) -> None:
    """Runs `num_seeds` worlds of each scenario. With `same_split` all engines of a world have the same number of
    ranks.
    """
    for name in scenarios:
        for seed in range(num_seeds):
            rng = random.Random(f"{name} {seed}")
            setup = SCENARIOS[name].draw(rng)
            assert isinstance(setup, Setup), f"{name} has no connector"
            if same_split:
                setup = setup.with_one_split()
            result = World(
                setup, f"{name} {seed} world", lambda context: cast(Backing, CheckedBacking(make(context)))
            ).run()
            trace = "\n".join(result.trace)
            assert not result.violation, f"{name}, seed {seed}, tick {result.num_ticks}: {result.violation}\n{trace}"


def _private(num_bytes: int) -> memoryview:
    return memoryview(bytearray(num_bytes))


@dataclass(frozen=True, slots=True)
class TransportRig:
    """Two fresh endpoints with nothing registered. `restart_right` kills the right one without an orderly shutdown and
    returns its next life. The factory must arrange everything needed to connect. The right one may be a proxy for an
    endpoint in another process. `allocate` creates the zeroed memory that the tests register on both sides and inspect.
    """

    left: DataTransport
    right: DataTransport
    restart_right: Callable[[], DataTransport]
    allocate: Callable[[int], memoryview] = _private


def runs_of(*runs: tuple[int, int, int]) -> np.ndarray:
    """Returns [n, 3] int64 of local offset, remote offset, bytes."""
    return np.array(runs, np.int64).reshape(-1, 3)


class _Pair:
    """The rig with memory of two regions on each side: the left's is empty, the right's has a pattern."""

    def __init__(self, rig: TransportRig) -> None:
        self.rig = rig
        self.left, self.right = rig.left, rig.right
        self._near = [rig.allocate(_SPLIT), rig.allocate(_SIZE - _SPLIT)]
        self._far = [rig.allocate(_SIZE - _SPLIT), rig.allocate(_SPLIT)]
        self.far = _PATTERN
        self.left.register(self._near)
        self.right.register(self._far)
        self.peer: PeerId = self.left.connect(self.right.descriptor())

    @property
    def near(self) -> bytes:
        return b"".join(map(bytes, self._near))

    @near.setter
    def near(self, data: bytes) -> None:
        self._near[0][:], self._near[1][:] = data[:_SPLIT], data[_SPLIT:]

    @property
    def far(self) -> bytes:
        return b"".join(map(bytes, self._far))

    @far.setter
    def far(self, data: bytes) -> None:
        self._far[0][:], self._far[1][:] = data[: _SIZE - _SPLIT], data[_SIZE - _SPLIT :]

    def register_again(self, right: DataTransport, data: bytes) -> None:
        """Registers memory for the next life of the right endpoint."""
        memory = self.rig.allocate(_SIZE)
        memory[:] = data
        right.register([memory])

    def read(self, runs: np.ndarray) -> TransferState:
        """Submits and waits for the end."""
        handle = self.left.submit(self.peer, runs)
        self.settle([handle])
        state = self.left.poll(handle)
        assert state.is_settled, f"a transfer has not ended in {_SECONDS} seconds: {state}"
        assert self.left.poll(handle) is state, "a settled transfer changed its state"
        return state

    def settle(self, handles: Sequence[TransferHandle]) -> None:
        """Waits, with a time limit, until all have settled."""
        waited = 0.0
        # All are polled each time: `wait` returns when something has changed since.
        while not {self.left.poll(handle) for handle in handles} <= _SETTLED and waited < _SECONDS:
            self.left.wait(handles, 0.1)
            waited += 0.1

    def close(self) -> None:
        self.left.close()
        self.right.close()
        self.left.close()


def check_transport(make: Callable[[], TransportRig]) -> None:
    """Checks the contract of `transports/base.py` without scripted faults."""
    for check in (
        _check_reads,
        _check_nothing_else_changes,
        _check_many_runs,
        _check_several_at_once,
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


def _check_reads(pair: _Pair) -> None:
    assert pair.left.connect(pair.right.descriptor()) == pair.peer, "connecting twice made a second peer"
    assert pair.read(_WHOLE) is TransferState.DONE
    assert pair.near == _PATTERN, "a read returned wrong bytes"
    assert pair.read(runs_of()) is TransferState.DONE, "a read of nothing does not end"


def _check_nothing_else_changes(pair: _Pair) -> None:
    runs = runs_of((200, 3, 5), (7, 100, 1), (64, 0, 0), (_SIZE, _SIZE, 0))
    expected = bytearray(_SIZE)
    expected[200:205] = _PATTERN[3:8]
    expected[7] = _PATTERN[100]
    assert pair.read(runs) is TransferState.DONE
    assert pair.near == expected, "a read of some runs changed other bytes, or missed a run"
    assert pair.far == _PATTERN, "a read changed its source"


def _check_many_runs(pair: _Pair) -> None:
    """Checks more runs than one system call accepts, across the ends of the regions."""
    order = list(range(0, _SIZE - 1, 2))
    random.Random(0).shuffle(order)
    swapped = runs_of(*((at, order[number], 2) for number, at in enumerate(range(0, _SIZE - 1, 2))))
    expected = b"".join(_PATTERN[at : at + 2] for at in order)
    assert pair.read(swapped) is TransferState.DONE
    assert pair.near[: len(expected)] == expected, "a read of many runs returned wrong bytes"
    pair.far = pair.near
    assert pair.read(swapped[:, [1, 0, 2]]) is TransferState.DONE
    assert pair.near[: len(expected)] == _PATTERN[: len(expected)], "a read into many runs went to wrong places"


def _check_several_at_once(pair: _Pair) -> None:
    half = _SIZE // 2
    quarters = [runs_of((at, (at + half) % _SIZE, _SIZE // 4)) for at in range(0, _SIZE, _SIZE // 4)]
    handles = [pair.left.submit(pair.peer, runs) for runs in quarters]
    pair.settle(handles)
    assert {pair.left.poll(handle) for handle in handles} == {TransferState.DONE}
    assert pair.near == _PATTERN[half:] + _PATTERN[:half], "concurrent reads are mixed up"


def _check_refusals(pair: _Pair) -> None:
    good = (0, 0, 8)
    for descriptor in (b"", b"\xff\x00 nonsense", b"x" * 10_000):
        _refuses(lambda descriptor=descriptor: pair.left.connect(descriptor), f"descriptor {descriptor[:20]!r}")
    _refuses(lambda: pair.left.submit("unknown", runs_of(good)), "an unknown peer")
    huge = 1 << 62
    for run in (
        (_SIZE - 4, 0, 8),
        (0, _SIZE - 4, 8),
        (0, -8, 8),
        (-8, 0, 8),
        (0, 8, -1),
        (0, huge, 8),
        (0, 8, huge),
        (8, (1 << 63) - 1, (1 << 63) - 1),
    ):
        # A transport that asks the peer first reports this with the end of the transfer.
        try:
            state = pair.read(runs_of(good, run))
        except PeerError:
            continue
        assert state is TransferState.FAILED_SETTLED, f"{run} is out of bounds, and ended as {state}"
    assert pair.far == _PATTERN, "a refused read changed the memory of the peer"
    assert pair.read(runs_of(good)) is TransferState.DONE, "a refusal has broken the connection"


def _check_restart(pair: _Pair) -> None:
    stale = pair.right.descriptor()
    again = pair.rig.restart_right()
    pair.register_again(again, b"\xaa" * _SIZE)
    try:
        state = pair.read(runs_of((0, 0, 8)))
    except PeerError:
        state = TransferState.FAILED_SETTLED
    assert state is TransferState.FAILED_SETTLED, "a peer of another life was read"
    assert pair.near == bytes(_SIZE), "bytes of another life landed"
    _refuses(lambda: pair.left.connect(stale), "the descriptor of a life that has ended")
    pair.peer = pair.left.connect(again.descriptor())
    assert pair.read(runs_of((0, 0, 8))) is TransferState.DONE
    assert pair.near[:8] == b"\xaa" * 8
    again.close()


def _check_disconnect(pair: _Pair) -> None:
    handles = [pair.left.submit(pair.peer, _WHOLE) for _ in range(3)]
    pair.left.disconnect(pair.peer)
    pair.settle(handles)
    assert all(pair.left.poll(handle).is_settled for handle in handles), "a disconnected transfer does not settle"
    pair.near = bytes(_SIZE)
    pair.left.wait(handles, 0.2)
    assert pair.near == bytes(_SIZE), "bytes landed after the end of a transfer"
    _refuses(lambda: pair.left.submit(pair.peer, _WHOLE), "a disconnected peer")
    pair.left.disconnect(pair.peer)
    pair.peer = pair.left.connect(pair.right.descriptor())
    assert pair.read(_WHOLE) is TransferState.DONE
    assert pair.near == _PATTERN


def _check_close(pair: _Pair) -> None:
    handle = pair.left.submit(pair.peer, _WHOLE)
    pair.left.close()
    before = pair.near
    pair.far = bytes(_SIZE)
    assert pair.left.poll(handle).is_settled, "a transfer of a closed endpoint has not settled"
    assert pair.near == before, "bytes landed after the end of the endpoint"


def _refuses(action: Callable[[], object], what: str) -> None:
    try:
        action()
    except PeerError:
        return
    raise AssertionError(f"{what} was taken")
