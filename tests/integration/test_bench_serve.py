"""`penstock bench serve` against a server whose delays are known."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import penstock
from penstock.cli import bench_serve
from penstock.utils.errors import ConfigError

DEMO = str(Path(penstock.__file__).parent / "demo")
SLOW_FIRST, FAST_FIRST, GAP = 0.4, 0.1, 0.03
TOKENS_PER_CHUNK = 2


class FakeServer:
    """Answers in chunks of two tokens; every second request waits longer. Records the requests."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.fail_after = 10**9
        self.interrupt_after = 10**9
        self.models_refused = 0
        self.model_id: Any = "fake/model"
        self.answers: dict[str, Any] = {}  # of paths, instead of the right ones
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_post("/v1/embeddings", self._embed)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        if self.models_refused > 0:
            self.models_refused -= 1
            return web.json_response({"error": {"message": "loading"}}, status=503)
        return web.json_response({"object": "list", "data": [{"id": self.model_id, "max_model_len": 600}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        if request.path in self.answers:
            return web.json_response({"tokens": self.answers[request.path]})
        text = (await request.json())["prompt"]
        return web.json_response({"count": len(text), "max_model_len": 600, "tokens": list(text.encode())})

    async def _detokenize(self, request: web.Request) -> web.Response:
        if request.path in self.answers:
            return web.json_response({"prompt": self.answers[request.path]})
        return web.json_response({"prompt": bytes((await request.json())["tokens"]).decode()})

    async def _embed(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        if len(self.bodies) > self.fail_after:
            return web.json_response({"data": []})
        await asyncio.sleep(FAST_FIRST)
        usage = {"prompt_tokens": 22, "total_tokens": 22}
        return web.json_response({"data": [{"index": 0, "embedding": "AACAPw=="}], "usage": usage})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        number = len(self.bodies)
        body = await request.json()
        self.bodies.append(body)
        self.keys.add(request.headers.get("Authorization"))
        if number == self.interrupt_after:
            os.kill(os.getpid(), signal.SIGINT)
        if number >= self.fail_after:
            return web.json_response({"error": {"message": "too busy"}}, status=503)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(event: Any) -> None:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())

        is_chat = "messages" in body
        if is_chat:
            await send({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        await asyncio.sleep(SLOW_FIRST if number % 2 else FAST_FIRST)
        num_chunks = body["max_tokens"] // TOKENS_PER_CHUNK
        for index in range(num_chunks):
            if index:
                await asyncio.sleep(GAP)
            reason = "length" if index == num_chunks - 1 else None
            choice = {"delta": {"content": "ab"}} if is_chat else {"text": "ab"}
            await send({"choices": [{**choice, "finish_reason": reason}]})
        await send({"choices": [], "usage": {"prompt_tokens": 33, "completion_tokens": body["max_tokens"]}})
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    fake.start()
    yield fake
    fake.stop()


def bench(server: FakeServer, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    bench_serve.add_arguments(parser)
    args = parser.parse_args(["--base-url", server.url, "--disable-tqdm", *arguments])
    return args.run(args)


def result_of(folder: Path) -> dict[str, Any]:
    (file,) = folder.iterdir()
    return json.loads(file.read_text())


SHORT = ("--random-input-len", "20", "--random-output-len", "12")


@pytest.mark.alone
def test_completions_with_known_delays(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ("--goodput", "ttft:250", "e2el:2000", "--metric-percentiles", "50,99")
    save = ("--save-result", "--result-dir", str(tmp_path / "new"))
    assert bench(server, "--tokenizer", DEMO, "--num-prompts", "10", "--top-k", "5", *SHORT, *limits, *save) == 0
    result = result_of(tmp_path / "new")
    assert (result["completed"], result["failed"], result["num_prompts"]) == (10, 0, 10)
    assert (result["model_id"], result["request_rate"], result["backend"]) == ("fake/model", "inf", "openai")
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (330, 120)
    assert result["request_goodput"] * result["duration"] == pytest.approx(5)
    assert result["max_concurrent_requests"] == 10
    middle = 1000 * (SLOW_FIRST + FAST_FIRST) / 2
    assert middle <= result["mean_ttft_ms"] < middle + 100
    assert 1000 * SLOW_FIRST <= result["p99_ttft_ms"] < 1000 * SLOW_FIRST + 200
    assert 1000 * GAP <= result["median_itl_ms"] < 1000 * GAP + 20
    # Six chunks of two tokens: five gaps over eleven tokens.
    assert result["median_tpot_ms"] == pytest.approx(result["mean_itl_ms"] * 5 / 11, rel=0.2)
    assert result["mean_e2el_ms"] == pytest.approx(result["mean_ttft_ms"] + 5 * result["mean_itl_ms"], rel=0.05)
    assert not result.keys() & {"ttfts", "generated_texts"}
    for body in server.bodies:
        assert len(body["prompt"]) == 20
        assert (body["max_tokens"], body["ignore_eos"], body["top_k"]) == (12, True, 5)
        assert "temperature" not in body
    assert server.keys == {None}
    printed = capsys.readouterr().out
    for line in ("Serving Benchmark Result", "Request goodput (req/s):", "P99 TPOT (ms):", "Inter-token Latency"):
        assert line in printed


def test_chat_without_a_local_tokenizer(server: FakeServer, tmp_path: Path) -> None:
    save = ("--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "new/r.json")
    chat = ("--backend", "openai-chat", "--api-key", "k", "--max-concurrency", "2", "--num-warmups", "1")
    assert bench(server, "--num-prompts", "4", *SHORT, *save, *chat) == 0
    result = result_of(tmp_path / "new")
    assert result["max_concurrent_requests"] == 2
    assert result["generated_texts"] == ["ab" * 6] * 4
    assert [len(gaps) for gaps in result["itls"]] == [5] * 4
    assert min(result["ttfts"]) >= FAST_FIRST
    assert result["input_lens"] == [33] * 4
    assert len(server.bodies) == 5
    assert server.keys == {"Bearer k"}
    assert all(len(body["messages"][0]["content"]) == 20 for body in server.bodies)


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        *(("/tokenize", each) for each in (None, 5, "ab", {"a": 1}, [[1]], ["x"], [1.5], [None])),
        *(("/detokenize", each) for each in (None, 5, ["x"])),
    ],
    ids=str,
)
def test_a_tokenizer_of_the_server_that_answers_in_another_form(server: FakeServer, path: str, answer: Any) -> None:
    server.answers[path] = answer
    with pytest.raises(ConfigError, match=rf"{path} gave no valid .*: pass --tokenizer FOLDER"):
        bench(server, "--num-prompts", "2", *SHORT, "--backend", "openai-chat")


EMBEDDINGS = ("--backend", "openai-embeddings", "--random-input-len", "20")


def test_embeddings_have_vllms_keys_and_no_output_tokens(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = ("--save-detailed", "--result-dir", str(tmp_path), "--label", "model/int8")
    server.fail_after = 4
    limits = ("--goodput", "e2el:60000", "--max-concurrency", "1")
    arguments = ("--endpoint", "/v1/embeddings", "--tokenizer", DEMO, "--num-prompts", "6", *limits, *save)
    assert bench(server, *EMBEDDINGS, *arguments) == 0
    result = result_of(tmp_path)
    assert (result["backend"], result["completed"], result["failed"]) == ("openai-embeddings", 4, 2)
    assert (result["total_input_tokens"], result["input_lens"]) == (88, [22] * 4 + [20] * 2)
    assert result["request_throughput"] * result["duration"] == pytest.approx(4)
    assert result["total_token_throughput"] * result["duration"] == pytest.approx(88)
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert min(result["latencies"][:4]) >= FAST_FIRST
    assert {"mean_e2el_ms", "median_e2el_ms", "std_e2el_ms", "p99_e2el_ms", "errors"} <= result.keys()
    assert not [key for key in result if "output" in key or "ttft" in key or "itl" in key or "tpot" in key]
    wanted = {"model": "fake/model", "encoding_format": "base64"}
    assert all(len(body.pop("input")) == 20 and body == wanted for body in server.bodies)
    printed = capsys.readouterr()
    assert "Mean E2EL (ms):" in printed.out
    assert "generated" not in printed.out
    assert "TTFT" not in printed.out
    assert "2 failed: not a response of /v1/embeddings" in printed.err


def test_a_trace_is_replayed_at_its_timestamps(server: FakeServer, tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 520, "output_length": 4, "hash_ids": [1, 2]},
        {"timestamp": 20_000, "input_length": 530, "output_length": 4, "hash_ids": [1, 3]},
        {"timestamp": 20_000, "input_length": 5000, "output_length": 4, "hash_ids": []},
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    save = ("--save-detailed", "--result-dir", str(tmp_path / "out"))
    assert bench(server, "--dataset-name", "trace", "--dataset-path", str(trace), "--trace-scale", "20", *save) == 0
    result = result_of(tmp_path / "out")
    assert result["num_prompts"] == 2
    first, second = result["start_times"]
    assert 0.1 < second - first < 10, "a twentieth of 20 s"
    assert server.bodies[0]["prompt"][:512] == server.bodies[1]["prompt"][:512]


def test_failures_are_counted_and_shown(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.fail_after = 2
    save = ("--save-detailed", "--result-dir", str(tmp_path))
    assert bench(server, "--tokenizer", DEMO, "--num-prompts", "5", *SHORT, *save) == 0
    result = result_of(tmp_path)
    assert (result["completed"], result["failed"]) == (2, 3)
    assert sorted(result["output_lens"]) == [0, 0, 0, 12, 12]
    assert "3 failed: HTTP 503: too busy" in capsys.readouterr().err
    assert bench(server, "--tokenizer", DEMO, "--num-prompts", "2", *SHORT) == 1


def test_an_interrupt_reports_what_was_measured(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.interrupt_after = 3
    save = ("--save-result", "--result-dir", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        bench(server, "--tokenizer", DEMO, "--num-prompts", "50", "--max-concurrency", "1", *SHORT, *save)
    assert result_of(tmp_path)["completed"] == 3
    captured = capsys.readouterr()
    assert "47 requests had not finished" in captured.err
    assert "Successful requests:                     3" in captured.out


def test_the_benchmark_waits_for_a_server_that_is_loading(server: FakeServer) -> None:
    arguments = ("--tokenizer", DEMO, "--num-prompts", "1", *SHORT)
    server.models_refused = 1
    assert bench(server, "--ready-check-timeout-sec", "30", *arguments) == 0
    server.models_refused = 1
    with pytest.raises(ConfigError, match="503: loading"):
        bench(server, *arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--random-input-len", "1000"), "max_model_len=600"),
        (("--dataset-name", "trace"), "needs --dataset-path"),
        (("--dataset-path", "x"), "cannot be used with --dataset-path"),
        (("--dataset-name", "trace", "--dataset-path", "x", "--request-rate", "2"), "--trace-scale"),
        (("--dataset-name", "sharegpt", "--dataset-path", "nowhere.json"), "nowhere.json cannot be read"),
        ((*EMBEDDINGS, "--temperature", "0"), "--temperature cannot be used with --backend openai-embeddings"),
        ((*EMBEDDINGS, "--ignore-eos"), "--ignore-eos cannot be used with --backend openai-embeddings"),
        ((*EMBEDDINGS, "--random-output-len", "8"), "--random-output-len cannot be used with --backend"),
        ((*EMBEDDINGS, "--sharegpt-output-len", "8"), "--sharegpt-output-len cannot be used with --backend"),
        ((*EMBEDDINGS, "--percentile-metrics", "e2el,ttft"), "embeddings have no ttft"),
        ((*EMBEDDINGS, "--goodput", "tpot:5"), "embeddings have no tpot"),
        ((*EMBEDDINGS, "--dataset-name", "trace", "--dataset-path", "x"), "it cannot be used with --backend"),
        (("--tokenizer", "nowhere"), "no tokenizer.json"),
        (("--base-url", "http://127.0.0.1:9"), "is the server up"),
    ],
)
def test_invalid_arguments(server: FakeServer, arguments: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        bench(server, *arguments)


@pytest.mark.parametrize("model_id", [["m"], 5, "\ud800", "a\0b"], ids=repr)
def test_a_model_whose_name_is_not_text(server: FakeServer, model_id: Any) -> None:
    server.model_id = model_id
    with pytest.raises(ConfigError, match="lists no model: pass --model"):
        bench(server, "--tokenizer", DEMO, "--num-prompts", "1", *SHORT)


@pytest.mark.parametrize("argument", ["--goodput=itl:5", "--request-rate=0", "--metric-percentiles=101", "--seed=x"])
def test_arguments_that_cannot_be_parsed(server: FakeServer, argument: str) -> None:
    with pytest.raises(SystemExit):
        bench(server, argument)
