"""Which states of recurrent layers are kept, and the hits that begin with them."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.kv_cache_manager import KVCacheManager
from penstock.core.request import Request
from penstock.messages.kv_cache_spec import NULL_BLOCK, KVCacheConfig, KVCacheGroup, KVCacheSpec
from penstock.messages.requests import EngineRequest
from penstock.messages.sampling_params import SamplingParams
from penstock.messages.stats import StateCounts

BLOCK_SIZE, NUM_BLOCKS = 4, 40
GROUPS = (
    KVCacheGroup(("attention",), KVCacheSpec.keys_and_values(1, 8, "float32")),
    KVCacheGroup(("recurrent",), KVCacheSpec.states(2, 64, 0, 2)),
)


def manager(
    num_states: int = 12, interval: int = 0, num_uncertain: int = 0, *, has_prefix_cache: bool = True
) -> KVCacheManager:
    config = KVCacheConfig(
        NUM_BLOCKS,
        BLOCK_SIZE,
        GROUPS,
        num_states=num_states,
        checkpoint_interval=interval,
        num_uncertain_tokens=num_uncertain,
    )
    return KVCacheManager(config, enable_prefix_caching=has_prefix_cache)


def make_request(tokens: list[int], name: str = "a", **params: Any) -> Request:
    data = EngineRequest(
        request_id=name,
        prompt_token_ids=tuple(tokens),
        sampling_params=SamplingParams(kv_transfer_params=params),
        max_tokens=30,
        seed=0,
    )
    return Request(data, 0, BLOCK_SIZE)


def start(kv: KVCacheManager, request: Request) -> int:
    """Admits a request and computes its prompt; returns the length of its hit."""
    hit = kv.find_prefix(request)
    assert kv.admit(request, hit, request.num_tokens) is not None
    request.admit(1, hit.num_tokens)
    step(kv, request, request.num_tokens - hit.num_tokens, [1000])
    return hit.num_tokens


def step(kv: KVCacheManager, request: Request, count: int, sampled: list[int], num_drafts: int = 0) -> None:
    request.num_drafts = num_drafts
    request.on_scheduled(1, count, num_drafts=num_drafts, num_new_drafts=0)
    request.on_processed(count, num_drafts=num_drafts, num_sampled=len(sampled))
    for token in sampled:
        request.append_output(token)
    kv.publish(request)


def decode(kv: KVCacheManager, request: Request, count: int) -> None:
    for token in range(2000, 2000 + count):
        assert kv.grow(request, request.num_computed_tokens + 1) is not None
        step(kv, request, 1, [token])


def run(kv: KVCacheManager, tokens: list[int], num_output: int = 1) -> tuple[int, Request]:
    """Runs a request to its end; returns the length of its hit, and the request."""
    request = make_request(tokens)
    length = start(kv, request)
    decode(kv, request, num_output - 1)
    kv.release(request, fence=0)
    kv.check_integrity()
    return length, request


def states_of(kv: KVCacheManager, request: Request) -> list[bool]:
    """Returns which blocks of the request have a state."""
    return [block_id != NULL_BLOCK for block_id in kv.block_ids(request)[1]]


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 4), (13, 12), (16, 12), (17, 16)])
def test_an_equal_prompt_begins_with_the_state_at_its_last_whole_block(length: int, hit: int) -> None:
    kv = manager()
    assert run(kv, list(range(length)))[0] == 0
    assert run(kv, list(range(length)))[0] == hit


def test_states_in_the_middle_of_a_prompt_are_not_kept() -> None:
    kv = manager()
    request = make_request(list(range(30)))
    start(kv, request)
    assert states_of(kv, request) == [False] * 6 + [True, True]


def test_where_prompts_part_the_second_keeps_a_state_for_the_third() -> None:
    kv, shared = manager(), list(range(17))
    assert [run(kv, [*shared, *range(start, start + 9)])[0] for start in (100, 200, 300)] == [0, 0, 16]


def test_every_so_many_tokens_a_state_is_kept() -> None:
    kv = manager(interval=8)
    request = make_request(list(range(30)))
    start(kv, request)
    assert states_of(kv, request) == [False, True, False, True, False, True, True, True]
    assert kv.pool.state_counts == StateCounts(held=5, checkpoints=0)
    kv.release(request, fence=0)
    # The state in the middle of a block is no use to others.
    assert kv.pool.state_counts == StateCounts(held=0, checkpoints=4)
    assert kv.find_prefix(make_request([*range(21), 99, 98, 97])).num_tokens == 16


@pytest.mark.parametrize("num_output", range(1, 12))
def test_the_next_turn_begins_with_the_state_at_the_end_of_the_answer(num_output: int) -> None:
    kv = manager()
    _, request = run(kv, list(range(14)), num_output)
    known = 14 + num_output - 1
    found = kv.find_prefix(make_request([*request.token_ids, *range(50, 60)]))
    assert found.num_tokens == known // BLOCK_SIZE * BLOCK_SIZE


def test_a_long_answer_holds_few_states() -> None:
    kv = manager(num_states=6)
    request = make_request(list(range(14)))
    start(kv, request)
    for _ in range(8):
        decode(kv, request, 3)
        assert sum(states_of(kv, request)) <= 3


def test_the_state_that_another_engine_begins_with_outlives_a_long_answer() -> None:
    kv = manager(num_states=6)
    request = make_request(list(range(14)), do_remote_decode=True)
    start(kv, request)
    for _ in range(8):
        decode(kv, request, 3)
        assert sum(states_of(kv, request)) <= 4
        kv.check_integrity()
    tokens, states = kv.blocks_for_others(request)
    assert [index for index, block_id in enumerate(states) if block_id != NULL_BLOCK] == [2]
    assert NULL_BLOCK not in tokens[:3]
    # It is not evicted either.
    other = make_request(list(range(100, 130)), "b")
    assert start(kv, other) == 0
    assert kv.blocks_for_others(request)[1] == states
    kv.release(request, fence=0)
    kv.release(other, fence=0)
    kv.check_integrity()
    assert kv.pool.state_counts.held == 0


def test_a_connector_finds_no_state_that_its_request_has_released() -> None:
    """It may be asked to store old blocks too, and the block has another request's state by then."""
    kv = manager(num_states=5)
    run(kv, list(range(17)))
    request = make_request([*range(17), *range(50, 60)])
    assert start(kv, request) == 16
    assert [index for index, block_id in enumerate(kv.published_blocks(request)[1]) if block_id] == [3, 5]
    decode(kv, request, 9)
    other = make_request(list(range(100, 130)), "b")
    start(kv, other)
    own = kv.block_ids(request)[1]
    assert all(block_id in (NULL_BLOCK, own[index]) for index, block_id in enumerate(kv.published_blocks(request)[1]))
    kv.check_integrity()


def test_without_a_prefix_cache_no_state_is_offered_to_connectors() -> None:
    """Nor the one that another engine begins with, which stays when those around it are released."""
    kv = manager(num_states=6, has_prefix_cache=False)
    request = make_request(list(range(14)), do_remote_decode=True)
    start(kv, request)
    for _ in range(8):
        decode(kv, request, 3)
        assert not kv.published_blocks(request)[1]
    assert any(kv.blocks_for_others(request)[1])


@pytest.mark.parametrize("num_local", [0, 2])
@pytest.mark.parametrize("num_loaded", [1, 2, 4])
def test_a_state_that_is_loaded_by_the_step_that_needs_it_has_a_block(num_local: int, num_loaded: int) -> None:
    """Wherever it is: without one the step would begin with the state of no tokens."""
    kv = manager(num_uncertain=3)
    run(kv, list(range(num_local * BLOCK_SIZE + 1)))
    request, end = make_request([*range(9), *range(50, 90)]), num_local + num_loaded
    hit = kv.find_prefix(request)
    assert hit.num_blocks == num_local
    assert kv.admit(request, hit, request.num_tokens + 3, num_loaded * BLOCK_SIZE) is not None
    assert states_of(kv, request)[: end + 1] == [False] * (end - 1) + [True, False]
    request.admit(1, end * BLOCK_SIZE)
    step(kv, request, request.num_tokens - end * BLOCK_SIZE, [1000])
    kv.release(request, fence=0)
    kv.check_integrity()
    follower = make_request([*request.prompt_token_ids[: end * BLOCK_SIZE], 99, 98], "b")
    assert kv.find_prefix(follower).num_blocks == end, "it is found like a state that was computed"


def test_the_state_before_accepted_drafts_is_published_when_it_contains_them() -> None:
    kv = manager(num_uncertain=3)
    request = make_request(list(range(14)))
    start(kv, request)
    assert kv.grow(request, 18) is not None
    # One known token and two accepted drafts: tokens 14 to 16, of which the state contains the first.
    step(kv, request, 3, [5, 6, 7], num_drafts=2)
    assert kv.published_blocks(request)[0][-1] != NULL_BLOCK
    assert len(kv.published_blocks(request)[1]) == 3
    assert kv.grow(request, 18) is not None
    step(kv, request, 1, [8])
    kv.release(request, fence=0)
    assert kv.find_prefix(make_request([*request.token_ids, 1, 2])).num_tokens == 16


def test_a_state_in_use_is_not_evicted_and_too_few_states_admit_nothing() -> None:
    kv = manager(num_states=2)
    first, second = make_request(list(range(14))), make_request(list(range(50, 64)), "b")
    start(kv, first)
    assert kv.admit(second, kv.find_prefix(second), 14) is None
    kv.release(first, fence=0)
    start(kv, second)
    kv.check_integrity()
    assert kv.find_prefix(make_request(list(range(14)))).num_tokens == 0, "its state made room for the second's"


def test_a_waiting_request_waits_for_a_state_only() -> None:
    """It has a prefix in common with a running one, which ends where no state is kept, or where one is."""
    kv = manager()
    running = make_request(list(range(30)))
    assert kv.admit(running, kv.find_prefix(running), 30) is not None
    other, equal = make_request([*range(20), *range(90, 99)], "b"), make_request(list(range(30)), "c")
    assert not kv.is_being_computed(other, kv.find_prefix(other))
    assert kv.is_being_computed(equal, kv.find_prefix(equal))
