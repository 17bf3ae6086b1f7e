"""Penstock's own connectors and transports pass the conformance kit, and the kit refuses violations of contracts."""

from __future__ import annotations

import pytest

from penstock.kv_transfer.connector import Match, RequestView
from penstock.kv_transfer.offload.scheduler import OffloadingScheduler
from penstock.kv_transfer.offload.worker import OffloadingWorker
from penstock.kv_transfer.transports.base import TransferState
from penstock.messages.kv_transfer import KVConnectorOutput
from penstock.simulation.backing import Backing
from penstock.simulation.backings import BACKINGS
from penstock.simulation.conformance import CONNECTOR_SCENARIOS, TransportRig, check_connector, check_transport, runs_of
from penstock.simulation.memory_transport import Fault, FaultKind, MemoryFabric, MemoryTransport
from penstock.simulation.tiers import OffloadBacking
from penstock.utils.clock import ManualClock


@pytest.mark.spread(5)
@pytest.mark.parametrize("scenario", [*CONNECTOR_SCENARIOS, "other_split"])
def test_the_tiers_conform(scenario: str) -> None:
    check_connector(OffloadBacking, (scenario,), num_seeds=4, same_split=scenario != "other_split")


@pytest.mark.parametrize("scenario", ["pd_many", "held_blocks", "several_connectors", "several_connectors_fail"])
def test_connectors_between_engines_conform(scenario: str) -> None:
    backing = "several" if scenario.startswith("several") else "p2p"
    check_connector(BACKINGS[backing], (scenario,), num_seeds=3, same_split=False)


def test_an_engine_without_a_connector_conforms() -> None:
    check_connector(lambda context: Backing(), num_seeds=1)


def make_rig(delay: float = 0.01) -> TransportRig:
    fabric = MemoryFabric(ManualClock(), lambda: Fault(delay=delay))
    left, right = fabric.endpoint("left"), fabric.endpoint("right")

    def restart() -> MemoryTransport:
        fabric.crash(right)
        return fabric.endpoint("right")

    return TransportRig(left, right, restart)


@pytest.mark.parametrize("delay", [0.0, 0.01, 5.0])
def test_the_memory_transport_conforms(delay: float) -> None:
    check_transport(lambda: make_rig(delay))


def test_a_match_that_changes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(range(0, 10_000, 4))

    def fickle(self: OffloadingScheduler, request: RequestView, num_computed_tokens: int) -> Match:
        return Match(next(answers) % 8, is_async=True)

    monkeypatch.setattr(OffloadingScheduler, "get_num_new_matched_tokens", fickle)
    with pytest.raises(AssertionError, match="was promised"):
        check_connector(OffloadBacking)


def test_a_rank_that_reports_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = OffloadingWorker.get_finished

    def twice(self: OffloadingWorker, finished_request_ids: frozenset[str]) -> KVConnectorOutput:
        output = real(self, finished_request_ids)
        return KVConnectorOutput(output.reports * 2)

    monkeypatch.setattr(OffloadingWorker, "get_finished", twice)
    with pytest.raises(AssertionError, match="ends twice"):
        check_connector(OffloadBacking)


def test_a_transport_that_reads_from_a_restarted_peer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = MemoryFabric.find
    monkeypatch.setattr(MemoryFabric, "find", lambda self, name, life: real(self, name, self._lives[name]))
    with pytest.raises(AssertionError, match="life"):
        check_transport(make_rig)


def begin_read(fault: Fault, drain: float = 0.0) -> tuple[MemoryFabric, MemoryTransport, object, bytearray]:
    """Begins a read of 100 bytes of ones into zeros, with a fault."""
    fabric = MemoryFabric(ManualClock(), lambda: fault, drain)
    here, there = fabric.endpoint("here"), fabric.endpoint("there")
    memory = bytearray(100)
    here.register([memoryview(memory)])
    there.register([memoryview(bytearray(b"\x01" * 100))])
    peer = here.connect(there.descriptor())
    return fabric, here, here.submit(peer, runs_of((0, 0, 100))), memory


def pass_time(fabric: MemoryFabric, seconds: float) -> None:
    fabric.clock.advance(seconds)
    fabric.run()


def test_a_dropped_transfer_settles_when_its_peer_is_given_up() -> None:
    fabric, here, handle, memory = begin_read(Fault(FaultKind.DROP, delay=1.0), drain=1.0)
    pass_time(fabric, 100.0)
    assert here.poll(handle) is TransferState.PENDING
    here.disconnect("there#1")
    assert here.poll(handle) is TransferState.PENDING
    pass_time(fabric, 1.0)
    assert here.poll(handle) is TransferState.FAILED_SETTLED
    assert sum(memory) == 0


def test_bytes_of_an_unsettled_failure_land_later() -> None:
    fabric, here, handle, memory = begin_read(Fault(FaultKind.DIE_UNSETTLED, delay=1.0, at=0.3, late_by=5.0))
    pass_time(fabric, 1.0)
    assert here.poll(handle) is TransferState.FAILED_UNSETTLED
    assert sum(memory) == 30
    pass_time(fabric, 5.0)
    assert here.poll(handle) is TransferState.FAILED_SETTLED
    assert sum(memory) == 100


def test_giving_a_peer_up_stops_the_bytes_of_an_unsettled_failure() -> None:
    fabric, here, handle, memory = begin_read(Fault(FaultKind.DIE_UNSETTLED, delay=1.0, at=0.3, late_by=5.0))
    pass_time(fabric, 1.0)
    here.disconnect("there#1")
    assert here.poll(handle) is TransferState.FAILED_SETTLED
    pass_time(fabric, 10.0)
    assert sum(memory) == 30


@pytest.mark.parametrize(
    ("kind", "state", "landed"),
    [
        (FaultKind.NONE, TransferState.DONE, 100),
        (FaultKind.DIE, TransferState.FAILED_SETTLED, 30),
        (FaultKind.LOST_COMPLETION, TransferState.PENDING, 100),
        (FaultKind.CORRUPT, TransferState.DONE, 99),
    ],
)
def test_states_of_transfers_with_faults(kind: FaultKind, state: TransferState, landed: int) -> None:
    fabric, here, handle, memory = begin_read(Fault(kind, delay=1.0, at=0.3))
    pass_time(fabric, 1.0)
    assert here.poll(handle) is state
    assert sum(memory) == landed
