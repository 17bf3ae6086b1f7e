"""The scheduler's part of the OffloadingConnector: what it stores and loads, and when a store or load is complete."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
from msgspec.structs import replace

from penstock.kv_transfer.connector import NO_MATCH, PENDING
from penstock.kv_transfer.digest import Attestation
from penstock.kv_transfer.offload.manager import LookupResult, OffloadingManager, Prompt
from penstock.kv_transfer.offload.messages import StateChunks
from penstock.kv_transfer.offload.policies import LRUPolicy
from penstock.kv_transfer.offload.region import OffloadRegion
from penstock.kv_transfer.offload.scheduler import OffloadingScheduler, OffloadPolicy, OffloadRules
from penstock.messages.kv_cache_spec import NULL_BLOCK, KVCacheConfig, KVCacheGroup, KVCacheSpec
from penstock.messages.kv_transfer import BadRange, KVConnectorOutput, TransferId, TransferReport, TransferStatus
from penstock.messages.outputs import FinishReason
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.utils.clock import ManualClock
from penstock.utils.digest import add_digests, digest
from tests.unit.offload_fakes import CHUNK_BYTES, FakeTier, make_key

SPEC = KVCacheSpec.keys_and_values(1, 1, "float32")
STATE = KVCacheSpec.states(1, 8, 0, 1)
# Four tokens, the size of a block.
WINDOW = KVCacheSpec.keys_and_values(1, 1, "float32", sliding_window=4)
HIT, MISS, PENDING_KEY = LookupResult.HIT, LookupResult.MISS, LookupResult.PENDING
DONE, FAILED = TransferStatus.DONE, TransferStatus.FAILED


def make_scheduler(
    manager: OffloadingManager,
    policy: OffloadPolicy = OffloadPolicy.CHUNK_LEVEL,
    num_ranks: int = 1,
    groups: tuple[KVCacheSpec, ...] = (SPEC,),
    costs: Any = None,
    **options: Any,
) -> Any:
    cache = KVCacheConfig(1000, 4, tuple(KVCacheGroup((f"layer{n}",), spec) for n, spec in enumerate(groups)))
    rules = OffloadRules(Attestation.ALL, policy, costs, **{"load_timeout": 30.0, **options})
    shards = frozenset((0, rank) for rank in range(num_ranks))
    return OffloadingScheduler(cache, shards, OffloadRegion(1, 64), manager, rules, ManualClock(), "epoch")


def add_request(scheduler: OffloadingScheduler, name: str, num_blocks: int, start: int = 0, **params: Any) -> Any:
    """Adds a request whose prompt has as many complete blocks, with keys from `start` on, and one more token."""
    hashes = [make_key(number)[1] for number in range(start, start + num_blocks)]
    request: Any = SimpleNamespace(
        request_id=name,
        hold_id=TransferId(name, start),
        block_hashes=hashes,
        kv_transfer_params=params,
        num_tokens=4 * num_blocks + 1,
    )
    scheduler.on_new_request(request)
    return request


def report(scheduler: OffloadingScheduler, job_id: TransferId, rank: int, *digests: bytes, **changes: Any) -> list[Any]:
    """Reports the end of a job on a rank; returns the events."""
    done = TransferReport(job_id, (0, rank), **{"status": DONE, "digests": digests, **changes})
    return list(scheduler.update_connector_output(KVConnectorOutput((done,))))


def begin_store(scheduler: OffloadingScheduler, request: Any, end: int) -> TransferId:
    """Completes blocks [0, end) of the request, in engine blocks from 1 on. Returns the name of their store."""
    scheduler.on_blocks_complete(request, [list(range(1, end + 1))] * len(scheduler._groups), 0, end)
    (job,) = scheduler.build_connector_meta(SchedulerOutput(step=1)).stores
    return job.job_id


def store(scheduler: OffloadingScheduler, request: Any, end: int, num_ranks: int = 1) -> None:
    """Stores those of the blocks that are to be stored, completely."""
    scheduler.on_blocks_complete(request, [list(range(1, end + 1))] * len(scheduler._groups), 0, end)
    for job in scheduler.build_connector_meta(SchedulerOutput(step=1)).stores:
        for rank in range(num_ranks):
            report(scheduler, job.job_id, rank, *[digest(b"part")] * len(job.blocks))


def load_of(request_id: str) -> TransferId:
    return TransferId(request_id, 0, part=1)


def begin_load(
    scheduler: OffloadingScheduler, request: Any, tables: tuple[tuple[int, ...], ...], end: int
) -> TransferId:
    """Allocates blocks for the KV that is found for the request, up to token `end`. Returns the name of its load."""
    assert scheduler.get_num_new_matched_tokens(request, 0).num_tokens == end
    scheduler.update_state_after_alloc(request, load_of(request.request_id), tables, 0, end)
    (load,) = scheduler.build_connector_meta(SchedulerOutput(step=2)).loads
    return load.job_id


def test_a_store_is_complete_when_every_rank_has_written_its_part() -> None:
    manager = OffloadingManager(100, LRUPolicy())
    scheduler = make_scheduler(manager, num_ranks=2)
    job_id = begin_store(scheduler, add_request(scheduler, "r", 1), 1)
    key, parts = make_key(0), (digest(b"first"), digest(b"second"))
    for _ in range(2):
        report(scheduler, job_id, 0, parts[0])
        assert manager.lookup(key) is PENDING_KEY, "the other rank may still be writing"
        assert scheduler.has_pending_work
    report(scheduler, job_id, 1, parts[1])
    assert manager.lookup(key) is HIT
    (stored,) = manager.prepare_load([key])
    assert stored.digest == add_digests(*parts), "the parts of both ranks are compared"
    assert not scheduler.has_pending_work


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_one_rank_could_not_write_is_not_found(rank: int) -> None:
    manager = OffloadingManager(100, LRUPolicy())
    scheduler = make_scheduler(manager, num_ranks=2)
    job_id = begin_store(scheduler, add_request(scheduler, "r", 1), 1)
    report(scheduler, job_id, rank, status=FAILED)
    report(scheduler, job_id, 1 - rank, digest(b"written"))
    assert manager.lookup(make_key(0)) is MISS
    assert scheduler.counters()["num_stores_failed"] == 1
    scheduler.check_integrity()


@pytest.mark.parametrize(
    ("policy", "expected"), [(OffloadPolicy.CHUNK_LEVEL, range(3, 10)), (OffloadPolicy.REQUEST_LEVEL, range(10))]
)
def test_only_new_blocks_are_offered(monkeypatch: pytest.MonkeyPatch, policy: OffloadPolicy, expected: range) -> None:
    """Three blocks are found in the engine's cache, and seven are then computed, one by one."""
    manager = OffloadingManager(100, LRUPolicy())
    scheduler = make_scheduler(manager, policy)
    prepare_store, offered = manager.prepare_store, []

    def recorded(keys: Any, prompt: Prompt) -> Any:
        offered.append([place for _, place in keys])
        return prepare_store(keys, prompt)

    monkeypatch.setattr(manager, "prepare_store", recorded)
    request = add_request(scheduler, "r", 10)
    table = [list(range(1, 11))]
    for end in range(4, 11):
        scheduler.on_blocks_complete(request, table, end - 1, end)
        metadata = scheduler.build_connector_meta(SchedulerOutput(step=end))
        for store in metadata.stores:
            assert [block.block_id for block in store.blocks] == [place + 1 for place in offered[-1]]
            done = TransferReport(store.job_id, (0, 0), DONE, digests=(b"d" * 16,) * len(store.blocks))
            scheduler.update_connector_output(KVConnectorOutput((done,)))
    assert [place for each in offered for place in each] == list(expected)
    assert [len(each) for each in offered[1:]] == [1] * 6
    scheduler.check_integrity()


def test_a_load_is_complete_when_every_rank_has_read_its_part() -> None:
    manager = OffloadingManager(1, LRUPolicy())
    scheduler = make_scheduler(manager, num_ranks=2)
    store(scheduler, add_request(scheduler, "first", 1), 1, num_ranks=2)
    job_id = begin_load(scheduler, add_request(scheduler, "second", 1), ((7,),), end=4)
    other = [(make_key(99), 0)]
    assert report(scheduler, job_id, 0) == []
    assert not manager.prepare_store(other), "the other rank may still be reading the only chunk"
    assert scheduler.has_pending_work
    (ended,) = report(scheduler, job_id, 1)
    assert (ended.transfer_id, ended.bad_ranges) == (load_of("second"), ())
    assert manager.prepare_store(other)
    scheduler.check_integrity()


@pytest.mark.parametrize("is_sent", [True, False], ids=["sent", "not sent"])
def test_a_cancelled_load_says_nothing_about_the_tier(is_sent: bool) -> None:
    """What has not been copied is neither bad nor slow, and is found again."""
    manager, costs = OffloadingManager(9, LRUPolicy()), Mock()
    scheduler = make_scheduler(manager, num_ranks=2, costs=costs)
    store(scheduler, add_request(scheduler, "first", 2), 2, num_ranks=2)
    second, other = add_request(scheduler, "second", 2), add_request(scheduler, "other", 1, start=10)
    scheduler.update_state_after_alloc(second, load_of("second"), ((1, 2),), 0, 8)
    if is_sent:
        scheduler.build_connector_meta(SchedulerOutput(step=2))
    scheduler.cancel_load(other)
    scheduler.cancel_load(second)
    job_id = replace(load_of("second"), epoch="epoch")
    assert scheduler.build_connector_meta(SchedulerOutput(step=3)).cancelled == (job_id,)
    assert scheduler.build_connector_meta(SchedulerOutput(step=4)).cancelled == ()
    assert report(scheduler, job_id, 0) == []
    (ended,) = report(scheduler, job_id, 1, status=FAILED, bad_ranges=(BadRange(0, 4, 8),))
    assert (ended.transfer_id, ended.bad_ranges) == (load_of("second"), (BadRange(0, 4, 8),))
    assert [manager.lookup(make_key(number)) for number in range(2)] == [HIT, HIT]
    assert (manager.stats.num_pinned, manager.stats.num_bad, scheduler.counters()["num_corrupted"]) == (0, 0, 0)
    costs.on_loaded.assert_not_called()
    scheduler.check_integrity()


def test_blocks_of_a_long_prompt_in_the_cache_are_offered_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are new, or two of them here, at a time, from the head on; a step is not to copy them all."""
    monkeypatch.setattr("penstock.kv_transfer.offload.scheduler._OLD_BYTES", 2 * SPEC.block_bytes(4) + 1)
    scheduler = make_scheduler(OffloadingManager(100, LRUPolicy()), OffloadPolicy.REQUEST_LEVEL)
    request, table = add_request(scheduler, "r", 20), [list(range(1, 21))]

    def stored(first: int, end: int) -> list[int]:
        scheduler.on_blocks_complete(request, table, first, end)
        (job,) = scheduler.build_connector_meta(SchedulerOutput(step=end)).stores
        report(scheduler, job.job_id, 0, *[digest(b"part")] * len(job.blocks))
        return [block.block_id - 1 for block in job.blocks]

    assert stored(10, 11) == [0, 1, 10]
    assert stored(11, 15) == [2, 3, 4, 5, 11, 12, 13, 14]
    assert stored(15, 16) == [6, 7, 15]
    assert stored(16, 17) == [8, 9, 16], "block 10 is here"
    assert stored(17, 18) == [17], "blocks 10 to 13 are here"
    assert stored(18, 20) == [18, 19]
    scheduler.check_integrity()
    limited = add_request(scheduler, "limited", 20, start=50, max_offload_tokens=7)
    scheduler.on_blocks_complete(limited, table, 10, 11)
    (job,) = scheduler.build_connector_meta(SchedulerOutput(step=21)).stores
    assert [block.block_id for block in job.blocks] == [1]


def test_blocks_that_were_loaded_wrong_are_forgotten() -> None:
    manager = OffloadingManager(9, LRUPolicy())
    scheduler = make_scheduler(manager, groups=(SPEC, SPEC))
    store(scheduler, add_request(scheduler, "first", 3), 3)
    tables = ((1, 2, 3), (4, 5, 6))
    job_id = begin_load(scheduler, add_request(scheduler, "second", 3), tables, end=12)
    (ended,) = report(scheduler, job_id, 0, status=FAILED, bad_ranges=(BadRange(1, 4, 12), BadRange(0, 0, 4)))
    assert len(ended.bad_ranges) == 2
    found = [[manager.lookup(make_key(number, group)) for number in range(3)] for group in range(2)]
    assert found == [[MISS, HIT, HIT], [HIT, MISS, MISS]]
    assert scheduler.counters()["num_corrupted"] == 3
    assert manager.stats.num_pinned == 0
    scheduler.check_integrity()


def test_states_have_their_own_room_and_are_needed_at_the_end() -> None:
    states = StateChunks(group=1, num_chunks=2, chunk_bytes=96)
    manager = OffloadingManager(9, LRUPolicy(), states=states, state_policy=LRUPolicy())
    scheduler = make_scheduler(manager, groups=(SPEC, STATE))
    first = add_request(scheduler, "first", 3)
    scheduler.on_blocks_complete(first, ([5, 6, 7], [NULL_BLOCK, 8, NULL_BLOCK]), 0, 3)
    # At the request's end, the state after its last whole block can be stored too.
    scheduler.on_blocks_complete(first, ([5, 6, 7], [NULL_BLOCK, 8, 9]), 2, 3)
    (job,) = scheduler.build_connector_meta(SchedulerOutput(step=1)).stores
    found = [(block.group, block.block_id, block.chunk_id) for block in job.blocks]
    assert found == [(0, 5, 0), (0, 6, 1), (0, 7, 2), (1, 8, 9), (1, 9, 10)]
    report(scheduler, job.job_id, 0, *[digest(b"part")] * 5)
    second = add_request(scheduler, "second", 3)
    scheduler.update_state_after_alloc(second, load_of("second"), ((1, 2, 3), (NULL_BLOCK, NULL_BLOCK, 4)), 0, 12)
    (load,) = scheduler.build_connector_meta(SchedulerOutput(step=2)).loads
    assert [(block.group, block.chunk_id) for block in load.blocks] == [(0, 0), (0, 1), (0, 2), (1, 10)]
    report(scheduler, load.job_id, 0)
    # Of states used at the same time the first one leaves.
    scheduler.request_finished(first, (), FinishReason.LENGTH)
    other = add_request(scheduler, "other", 1, start=50)
    scheduler.on_blocks_complete(other, ([6], [7]), 0, 1)
    (job,) = scheduler.build_connector_meta(SchedulerOutput(step=3)).stores
    assert [(block.group, block.chunk_id) for block in job.blocks] == [(0, 3), (1, 9)]
    report(scheduler, job.job_id, 0, *[digest(b"part")] * 2)
    assert [manager.lookup((1, make_key(number)[1])) for number in (1, 2, 50)] == [MISS, HIT, HIT]
    # Without its last state the prompt is of no use, because the earlier one has left.
    third = add_request(scheduler, "third", 3)
    assert scheduler.get_num_new_matched_tokens(third, 0).num_tokens == 12
    manager.mark_bad((1, make_key(2)[1]))
    assert scheduler.get_num_new_matched_tokens(third, 0) == NO_MATCH
    manager.check_integrity()


def test_the_state_of_a_long_hit_is_offered_before_it_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of its tokens follow bit by bit; without the state they would be of no use."""
    monkeypatch.setattr("penstock.kv_transfer.offload.scheduler._OLD_BYTES", 2 * SPEC.block_bytes(4))
    states = StateChunks(group=1, num_chunks=9, chunk_bytes=96)
    manager = OffloadingManager(99, LRUPolicy(), states=states, state_policy=LRUPolicy())
    scheduler = make_scheduler(manager, OffloadPolicy.REQUEST_LEVEL, groups=(SPEC, STATE))
    request, table = add_request(scheduler, "r", 12), list(range(1, 13))
    offered: list[tuple[int, int]] = []
    # The hit has 8 blocks.
    for end, has_state in ((9, True), (10, False), (11, False)):
        of_states = [8 if has_state and index == 7 else NULL_BLOCK for index in range(12)]
        scheduler.on_blocks_complete(request, (table, of_states), end - 1, end)
        (job,) = scheduler.build_connector_meta(SchedulerOutput(step=end)).stores
        offered += [(block.group, block.block_id) for block in job.blocks]
        report(scheduler, job.job_id, 0, *[digest(b"part")] * len(job.blocks))
    assert offered == [(0, 1), (0, 2), (0, 9), (1, 8), (0, 3), (0, 4), (0, 10), (0, 5), (0, 6), (0, 11)]
    scheduler.check_integrity()


def test_blocks_outside_of_a_window_are_neither_stored_nor_loaded() -> None:
    manager = OffloadingManager(9, LRUPolicy())
    scheduler = make_scheduler(manager, groups=(SPEC, WINDOW))
    tables = ([5, 6, 7], [NULL_BLOCK, NULL_BLOCK, 8])
    first = add_request(scheduler, "first", 3)
    scheduler.on_blocks_complete(first, tables, 0, 3)
    (job,) = scheduler.build_connector_meta(SchedulerOutput(step=1)).stores
    assert [(block.group, block.block_id) for block in job.blocks] == [(0, 5), (0, 6), (0, 7), (1, 8)]
    report(scheduler, job.job_id, 0, *[digest(b"part")] * 4)
    second = add_request(scheduler, "second", 3)
    assert scheduler.get_num_new_matched_tokens(second, 0).num_tokens == 12
    scheduler.update_state_after_alloc(second, load_of("second"), tuple(map(tuple, tables)), 0, 12)
    (load,) = scheduler.build_connector_meta(SchedulerOutput(step=2)).loads
    assert [(block.group, block.block_id, block.index) for block in load.blocks] == [
        (0, 5, 0),
        (0, 6, 1),
        (0, 7, 2),
        (1, 8, 2),
    ]
    # Two blocks are of no use without the window before their end.
    third = add_request(scheduler, "third", 2)
    assert scheduler.get_num_new_matched_tokens(third, 0) == NO_MATCH


def test_a_prompt_without_a_window_is_not_looked_up_length_by_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of 64 blocks lacks one for all lengths but the shortest: each block is looked at a few times at most."""
    manager, num_blocks = OffloadingManager(2000, LRUPolicy()), 800
    window = KVCacheSpec.keys_and_values(1, 1, "float32", sliding_window=256)
    scheduler = make_scheduler(manager, groups=(SPEC, window))
    request = add_request(scheduler, "r", num_blocks)
    keys = [((0, block_hash), place) for place, block_hash in enumerate(request.block_hashes)]
    for key, _ in manager.prepare_store([*keys, *(((1, key[1]), place) for key, place in keys[:3])]):
        manager.complete_store(key, None, success=True)
    looked_up, lookup = list[Any](), manager.lookup
    monkeypatch.setattr(manager, "lookup", lambda key: looked_up.append(key) or lookup(key))
    assert scheduler.get_num_new_matched_tokens(request, 0).num_tokens == 4 * 3
    assert len(looked_up) < 10 * num_blocks


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    scheduler = make_scheduler(OffloadingManager(9, LRUPolicy()))
    store(scheduler, add_request(scheduler, "first", 2), 2)
    request = add_request(scheduler, "second", 2)
    assert scheduler.get_num_new_matched_tokens(request, 0).num_tokens == 8
    request.num_tokens = 8
    assert scheduler.get_num_new_matched_tokens(request, 0).num_tokens == 4
    assert scheduler.get_num_new_matched_tokens(request, 4) == NO_MATCH


def test_the_limits_of_a_request() -> None:
    manager = OffloadingManager(9, LRUPolicy())
    scheduler = make_scheduler(manager)
    limited = add_request(scheduler, "stores", 4, max_offload_tokens=11)
    store(scheduler, limited, 4)
    assert [manager.lookup(make_key(number)) for number in range(4)] == [HIT, HIT, MISS, MISS]
    store(scheduler, add_request(scheduler, "stores all", 4), 4)
    limited = add_request(scheduler, "loads", 4, max_load_tokens=11)
    begin_load(scheduler, limited, ((1, 2, 0, 0),), end=8)
    assert scheduler.get_num_new_matched_tokens(limited, 8) == NO_MATCH, "two blocks are loaded already"


def test_a_request_may_store_nothing() -> None:
    manager = OffloadingManager(9, LRUPolicy())
    scheduler = make_scheduler(manager)
    store(scheduler, add_request(scheduler, "r", 4, offload_policy="none"), 4)
    assert manager.lookup(make_key(0)) is MISS


def test_blocks_that_wait_to_be_stored_are_forgotten_by_a_reset() -> None:
    scheduler = make_scheduler(OffloadingManager(9, LRUPolicy()))
    scheduler.on_blocks_complete(add_request(scheduler, "r", 1), [[1]], 0, 1)
    assert scheduler.reset_cache()
    assert scheduler.build_connector_meta(SchedulerOutput(step=1)).stores == ()


def test_a_prompt_is_used_until_its_request_ends() -> None:
    manager = OffloadingManager(2, LRUPolicy())
    scheduler = make_scheduler(manager)
    first = add_request(scheduler, "first", 1)
    store(scheduler, first, 1)
    store(scheduler, add_request(scheduler, "second", 1, start=10), 1)
    scheduler.request_finished(first, (), FinishReason.STOP)
    store(scheduler, add_request(scheduler, "third", 1, start=20), 1)
    assert [manager.lookup(make_key(number)) for number in (0, 10, 20)] == [HIT, MISS, HIT]


def test_reports_of_another_run_change_nothing() -> None:
    manager = OffloadingManager(9, LRUPolicy())
    scheduler = make_scheduler(manager)
    job_id = begin_store(scheduler, add_request(scheduler, "r", 1), 1)
    assert job_id.epoch == "epoch"
    report(scheduler, replace(job_id, epoch="earlier"), 0, digest(b"part"))
    assert manager.lookup(make_key(0)) is PENDING_KEY


# ---- Promotions ----


def test_a_request_that_waits_does_not_look_at_all_its_blocks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every step; it does when the last key that it waits for has come."""
    tier = FakeTier(OffloadRegion(9, CHUNK_BYTES), num_delays=3)
    manager, looked_up = OffloadingManager(9, LRUPolicy(), [tier]), list[Any]()
    scheduler, lookup = make_scheduler(manager), manager.lookup
    monkeypatch.setattr(manager, "lookup", lambda key: looked_up.append(key) or lookup(key))
    for number in range(8):
        tier.bytes[make_key(number)] = (bytes(CHUNK_BYTES), None)
    request = add_request(scheduler, "r", 8)
    assert scheduler.get_num_new_matched_tokens(request, 0) == PENDING
    for _ in range(3):
        scheduler.update_connector_output(KVConnectorOutput())
        looked_up.clear()
        assert scheduler.get_num_new_matched_tokens(request, 0) == PENDING
        assert looked_up == [make_key(7)]
        # Another request has computed the prompt meanwhile.
        assert scheduler.get_num_new_matched_tokens(request, 32) == NO_MATCH
        assert scheduler.get_num_new_matched_tokens(request, 0) == PENDING
    scheduler.update_connector_output(KVConnectorOutput())
    assert scheduler.get_num_new_matched_tokens(request, 0).num_tokens == 32
    begin_load(scheduler, request, (tuple(range(1, 9)),), end=32)  # asks again: there were no free blocks


@pytest.mark.parametrize(
    ("groups", "num_chunks", "num_tokens"), [((SPEC, SPEC), 16, 24), ((SPEC, SPEC), 8, 0), ((SPEC, WINDOW), 10, 0)]
)
def test_the_groups_of_a_prompt_larger_than_memory_do_not_evict_each_other(
    groups: tuple[KVCacheSpec, ...], num_chunks: int, num_tokens: int
) -> None:
    """Else each would be read from the disk again and again, until the request has waited too long."""
    tier = FakeTier(OffloadRegion(num_chunks, CHUNK_BYTES))
    manager = OffloadingManager(num_chunks, LRUPolicy(), [tier])
    scheduler = make_scheduler(manager, groups=groups)
    request = add_request(scheduler, "r", 10)
    for group in range(len(groups)):
        tier.bytes.update({(group, block_hash): (bytes(CHUNK_BYTES), None) for block_hash in request.block_hashes})
    for _ in range(3):
        found = scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.update_connector_output(KVConnectorOutput())
    assert found != PENDING
    assert found.num_tokens == num_tokens
    assert scheduler.counters()["num_promoted"] <= num_chunks
    scheduler.check_integrity()


def test_a_request_awaits_once_what_a_tier_cannot_read_now() -> None:
    tier = FakeTier(OffloadRegion(9, CHUNK_BYTES), outcome=lambda key: key != make_key(2))
    tier.keeps_failed = True
    manager = OffloadingManager(9, LRUPolicy(), [tier])
    scheduler = make_scheduler(manager)
    for number in range(4):
        tier.bytes[make_key(number)] = (bytes(CHUNK_BYTES), None)
    request = add_request(scheduler, "r", 4)
    assert scheduler.get_num_new_matched_tokens(request, 0) == PENDING
    scheduler.update_connector_output(KVConnectorOutput())
    assert scheduler.get_num_new_matched_tokens(request, 8) == NO_MATCH
    begin_load(scheduler, request, ((1, 2),), end=8)
    tier.outcome = lambda key: True
    other = add_request(scheduler, "other", 4)
    assert scheduler.get_num_new_matched_tokens(other, 0) == PENDING
    scheduler.update_connector_output(KVConnectorOutput())
    assert scheduler.get_num_new_matched_tokens(other, 0).num_tokens == 16


def test_what_a_hung_tier_has_is_computed_after_one_request_has_waited() -> None:
    tier = FakeTier(OffloadRegion(9, CHUNK_BYTES), num_delays=2)
    manager = OffloadingManager(9, LRUPolicy(), [tier])
    scheduler = make_scheduler(manager)
    store(scheduler, add_request(scheduler, "first", 1), 1)
    scheduler.update_connector_output(KVConnectorOutput())
    for number in range(3):
        tier.bytes[make_key(number)] = (bytes(CHUNK_BYTES), None)
    waiting, also, other = (add_request(scheduler, name, 3) for name in ("waiting", "also", "other"))
    assert scheduler.get_num_new_matched_tokens(waiting, 0) == PENDING
    assert scheduler.get_num_new_matched_tokens(also, 0) == PENDING
    scheduler.cancel_load(waiting)
    assert scheduler.get_num_new_matched_tokens(also, 0) == PENDING, "what it awaits has just begun"
    scheduler._clock.advance(3.1)
    scheduler.cancel_load(waiting)
    assert scheduler.get_num_new_matched_tokens(also, 0).num_tokens == 4, "what memory has"
    assert scheduler.get_num_new_matched_tokens(other, 0).num_tokens == 4
    # What the engine is storing is not its business.
    manager.prepare_store([(make_key(9), 0)])
    manager.give_up([make_key(0), make_key(1), make_key(8), make_key(9)])
    assert [manager.lookup(make_key(number)) for number in (0, 1, 9)] == [HIT, MISS, PENDING_KEY]
    manager.complete_store(make_key(9), None, success=True)
    manager.check_integrity()
    # It is found again when the tier has answered.
    for _ in range(4):
        scheduler.update_connector_output(KVConnectorOutput())
    manager.check_integrity()
    assert scheduler.get_num_new_matched_tokens(other, 0) == PENDING


def test_only_the_first_request_waits_for_a_hung_tier_however_short_its_patience_is() -> None:
    tier = FakeTier(OffloadRegion(9, CHUNK_BYTES), num_delays=9)
    scheduler = make_scheduler(OffloadingManager(9, LRUPolicy(), [tier]), load_timeout=2.0)
    tier.bytes[make_key(0)] = (bytes(CHUNK_BYTES), None)
    first, second = (add_request(scheduler, name, 1) for name in ("first", "second"))
    assert scheduler.get_num_new_matched_tokens(first, 0) == PENDING
    scheduler._clock.advance(2.0)
    scheduler.cancel_load(first)
    assert scheduler.get_num_new_matched_tokens(second, 0) == NO_MATCH
    scheduler.check_integrity()


# ---- Costs ----


def test_a_load_costs_as_much_as_its_slowest_medium() -> None:
    region = OffloadRegion(4, CHUNK_BYTES)
    tier, costs = FakeTier(region), Mock(should_load=Mock(return_value=False))
    manager = OffloadingManager(4, LRUPolicy(), [tier])
    scheduler, num_bytes = make_scheduler(manager, costs=costs), 2 * SPEC.block_bytes(4)
    store(scheduler, add_request(scheduler, "first", 1), 1)
    manager.poll()
    tier.bytes[make_key(1)] = (bytes(CHUNK_BYTES), None)
    request = add_request(scheduler, "second", 2)
    assert scheduler.get_num_new_matched_tokens(request, 0) == NO_MATCH
    costs.should_load.assert_called_once_with("STORAGE", 8, num_bytes)
    assert not tier.has_pending_work()
    costs.should_load.return_value, tier.seconds = True, 1.0
    assert scheduler.get_num_new_matched_tokens(request, 0) == PENDING
    scheduler._clock.advance(1.0)
    for _ in range(2):
        scheduler.update_connector_output(KVConnectorOutput())
    job_id = begin_load(scheduler, request, ((1, 2),), end=8)
    scheduler._clock.advance(2.0)
    report(scheduler, job_id, 0)
    costs.on_loaded.assert_called_once_with("STORAGE", num_bytes, 3.0)


def test_the_wait_of_a_promoted_prompt_for_free_blocks_is_no_cost_of_its_medium() -> None:
    """Else a busy engine measures a disk as slow, and computes what the disk has."""
    tier, costs = FakeTier(OffloadRegion(4, CHUNK_BYTES)), Mock(should_load=Mock(return_value=True))
    tier.seconds = 0.5
    scheduler, num_bytes = make_scheduler(OffloadingManager(4, LRUPolicy(), [tier]), costs=costs), SPEC.block_bytes(4)
    tier.bytes[make_key(0)] = (bytes(CHUNK_BYTES), None)
    request = add_request(scheduler, "r", 1)
    assert scheduler.get_num_new_matched_tokens(request, 0) == PENDING
    scheduler._clock.advance(1.0)
    scheduler.update_connector_output(KVConnectorOutput())
    for _ in range(9):
        assert scheduler.get_num_new_matched_tokens(request, 0).num_tokens == 4
        scheduler._clock.advance(10.0)
    job_id = begin_load(scheduler, request, ((1,),), end=4)
    scheduler._clock.advance(2.0)
    report(scheduler, job_id, 0)
    # The chunk is in memory now.
    job_id = begin_load(scheduler, add_request(scheduler, "other", 1), ((2,),), end=4)
    scheduler._clock.advance(2.0)
    report(scheduler, job_id, 0)
    assert costs.on_loaded.mock_calls == [call("STORAGE", num_bytes, 2.5), call("CPU", num_bytes, 2.0)]


def test_a_load_from_memory_is_measured_from_its_allocation() -> None:
    costs = Mock()
    scheduler = make_scheduler(OffloadingManager(4, LRUPolicy()), costs=costs)
    store(scheduler, add_request(scheduler, "first", 1), 1)
    scheduler._clock.advance(5.0)
    job_id = begin_load(scheduler, add_request(scheduler, "second", 1), ((1,),), end=4)
    scheduler._clock.advance(2.0)
    report(scheduler, job_id, 0)
    costs.on_loaded.assert_called_once_with("CPU", SPEC.block_bytes(4), 2.0)


def test_overlapping_steps_are_not_counted_twice() -> None:
    costs = Mock()
    scheduler = make_scheduler(OffloadingManager(4, LRUPolicy()), costs=costs)
    for num_tokens in (64, 63, 70):
        scheduler.build_connector_meta(SchedulerOutput(step=1, total_num_scheduled_tokens=num_tokens))
        scheduler._clock.advance(1.0)
    for _ in range(3):
        scheduler.update_connector_output(KVConnectorOutput())
        scheduler._clock.advance(0.5)
    # The second step is too small to measure a prefill.
    assert costs.on_computed.mock_calls == [call(64, 3.0), call(70, 0.5)]
