"""Prefix hits: their length, and which requests share them."""

from __future__ import annotations

import pytest

from penstock.core.kv_cache_manager import KVCacheManager, PrefixHit
from penstock.core.request import Request, RequestStatus
from penstock.messages.kv_cache_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from penstock.messages.requests import EngineRequest
from penstock.messages.sampling_params import SamplingParams

BLOCK_SIZE = 4


@pytest.fixture
def kv() -> KVCacheManager:
    groups = (KVCacheGroup(("layer",), KVCacheSpec.keys_and_values(1, 8, "float32")),)
    return KVCacheManager(KVCacheConfig(32, BLOCK_SIZE, groups), enable_prefix_caching=True)


def make_request(prompt: range, salt: str | None = None, **params: int) -> Request:
    data = EngineRequest(
        request_id=f"{prompt} {salt}",
        prompt_token_ids=tuple(prompt),
        sampling_params=SamplingParams(**params),
        max_tokens=8,
        seed=0,
        cache_salt=salt,
    )
    return Request(data, 0, BLOCK_SIZE)


def run_and_release(kv: KVCacheManager, request: Request) -> None:
    """Computes the whole prompt, publishes its blocks and releases them."""
    hit = kv.find_prefix(request)
    assert kv.admit(request, hit, request.num_tokens) is not None
    request.admit(1, hit.num_tokens)
    count = request.num_tokens - hit.num_tokens
    request.on_scheduled(1, count, num_drafts=0, num_new_drafts=0)
    assert kv.find_prefix(request).num_blocks == hit.num_blocks, "a step in flight has published its blocks"
    request.on_processed(count, num_drafts=0, num_sampled=1)
    kv.publish(request)
    kv.release(request, fence=0)
    kv.check_integrity()


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_a_hit_never_covers_the_last_prompt_token(kv: KVCacheManager, length: int, hit: int) -> None:
    run_and_release(kv, make_request(range(length)))
    assert kv.find_prefix(make_request(range(length))).num_tokens == hit


def test_another_salt_shares_nothing(kv: KVCacheManager) -> None:
    run_and_release(kv, make_request(range(13), "a"))
    assert kv.find_prefix(make_request(range(13), "a")).num_tokens == 12
    assert kv.find_prefix(make_request(range(13), "b")).num_tokens == 0
    assert kv.find_prefix(make_request(range(13))).num_tokens == 0


def test_prompt_logprobs_need_every_position(kv: KVCacheManager) -> None:
    run_and_release(kv, make_request(range(13)))
    assert kv.find_prefix(make_request(range(13), prompt_logprobs=1)).num_tokens == 0


def test_blocks_that_another_request_is_computing_are_recognised(kv: KVCacheManager) -> None:
    first, twin = make_request(range(13)), make_request(range(13))
    hit = kv.find_prefix(first)
    assert not kv.is_being_computed(twin, hit)
    kv.admit(first, hit, 13)
    assert kv.is_being_computed(twin, kv.find_prefix(twin))
    kv.release(first, fence=0)
    assert not kv.is_being_computed(twin, kv.find_prefix(twin))


def test_blocks_that_a_request_only_loads_are_not_being_computed(kv: KVCacheManager) -> None:
    first, twin = make_request(range(13)), make_request(range(13))
    hit = kv.find_prefix(first)
    kv.admit(first, hit, num_tokens=8, num_external=8)
    first.set_status(RequestStatus.WAITING_FOR_REMOTE_KV)
    assert not kv.is_being_computed(twin, hit)
    kv.check_integrity()
    assert kv.publish_loaded(first, 0, 2, bad=set()) == 8
    kv.release(first, fence=0)
    first.set_status(RequestStatus.WAITING)
    kv.check_integrity()
    hit = kv.find_prefix(first)
    assert hit.num_blocks == 2
    kv.admit(first, hit, num_tokens=13)
    assert kv.is_being_computed(twin, kv.find_prefix(twin)), "the third block is computed"
    kv.check_integrity()


def test_a_request_that_generates_a_block_of_anothers_prompt_ends_only_its_own_count(kv: KVCacheManager) -> None:
    short, long, twin = make_request(range(6)), make_request(range(13)), make_request(range(13))
    kv.admit(short, kv.find_prefix(short), 9)
    short.admit(1, 0)
    for token in (6, 7, 8):
        short.append_output(token)
    kv.admit(long, kv.find_prefix(long), 13)
    short.on_scheduled(1, 9, num_drafts=0, num_new_drafts=0)
    short.on_processed(9, num_drafts=0, num_sampled=1)
    assert kv.publish(short) == (0, 2)
    kv.check_integrity()
    kv.release(short, fence=0)
    hit = kv.find_prefix(twin)
    assert hit.num_blocks == 2
    assert kv.is_being_computed(twin, hit), "the third block is computed for the long prompt"
    assert kv.is_being_computed(twin, PrefixHit(((),), 1, 4)), "so is the second, also after the short one's"
    kv.check_integrity()


def test_a_load_takes_no_more_of_a_hit_than_the_window_needs() -> None:
    """A pool of the minimum size admits every single request, also one whose hit and load are far apart."""
    groups = (KVCacheGroup(("layer",), KVCacheSpec.keys_and_values(1, 8, "float32", sliding_window=6)),)
    kv = KVCacheManager(KVCacheConfig(5, BLOCK_SIZE, groups), enable_prefix_caching=True)
    run_and_release(kv, make_request(range(16)))
    request = make_request(range(32))
    hit = kv.find_prefix(request)
    assert [i != 0 for i in hit.block_ids[0]] == [False, False, True, True][: hit.num_blocks]
    num_external = 28 - hit.num_tokens
    block_ids = kv.admit(request, hit, num_tokens=31, num_external=num_external)
    assert block_ids is not None, "one request does not fit"
    assert [i != 0 for i in block_ids[0]] == [False] * 5 + [True] * 3, "after 28 tokens the window begins in block 5"
    kv.release(request, fence=0)
    kv.check_integrity()


@pytest.mark.parametrize("first_part", range(1, 12))
def test_another_engine_finds_the_window_at_the_last_whole_block(first_part: int) -> None:
    """However a prompt is divided into steps: the last one may begin behind that block."""
    groups = (KVCacheGroup(("layer",), KVCacheSpec.keys_and_values(1, 8, "float32", sliding_window=6)),)
    kv = KVCacheManager(KVCacheConfig(32, BLOCK_SIZE, groups), enable_prefix_caching=True)
    request = make_request(range(12))
    kv.admit(request, kv.find_prefix(request), first_part)
    request.admit(1, 0)
    for count, num_sampled in ((first_part, 0), (12 - first_part, 1)):
        kv.grow(request, request.num_computed_tokens + count)
        request.on_scheduled(1, count, num_drafts=0, num_new_drafts=0)
        request.on_processed(count, num_drafts=0, num_sampled=num_sampled)
        kv.publish(request)
    assert all(kv.blocks_for_others(request)[0][:2]), "the window of token 8 begins in block 0"
    request.append_output(5)
    for _ in range(8):
        request.on_scheduled(1, 1, num_drafts=0, num_new_drafts=0)
        request.on_processed(1, num_drafts=0, num_sampled=1)
        request.append_output(5)
    kv.grow(request, 20)
    assert not any(kv.block_ids(request)[0][:3]), "an answer needs them no more"
    kv.release(request, fence=0)
    kv.check_integrity()


def test_a_model_that_stores_nothing_needs_no_blocks() -> None:
    kv = KVCacheManager(KVCacheConfig(1, BLOCK_SIZE, ()), enable_prefix_caching=False)
    request = make_request(range(9))
    assert kv.admit(request, kv.find_prefix(request), request.num_tokens) == ()
    request.admit(1, 0)
    request.on_scheduled(1, request.num_tokens, num_drafts=0, num_new_drafts=0)
    assert kv.grow(request, request.num_tokens + 100) == ()
    assert kv.could_grow_after_steps_in_flight(request, 1000)
    request.on_processed(request.num_tokens, num_drafts=0, num_sampled=1)
    assert kv.publish(request) == (0, 0)
    kv.check_integrity()
    kv.release(request, fence=0)
    kv.check_integrity()
    assert (kv.usage, kv.pool.num_usable, kv.pool.map(10).cells) == (0.0, 0, "")
