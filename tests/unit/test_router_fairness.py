"""The order of waiting requests: clients take turns, and one with many requests delays no other."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from penstock.router.dispatcher import Dispatcher, Limits, Plan, Refusal, Routed
from penstock.router.instances import Instance, Role, Signal
from penstock.router.pool import Pool
from penstock.router.waiting import FairQueue


def request(client: str, model: str = "") -> Routed:
    return Routed(lambda: True, model, client, 10)


def make(num_places: int, models: Sequence[tuple[str, ...]] = ((),), max_queued: int = 100) -> Dispatcher:
    pool = Pool(dead_after=10)
    for number, names in enumerate(models):
        url = f"http://s{number}"
        pool.add(Instance(url, Role.SERVE))
        pool.learn(url, names)
        pool.observe(url, Signal.READY, 0)
    return Dispatcher(pool, Limits(max_outstanding=num_places, max_queued=max_queued))


def served(router: Dispatcher, running: list[Routed]) -> list[Routed]:
    """Ends the running requests, and returns those that run then."""
    for each in running:
        router.end(each)
    found = [each for each, decision in router.poll(0) if isinstance(decision, Plan)]
    router.check_integrity()
    return found


def test_clients_take_turns() -> None:
    router = make(num_places=1)
    first = request("many")
    assert isinstance(router.submit(first, 0), Plan)
    waiting = [request("many") for _ in range(4)]
    for each in waiting:
        assert router.submit(each, 0) is None
    other, another = request("one"), request("two")
    assert router.submit(other, 0) is None
    assert router.submit(another, 0) is None
    order, running = [], [first]
    while running := served(router, running):
        order += running
    assert order == [waiting[0], other, another, *waiting[1:]]


def test_a_client_keeps_its_order_whatever_comes_and_goes() -> None:
    rng, queue = random.Random(3), FairQueue[Routed]()
    known: dict[str, list[Routed]] = {name: [] for name in "abc"}
    for _ in range(2000):
        client = rng.choice("abc")
        if rng.random() < 0.6 or not len(queue):
            each = request(client)
            queue.add(each)
            known[client].append(each)
        elif rng.random() < 0.5 and known[client]:
            gone = known[client].pop(rng.randrange(len(known[client])))
            assert queue.remove(gone)
            assert not queue.remove(gone)
        else:
            head = queue.heads()[0]
            queue.take(head)
            assert known[head.client].pop(0) is head
        assert len(queue) == sum(map(len, known.values())) == len(list(queue))
        assert set(queue.heads()) == {each[0] for each in known.values() if each}


def test_turns_go_round() -> None:
    queue = FairQueue[Routed]()
    for client in "aaabbc":
        queue.add(request(client))
    order = ""
    while len(queue):
        head = queue.heads()[0]
        queue.take(head)
        order += head.client
    assert order == "abcaba"
    late, early = request("a"), request("b")
    queue.add(late)
    queue.add(early, is_first=True)
    assert queue.heads() == [early, late]


def test_a_request_that_has_waited_before_comes_first() -> None:
    router = make(num_places=1)
    running, waiting, other = request("a"), request("a"), request("b")
    for each in (running, waiting, other):
        router.submit(each, 0)
    router.end(running)
    ((placed, _),) = router.poll(0)
    assert placed is waiting
    router.submit(request("b"), 0)
    assert isinstance(router.failed(waiting, "http://s0", "it has died", 0), Refusal)  # the only instance


def test_a_full_queue_is_shared() -> None:
    router = make(num_places=1, max_queued=4)
    router.submit(request("many"), 0)
    waiting = [request("many") for _ in range(4)]
    for each in waiting:
        assert router.submit(each, 0) is None
    assert isinstance(router.submit(request("many"), 0), Refusal)
    other = request("one")
    assert router.submit(other, 0) is None
    # The last one of the client with the most makes room, and is told at once.
    assert router.next_poll <= 0
    ((displaced, decision),) = router.poll(0)
    assert displaced is waiting[-1]
    assert isinstance(decision, Refusal)
    assert router.num_queued == 4
    router.end(displaced)
    assert router.submit(request("two"), 0) is None
    assert [each for each, _ in router.poll(0)] == [waiting[-2]]
    # Now no client has more than the others would.
    third = request("one")
    assert isinstance(router.submit(third, 0), Refusal)
    router.end(third)
    router.check_integrity()


@pytest.mark.parametrize("other", ["x", "y"])
def test_a_model_without_room_delays_no_other(other: str) -> None:
    router = make(num_places=1, models=(("a",), ("b",)))
    running = request("x", "a")
    assert isinstance(router.submit(running, 0), Plan)
    blocked = request("x", "a")
    assert router.submit(blocked, 0) is None
    first = request(other, "b")
    assert isinstance(router.submit(first, 0), Plan)
    second = request(other, "b")
    assert router.submit(second, 0) is None
    assert served(router, [first]) == [second]
    assert served(router, [running]) == [blocked]


def test_a_request_that_waits_for_another_instance_delays_no_other() -> None:
    """The one on which it has failed still takes requests, whoever sends them."""
    router = make(num_places=1, models=((), ()))
    router.pool.observe("http://s1", Signal.STARTING, 0)
    retried, later, waiting = request("x"), request("x"), request("x")
    assert isinstance(router.submit(retried, 0), Plan)
    assert router.failed(retried, "http://s0", "it is full", 0) is None
    assert isinstance(router.submit(later, 0), Plan)
    assert router.submit(waiting, 0) is None
    assert served(router, [later]) == [waiting]
    router.pool.observe("http://s1", Signal.READY, 0)
    assert served(router, []) == [retried]


def test_one_request_a_second_is_not_delayed_by_a_thousand() -> None:
    """With one place and requests of a second, each of the other client's waits for one request at most."""
    router = make(num_places=1, max_queued=2000)
    running = [request("many")]
    router.submit(running[0], 0)
    for _ in range(1000):
        router.submit(request("many"), 0)
    for _ in range(20):
        single = request("one")
        assert router.submit(single, 0) is None
        turns = 0
        while single not in running:
            running = served(router, running)
            turns += 1
        assert turns <= 2
