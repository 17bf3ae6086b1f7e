"""The load generator's pure parts: event streams, data sets, arrival times, the runner, the figures."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.loadgen import results
from penstock.loadgen.datasets import TRACE_BLOCK, RandomShape, random_samples, sharegpt_samples, trace_samples
from penstock.loadgen.runner import Run, arrivals, run_load
from penstock.loadgen.stream import Outcome, ResponseStream, take_vector
from penstock.loadgen.tokens import LocalTokenizer
from penstock.utils.errors import ConfigError

DEMO = Path(penstock.__file__).parent / "demo"


def events(*items: Any, end: str = "\n\n") -> bytes:
    return b"".join(f"data: {item if item == '[DONE]' else json.dumps(item)}{end}".encode() for item in items)


def completion(text: str, finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}], **more}


def chat(finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}


def test_a_completion_is_timed_by_its_chunks() -> None:
    stream = ResponseStream(10.0, prompt_len=6)
    stream.receive(events(completion("a")), 10.5)
    stream.receive(b": a comment keeps the connection open\n\n", 10.6)
    stream.receive(events(completion("bcd")), 10.7)
    stream.receive(events(completion("", "length")), 11.0)
    stream.receive(events(USAGE, "[DONE]"), 12.0)
    outcome = stream.finish()
    assert outcome.error == ""
    assert outcome.text == "abcd"
    assert (outcome.prompt_len, outcome.output_len, outcome.has_usage) == (7, 5, True)
    assert outcome.ttft == pytest.approx(0.5)
    assert outcome.itls == pytest.approx([0.2, 0.3])
    assert outcome.latency == pytest.approx(1.0)
    assert outcome.tpot == pytest.approx(0.5 / 4)


def test_the_role_of_a_chat_is_not_a_token() -> None:
    stream = ResponseStream(0.0, prompt_len=1)
    stream.receive(events(chat(role="assistant", content="")), 1.0)
    stream.receive(events(chat(reasoning_content="hm")), 2.0)
    stream.receive(events(chat(content="yes")), 3.0)
    stream.receive(events(chat("stop"), "[DONE]"), 3.5)
    outcome = stream.finish()
    assert (outcome.ttft, outcome.itls, outcome.latency) == (2.0, [1.0, 0.5], 3.5)
    assert (outcome.text, outcome.output_len, outcome.has_usage) == ("hmyes", 3, False)


@given(st.lists(st.integers(1, 60), max_size=20), st.sampled_from(["\n\n", "\r\n\r\n"]))
def test_events_may_be_split_anywhere(cuts: list[int], end: str) -> None:
    data = events(completion("añ"), completion("😀", "stop"), USAGE, "[DONE]", end=end)
    stream = ResponseStream(0.0, prompt_len=1)
    for cut in cuts:
        stream.receive(data[:cut], 1.0)
        data = data[cut:]
    stream.receive(data, 1.0)
    outcome = stream.finish()
    assert (outcome.text, outcome.output_len, outcome.error) == ("añ😀", 5, "")


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (events({"error": {"message": "out of blocks", "type": "server_error"}}), "out of blocks"),
        (b"data: {nonsense\n\n", "not an event"),
        (b"data: 3\n\n", "not an event"),
        (events({"choices": [3]}), "not an event"),
        (events({"choices": [{"text": ["x"]}]}), "not an event"),
        (b'data: {"usage": {"completion_tokens": 1e400}}\n\n', "not an event"),
        (events({"usage": {"completion_tokens": 10**400}}), "not an event"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "not an event"),
    ],
    ids=lambda value: value[:60],
)
def test_events_that_fail_a_request(data: bytes, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ResponseStream(0.0, prompt_len=1).receive(data, 1.0)


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b'{"data": [{"embedding": "AA=="}], "usage": {"prompt_tokens": 1e400}}', b'{"data": []}'],
    ids=["deep", "infinite", "empty"],
)
def test_vectors_that_fail_a_request(body: bytes) -> None:
    with pytest.raises(ValueError, match="not a response of /v1/embeddings"):
        take_vector(body, Outcome(0.0, 1))


def test_an_incomplete_stream_has_failed() -> None:
    stream = ResponseStream(0.0, prompt_len=1)
    stream.receive(events(completion("a")), 1.0)
    assert "ended before" in stream.finish().error
    stream = ResponseStream(0.0, prompt_len=1)
    stream.receive(events("[DONE]"), 1.0)
    assert "no output" in stream.finish().error


def test_random_prompts_are_exact_reproducible_and_share_only_the_prefix() -> None:
    tokenizer = LocalTokenizer(DEMO)
    shape = RandomShape(num_prompts=20, input_len=30, output_len=10, range_ratio=0.5, prefix_len=8)
    samples = asyncio.run(random_samples(tokenizer, shape, 1, as_text=False))
    assert samples == asyncio.run(random_samples(tokenizer, shape, 1, as_text=False))
    assert samples != asyncio.run(random_samples(tokenizer, shape, 2, as_text=False))
    assert all(len(sample.prompt) == sample.prompt_len for sample in samples)
    assert len({tuple(sample.prompt[:8]) for sample in samples}) == 1
    assert len({tuple(sample.prompt[8:12]) for sample in samples}) == 20
    lengths = {sample.prompt_len - 8 for sample in samples}
    assert len(lengths) > 5
    assert lengths <= set(range(15, 46))
    assert {sample.output_len for sample in samples} <= set(range(5, 16))
    assert not {0, 1, 2} & {token_id for sample in samples for token_id in sample.prompt}


def test_random_text_encodes_to_the_stated_length() -> None:
    tokenizer = LocalTokenizer(DEMO)
    shape = RandomShape(num_prompts=10, input_len=100, output_len=4)
    samples = asyncio.run(random_samples(tokenizer, shape, 0, as_text=True))
    for sample in samples:
        assert isinstance(sample.prompt, str)
        assert len(asyncio.run(tokenizer.encode(sample.prompt))) == sample.prompt_len
    assert statistics.fmean(sample.prompt_len for sample in samples) == pytest.approx(100, abs=2)


def test_sharegpt_takes_first_exchanges_within_bounds(tmp_path: Path) -> None:
    def talk(*turns: tuple[str, Any]) -> dict[str, Any]:
        return {"conversations": [{"from": who, "value": text} for who, text in turns]}

    good = talk(("system", "Be kind."), ("human", "one two three four five"), ("gpt", "six seven eight nine ten"))
    file = tmp_path / "sharegpt.json"
    file.write_text(
        json.dumps(
            [
                good,
                talk(("human", "one two three four five")),
                talk(("human", "x"), ("gpt", "six seven eight nine ten")),
                talk(("human", "word " * 1500), ("gpt", "six seven eight nine ten")),
                {"id": "empty"},
                talk(("human", None), ("gpt", "six seven eight nine ten")),
                talk(("human", "one two three four five"), ("gpt", ["six"])),
            ]
        )
    )
    tokenizer = LocalTokenizer(DEMO)
    (sample,) = asyncio.run(sharegpt_samples(tokenizer, file, 10, None, 0))
    assert sample.prompt == "one two three four five"
    assert sample.prompt_len == len(asyncio.run(tokenizer.encode(sample.prompt)))
    assert sample.output_len == len(asyncio.run(tokenizer.encode("six seven eight nine ten")))
    (sample,) = asyncio.run(sharegpt_samples(tokenizer, file, 10, 3, 0))
    assert sample.output_len == 3
    file.write_text('[{"conversations": [{"text": "a"}, {"text": "b"}]}]')
    with pytest.raises(ConfigError, match="not a ShareGPT file"):
        asyncio.run(sharegpt_samples(tokenizer, file, 10, None, 0))
    file.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="not a ShareGPT file"):
        asyncio.run(sharegpt_samples(tokenizer, file, 10, None, 0))


def test_a_trace_shares_the_blocks_that_share_a_hash(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000, "input_length": 2 * TRACE_BLOCK + 10, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 3000, "input_length": TRACE_BLOCK + 20, "output_length": 0, "hash_ids": [7, 10]},
        {"timestamp": 2000, "input_length": 20, "output_length": 1},
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    first, third, second = trace_samples(range(1000), file, None, 2.0, 0)
    assert [sample.at for sample in (first, third, second)] == [0.0, 0.5, 1.0]
    assert [len(sample.prompt) for sample in (first, second, third)] == [1034, 532, 20]
    assert first.prompt[:TRACE_BLOCK] == second.prompt[:TRACE_BLOCK]
    assert first.prompt[TRACE_BLOCK:][:10] != second.prompt[TRACE_BLOCK:][:10]
    assert second.output_len == 1
    assert len(trace_samples(range(1000), file, 1, 1.0, 0)) == 1
    file.write_text('{"timestamp": 0}')
    with pytest.raises(ConfigError, match="line 1"):
        trace_samples(range(1000), file, None, 1.0, 0)
    file.write_text('{"timestamp": 0, "input_length": 1e400, "output_length": 5}')
    with pytest.raises(ConfigError, match="line 1"):
        trace_samples(range(1000), file, None, 1.0, 0)


def test_a_warm_up_shares_no_prefix(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 50, "output_length": 5, "hash_ids": [1]}')
    (sample,) = trace_samples(range(1000), file, None, 1.0, 0)
    assert sample.backwards().prompt == sample.prompt[::-1]


def test_arrivals_offer_the_requested_load() -> None:
    assert arrivals(3, float("inf"), 1.0, 0) == [0.0, 0.0, 0.0]
    for even in (1e31, 1e306, 1e308, float("inf")):
        assert arrivals(4, 2.0, even, 0) == pytest.approx([0.5, 1.0, 1.5, 2.0])

    def variation(burstiness: float) -> float:
        times = arrivals(2000, 10.0, burstiness, 0)
        assert times[-1] == pytest.approx(200.0)
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        return statistics.stdev(gaps) / statistics.fmean(gaps)

    assert variation(1.0) == pytest.approx(1.0, abs=0.15)
    assert variation(0.25) == pytest.approx(2.0, abs=0.4)
    assert variation(100.0) == pytest.approx(0.1, abs=0.03)
    assert arrivals(5, 1.0, 1.0, 3) == arrivals(5, 1.0, 1.0, 3) != arrivals(5, 1.0, 1.0, 4)
    with pytest.raises(ConfigError, match=r"burstiness=0\.0001 leaves no time between the requests: raise it"):
        arrivals(8, 100.0, 0.0001, 0)


def test_the_runner_keeps_to_the_arrival_times_and_the_limit() -> None:
    sent: list[float] = []
    in_flight = most = done = 0

    async def main() -> Run:
        loop = asyncio.get_running_loop()
        start = loop.time()

        async def send(index: int) -> Outcome:
            nonlocal in_flight, most
            sent.append(loop.time() - start)
            in_flight += 1
            most = max(most, in_flight)
            await asyncio.sleep(0.05)
            in_flight -= 1
            return Outcome(started=0.0, prompt_len=index)

        def count() -> None:
            nonlocal done
            done += 1

        return await run_load(send, [0.0, 0.0, 0.0, 0.3], 2, count)

    run = asyncio.run(main())
    assert [outcome.prompt_len for outcome in run.outcomes] == [0, 1, 2, 3]
    assert (most, done, run.interrupted) == (2, 4, False)
    assert sent[2] >= 0.05
    assert sent[3] >= 0.3
    assert run.duration >= 0.35


def test_a_cancelled_run_keeps_the_finished_requests() -> None:
    async def send(index: int) -> Outcome:
        await asyncio.sleep(0 if index == 0 else 60)
        return Outcome(started=0.0, prompt_len=index)

    async def main() -> Run:
        task = asyncio.ensure_future(run_load(send, [0.0, 0.0, 60.0], None, lambda: None))
        await asyncio.sleep(0.05)
        task.cancel()
        return await task

    run = asyncio.run(main())
    assert run.interrupted
    assert [outcome.prompt_len for outcome in run.outcomes] == [0]


def outcome(started: float, ttft: float, itls: list[float], output_len: int) -> Outcome:
    return Outcome(started, 10, output_len, ttft, itls, ttft + sum(itls), has_usage=True)


def test_figures_of_a_run() -> None:
    run = Run(
        [
            outcome(0.0, 0.1, [0.1, 0.1], 3),
            outcome(0.0, 0.3, [0.2, 0.2], 5),
            outcome(1.0, 0.2, [], 1),
            Outcome(0.0, 10, error="refused"),
        ],
        duration=2.0,
        interrupted=False,
    )
    figures = results.summarize(run, {"ttft": 250, "tpot": 110})
    assert (figures["completed"], figures["failed"]) == (3, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (30, 9)
    assert figures["request_throughput"] == 1.5
    assert figures["output_throughput"] == 4.5
    assert figures["total_token_throughput"] == 19.5
    assert figures["request_goodput"] == 1.0
    assert results.summarize(run, {})["request_goodput"] is None
    assert figures["max_output_tokens_per_s"] == pytest.approx(8.0)
    assert figures["max_concurrent_requests"] == 2

    latencies = results.latency_figures(run.outcomes, ("ttft", "tpot", "itl", "e2el"), (50.0, 99.9))
    assert latencies["mean_ttft_ms"] == pytest.approx(200)
    assert latencies["median_ttft_ms"] == latencies["p50_ttft_ms"] == pytest.approx(200)
    assert latencies["std_ttft_ms"] == pytest.approx(81.65, abs=0.01)
    assert latencies["p99.9_ttft_ms"] == pytest.approx(299.8)
    # The second response brought four more tokens in two chunks; the third, of one token, has no TPOT.
    assert latencies["mean_tpot_ms"] == pytest.approx(100)
    assert latencies["mean_itl_ms"] == pytest.approx(150)
    assert latencies["mean_e2el_ms"] == pytest.approx((300 + 700 + 200) / 3)

    listed = results.details(run.outcomes)
    assert listed["output_lens"] == [3, 5, 1, 0]
    assert listed["errors"] == ["", "", "", "refused"]


def test_figures_without_successful_requests_are_zero() -> None:
    run = Run([Outcome(0.0, 10, error="refused")], duration=1.0, interrupted=False)
    assert results.summarize(run, {})["max_output_tokens_per_s"] == 0
    assert results.latency_figures(run.outcomes, ("itl",), (99.0,))["p99_itl_ms"] == 0
