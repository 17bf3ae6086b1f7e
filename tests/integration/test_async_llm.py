"""`AsyncLLM` in a program with an event loop: concurrent requests, aborts at any moment, immediate refusals."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, AsyncLLM, ConfigError, RequestError, SamplingParams
from penstock.config.engine import EngineArgs, EngineConfig, resolve
from penstock.config.model import read_model_json
from penstock.config.model_path import resolve_model_path
from penstock.config.replicas import CorePlan
from penstock.frontend import async_llm
from penstock.frontend import llm as llm_module
from penstock.frontend.core_client import CoreClient
from penstock.messages.outputs import RequestOutput
from penstock.tokenizer.tokenizer import Tokenizer, load_tokenizer
from penstock.utils.errors import EngineDeadError, OverloadedError, PenstockError

STORY = "Once upon a time"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
MAX_QUEUED = 8

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def engine(run: Run) -> Iterator[AsyncLLM]:
    engine = run(AsyncLLM.start(max_model_len=512, max_num_queued_requests=MAX_QUEUED))
    yield engine
    run(engine.check_integrity())
    run(engine.shutdown())


@pytest.fixture(autouse=True)
def nothing_is_left(run: Run, request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        run(asyncio.wait_for(engine.wait_until_idle(), 10))
        run(engine.check_integrity())
        assert engine.num_unfinished == 0
        assert engine.seconds_without_progress == 0
        assert (engine.replicas[0].stats.num_running, engine.replicas[0].stats.num_waiting) == (0, 0)


async def last(engine: AsyncLLM, prompt: Any = STORY, params: SamplingParams = GREEDY, **options: Any) -> RequestOutput:
    states = [output async for output in engine.generate(prompt, params, **options)]
    assert states[-1].finished
    return states[-1]


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_a_start_resolves_the_configuration_once(
    kind: type[LLM | AsyncLLM], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two ranks in processes of their own, and for `AsyncLLM` the engine core too: after the first resolution the
    checkpoint's configuration changes to one that is refused.
    """
    folder = shutil.copytree(resolve_model_path("demo"), tmp_path / "model")

    def resolve_once(args: EngineArgs) -> EngineConfig:
        config = resolve(args)
        refused = {**read_model_json(folder), "quantization_config": {"bits": 4}}
        (folder / "config.json").write_text(json.dumps(refused), encoding="utf-8")
        return config

    monkeypatch.setattr(llm_module if kind is LLM else async_llm, "resolve", resolve_once)
    arguments: dict[str, Any] = {"model": str(folder), "tensor_parallel_size": 2, "max_model_len": 64}
    engine = LLM(**arguments) if kind is LLM else run(AsyncLLM.start(**arguments))
    stopping = engine.shutdown()
    if stopping is not None:
        run(stopping)
    with pytest.raises(ConfigError, match="is quantized"):
        resolve(EngineArgs(**arguments))


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> list[CoreClient]:
    """The clients of the cores that the test starts."""
    found: list[CoreClient] = []
    start = CoreClient.start

    async def starting(plan: CorePlan) -> CoreClient:
        found.append(await start(plan))
        return found[-1]

    monkeypatch.setattr(CoreClient, "start", starting)
    return found


def test_the_tokenizer_is_read_while_the_core_loads(
    run: Run, clients: list[CoreClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loading(config: EngineConfig) -> Tokenizer | None:
        assert [client.ready.done() for client in clients] == [False]
        return load_tokenizer(config)

    monkeypatch.setattr(async_llm, "load_tokenizer", loading)
    engine = run(AsyncLLM.start(max_model_len=64))
    assert engine.get_tokenizer().max_tokens == 64
    run(engine.shutdown())


def test_a_tokenizer_that_cannot_be_read_ends_the_core(run: Run, clients: list[CoreClient], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read"):
        run(AsyncLLM.start(max_model_len=64, tokenizer=str(tmp_path)))
    assert [client.death is None for client in clients] == [False]


@pytest.mark.long
def test_the_same_tokens_as_llm(engine: AsyncLLM, run: Run) -> None:
    params = [GREEDY, SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=24, logprobs=2, prompt_logprobs=1)]
    llm = LLM(max_model_len=512)
    wanted = [llm.generate(STORY, each, use_tqdm=False)[0] for each in params]
    llm.shutdown()

    async def both() -> list[RequestOutput]:
        return await asyncio.gather(*(last(engine, params=each) for each in params))

    for output, expected in zip(run(both()), wanted, strict=True):
        assert output.outputs == expected.outputs
        assert output.prompt_logprobs == expected.prompt_logprobs


def test_output_grows_and_is_never_taken_back(engine: AsyncLLM, run: Run) -> None:
    async def watch() -> None:
        seen = ""
        num_seen = 0
        async for output in engine.generate(STORY, SamplingParams(temperature=0, max_tokens=24, stop="no such text")):
            (completion,) = output.outputs
            assert completion.text.startswith(seen)
            assert len(completion.token_ids) > num_seen or completion.finished
            seen, num_seen = completion.text, len(completion.token_ids)
        assert num_seen == 24

    run(watch())


def test_a_slow_reader_misses_states_but_no_tokens(engine: AsyncLLM, run: Run) -> None:
    async def watch() -> int:
        count = 0
        async for _ in engine.generate(STORY, GREEDY):
            count += 1
            await asyncio.sleep(0.2)
        return count

    assert run(watch()) < GREEDY.max_tokens  # pyright: ignore


def test_closing_the_generator_aborts(engine: AsyncLLM, run: Run) -> None:
    async def leave() -> None:
        async with aclosing(engine.generate(STORY, ENDLESS)) as outputs:
            async for output in outputs:
                assert not output.finished
                break
        assert engine.num_unfinished == 0

    run(leave())


def test_cancelling_the_task_aborts_at_any_moment(engine: AsyncLLM, run: Run) -> None:
    async def leave(seconds: float) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(last(engine, "word " * 300, ENDLESS), seconds)
        assert engine.num_unfinished == 0

    for seconds in (0, 0.001, 0.02, 0.1):
        run(leave(seconds))


def test_an_aborted_request_does_not_affect_another(engine: AsyncLLM, run: Run) -> None:
    async def race() -> tuple[RequestOutput, RequestOutput]:
        alone = await last(engine)
        async with aclosing(engine.generate("The moon", ENDLESS)) as outputs:
            await anext(outputs)
            staying = asyncio.create_task(last(engine))
            await anext(outputs)
        return alone, await staying

    alone, staying = run(race())
    assert staying.outputs == alone.outputs


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ("", GREEDY, "prompt"),
        (5, GREEDY, "prompt"),
        ("\ud800", GREEDY, "prompt"),
        ([4096], GREEDY, "prompt_token_ids"),
        ("x " * 600, GREEDY, "prompt"),
        ("x " * 6000, GREEDY, "prompt"),
        ({"prompts": "x"}, GREEDY, "prompts"),
        (STORY, SamplingParams(min_tokens=600, max_tokens=None), "min_tokens"),
        (STORY, SamplingParams(allowed_token_ids=[9999]), "allowed_token_ids"),
        (STORY, "greedy", "sampling_params"),
    ],
)
def test_mistakes_are_refused_before_anything_runs(
    engine: AsyncLLM, run: Run, prompt: Any, params: Any, field: str
) -> None:
    with pytest.raises(RequestError) as caught:
        run(last(engine, prompt, params))
    assert caught.value.field == field


def test_a_request_id_cannot_be_in_use_twice(engine: AsyncLLM, run: Run) -> None:
    async def twice() -> None:
        async with aclosing(engine.generate(STORY, ENDLESS, "mine")) as outputs:
            await anext(outputs)
            with pytest.raises(RequestError, match="already in use"):
                await engine.submit(STORY, GREEDY, "mine")
        assert (await last(engine, request_id="mine")).request_id == "mine"
        assert (await last(engine, request_id="x" * 1024)).request_id == "x" * 1024
        with pytest.raises(RequestError, match="a request id may have 1,024 characters at most"):
            await last(engine, request_id="x" * 1025)

    run(twice())


def test_a_request_with_the_id_of_one_that_was_aborted_has_its_own_tokens(engine: AsyncLLM, run: Run) -> None:
    async def main() -> None:
        wanted = await last(engine, "The sea")
        for count in range(20):
            stream = await engine.submit(STORY, ENDLESS, "again")
            for _ in range(1 + count % 4):
                await anext(stream)
            stream.close()
            assert (await last(engine, "The sea", request_id="again")).outputs == wanted.outputs

    run(main())


def test_requests_beyond_max_num_queued_requests_are_refused(engine: AsyncLLM, run: Run) -> None:
    async def fill() -> None:
        streams = [await engine.submit(STORY, ENDLESS) for _ in range(MAX_QUEUED - 1)]
        assert engine.num_unfinished == MAX_QUEUED - 1
        with pytest.raises(OverloadedError, match=f"max_num_queued_requests={MAX_QUEUED}"):
            await engine.submit(STORY, SamplingParams(n=2, seed=1))
        streams.append(await engine.submit(STORY, ENDLESS))
        with pytest.raises(OverloadedError):
            await last(engine)
        for stream in streams:
            stream.close()
            stream.close()
        await last(engine)

    run(fill())


def test_statistics_and_the_prefix_cache(engine: AsyncLLM, run: Run) -> None:
    async def use() -> None:
        prompt = "A story about a mill and a river. " * 6
        before = engine.replicas[0].stats
        assert await engine.reset_prefix_cache()
        assert (await last(engine, prompt)).num_cached_tokens == 0
        assert (await last(engine, prompt)).num_cached_tokens > 0
        assert engine.replicas[0].stats.prefix_cache_hits > before.prefix_cache_hits
        assert engine.replicas[0].stats.prefix_cache_queries > before.prefix_cache_queries
        async with aclosing(engine.generate(prompt, ENDLESS)) as outputs:
            await anext(outputs)
            assert engine.replicas[0].stats.num_running == 1
            assert engine.replicas[0].stats.kv_cache_usage > 0
            assert not await engine.reset_prefix_cache()
            assert await engine.replicas[0].block_map(64)
        await engine.wait_until_idle()
        while not await engine.reset_prefix_cache():
            await asyncio.sleep(0.01)
        assert not await engine.reset_prefix_cache(reset_connector=True), "there is no connector"
        assert (await last(engine, prompt)).num_cached_tokens == 0

    run(use())


def test_a_stream_that_has_ended_stays_ended(engine: AsyncLLM, run: Run) -> None:
    async def read_on() -> None:
        stream = await engine.submit(STORY, GREEDY)
        async for _ in stream:
            pass
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(read_on())


def test_a_failed_stream_does_not_block_its_reader(run: Run) -> None:
    async def shut_down_during_a_read() -> None:
        engine = await AsyncLLM.start(max_model_len=64)
        stream = await engine.submit(STORY, ENDLESS)
        await anext(stream)
        await engine.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            async for _ in stream:
                pass
        with pytest.raises((StopAsyncIteration, EngineDeadError)):
            await asyncio.wait_for(anext(stream), 1)
        stream.close()
        with pytest.raises(EngineDeadError):
            await last(engine)
        with pytest.raises(EngineDeadError):
            await engine.reset_prefix_cache()
        assert engine.num_unfinished == 0
        await engine.shutdown()

    run(shut_down_during_a_read())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 10**9}, "max_model_len"),
        ({"max_model_lenn": 5}, "max_model_len"),
        ({"model": "/nowhere"}, "/nowhere"),
    ],
)
def test_an_invalid_configuration_is_a_config_error(run: Run, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(AsyncLLM.start(**options))


def test_all_errors_have_one_base_class() -> None:
    assert all(
        issubclass(kind, PenstockError) for kind in (RequestError, OverloadedError, EngineDeadError, ConfigError)
    )
