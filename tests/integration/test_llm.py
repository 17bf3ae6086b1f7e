"""The offline interface as a user sees it, with the built-in model."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import LLM, ConfigError, EngineDeadError, RequestError, SamplingParams
from penstock.runner.model_runner import ModelRunner
from tests.grids import grid

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(max_model_len=512)
    yield llm
    llm.check_integrity()
    llm.shutdown()


def ask(llm: LLM, question: str, **params: Any) -> str:
    params = {"temperature": 0.0, "max_tokens": 60, **params}
    return llm.chat([{"role": "user", "content": question}], SamplingParams(**params))[0].outputs[0].text


def test_the_model_can_add(llm: LLM) -> None:
    assert "579" in ask(llm, "What is 123 + 456?")


def test_prompts_in_every_form(llm: LLM) -> None:
    text = "Once upon a time"
    token_ids = llm.get_tokenizer().encode(text)
    shapes: list[Any] = [text, token_ids, {"prompt": text}, {"prompt_token_ids": token_ids, "cache_salt": "s"}]
    outputs = llm.generate(shapes, GREEDY, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert [output.prompt for output in outputs] == [text, None, text, None]
    assert all(output.finished for output in outputs)
    single = llm.generate(token_ids, GREEDY, use_tqdm=False)
    assert single[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_n_completions_differ_and_are_reproducible(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=12, logprobs=1)
    first, second = (llm.generate("Once upon a time", params, use_tqdm=False)[0] for _ in range(2))
    assert [c.index for c in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in first.outputs}) > 1
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in second.outputs]
    for completion in first.outputs:
        assert completion.logprobs is not None
        chosen = [row[token].logprob for row, token in zip(completion.logprobs, completion.token_ids, strict=True)]
        assert completion.cumulative_logprob == pytest.approx(sum(chosen))


def test_a_seed_may_be_a_numpy_integer(llm: LLM) -> None:
    seeds: list[Any] = [7, np.int64(7)]
    params = [SamplingParams(seed=seed, max_tokens=8) for seed in seeds]
    plain, numpy = llm.generate(["Once upon a time"] * 2, params, use_tqdm=False)
    assert plain.outputs[0].token_ids == numpy.outputs[0].token_ids


def test_prefix_hits_are_reported(llm: LLM) -> None:
    prompt = "The key of Anna is in the red box. " * 10
    llm.generate(prompt, GREEDY, use_tqdm=False)
    (again,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert again.num_cached_tokens >= len(again.prompt_token_ids) - 16
    (other,) = llm.generate({"prompt": prompt, "cache_salt": "somebody else"}, GREEDY, use_tqdm=False)
    assert other.num_cached_tokens == 0
    assert other.outputs[0].token_ids == again.outputs[0].token_ids


def test_finish_reasons(llm: LLM) -> None:
    (stopped,) = llm.chat([{"role": "user", "content": "What is 2 + 2?"}], GREEDY)
    assert stopped.outputs[0].finish_reason == "stop"
    assert stopped.outputs[0].stop_reason is None
    (cut,) = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    assert (cut.outputs[0].finish_reason, len(cut.outputs[0].token_ids)) == ("length", 24)
    word = cut.outputs[0].text.split()[3]
    params = SamplingParams(temperature=0.0, max_tokens=24, stop=[word])
    (by_string,) = llm.generate("Once upon a time", params, use_tqdm=False)
    assert by_string.outputs[0].stop_reason == word
    assert by_string.outputs[0].text == cut.outputs[0].text[: cut.outputs[0].text.find(word)]
    token = cut.outputs[0].token_ids[5]
    params = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=[token])
    (by_token,) = llm.generate("Once upon a time", params, use_tqdm=False)
    assert by_token.outputs[0].stop_reason == token
    assert by_token.outputs[0].token_ids[-1] == token


def test_min_tokens_and_ignore_eos(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is 2 + 2?"}]
    (longer,) = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=30, min_tokens=20))
    assert len(longer.outputs[0].token_ids) >= 20
    (endless,) = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    assert len(endless.outputs[0].token_ids) == 30


def test_bad_words_do_not_appear(llm: LLM) -> None:
    (free,) = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    word = free.outputs[0].text.split()[2].strip(",.")
    params = SamplingParams(temperature=0.0, max_tokens=24, bad_words=[word])
    (without,) = llm.generate("Once upon a time", params, use_tqdm=False)
    assert word not in without.outputs[0].text.split()


def test_a_bad_word_of_white_space_is_that_white_space(llm: LLM) -> None:
    (free,) = llm.generate("def add(a, b):", GREEDY, use_tqdm=False)
    blank = free.outputs[0].token_ids[0]
    word = llm.get_tokenizer().decode([blank])
    assert word.isspace()
    assert word != " "
    params = SamplingParams(temperature=0.0, max_tokens=24, bad_words=[word])
    (without,) = llm.generate("def add(a, b):", params, use_tqdm=False)
    assert blank not in without.outputs[0].token_ids


def test_a_stream_ends_as_generate_does_and_can_be_closed(llm: LLM) -> None:
    (whole,) = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    texts = [output.outputs[0].text for output in llm.stream("Once upon a time", GREEDY)]
    assert texts[-1] == whole.outputs[0].text
    assert len(texts) == 24
    stream = llm.stream("Once upon a time", SamplingParams(temperature=0.0, max_tokens=200))
    next(stream)
    stream.close()
    assert llm.stats().num_running == 0
    llm.check_integrity()


@pytest.mark.spread(1)
@pytest.mark.parametrize(("overlap", "streams"), grid((False, True), (False, True), strength=1))
def test_an_interrupt_leaves_the_engine_usable(overlap: bool, streams: bool) -> None:
    """Sends real signals at random moments."""
    llm = LLM(max_model_len=256, num_gpu_blocks_override=100, async_scheduling=overlap)
    (before,) = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    rng = random.Random(0)
    num_interrupted = 0
    for _ in range(25):
        timer = threading.Timer(rng.uniform(0.001, 0.08), os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        kept = None
        try:
            if streams:
                for _ in range(2):
                    list(llm.stream("Once upon a time", GREEDY))
            else:
                llm.generate(["Once upon a time"] * 5, GREEDY, use_tqdm=False)
            timer.join()
        except KeyboardInterrupt as interrupt:
            # An interactive shell keeps the last traceback, too.
            kept = interrupt.__traceback__
            num_interrupted += 1
        timer.join()
        assert llm.stats().num_running == llm.stats().num_waiting == 0
        llm.check_integrity()
        (after,) = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
        assert after.outputs[0].token_ids == before.outputs[0].token_ids
        del kept
    assert num_interrupted > 5
    llm.shutdown()


def test_one_run_at_a_time(llm: LLM) -> None:
    first = llm.stream("Once upon a time", GREEDY)
    next(first)
    with pytest.raises(RequestError, match="still running"):
        llm.generate("x", GREEDY, use_tqdm=False)
    assert len(list(first)) == 23


@pytest.mark.uniproc
def test_a_failed_worker_is_reported_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(max_model_len=64)

    def fail(*_: Any) -> None:
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(ModelRunner, "execute_model", fail)
    with pytest.raises(EngineDeadError, match="on fire"):
        llm.generate("x", GREEDY, use_tqdm=False)
    monkeypatch.undo()
    with pytest.raises(EngineDeadError, match="has stopped"):
        llm.generate("x", GREEDY, use_tqdm=False)
    llm.shutdown()


def test_steps_in_flight_outlive_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may own memory that a GPU still writes: torch aborts if that is freed after an error."""
    llm = LLM(max_model_len=64, async_scheduling=True)
    execute_model, plans = llm._core._executor.execute_model, []

    def fail_later(plan: Any, engine: int) -> None:
        plans.append(plan)
        if len(plans) == 2:
            raise RuntimeError("the device is on fire")
        execute_model(plan, engine)

    monkeypatch.setattr(llm._core._executor, "execute_model", fail_later)
    with pytest.raises(EngineDeadError, match="on fire"):
        llm.generate("x", GREEDY, use_tqdm=False)
    assert not llm._core.has_work
    llm.shutdown()
    assert [plan for plan, _ in llm._core._in_flight] == plans[:1]


BAD_PROMPTS = [
    ("", "prompt"),
    ([], "prompt"),
    ({"prompt_token_ids": []}, "prompt_token_ids"),
    ({"prompt_token_ids": [4096]}, "4095"),
    ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
    ({"prompt_token_ids": [1.5]}, "prompt_token_ids"),
    ({"prompt_token_ids": [True]}, "prompt_token_ids"),
    ({"prompt_token_ids": [5] * 512}, "max_model_len=512"),
    ({"text": "x"}, "unknown prompt field 'text'"),
    ({"prompt": "x", "cache_salt": ""}, "cache_salt"),
    ({"prompt": "x", "cache_salt": "\ud800"}, "cache_salt"),
    ({"prompt": [5, 6]}, "prompt must be text"),
    ({"prompt_token_ids": "abc"}, "prompt_token_ids must be a list"),
    ({}, "prompt"),
    (7, "prompt"),
    (None, "prompt"),
    (b"bytes", "bytes"),
    ("half a character: \udcff", "not valid Unicode at character 18"),
]


@pytest.mark.parametrize("prompt", [5, None, b"bytes"])
def test_what_is_no_prompt_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError, match="a prompt must be text, token ids or a dictionary, got"):
        llm.generate(prompt, GREEDY, use_tqdm=False)


@pytest.mark.parametrize(("prompt", "named"), BAD_PROMPTS)
def test_bad_prompts_are_refused_and_the_engine_continues(llm: LLM, prompt: Any, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        llm.generate([prompt, "fine"], GREEDY, use_tqdm=False)
    assert llm.stats().num_running == llm.stats().num_waiting == 0


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"stop_token_ids": [4096]}, "stop_token_ids"),
        ({"allowed_token_ids": [5000]}, "allowed_token_ids"),
        ({"logit_bias": {4096: 1.0}}, "logit_bias"),
        ({"max_tokens": 600, "min_tokens": 600}, "min_tokens"),
    ],
)
def test_parameters_beyond_the_model_are_refused(llm: LLM, params: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        llm.generate("x", SamplingParams(**params), use_tqdm=False)


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    "others", [{"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}]
)
def test_an_error_in_one_request_ends_only_that_request(llm: LLM, others: dict[str, Any]) -> None:
    # Every token is forbidden: nothing can be drawn for the second request.
    impossible = SamplingParams(max_tokens=5, min_tokens=5, allowed_token_ids=[2], **others)
    good, bad = llm.generate(["Once upon a time"] * 2, [GREEDY, impossible], use_tqdm=False)
    assert len(good.outputs[0].token_ids) == 24
    assert bad.outputs[0].finish_reason == "error"
    assert bad.error is not None


CHATS = [
    ([], "messages"),
    ([{"role": 5, "content": "x"}], r"messages\[0\]"),
    ([{"role": "user"}], r"messages\[0\].content"),
    ([{"role": "user", "content": None}], "content"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "not text"),
]


@pytest.mark.parametrize(("messages", "named"), CHATS)
def test_bad_conversations_are_refused(llm: LLM, messages: Any, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        llm.chat(messages, GREEDY)


def test_text_parts_are_joined(llm: LLM) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 2?"}]
    joined, whole = (
        llm.chat([{"role": "user", "content": content}], GREEDY)[0].prompt_token_ids
        for content in (parts, "What is 2 + 2?")
    )
    assert joined == whole


def test_prompt_logprobs_of_one_token(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    assert llm.generate([5], params, use_tqdm=False)[0].prompt_logprobs == [None]


def test_more_prompts_than_the_queue_holds_wait_their_turn() -> None:
    llm = LLM(max_model_len=128, max_num_queued_requests=3)
    params = SamplingParams(n=2, max_tokens=4)
    assert len(llm.generate(["x"] * 10, params, use_tqdm=False)) == 10
    with pytest.raises(RequestError, match="max_num_queued_requests=3"):
        llm.generate("x", SamplingParams(n=4), use_tqdm=False)
    llm.shutdown()


def test_requests_run_in_order_of_priority() -> None:
    llm = LLM(max_model_len=128, max_num_seqs=1, scheduling_policy="priority")
    requests = llm._process(["a", "b", "c"], GREEDY, [2, 1, 0])
    order = [output.request_id for changed in llm._run(requests) for output in changed if output.finished]
    assert order == [request.request_id for request in reversed(requests)]
    llm.shutdown()


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"max_modl_len": 5}, "did you mean 'max_model_len'"),
    ({"max_model_len": 100_000}, "2048"),
    ({"max_model_len": 2048, "num_gpu_blocks_override": 20}, "lower max_model_len to at most 304"),
    ({"kv_cache_memory": 1000}, "kv_cache_memory"),
    ({"block_size": 12}, "block_size"),
    ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization"),
    ({"dtype": "int3"}, "dtype"),
    ({"scheduling_policy": "random"}, "scheduling_policy"),
    ({"max_num_seqs": 0}, "max_num_seqs"),
    ({"max_num_seqs": 10**8}, "max_num_seqs"),
    ({"seed": 1.5}, "seed must be int"),
    ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be bool"),
    ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization must be float"),
    ({"model": 5}, "model must be str"),
    ({"device": "cuda"}, "no CUDA device"),
    ({"model": "./no/such/folder"}, "no folder"),
]


@pytest.mark.parametrize(("arguments", "named"), BAD_ARGUMENTS)
def test_errors_for_bad_arguments_are_one_line(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        LLM(**arguments)
    assert "\n" not in str(caught.value)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the built-in model for the test to damage."""
    return Path(shutil.copytree(Path(penstock.__file__).parent / "demo", tmp_path / "model"))


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def break_architecture(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="mamba9", architectures=["Mamba9"])


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def break_shape(folder: Path) -> None:
    edit_json(folder / "config.json", intermediate_size=512)


def break_layers(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=9)


def break_heads(folder: Path) -> None:
    edit_json(folder / "config.json", num_key_value_heads=3)


def break_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def miss_a_shard(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def remove_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def break_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def break_vocabulary(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["<more>"] = 4096
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def break_rope(folder: Path) -> None:
    edit_json(folder / "config.json", rope_scaling={"rope_type": "spiral", "factor": 2.0})


def quantize(folder: Path) -> None:
    edit_json(folder / "config.json", quantization_config={"quant_method": "bitsandbytes"})


def change_activation(folder: Path) -> None:
    edit_json(folder / "config.json", hidden_act="relu2")


def break_layer_types(folder: Path) -> None:
    edit_json(folder / "config.json", layer_types=["full_attention"])


def break_rope_factor(folder: Path) -> None:
    edit_json(folder / "config.json", rope_scaling={"rope_type": "linear", "factor": None})


def remove_layers(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=0)


def break_template(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", chat_template=5)


def break_generation(folder: Path) -> None:
    edit_json(folder / "generation_config.json", temperature=-1.0, do_sample=True)


BROKEN = [
    (quantize, "quantized"),
    (change_activation, "hidden_act must be one of .*, got 'relu2'"),
    (break_layer_types, "layer_types names 1 layers of 6"),
    (break_rope_factor, "cannot use its parameters"),
    (remove_layers, "num_hidden_layers must be an integer of at least 1"),
    (break_template, "chat_template must be text"),
    (break_generation, "generation_config.json: temperature"),
    (break_architecture, "mamba9.*supported: llama, mistral, qwen2, qwen3"),
    (break_config, "config.json is not valid JSON"),
    (break_shape, "has shape .* config.json asks for"),
    (break_layers, "has no tensor 'model.layers.6"),
    (break_heads, "not a multiple of num_key_value_heads"),
    (break_weights, "truncated"),
    (remove_weights, "no .*safetensors"),
    (miss_a_shard, "model-00002-of-00002.safetensors"),
    (remove_tokenizer, "no tokenizer.json"),
    (break_tokenizer, "tokenizer.json cannot be read"),
    (break_vocabulary, "do not belong together"),
    (break_rope, "rope type 'spiral' is not supported"),
]


@pytest.mark.parametrize(("damage", "named"), BROKEN, ids=[damage.__name__ for damage, _ in BROKEN])
def test_errors_for_broken_checkpoints_are_one_line(checkpoint: Path, damage: Any, named: str) -> None:
    damage(checkpoint)
    with pytest.raises(ConfigError, match=named) as caught:
        LLM(str(checkpoint), max_model_len=64)
    assert "\n" not in str(caught.value)


def test_an_end_token_that_the_model_does_not_have_ends_nothing(checkpoint: Path) -> None:
    """A request that must go on for some tokens forbids those that end it."""
    edit_json(checkpoint / "generation_config.json", eos_token_id=[-1, 4096, 2**64])
    llm = LLM(str(checkpoint), max_model_len=64)
    try:
        (result,) = llm.generate(["hello"], SamplingParams(max_tokens=3, min_tokens=2))
    finally:
        llm.shutdown()
    assert len(result.outputs[0].token_ids) in (2, 3)


def test_truncation_in_the_tokenizer_file_does_not_apply_to_prompts(checkpoint: Path) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    tokenizer["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    llm = LLM(str(checkpoint), max_model_len=64)
    assert len(llm.generate("one two three four five", GREEDY, use_tqdm=False)[0].prompt_token_ids) > 4
    llm.shutdown()


def test_dummy_weights_need_no_weight_files(checkpoint: Path) -> None:
    remove_weights(checkpoint)
    llm = LLM(str(checkpoint), load_format="dummy", max_model_len=64)
    assert len(llm.generate("x", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) > 0
    llm.shutdown()
