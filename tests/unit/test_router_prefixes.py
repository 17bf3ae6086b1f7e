"""The router's view of KV events, and its reading of a request's prompt, without sockets."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from penstock.engine.kv_events import encode_batch
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


def test_a_block_counts_until_its_last_copy_is_removed() -> None:
    made = view(stored(0, 2), stored(0, 2, group=1))
    made.receive(2, batch(BlockRemoved(block_hashes=stored(0, 2).block_hashes)))
    assert cached(made) == 8
    made.receive(3, batch(BlockRemoved(block_hashes=stored(0, 2, group=1).block_hashes, group_idx=1)))
    assert cached(made) == 0


def test_blocks_of_windows_and_other_media_do_not_count() -> None:
    made = view(stored(0, 1, kv_cache_spec_sliding_window=8), stored(0, 2, medium="CPU"))
    assert cached(made) == 0


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


@pytest.mark.parametrize("content", [b"", b"{}", b'{"tokens": ["a"]}', b"\xff"])
def test_an_answer_without_tokens_is_ignored(content: bytes) -> None:
    assert tokens_of(content) == ()
    assert tokens_of(b'{"count": 2, "tokens": [1, 2]}') == [1, 2]


def test_a_client_with_a_key_has_the_servers_salt() -> None:
    headers = (("AUTHORIZATION", "Bearer k"),)
    assert salts_of((), {"cache_salt": "s"}) == ("s",)
    assert salts_of((), {"cache_salt": 3}) == ("",)
    assert salts_of(headers, {}) == ("", scoped_salt(b"k", None))
    assert salts_of(headers, {"cache_salt": "s"}) == ("s", scoped_salt(b"k", "s"))
