"""The CPU tier's index: random operations with a check of all bytes, and tests of its guarantees."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.kv_transfer.offload import OffloadKey
from penstock.kv_transfer.offload.manager import LookupResult, OffloadingManager, StoredChunk
from penstock.kv_transfer.offload.messages import StateChunks
from penstock.kv_transfer.offload.policies import ARCPolicy, LRUPolicy
from penstock.kv_transfer.offload.region import OffloadRegion
from penstock.kv_transfer.offload.tiers.base import OffloadEvent
from penstock.utils.digest import digest
from tests.unit.offload_fakes import CHUNK_BYTES, FakeTier, content, make_key

NUM_CHUNKS = 5
STATES = StateChunks(group=1, num_chunks=2, chunk_bytes=3 * CHUNK_BYTES)
NUM_ALL = NUM_CHUNKS + STATES.num_chunks
PROMPTS = [[make_key(10 * prompt + place, prompt // 3) for place in range(4)] for prompt in range(4)]
KEYS = [key for prompt in PROMPTS for key in prompt]
HIT, PENDING, MISS = LookupResult.HIT, LookupResult.PENDING, LookupResult.MISS

prompts = st.sampled_from(PROMPTS)
lengths = st.integers(1, 4)
picks = st.integers(0, 1000)
# Operations that empty the tiers must be rarer than operations that fill them.
rarely = st.sampled_from([False] * 7 + [True])


def whole(key: OffloadKey) -> bytes:
    """Returns the content of the key's chunk, which is larger for a state."""
    return content(key, STATES.chunk_bytes if key[0] == STATES.group else CHUNK_BYTES)


def write(region: OffloadRegion, key: OffloadKey, chunk_id: int) -> None:
    region.chunk(chunk_id)[:] = whole(key)


class Replay:
    """The state as a reader of the events knows it."""

    def __init__(self) -> None:
        self.keys: dict[str, set[OffloadKey]] = {"CPU": set(), "STORAGE": set(), "SLOW": set()}

    def apply(self, events: list[OffloadEvent]) -> None:
        for event in events:
            there = self.keys[event.medium]
            assert (event.key in there) != event.is_stored, f"{event} changes nothing"
            (there.add if event.is_stored else there.remove)(event.key)


class ManagerMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 999), arc=st.booleans(), delays=st.integers(0, 2), reliable=st.booleans())
    def start(self, seed: int, arc: bool, delays: int, reliable: bool) -> None:
        chance = random.Random(seed)
        self.region = OffloadRegion(NUM_CHUNKS, CHUNK_BYTES, STATES)
        succeeds = (lambda key: True) if reliable else (lambda key: chance.random() < 0.6)
        self.tiers = [
            FakeTier(self.region, succeeds, num_delays=delays, max_jobs=3),
            FakeTier(self.region, succeeds, medium="SLOW", num_delays=3),
        ]
        self.policies = [ARCPolicy(count) if arc else LRUPolicy() for count in (NUM_CHUNKS, STATES.num_chunks)]
        policy, state_policy = self.policies
        self.manager = OffloadingManager(NUM_CHUNKS, policy, self.tiers, 4, 3, STATES, state_policy)
        self.stores: list[tuple[OffloadKey, int]] = []
        self.loads: list[list[tuple[OffloadKey, StoredChunk]]] = []
        self.stale: set[OffloadKey] = set()
        self.replay = Replay()

    @rule(prompt=prompts, length=lengths)
    def begin_store(self, prompt: list[OffloadKey], length: int) -> None:
        wanted = prompt[:length]
        before = {key: self.manager.lookup(key) for key in wanted}
        stores = self.manager.prepare_store([(key, place) for place, key in enumerate(wanted)])
        missing = [key for key in wanted if before[key] is MISS]
        assert all(key in missing for key, _ in stores)
        for key in wanted:
            assert before[key] is not HIT or self.manager.lookup(key) is HIT, "keys of the call are protected"
        self.stores += stores

    @rule(pick=picks, success=st.booleans(), attested=st.booleans())
    def end_store(self, pick: int, success: bool, attested: bool) -> None:
        if not self.stores:
            return
        key, chunk_id = self.stores.pop(pick % len(self.stores))
        # The bytes are complete only now.
        if success:
            write(self.region, key, chunk_id)
        was_stale = key in self.stale
        self.stale.discard(key)
        self.manager.complete_store(key, digest(content(key)) if attested else None, success)
        assert self.manager.lookup(key) is (HIT if success and not was_stale else MISS)

    @rule(prompt=prompts, length=lengths)
    def store_and_settle(self, prompt: list[OffloadKey], length: int) -> None:
        """Stores a prompt and lets it cascade, which is the usual case and fills the tiers."""
        self.begin_store(prompt, length)
        while self.stores:
            self.end_store(0, True, True)
        for _ in range(4):
            self.manager.poll()

    @rule(prompt=prompts, length=lengths)
    def begin_load(self, prompt: list[OffloadKey], length: int) -> None:
        found = []
        for key in prompt[:length]:
            if self.manager.lookup(key) is not HIT:
                break
            found.append(key)
        self.loads.append(list(zip(found, self.manager.prepare_load(found), strict=True)))

    @rule(pick=picks)
    def end_load(self, pick: int) -> None:
        if self.loads:
            load = self.loads.pop(pick % len(self.loads))
            self.manager.complete_load([key for key, _ in load])

    @rule(prompt=prompts, length=st.integers(2, 4), polls=st.integers(0, 2))
    def bring_up(self, prompt: list[OffloadKey], length: int, polls: int) -> None:
        """Acts as a request that waits for its prompt."""
        self.promote(prompt, length)
        for _ in range(polls):
            self.manager.poll()
        self.begin_load(prompt, length)

    @rule(prompt=prompts, length=lengths)
    def promote(self, prompt: list[OffloadKey], length: int) -> None:
        count = self.manager.promote(prompt[:length])
        assert all(self.manager.lookup(key) is not MISS for key in prompt[:count])
        assert count == length or self.manager.lookup(prompt[count]) is MISS

    @rule()
    def poll(self) -> None:
        self.manager.poll()

    @rule(key=st.sampled_from(KEYS), happens=rarely)
    def mark_bad(self, key: OffloadKey, happens: bool) -> None:
        if not happens:
            return
        if key in {stored for stored, _ in self.stores}:
            self.stale.add(key)
        self.manager.mark_bad(key)
        assert self.manager.lookup(key) is MISS
        assert self.manager.medium_of(key) is None

    @rule(happens=rarely)
    def reset(self, happens: bool) -> None:
        if not happens:
            return
        self.stale |= {key for key, _ in self.stores}
        self.manager.reset()
        assert all(self.manager.lookup(key) is MISS and self.manager.medium_of(key) is None for key in KEYS)

    @rule()
    def take_events(self) -> None:
        self.replay.apply(self.manager.take_events())
        assert self.replay.keys["CPU"] == {key for key in KEYS if self.manager.lookup(key) is HIT}
        for tier in self.tiers:
            assert self.replay.keys[tier.medium] == tier.bytes.keys()

    @invariant()
    def the_index_is_consistent(self) -> None:
        self.manager.check_integrity()
        for policy in self.policies:
            if isinstance(policy, ARCPolicy):
                policy.check_integrity()
        stats = self.manager.stats
        parts = (stats.num_free, stats.num_stored, stats.num_being_written, stats.num_pinned)
        assert min(parts) >= 0, stats
        assert sum(parts) == NUM_ALL, stats

    @invariant()
    def loadable_chunks_have_the_content_of_their_keys(self) -> None:
        for key in KEYS:
            if self.manager.lookup(key) is HIT:
                chunk = self.manager._chunks[key]
                assert self.region.chunk(chunk.chunk_id) == whole(key)
                assert chunk.digest in (None, digest(content(key)))
        for tier in self.tiers:
            for key, (data, _) in tier.bytes.items():
                assert data == whole(key)

    @invariant()
    def chunks_that_are_being_loaded_do_not_change(self) -> None:
        for load in self.loads:
            for key, chunk in load:
                assert self.region.chunk(chunk.chunk_id) == whole(key)

    def teardown(self) -> None:
        """When all jobs have ended, nothing is pinned, and a reset frees every chunk."""
        if not hasattr(self, "manager"):
            return
        while self.stores:
            self.end_store(0, True, False)
        while self.loads:
            self.end_load(0)
        for _ in range(6):
            self.manager.poll()
        assert not self.manager.has_pending_work
        assert self.manager.stats.num_pinned == self.manager.stats.num_being_written == 0
        self.manager.reset()
        assert self.manager.stats.num_free == NUM_ALL
        self.take_events()
        assert not any(self.replay.keys.values())


TestStorm = ManagerMachine.TestCase
TestStorm.settings = settings(max_examples=200, stateful_step_count=50)


@pytest.mark.parametrize("seed", range(8))
def test_a_long_storm(seed: int) -> None:
    """Hypothesis generates short sequences; these are long ones, with all chunks in use."""
    chance = random.Random(seed)
    machine = ManagerMachine()
    machine.start(seed=seed, arc=bool(seed % 2), delays=seed % 3, reliable=seed < 3)
    for _ in range(1500):
        prompt, length, pick = chance.choice(PROMPTS), chance.randint(1, 4), chance.randrange(1500)
        act, arguments = chance.choice(
            [
                (machine.begin_store, (prompt, length)),
                (machine.end_store, (pick, chance.random() < 0.8, True)),
                (machine.end_store, (pick, True, False)),
                (machine.begin_load, (prompt, length)),
                (machine.end_load, (pick,)),
                (machine.end_load, (pick,)),
                (machine.promote, (prompt, length)),
                (machine.bring_up, (prompt, length, 1)),
                (machine.poll, ()),
                (machine.mark_bad, (chance.choice(KEYS), chance.random() < 0.2)),
                (machine.reset, (chance.random() < 0.03,)),
                (machine.take_events, ()),
            ]
        )
        act(*arguments)
        # With more open loads every chunk would be pinned, and nothing could change.
        while len(machine.loads) > 2:
            machine.end_load(pick)
        machine.the_index_is_consistent()
        machine.loadable_chunks_have_the_content_of_their_keys()
        machine.chunks_that_are_being_loaded_do_not_change()
    stats = machine.manager.stats
    assert min(stats.num_promoted, stats.num_evicted, stats.num_cascaded, stats.num_loads) > 5, stats
    machine.teardown()


class World:
    """A manager with one tier, and methods for common sequences."""

    def __init__(self, num_chunks: int = 4, **options: int) -> None:
        self.region = OffloadRegion(num_chunks, CHUNK_BYTES)
        self.tier = FakeTier(self.region)
        self.manager = OffloadingManager(num_chunks, LRUPolicy(), [self.tier], **options)

    def store(self, *numbers: int) -> list[int]:
        stores = self.manager.prepare_store([(make_key(number), place) for place, number in enumerate(numbers)])
        for key, chunk_id in stores:
            write(self.region, key, chunk_id)
            self.manager.complete_store(key, digest(content(key)), success=True)
        return [chunk_id for _, chunk_id in stores]

    def lookups(self, *numbers: int) -> list[LookupResult]:
        return [self.manager.lookup(make_key(number)) for number in numbers]


def test_a_chunk_is_found_only_when_it_is_complete() -> None:
    manager = World().manager
    key = make_key(1)
    assert [place for _, place in manager.prepare_store([(key, 0)])] == [0]
    assert manager.lookup(key) is PENDING
    assert manager.prepare_store([(key, 0)]) == [], "it is being stored already"
    manager.complete_store(key, b"d" * 16, success=True)
    assert manager.prepare_load([key]) == [StoredChunk(0, b"d" * 16)]
    manager.complete_load([key])
    manager.check_integrity()


def test_states_and_blocks_of_tokens_do_not_evict_each_other() -> None:
    states = StateChunks(group=1, num_chunks=2, chunk_bytes=3 * CHUNK_BYTES)
    manager = OffloadingManager(3, LRUPolicy(), states=states, state_policy=LRUPolicy())

    def store(group: int, *numbers: int) -> list[int]:
        stores = manager.prepare_store([(make_key(number, group), place) for place, number in enumerate(numbers)])
        for key, _ in stores:
            manager.complete_store(key, None, success=True)
        manager.check_integrity()
        return [chunk_id for _, chunk_id in stores]

    def present(group: int) -> list[int]:
        return [number for number in range(9) if manager.lookup(make_key(number, group)) is HIT]

    assert store(0, 0, 1, 2) == [0, 1, 2]
    assert store(1, 0) == [3]
    assert store(1, 1) == [4]
    assert store(1, 2) == [3], "the oldest state leaves"
    assert (present(0), present(1)) == ([0, 1, 2], [1, 2])
    assert store(0, 5, 6) == [1, 2]
    assert (present(0), present(1)) == ([0, 5, 6], [1, 2])
    manager.touch([make_key(1, 1), make_key(0, 0)])
    store(1, 3)
    store(0, 7)
    assert (present(0), present(1)) == ([0, 5, 7], [1, 3])
    stats = manager.stats
    assert (stats.num_chunks, stats.num_free, stats.num_stored, stats.num_evicted) == (5, 0, 5, 5)
    manager.reset()
    manager.check_integrity()
    assert manager.stats.num_free == 5


def test_a_failed_store_leaves_no_entry() -> None:
    manager = World().manager
    key = make_key(1)
    manager.prepare_store([(key, 0)])
    manager.complete_store(key, None, success=False)
    assert manager.lookup(key) is MISS
    assert manager.stats.num_free == 4
    assert manager.take_events() == []
    manager.check_integrity()


def test_room_is_made_for_as_many_chunks_from_the_head_as_fit() -> None:
    world = World(4)
    world.store(1, 2, 3, 4)
    world.manager.poll()
    world.manager.prepare_load([make_key(1), make_key(2)])
    stores = world.manager.prepare_store([(make_key(number), number - 10) for number in (10, 11, 12)])
    assert [key for key, _ in stores] == [make_key(10), make_key(11)]
    assert world.lookups(1, 2, 3, 4) == [HIT, HIT, MISS, MISS]
    assert world.manager.stats.num_stores_without_room == 1
    world.manager.check_integrity()


def test_storing_a_longer_prompt_refreshes_its_head() -> None:
    world = World(4)
    for prompt in ((1, 2), (10, 11), (1, 2, 3), (20,), (21,)):
        world.store(*prompt)
        world.manager.poll()
    assert world.lookups(1, 2, 3, 10, 11, 20, 21) == [HIT, HIT, MISS, MISS, MISS, HIT, HIT], (
        "the tail was evicted first"
    )


def test_a_prompt_whose_head_is_still_being_written_keeps_it_longer_than_its_tail() -> None:
    """Another prompt with the same head has begun to store it."""
    world = World(3)
    first, second = ([(make_key(number), place) for place, number in enumerate(prompt)] for prompt in ((1,), (1, 2)))
    assert len(world.manager.prepare_store(first)) == 1
    assert len(world.manager.prepare_store(second)) == 1
    for number in (2, 1):
        world.manager.complete_store(make_key(number), None, success=True)
    world.manager.poll()
    world.store(3)
    world.store(4)
    assert world.lookups(1, 2) == [HIT, MISS]


def test_a_prompt_evicts_none_of_its_own_blocks_to_promote_others() -> None:
    world = World(2)
    world.store(1)
    world.manager.poll()
    keys = [make_key(number) for number in (1, 2, 3)]
    world.tier.bytes.update({key: (content(key), None) for key in keys})
    assert world.manager.promote(keys) == 2
    assert world.lookups(1, 2, 3) == [HIT, PENDING, MISS]


def test_chunks_that_a_tier_has_are_not_stored_there_again() -> None:
    world = World(1)
    for number in (1, 2):
        world.store(number)
        world.manager.poll()
    world.store(1)
    assert not world.tier.has_pending_work()
    assert world.manager.stats.num_cascaded == 2


def test_tiers_share_the_time_to_wait() -> None:
    region = OffloadRegion(2, CHUNK_BYTES)
    waits: list[tuple[str, float]] = []
    tiers = [FakeTier(region, medium=name, num_delays=1) for name in ("STORAGE", "SLOW", "IDLE")]
    for tier in tiers:
        tier.wait = lambda seconds, name=tier.medium: waits.append((name, seconds))
    manager = OffloadingManager(2, LRUPolicy(), tiers)
    tiers[2].max_jobs = 0
    manager.prepare_store([(make_key(1), 0)])
    manager.complete_store(make_key(1), None, success=True)
    manager.wait(3.0)
    assert waits == [("STORAGE", 1.5), ("SLOW", 1.5)]


def test_evicted_chunks_are_promoted_from_the_tier() -> None:
    world = World(2)
    world.store(1, 2)
    world.manager.poll()
    world.store(3, 4)
    world.manager.poll()
    keys = [make_key(1), make_key(2), make_key(99)]
    assert world.lookups(1, 2) == [MISS, MISS]
    assert [world.manager.medium_of(key) for key in keys] == ["STORAGE", "STORAGE", None]
    assert world.manager.promote(keys) == 2
    assert world.manager.promote(keys) == 2, "a repeated call starts nothing"
    assert world.lookups(1, 2) == [PENDING, PENDING]
    world.manager.poll()
    for key, chunk in zip(keys, world.manager.prepare_load(keys[:2]), strict=False):
        assert world.region.chunk(chunk.chunk_id) == content(key)
        assert chunk.digest == digest(content(key)), "the tier returns the digest with the bytes"
    assert world.manager.stats.num_promoted == 2
    world.manager.check_integrity()


def test_a_failed_promotion_is_a_miss_and_is_not_retried() -> None:
    world = World(2)
    world.store(1, 2)
    world.manager.poll()
    world.store(3, 4)
    world.manager.poll()
    world.tier.outcome = lambda key: key != make_key(2)
    assert world.manager.promote([make_key(1), make_key(2)]) == 2
    world.manager.poll()
    assert world.lookups(1, 2) == [HIT, MISS]
    assert world.manager.promote([make_key(1), make_key(2)]) == 1
    assert world.manager.medium_of(make_key(2)) is None
    assert world.manager.stats.num_promotions_failed == 1
    world.manager.check_integrity()


def test_a_corrupted_chunk_is_forgotten_at_once_and_freed_at_the_last_unpin() -> None:
    world = World(1)
    world.store(1)
    world.manager.poll()
    key = make_key(1)
    world.manager.prepare_load([key])
    world.manager.prepare_load([key])
    world.manager.mark_bad(key)
    assert world.manager.lookup(key) is MISS
    assert world.manager.promote([key]) == 0
    assert not world.tier.lookup(key)
    world.manager.complete_load([key])
    assert world.manager.prepare_store([(key, 0)]) == [], "the old chunk is still being read"
    world.manager.complete_load([key])
    assert len(world.manager.prepare_store([(key, 0)])) == 1
    world.manager.check_integrity()


def test_a_chunk_with_bad_bytes_is_not_replaced_while_it_is_being_read() -> None:
    """Another engine may store the key again in a tier that both use."""
    world = World(2)
    world.store(1)
    world.manager.poll()
    key = make_key(1)
    world.manager.prepare_load([key])
    world.manager.mark_bad(key)
    world.tier.bytes[key] = (content(key), None)
    assert world.manager.promote([key]) == 0
    world.manager.check_integrity()
    world.manager.complete_load([key])
    assert world.manager.promote([key]) == 1
    world.manager.check_integrity()


def test_corrupted_chunks_are_not_cascaded() -> None:
    world = World(1)
    world.store(1)
    world.manager.mark_bad(make_key(1))
    world.manager.poll()
    assert world.manager.medium_of(make_key(1)) is None
    assert world.manager.stats.num_free == 1


def test_a_reset_forgets_chunks_that_are_being_stored_or_loaded() -> None:
    world = World(4)
    world.tier.num_delays = 2
    world.store(1)
    for _ in range(3):
        world.manager.poll()
    world.manager.prepare_load([make_key(1)])
    world.manager.prepare_store([(make_key(2), 0)])
    world.manager.reset()
    assert world.lookups(1, 2) == [MISS, MISS]
    assert world.manager.stats.num_free == 2, "chunks in use are freed later"
    world.manager.complete_store(make_key(2), None, success=True)
    world.manager.complete_load([make_key(1)])
    assert world.lookups(1, 2) == [MISS, MISS]
    assert world.manager.stats.num_free == 4
    assert not world.tier.bytes
    world.manager.check_integrity()


def test_a_chunk_is_not_reused_while_it_cascades() -> None:
    world = World(1)
    world.tier.num_delays = 1
    world.store(1)
    assert world.manager.has_pending_work
    assert world.store(2) == []
    world.manager.poll()
    assert world.store(2) == []
    world.manager.poll()
    assert world.tier.bytes[make_key(1)] == (content(make_key(1)), digest(content(make_key(1))))
    assert world.store(2) == [0]


def test_cascades_and_promotions_are_bounded() -> None:
    world = World(4, max_cascading_chunks=2, max_promoting_chunks=1)
    world.tier.num_delays = 1
    world.store(1, 2, 3, 4)
    assert world.manager.stats.num_cascades_dropped == 2
    for _ in range(2):
        world.manager.poll()
    assert world.tier.bytes.keys() == {make_key(1), make_key(2)}
    world.store(5, 6, 7, 8)
    for _ in range(2):
        world.manager.poll()
    assert world.manager.promote([make_key(1), make_key(2)]) == 1
    world.manager.check_integrity()


def test_a_long_prompt_cascades_whole() -> None:
    world = World(1200)
    world.store(*range(300))
    assert world.manager.stats.num_cascades_dropped == 0
    world.store(*range(300, 320))
    assert world.manager.stats.num_cascades_dropped == 20


def test_refused_jobs_lose_nothing() -> None:
    world = World(2)
    world.store(1, 2)
    world.manager.poll()
    world.store(3, 4)
    world.manager.poll()
    world.tier.max_jobs = 0
    assert world.manager.promote([make_key(1)]) == 0
    assert world.manager.lookup(make_key(1)) is MISS
    assert world.tier.lookup(make_key(1)), "refused is not lost"
    world.store(5)
    assert world.manager.stats.num_promotions_refused == world.manager.stats.num_cascades_dropped == 1
    world.manager.check_integrity()


def test_the_first_tier_that_has_a_key_promotes_it() -> None:
    region = OffloadRegion(1, CHUNK_BYTES)
    tiers = [FakeTier(region, medium="STORAGE"), FakeTier(region, medium="SLOW")]
    manager = OffloadingManager(1, LRUPolicy(), tiers)
    for tier, numbers in zip(tiers, ((1,), (1, 2)), strict=True):
        tier.bytes = {make_key(number): (content(make_key(number)), None) for number in numbers}
    assert [manager.medium_of(make_key(number)) for number in (1, 2, 3)] == ["STORAGE", "SLOW", None]
    assert manager.promote([make_key(2)]) == 1
    assert [tier.has_pending_work() for tier in tiers] == [False, True]


def test_lookups_change_nothing() -> None:
    world = World(2)
    world.store(1)
    world.store(2)
    for _ in range(5):
        world.manager.lookup(make_key(1))
    world.manager.poll()
    world.store(3)
    assert world.lookups(1, 2, 3) == [MISS, HIT, HIT], "a lookup does not count as use"


def test_the_tiers_are_told_of_uses_from_head_to_tail() -> None:
    world = World(4)
    world.store(1, 2, 3)
    keys = [make_key(number) for number in (1, 2, 3)]
    world.manager.complete_load(keys if world.manager.prepare_load(keys) else [])
    assert world.tier.touched == keys
    world.tier.touched = []
    world.store(1, 2, 3, 4)
    assert world.tier.touched == keys, "storing a longer prompt is a use"


def test_an_unexpected_completion_is_an_assertion_error() -> None:
    manager = World().manager
    with pytest.raises(AssertionError, match="no store of"):
        manager.complete_store(make_key(1), None, success=True)
    with pytest.raises(AssertionError, match="no load of"):
        manager.complete_load([make_key(1)])


def test_events_report_only_changes() -> None:
    world = World(1)
    world.store(1)
    world.manager.poll()
    world.store(2)
    world.manager.poll()
    events = Counter((event.medium, event.is_stored) for event in world.manager.take_events())
    assert events == {("CPU", True): 1, ("STORAGE", True): 2}
    world.manager.reset()
    assert not any(event.is_stored for event in world.manager.take_events())
    assert world.manager.take_events() == []


def test_shutdown_reaches_every_tier() -> None:
    world = World()
    world.store(1)
    world.manager.shutdown()
    assert not world.tier.has_pending_work()
