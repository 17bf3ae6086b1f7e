"""Vectors of decoder models: agreement with transformers, identical bits in every configuration, and refusals."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock import LLM, AsyncLLM, ConfigError, PenstockError, PoolingParams, RequestError, SamplingParams
from penstock.core.scheduler import Scheduler
from tests.grids import exhaustive, grid
from tests.integration.checkpoints import COMMON, make_checkpoint, make_pooling_checkpoint

MODEL = "qwen3-128"
MAX_MODEL_LEN = 240
CHUNK = 24
# name -> how a vector is computed from the hidden states, [tokens, hidden_size].
POOLED = {"lasttoken": lambda h: h[-1], "mean_tokens": lambda h: h.mean(0), "cls_token": lambda h: h[0]}
RANKS = ((1, 1), (2, 1), (1, 2), (1, 3), (2, 2))
PLAIN: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_batched_tokens": 4096,
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "num_gpu_blocks_override": 400,
}


def prompts(vocab_size: int = COMMON["vocab_size"], count: int = 24) -> list[list[int]]:
    """Returns prompts of 1 token to the longest; many share a prefix."""
    draw = random.Random(3)
    shared = [draw.randrange(vocab_size) for _ in range(MAX_MODEL_LEN)]
    lengths = [1, 2, 16, 17, MAX_MODEL_LEN, *(draw.randint(3, 150) for _ in range(count - 5))]
    own = [[draw.randrange(vocab_size) for _ in range(length)] for length in lengths]
    return [shared[: min(len(each) - 1, 16 * (number % 5))] + each for number, each in enumerate(own)]


def cut(all_prompts: list[list[int]]) -> list[list[int]]:
    return [each[:MAX_MODEL_LEN] for each in all_prompts]


PROMPTS = cut(prompts())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pooling")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    return make_pooling_checkpoint(MODEL, folder)


def vectors(model: Path | str, *, one_by_one: bool = False, repeat: int = 1, **arguments: Any) -> tuple[bytes, LLM]:
    """Returns the bytes of all vectors. `repeat` runs the batch again on the cache of the first run."""
    llm = LLM(str(model), skip_tokenizer_init=True, runner="pooling", **{**PLAIN, **arguments})
    outputs = []
    for _ in range(repeat):
        if one_by_one:
            outputs = [llm.encode(prompt, use_tqdm=False)[0] for prompt in PROMPTS]
        else:
            outputs = llm.encode(PROMPTS, use_tqdm=False)
        llm.check_integrity()
    llm.shutdown()
    assert all(output.outputs.data.dtype == np.float32 for output in outputs)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    return b"".join(output.outputs.data.tobytes() for output in outputs), llm


# ---- Agreement with transformers ----


@torch.inference_mode()
def assert_agrees_with_transformers(path: Path, llm: LLM, dtype: torch.dtype, mode: str, tolerance: float) -> None:
    model = transformers.AutoModel.from_pretrained(path, dtype=dtype).eval()
    for prompt, output in zip(PROMPTS, llm.embed(PROMPTS, use_tqdm=False), strict=True):
        hidden = model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0].double()
        wanted = POOLED[mode](hidden)
        found = torch.tensor(output.outputs.embedding, dtype=torch.float64)
        assert len(found) == output.outputs.hidden_size == COMMON["hidden_size"]
        assert abs(found.norm() - 1) < 1e-6
        assert 1 - torch.cosine_similarity(found, wanted, dim=0) < tolerance


@pytest.mark.spread(3)
@pytest.mark.parametrize("mode", POOLED)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-3)])
def test_cosine_with_transformers(mode: str, dtype: torch.dtype, tolerance: float, folder: Path) -> None:
    path = make_pooling_checkpoint(MODEL, folder, dtype, mode)
    chunk = CHUNK if mode == "lasttoken" else None
    llm = LLM(str(path), skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=chunk)
    assert_agrees_with_transformers(path, llm, dtype, mode, tolerance)
    llm.shutdown()


def test_a_generating_checkpoint_pools_by_its_last_token(folder: Path) -> None:
    path = make_checkpoint(MODEL, folder)
    llm = LLM(str(path), skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN, runner="pooling")
    assert_agrees_with_transformers(path, llm, torch.float32, "lasttoken", 1e-5)
    llm.shutdown()


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen2-tied", "mistral-window", "llama3-gqa4-tied"])
def test_other_architectures(name: str, folder: Path) -> None:
    path = make_pooling_checkpoint(name, folder)
    llm = LLM(str(path), skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=CHUNK)
    assert_agrees_with_transformers(path, llm, torch.float32, "lasttoken", 1e-5)
    llm.shutdown()


def test_dimensions_and_normalisation(checkpoint: Path, folder: Path) -> None:
    llm = LLM(str(checkpoint), skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN)
    (whole,) = llm.encode(PROMPTS[7], PoolingParams(normalize=False), use_tqdm=False)
    (short,) = llm.encode(PROMPTS[7], PoolingParams(dimensions=32), use_tqdm=False)
    (raw,) = llm.encode(PROMPTS[7], PoolingParams(dimensions=32, normalize=False), use_tqdm=False)
    head = whole.outputs.data[:32]
    assert raw.outputs.data.tobytes() == head.tobytes()
    assert abs(np.linalg.norm(whole.outputs.data) - 1) > 0.1
    np.testing.assert_allclose(short.outputs.data, head / np.linalg.norm(head), rtol=1e-6)
    for wrong in (0, -1, True, 2.0):
        with pytest.raises(RequestError, match="dimensions must be an integer of at least 1"):
            PoolingParams(dimensions=wrong)
    with pytest.raises(RequestError, match="dimensions must be at most 96, the size of the model's vectors, got 97"):
        llm.embed(PROMPTS[0], PoolingParams(dimensions=97))
    llm.shutdown()

    path = make_pooling_checkpoint(MODEL, folder, normalize=False)
    unscaled = LLM(str(path), skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN)
    assert unscaled.encode(PROMPTS[7], use_tqdm=False)[0].outputs.data.tobytes() == whole.outputs.data.tobytes()
    unscaled.shutdown()


# ---- Identical bits ----


@pytest.fixture(scope="module", params=["random-qwen3", exhaustive("demo")])
def weights(request: pytest.FixtureRequest, checkpoint: Path) -> Path | str:
    return checkpoint if request.param == "random-qwen3" else "demo"


@pytest.fixture(scope="module")
def plain(weights: Path | str) -> bytes:
    return vectors(weights, one_by_one=True)[0]


@pytest.mark.parametrize(("overlap", "chunk"), grid((False, True), (16, 48, 4096)))
def test_a_batch_and_chunks(weights: Path | str, plain: bytes, overlap: bool, chunk: int) -> None:
    assert vectors(weights, async_scheduling=overlap, max_num_batched_tokens=chunk)[0] == plain


@pytest.mark.parametrize("overlap", [False, True])
def test_prefix_hits(weights: Path | str, plain: bytes, overlap: bool) -> None:
    found, llm = vectors(
        weights, repeat=2, async_scheduling=overlap, max_num_batched_tokens=48, enable_prefix_caching=True
    )
    assert found == plain
    assert llm.stats().prefix_cache_hits > 1000


@pytest.mark.spread(1)
@pytest.mark.parametrize(("overlap", "size"), grid((False, True), ((1, 1), (2, 2))))
def test_preemption(
    weights: Path | str, plain: bytes, overlap: bool, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts run one after another, so that a full cache preempts none; here every third step preempts one."""
    preempted: list[str] = []
    schedule = Scheduler.schedule

    def rewinding(self: Scheduler, *args: Any) -> Any:
        if len(self._running) and not self._is_warm_up and self._step % 3 == 0 and len(preempted) < 20:
            victim = self._running.last()
            self._rewind(victim)
            self._rewound_request_ids.add(victim.request_id)
            preempted.append(victim.request_id)
        return schedule(self, *args)

    monkeypatch.setattr(Scheduler, "schedule", rewinding)
    assert vectors(weights, async_scheduling=overlap, max_num_batched_tokens=48, **ranks(*size))[0] == plain
    assert len(preempted) == 20


def ranks(tp: int, pp: int, backend: str | None = "uniproc") -> dict[str, Any]:
    return {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "distributed_executor_backend": backend}


@pytest.mark.spread(1)
@pytest.mark.parametrize(("size", "overlap", "chunk"), grid(RANKS[1:], (False, True), (16, 4096), strength=1))
def test_ranks(weights: Path | str, plain: bytes, size: tuple[int, int], overlap: bool, chunk: int) -> None:
    found, _ = vectors(
        weights,
        repeat=2,
        async_scheduling=overlap,
        max_num_batched_tokens=chunk,
        enable_prefix_caching=True,
        **ranks(*size),
    )
    assert found == plain


@pytest.mark.long
def test_ranks_in_processes(checkpoint: Path) -> None:
    plain = vectors(checkpoint, one_by_one=True)[0]
    assert vectors(checkpoint, max_num_batched_tokens=48, **ranks(2, 2, None))[0] == plain


@pytest.mark.spread(1)
@pytest.mark.parametrize("size", [(1, 1), (2, 2)])
def test_tiers(weights: Path | str, plain: bytes, size: tuple[int, int]) -> None:
    """The cache holds one prompt, so the second run loads from the tier."""
    offloading = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"load_policy": "always"}}
    found, llm = vectors(
        weights,
        repeat=2,
        max_num_batched_tokens=48,
        enable_prefix_caching=True,
        kv_transfer_config=offloading,
        num_gpu_blocks_override=17,
        **ranks(*size),
    )
    assert found == plain
    assert llm.stats().remote_kv.num_tokens > 500


@pytest.mark.spread(1)
@pytest.mark.parametrize("mode", ["mean_tokens", "cls_token"])
def test_pooling_of_whole_prompts_gives_identical_bits(mode: str, folder: Path) -> None:
    path = make_pooling_checkpoint(MODEL, folder, mode=mode)
    whole = {"enable_prefix_caching": True, "max_num_batched_tokens": MAX_MODEL_LEN}
    plain = vectors(path, one_by_one=True)[0]
    for arguments in ({}, {"async_scheduling": True}, ranks(2, 2)):
        found, llm = vectors(path, repeat=2, **whole, **arguments)
        assert found == plain
        assert llm.stats().prefix_cache_hits == 0


def test_vectors_of_rounded_inputs_have_identical_bits(folder: Path) -> None:
    path = make_pooling_checkpoint(MODEL, folder, torch.bfloat16)
    rounded: dict[str, Any] = {"quantization": "int4", "quantize_activations": "int8"}
    plain = vectors(path, one_by_one=True, num_threads=1, **rounded)[0]
    assert vectors(path, quantization="int4")[0] != plain
    for arguments in ({"num_threads": 2, "max_num_batched_tokens": CHUNK}, {"num_threads": 2, **ranks(2, 1)}):
        assert vectors(path, **arguments, **rounded)[0] == plain


# ---- Refusals ----


def test_pooling_and_generating_engines_refuse_each_others_requests(checkpoint: Path) -> None:
    pooling = LLM(str(checkpoint), skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN)
    with pytest.raises(RequestError, match="pools and generates no tokens: use embed"):
        pooling.generate([[1, 2]], SamplingParams(max_tokens=2))
    longest = [1] * MAX_MODEL_LEN
    assert len(pooling.embed([longest], use_tqdm=False)[0].outputs.embedding) == COMMON["hidden_size"]
    with pytest.raises(RequestError, match=r"has 241 tokens; max_model_len=240 allows at most 240$"):
        pooling.embed([[*longest, 1]])
    with pytest.raises(RequestError, match="2 prompts but 1 priority"):
        pooling.embed([[1], [2]], priority=[0])
    with pytest.raises(RequestError, match="prompt_token_ids must not be empty"):
        pooling.embed([[]])
    pooling.shutdown()
    generating = LLM(max_model_len=64)
    with pytest.raises(RequestError, match="generates tokens and does not pool: start it with runner=pooling"):
        generating.embed("a")
    generating.shutdown()


@pytest.mark.parametrize(
    ("mode", "arguments", "message"),
    [
        ("lasttoken", {"runner": "generate"}, "a Qwen3Model, which has no output head: use runner=pooling"),
        ("lasttoken", {"runner": "both"}, "runner must be one of auto, generate, pooling"),
        (
            "lasttoken",
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative_config needs an engine that generates",
        ),
        ("mean_tokens", {"max_num_batched_tokens": 64}, "would split prompts of up to max_model_len=240 tokens"),
        ("cls_token", {"kv_transfer_config": {"kv_connector": "OffloadingConnector"}}, "cls pooling needs all tokens"),
        ("max_tokens", {}, "asks for pooling_mode_max_tokens; supported"),
    ],
)
def test_invalid_configurations(mode: str, arguments: dict[str, Any], message: str, folder: Path) -> None:
    path = make_pooling_checkpoint(MODEL, folder, mode=mode)
    with pytest.raises(ConfigError, match=message):
        LLM(str(path), skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN, **arguments)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", "{", "is not valid JSON"),
        pytest.param("modules.json", "[" * 100_000, "is not valid JSON", id="depth"),
        pytest.param("modules.json", "1" * 5000, "is not valid JSON", id="digits"),
        ("modules.json", '[{"path": ""}]', "must hold a list of modules with a type each"),
        ("modules.json", '[{"type": "a.Transformer"}]', "lists Transformer; supported"),
        ("modules.json", '[{"type": "a.Transformer"}, {"type": "a.Dense"}]', "lists a module 'Dense'"),
        ("1_Pooling/config.json", None, "is missing: modules.json refers to it"),
        ("1_Pooling/config.json", "{}", "asks for no pooling mode"),
        (
            "1_Pooling/config.json",
            '{"pooling_mode_lasttoken": true, "pooling_mode_mean_tokens": true}',
            "asks for pooling_mode_lasttoken and pooling_mode_mean_tokens",
        ),
        ("1_Pooling/config.json", '{"pooling_mode": "weightedmean"}', "asks for weightedmean"),
        (
            "1_Pooling/config.json",
            '{"pooling_mode_mean_tokens": true, "include_prompt": false}',
            "leaves prompts out of the result",
        ),
        ("1_Pooling/config.json", '{"pooling_mode": "cls", "include_prompt": false}', "leaves prompts out"),
        (
            "config_sentence_transformers.json",
            '{"prompts": {"a": "b"}, "default_prompt_name": ["a"]}',
            r"has default_prompt_name \['a'\], which is not in prompts",
        ),
    ],
)
def test_invalid_files(file: str, content: str | None, message: str, tmp_path: Path) -> None:
    path = make_pooling_checkpoint(MODEL, tmp_path)
    if content is None:
        (path / file).unlink()
    else:
        (path / file).write_text(content)
    with pytest.raises(ConfigError, match=message):
        LLM(str(path), skip_tokenizer_init=True)


def test_a_vector_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    path = make_pooling_checkpoint(MODEL, tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["embed_tokens.weight"][7] = torch.nan
    save_file(tensors, path / "model.safetensors")
    llm = LLM(str(path), skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN)
    with pytest.raises(PenstockError, match="no vector can be made: the hidden states are not finite"):
        llm.embed([[8], [7]])
    assert llm.embed([[8]], use_tqdm=False)
    llm.shutdown()


@pytest.mark.parametrize("pools", [True, False])
def test_a_number_that_is_not_finite_spoils_no_prefix_of_other_prompts(pools: bool, tmp_path: Path) -> None:
    """Attention computes the states before it together with it, and the first chunk of the prompt is whole blocks."""
    path = (make_pooling_checkpoint if pools else make_checkpoint)(MODEL, tmp_path)
    tensors, name = load_file(path / "model.safetensors"), f"{'' if pools else 'model.'}embed_tokens.weight"
    tensors[name][7] = torch.nan
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    llm = LLM(str(path), skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=64)
    prompt = list(range(20, 150))
    spoiled = [*prompt[:50], 7, *prompt[50:]]
    if pools:
        with pytest.raises(PenstockError, match="no vector can be made: the hidden states are not finite"):
            llm.embed([spoiled], use_tqdm=False)
        assert llm.embed([prompt], use_tqdm=False)
    else:
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        failed, fine = (llm.generate(each, params, use_tqdm=False)[0] for each in (spoiled, prompt))
        assert "not finite" in str(failed.error)
        assert (fine.error, len(fine.outputs[0].token_ids)) == (None, 2)
    llm.shutdown()


# ---- With an event loop ----


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def test_async_llm(loop: asyncio.AbstractEventLoop, plain: bytes, weights: Path | str) -> None:
    async def main() -> bytes:
        llm = await AsyncLLM.start(str(weights), runner="pooling", skip_tokenizer_init=True, **PLAIN)
        try:
            with pytest.raises(RequestError, match="generates no tokens"):
                await llm.submit([1])
            with pytest.raises(RequestError, match="must be integers from 0 to"):
                await llm.encode([10**6])
            outputs = await asyncio.gather(*(llm.encode(prompt) for prompt in PROMPTS))
            again = await llm.encode_all([(prompt, PoolingParams()) for prompt in PROMPTS[:3]])
            assert [a.outputs.data.tobytes() for a in again] == [b.outputs.data.tobytes() for b in outputs[:3]]
            with pytest.raises(RequestError, match="must not be empty"):
                await llm.encode_all([(PROMPTS[4], PoolingParams()), ([], PoolingParams())])
            # A request whose caller has been cancelled leaves the engine.
            task = asyncio.ensure_future(llm.encode(PROMPTS[4]))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait_for(llm.wait_until_idle(), 10)
            await llm.check_integrity()
        finally:
            await llm.shutdown()
        return b"".join(output.outputs.data.tobytes() for output in outputs)

    assert loop.run_until_complete(main()) == plain
