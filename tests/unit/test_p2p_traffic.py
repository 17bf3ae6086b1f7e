"""Counters of each peer's transfers; names that clients invent take no memory."""

from __future__ import annotations

from penstock.kv_transfer.p2p.traffic import Traffic


def test_transfers_are_counted_by_direction_and_peer() -> None:
    traffic = Traffic()
    traffic.introduce("p")
    traffic.on_moved("from", "p", 32, 1000, 0.5)
    traffic.on_moved("from", "p", 16, 500, 0.25)
    traffic.on_failed("from", "p")
    assert traffic.counters == {
        "p2p_from/p/transfers": 2,
        "p2p_from/p/tokens": 48,
        "p2p_from/p/bytes": 1500,
        "p2p_from/p/seconds": 0.75,
        "p2p_from/p/failed": 1,
    }


def test_names_of_unknown_peers_are_counted_together() -> None:
    traffic = Traffic()
    for number in range(1000):
        traffic.on_failed("from", f"made up {number}")
    assert traffic.counters == {"p2p_from/others/failed": 1000}


def test_the_number_of_separately_counted_peers_is_limited() -> None:
    traffic = Traffic()
    for number in range(100):
        traffic.introduce(f"p{number}")
        traffic.on_failed("from", f"p{number}")
    assert len(traffic.counters) == 65
    assert traffic.counters["p2p_from/others/failed"] == 36
