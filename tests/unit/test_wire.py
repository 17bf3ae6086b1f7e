"""Messages between processes: every message is decoded unchanged, and nothing else is decoded."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import SamplingParams
from penstock.config.engine import EngineArgs, SchedulerConfig, resolve
from penstock.engine.core_messages import (
    CODEC,
    AbortRequests,
    CheckIntegrity,
    GetBlockMap,
    GetExpertMap,
    Ready,
    Refusal,
    Refused,
    Reply,
    ResetPrefixCache,
)
from penstock.messages.engine_info import EngineInfo
from penstock.messages.outputs import EngineOutput, FinishReason
from penstock.messages.requests import EngineRequest
from penstock.messages.runner_output import TokenLogprobs
from penstock.messages.stats import (
    BlockMap,
    ExpertLoads,
    ExpertMap,
    RequestEvent,
    RequestEventKind,
    SchedulerStats,
    StepReport,
)
from penstock.utils import wire
from penstock.utils.child_process import Failed
from penstock.utils.errors import WireError
from penstock.utils.wire import Codec, FrameReader

HEADER = struct.Struct("<IB")

text = st.text(max_size=8)
maybe_text = st.none() | text
token = st.integers(0, 2**31 - 1)
tokens = st.lists(token, max_size=4).map(tuple)
count = st.integers(0, 2**31 - 1)
real = st.floats(allow_nan=False)
flag = st.booleans()

params = st.builds(
    SamplingParams,
    n=st.integers(1, 64),
    temperature=st.floats(0.1, 100),
    top_p=st.floats(0.1, 1),
    logit_bias=st.none() | st.dictionaries(token, st.floats(-100, 100), max_size=3),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.none() | st.integers(1, 2**31 - 1),
    stop=st.none() | st.text(min_size=1, max_size=4) | st.lists(st.text(min_size=1, max_size=4), max_size=3),
    stop_token_ids=st.none() | st.lists(token, max_size=3),
    ignore_eos=flag,
    logprobs=st.none() | st.integers(0, 20),
)
requests = st.builds(
    EngineRequest,
    request_id=text,
    prompt_token_ids=tokens,
    sampling_params=params,
    max_tokens=count,
    seed=st.integers(0, 2**64 - 1),
    eos_token_ids=st.frozensets(token, max_size=3),
    stop_token_ids=st.frozensets(token, max_size=3),
    bad_words_token_ids=st.lists(tokens, max_size=2).map(tuple),
    priority=st.integers(-(2**31), 2**31 - 1),
    cache_salt=maybe_text,
)
logprobs = st.lists(
    st.builds(TokenLogprobs, tokens, st.lists(st.floats(max_value=0, allow_nan=False), max_size=3).map(tuple), count),
    max_size=2,
).map(tuple)
outputs = st.builds(
    EngineOutput,
    request_id=text,
    new_token_ids=tokens,
    logprobs=logprobs,
    prompt_logprobs=logprobs,
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_reason=st.none() | token,
    num_cached_tokens=count,
    error=maybe_text,
)
events = st.builds(RequestEvent, text, st.sampled_from(RequestEventKind), real)
reports = st.builds(
    StepReport,
    outputs=st.lists(outputs, max_size=3).map(tuple),
    events=st.lists(events, max_size=3).map(tuple),
    num_tokens=count,
    stats=st.builds(SchedulerStats, count, count, real, count, count, count),
)
block_map = st.builds(BlockMap, text, st.dictionaries(text, count, max_size=3))
expert_loads = st.builds(ExpertLoads, st.lists(text, max_size=3).map(tuple), st.lists(real, max_size=3).map(tuple))
expert_map = st.builds(ExpertMap, st.lists(text, max_size=3).map(tuple), count, expert_loads, expert_loads)
messages = st.one_of(
    requests,
    reports,
    st.builds(AbortRequests, st.lists(text, max_size=3).map(tuple)),
    st.builds(ResetPrefixCache, count, flag),
    st.builds(CheckIntegrity, count),
    st.builds(GetBlockMap, count, count),
    st.builds(GetExpertMap, count),
    st.builds(Failed, text, flag),
    st.builds(Refused, text, text, st.sampled_from(Refusal), maybe_text),
    st.builds(Reply, count, flag | block_map | expert_map, maybe_text),
)


def frame(number: int, payload: bytes) -> bytes:
    return HEADER.pack(len(payload), number) + payload


@given(st.lists(messages, max_size=6), st.data())
@settings(max_examples=150)
def test_messages_survive_any_splitting(sent: list[Any], data: st.DataObject) -> None:
    stream = b"".join(map(CODEC.encode, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader = FrameReader(CODEC)
    received = [
        message
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)
        for message in reader.feed(stream[start:end])
    ]
    assert received == sent
    assert [type(message) for message in received] == [type(message) for message in sent]


def test_arguments_of_the_core_and_its_ready_message_survive_the_wire() -> None:
    numbers: dict[str, Any] = {
        name: 64 for name, field in SchedulerConfig.__dataclass_fields__.items() if field.type == "int"
    }
    info = EngineInfo(
        dtype="bfloat16",
        device="cpu",
        device_name="",
        kernels="avx2",
        num_threads=2,
        max_model_len=64,
        num_blocks=100,
        block_size=16,
        kv_cache_bytes=1 << 40,
        kv_cache_dtype="bfloat16",
        load_seconds=0.5,
    )
    ready = Ready(info, SchedulerConfig(**numbers))
    for message in (resolve(EngineArgs()), ready):
        stream = CODEC.encode(message)
        reader = FrameReader(CODEC)
        assert [m for byte in stream for m in reader.feed(bytes([byte]))] == [message]


def test_numpy_numbers_become_plain_numbers() -> None:
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), logit_bias={4: np.float64(1.5)})  # pyright: ignore
    request = EngineRequest(request_id="a", prompt_token_ids=(1,), sampling_params=params, max_tokens=3, seed=5)
    (received,) = FrameReader(CODEC).feed(CODEC.encode(request))
    assert received == request
    assert type(received.sampling_params.temperature) is float
    assert type(received.sampling_params.top_k) is int


def test_a_whole_configuration_with_its_paths_survives_the_wire() -> None:
    config = resolve(EngineArgs(speculative_config={"method": "mtp", "num_speculative_tokens": 2}))
    (received,) = FrameReader(CODEC).feed(CODEC.encode(config))
    assert received == config
    assert isinstance(received.model.path, Path)


@given(st.binary(max_size=64))
@settings(max_examples=300)
def test_garbage_is_an_error_or_an_unfinished_frame(data: bytes) -> None:
    _feed(data)


@given(messages, st.data())
@settings(max_examples=100)
def test_damaged_messages_are_an_error_or_another_message(message: Any, data: st.DataObject) -> None:
    stream = bytearray(CODEC.encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        stream[data.draw(st.integers(4, len(stream) - 1))] = data.draw(st.integers(0, 255))
    _feed(bytes(stream))
    # A payload that ends too early cannot be a whole message.
    number, payload = stream[4], bytes(CODEC.encode(message)[HEADER.size :])
    _feed(frame(number, payload[: data.draw(st.integers(0, len(payload) - 1))]))


def _feed(data: bytes) -> None:
    try:
        received = FrameReader(CODEC).feed(data)
    except WireError:
        return
    for message in received:
        assert FrameReader(CODEC).feed(CODEC.encode(message)) == [message] or "nan" in repr(message)


ABORT = 2


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode({"request_ids": [1]}),
        msgspec.msgpack.encode({"request_ids": "a"}),
        msgspec.msgpack.encode({"request_ids": ["a"]}) + b"\x00",
        b"\x81\xabrequest_ids\xdd\xff\xff\xff\xff",  # a list of four billion entries
        b"\x81\xabrequest_ids\x91\xdb\xff\xff\xff\xff",
        b"\x81\xabrequest_ids\x91\xa1\xff",  # not UTF-8
        b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0",  # deeper than any stack
        b"\x91" * 100_000 + b"\xc0",
        b"\xdf\xff\xff\xff\xff",
    ],
    ids=lambda payload: f"{payload[:20]!r}",
)
def test_invalid_payloads_are_refused(payload: bytes) -> None:
    assert CODEC.encode(AbortRequests(()))[4] == ABORT
    with pytest.raises(WireError, match="type 2"):
        FrameReader(CODEC).feed(frame(ABORT, payload))


@pytest.mark.parametrize("number", [13, 14, 255])
def test_unknown_message_types_are_refused(number: int) -> None:
    with pytest.raises(WireError, match=f"no message type {number}"):
        FrameReader(CODEC).feed(frame(number, b""))


def test_values_out_of_bounds_are_refused() -> None:
    """The bounds of sampling parameters hold for whatever arrives, not only for what was constructed here."""
    request = EngineRequest(
        request_id="a", prompt_token_ids=(1,), sampling_params=SamplingParams(), max_tokens=3, seed=5
    )
    stream = CODEC.encode(request)
    plain = msgspec.msgpack.decode(stream[HEADER.size :])
    for field, value in (("temperature", float("nan")), ("n", 0), ("top_p", 2.0), ("stop", [""]), ("logprobs", 21)):
        damaged = {**plain, "sampling_params": {**plain["sampling_params"], field: value}}
        with pytest.raises(WireError, match=field):
            FrameReader(CODEC).feed(frame(stream[4], msgspec.msgpack.encode(damaged)))


def test_frames_that_are_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WireError, match="exceeds"):
        FrameReader(CODEC).feed(HEADER.pack(wire.MAX_PAYLOAD_BYTES + 1, 0))
    monkeypatch.setattr(wire, "MAX_PAYLOAD_BYTES", 64)
    with pytest.raises(WireError, match=r"a Failed of \d+ bytes exceeds 64"):
        CODEC.encode(Failed("x" * 64))
    with pytest.raises(WireError, match="exceeds 64"):
        FrameReader(CODEC, 64).feed(HEADER.pack(65, ABORT))


def test_a_reader_keeps_only_the_unfinished_frame() -> None:
    reader = FrameReader(CODEC)
    stream = CODEC.encode(ResetPrefixCache(1))
    assert reader.feed(stream * 1000 + stream[:-1]) == [ResetPrefixCache(1)] * 1000
    assert reader.feed(stream[-1:]) == [ResetPrefixCache(1)]


def test_a_type_that_is_not_in_the_table_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        Codec(Reply).encode(ResetPrefixCache(1))
