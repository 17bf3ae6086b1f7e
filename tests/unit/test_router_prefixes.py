"""The router's view of KV events, and its reading of a request's prompt, without sockets."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from penstock.core.kv_cache_groups import AttentionGroup
from penstock.engine.kv_events import encode_batch
from penstock.messages.kv_cache_spec import KVCacheSpec
from penstock.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from penstock.router.kv_view import KVView
from penstock.router.prompts import question_of, salts_of, tokens_of
from penstock.utils.held_blocks import PromptKeys, scoped_salt


def stored(first: int, count: int, salt: str | None = None, *, group: int = 0, **more: Any) -> BlockStored:
    """Returns the event for blocks of four tokens; token ids count from 0 in every prompt."""
    prefix = f"{salt}-{group}-"
    names = [f"{prefix}{number:08}".encode() for number in range(first, first + count)]
    keys = ((salt,), *[None] * (count - 1)) if salt and not first else None
    return BlockStored(
        block_hashes=tuple(names),
        parent_block_hash=f"{prefix}{first - 1:08}".encode() if first else None,
        token_ids=tuple(range(first * 4, (first + count) * 4)),
        block_size=4,
        extra_keys=keys,
        group_idx=group,
        **more,
    )


def batch(*events: KVEvent) -> bytes:
    return encode_batch(0.0, events)


def view(*events: KVEvent) -> KVView:
    made = KVView()
    made.receive(0, batch(AllBlocksCleared()))
    assert made.receive(1, batch(*events)) is None
    return made


def cached(made: KVView, num_tokens: int = 40, *salts: str) -> int:
    return made.held.num_cached(PromptKeys(range(num_tokens), salts or ("",)))


def test_the_cached_beginning_of_a_prompt_counts_in_whole_blocks() -> None:
    made = view(stored(0, 3), stored(3, 2))
    assert [cached(made, count) for count in (3, 4, 19, 20, 40)] == [0, 4, 16, 20, 20]
    assert made.held.num_cached(PromptKeys([9, *range(1, 40)], ("",))) == 0
    assert made.held.num_cached(PromptKeys([*range(8), 9, *range(9, 40)], ("",))) == 8


def test_removed_and_cleared_blocks_do_not_count() -> None:
    made = view(stored(0, 5))
    made.receive(2, batch(BlockRemoved(block_hashes=stored(2, 1).block_hashes)))
    assert cached(made) == 8
    made.receive(3, batch(stored(2, 1)))
    assert cached(made) == 20
    made.receive(4, batch(AllBlocksCleared()))
    assert (cached(made), made.held.num_blocks) == (0, 0)


def test_a_block_counts_while_every_group_has_it() -> None:
    made = view(stored(0, 3), shared(0, 2))
    assert cached(made) == 8
    made.receive(2, batch(BlockRemoved(block_hashes=stored(1, 1).block_hashes, group_idx=1)))
    assert cached(made) == 4
    made.receive(3, batch(BlockRemoved(block_hashes=stored(0, 1).block_hashes)))
    assert cached(made) == 0


def shared(first: int, count: int, group: int = 1, **more: Any) -> BlockStored:
    """Returns the event for blocks of group 0 in another group: their hashes are the same."""
    return msgspec.structs.replace(stored(first, count), group_idx=group, **more)


def test_a_prefix_counts_up_to_a_state() -> None:
    states: dict[str, Any] = {"kv_cache_spec_kind": "mamba"}
    made = view(stored(0, 6), shared(1, 1, **states), shared(4, 1, **states))
    assert [cached(made, count) for count in (4, 8, 19, 20, 40)] == [0, 8, 8, 20, 20]
    made.receive(2, batch(BlockRemoved(block_hashes=stored(4, 1).block_hashes, group_idx=1)))
    assert cached(made) == 8
    # The events of a step may name the states first.
    made.receive(3, batch(shared(7, 1, **states), stored(6, 3)))
    assert cached(made) == 32
    made.receive(4, batch(BlockRemoved(block_hashes=stored(2, 1).block_hashes)))
    assert cached(made) == 8
    for number in (1, 7):
        made.receive(4 + number, batch(BlockRemoved(block_hashes=stored(number, 1).block_hashes, group_idx=1)))
    assert cached(made) == 0, "without a state all is computed"


def test_a_prefix_counts_if_its_last_window_is_there() -> None:
    window: dict[str, Any] = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 6}
    made = view(shared(0, 6, **window), stored(0, 6))
    assert cached(made) == 24
    # Blocks behind the window may be gone; the query at 24 reads tokens 19 to 24.
    made.receive(2, batch(BlockRemoved(block_hashes=stored(0, 4).block_hashes, group_idx=1)))
    assert [cached(made, count) for count in (24, 20, 16)] == [24, 0, 0]
    made.receive(3, batch(BlockRemoved(block_hashes=stored(4, 1).block_hashes, group_idx=1)))
    assert cached(made) == 0


@pytest.mark.parametrize("window", [0, 6])
def test_the_view_and_the_engine_agree_on_every_hit(window: int) -> None:
    """Three groups that store and lose blocks at random: all blocks, a window or all blocks again, and states."""
    specs = [
        KVCacheSpec.keys_and_values(1, 8, "float32"),
        KVCacheSpec.keys_and_values(1, 8, "float32", window),
        KVCacheSpec.states(1, 8, 0, 1),
    ]
    groups = [AttentionGroup(spec, 4) for spec in specs]
    kinds = [{"kv_cache_spec_sliding_window": each.sliding_window or None} for each in specs]
    rng, hits = random.Random(window), Counter[int]()
    for _ in range(60):
        made, held, published = view(), [set[int]() for _ in groups], set[int]()
        for number in range(2, 120):
            group = rng.randrange(3)
            has = held[group]
            index = rng.randrange(10)
            if index in has and rng.random() < 0.3:
                made.receive(number, batch(BlockRemoved(block_hashes=stored(index, 1).block_hashes, group_idx=group)))
                has.discard(index)
            elif index not in has and (specs[group].sliding_window or not index or index - 1 in has):
                made.receive(number, batch(shared(index, 1, group, **kinds[group])))
                has.add(index)
                published.add(group)
            else:
                made.receive(number, batch())
            length, before = 10, -1
            while length != before:
                before = length
                for each, known in zip(groups, held, strict=True):
                    length = each.longest_hit(known.__contains__, length)
            if len(published) == 3:
                assert cached(made) == 4 * length
                hits[length] += 1
    assert len(hits) > 4, hits


def test_blocks_of_other_media_do_not_count() -> None:
    assert cached(view(stored(0, 2, medium="CPU"))) == 0
    assert cached(view(stored(0, 1, kv_cache_spec_sliding_window=8))) == 0, "the other layers have nothing"


def test_prompts_of_other_salts_do_not_count() -> None:
    made = view(stored(0, 2, "mine"))
    assert [cached(made, 40, *salts) for salts in ((), ("yours",), ("mine",), ("", "mine"))] == [0, 0, 8, 8]


def test_missed_batches_are_requested_and_applied_once() -> None:
    made = view(stored(0, 1))
    assert made.receive(4, batch(stored(3, 1))) == 2
    assert cached(made) == 4
    made.take(2, batch(stored(1, 1)))
    made.take(3, batch(stored(2, 1)))
    made.take(4, batch(stored(3, 1)))
    assert cached(made) == 16
    assert made.receive(5, batch(stored(4, 1))) is None
    assert cached(made) == 20


def test_a_view_with_a_gap_that_cannot_be_filled_starts_afresh() -> None:
    made = view(stored(0, 2))
    made.take(4, batch(stored(0, 1)))
    assert cached(made) == 4, "what was removed meanwhile is not known"
    assert made.receive(5, batch(stored(1, 1))) is None
    assert cached(made) == 8


def test_a_restarted_instance_has_nothing_cached() -> None:
    made = view(stored(0, 2))
    assert made.receive(0, batch(AllBlocksCleared())) is None
    assert cached(made) == 0
    made.receive(1, batch(stored(0, 1)))
    assert cached(made) == 4


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"\xc1", msgspec.msgpack.encode([0.0]), msgspec.msgpack.encode([0.0, [{"type": "Unknown"}], 0]),
        msgspec.msgpack.encode([0.0, [{"type": "BlockStored", "block_hashes": "x"}], 0]),
        msgspec.msgpack.encode([0.0, [{"type": "BlockStored", "medium": "GPU"}], 0]).replace(b"GPU", b"\xff\xff\xff"),
        b"\x93\xcb" + bytes(8) + b"\x91" * 99_999,
    ],
)  # fmt: skip
def test_events_that_cannot_be_read_empty_the_view(payload: bytes) -> None:
    made = view(stored(0, 2))
    assert made.receive(2, payload) is None
    assert cached(made) == 0


def test_block_hashes_may_be_bytes_and_tokens_any_number() -> None:
    event = {"type": "BlockStored", "block_hashes": [b"a"], "parent_block_hash": None, "token_ids": [0, 1, 2, 3]}
    made = KVView()
    made.receive(0, msgspec.msgpack.encode([0.0, [{**event, "block_size": 4, "new_field": 1}], None]))
    assert cached(made) == 4
    made.receive(1, msgspec.msgpack.encode([0.0, [{**event, "block_size": 4, "token_ids": [2**63] * 4}], None]))
    assert cached(made) == 4


# ---- Prompts ----


def test_the_request_to_the_tokenizer_has_the_fields_that_determine_the_prompt() -> None:
    body = {"model": "m", "messages": [1], "tools": [2], "temperature": 1, "stream": True}
    question = question_of("/v1/chat/completions", body, None)
    assert question is not None
    assert json.loads(question) == {"model": "m", "messages": [1], "tools": [2]}
    question = question_of("/v1/completions", {"model": "m", "max_tokens": 2}, "text")
    assert question is not None
    assert json.loads(question) == {"model": "m", "prompt": "text"}
    assert question_of("/v1/chat/completions", {}, None) is None
    assert question_of("/v1/completions", {}, None) is None


@pytest.mark.parametrize("content", [b"", b"{}", b'{"tokens": ["a"]}', b"\xff", b'{"a": ' + b"[" * 99_999])
def test_an_answer_without_tokens_is_ignored(content: bytes) -> None:
    assert tokens_of(content) == ()
    assert tokens_of(b'{"count": 2, "tokens": [1, 2]}') == [1, 2]


def test_a_client_with_a_key_has_the_servers_salt() -> None:
    headers = (("AUTHORIZATION", "Bearer k"),)
    assert salts_of((), {"cache_salt": "s"}) == ("s",)
    assert salts_of((), {"cache_salt": 3}) == ("",)
    assert salts_of(headers, {}) == ("", scoped_salt(b"k", None))
    assert salts_of(headers, {"cache_salt": "s"}) == ("s", scoped_salt(b"k", "s"))


def test_an_instance_cannot_fill_the_memory_with_groups() -> None:
    made = view(*(stored(0, 1, group=number) for number in range(300)))
    assert made.held.num_blocks == 256
