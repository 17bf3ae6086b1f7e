"""LoRA adapters: equal to PEFT's, with the same bits in every company, and no KV shared that is not theirs."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from penstock import (
    LLM,
    AsyncLLM,
    ConfigError,
    EngineDeadError,
    LoRARequest,
    OverloadedError,
    RequestError,
    SamplingParams,
)
from penstock.config.model_path import resolve_model_path
from penstock.frontend.adapters import AdapterStore
from penstock.messages.adapters import Adapter
from penstock.models.lora import LoraModel
from tests.integration.checkpoints import COMMON, make_checkpoint
from tests.integration.raw_http import call
from tests.integration.server_process import serve
from tests.integration.test_disaggregation import transfer_config
from tests.integration.test_identity_families import CELLS, PLAIN, Answer, answer, requests
from tests.lora_files import projections, write_adapter
from tests.quantized_formats import quantize_checkpoint

# Plain, in pairs of neighbours with a fused feed-forward part, with one tensor of queries, keys and values, with norms
# on both sides of the parts, with experts that no adapter changes, and with recurrent layers.
FAMILIES = {
    "llama-biases": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "glm4": ["q_proj", "v_proj", "gate_up_proj", "down_proj"],
    "phi3-partial": ["qkv_proj", "o_proj", "gate_up_proj"],
    "gemma3": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"],
    "qwen3-moe": ["q_proj", "k_proj", "o_proj"],
    "qwen3.5": ["q_proj", "v_proj", "in_proj_qkv", "out_proj", "down_proj"],
}
LONG = ("gemma3", "qwen3-moe", "qwen3.5")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)


def with_adapter(path: Path, folder: Path, targets: Sequence[str]) -> peft.PeftModel:
    """Writes an adapter with PEFT, and returns its model with it."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    config = peft.LoraConfig(
        r=6,
        lora_alpha=9,
        target_modules=list(targets),
        rank_pattern={targets[0]: 3},
        alpha_pattern={targets[-1]: 20},
        use_rslora=len(targets) % 2 == 1,
        init_lora_weights=False,
    )
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(str(folder))
    return adapted


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of PEFT
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in FAMILIES]
)
def test_equals_peft_and_the_merged_checkpoint(name: str, tmp_path: Path) -> None:
    path = make_checkpoint(name, tmp_path)
    model = with_adapter(path, tmp_path / "adapter", FAMILIES[name])
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(COMMON["vocab_size"], (length,), generator=generator).tolist() for length in (5, 40, 33)]
    llm = LLM(str(path), skip_tokenizer_init=True, max_num_batched_tokens=24, enable_lora=True)
    adapter = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    found = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=adapter)
    plain = llm.generate(prompts, GREEDY, use_tqdm=False)
    llm.shutdown()
    for prompt, with_it, without in zip(prompts, found, plain, strict=True):
        output = with_it.outputs[0].token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert output == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1).max(-1).values
        given = with_it.outputs[0].logprobs
        assert given is not None
        logprobs = [at[token].logprob for at, token in zip(given, output, strict=True)]
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=1e-3, atol=1e-3)
        assert answer(with_it) != answer(without)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    llm = LLM(str(tmp_path / "merged"), skip_tokenizer_init=True)
    merged = llm.generate(prompts, GREEDY, use_tqdm=False)
    llm.shutdown()
    assert [each.outputs[0].token_ids for each in merged] == [each.outputs[0].token_ids for each in found]


class Adapters:
    """A checkpoint with two adapters, and the answers of each request with each of them and without, alone. Engines
    have the `arguments`.
    """

    def __init__(self, folder: Path, name: str = "qwen3-128", **arguments: Any) -> None:
        self.path = make_checkpoint(name, folder, torch.bfloat16)
        sizes = projections(json.loads((self.path / "config.json").read_text()))
        folders = [write_adapter(folder / str(seed), sizes, seed=seed, rank=3 + 9 * seed) for seed in range(2)]
        self.loras = [None, *(LoRARequest(f"adapter{seed}", seed, str(each)) for seed, each in enumerate(folders))]
        self.arguments = arguments
        self.expected: list[list[Answer]] = []
        llm = self.engine()
        for lora in self.loras:
            self.expected.append([self.answers(llm, [request], [lora])[0] for request in requests()])
        llm.shutdown()
        assert self.expected[0] != self.expected[1] != self.expected[2]

    def engine(self, **changes: Any) -> LLM:
        return LLM(str(self.path), **{**PLAIN, "enable_lora": True, **self.arguments, **changes})

    @staticmethod
    def answers(llm: LLM, of: Sequence[Any], loras: Sequence[LoRARequest | None]) -> list[Answer]:
        prompts, params = zip(*of, strict=True)
        outputs = llm.generate(list(prompts), list(params), use_tqdm=False, lora_request=list(loras))
        assert all(output.error is None for output in outputs)
        return [answer(output) for output in outputs]

    def check_mixed(self, llm: LLM) -> None:
        """Every request with every adapter, all together, twice: then what the first time left is used."""
        of = [request for request in requests() for _ in self.loras]
        loras = self.loras * len(requests())
        wanted = [self.expected[number % 3][number // 3] for number in range(len(of))]
        for _ in range(2):
            assert self.answers(llm, of, loras) == wanted
            llm.check_integrity()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("adapters"))


QUICK = ("chunks", "hits", "three ranks, drafts", "a tier")
MORE = ("overlap", "preemption", "drafts", "ranks of stages")


@pytest.mark.parametrize("cell", [*QUICK, *(pytest.param(cell, marks=pytest.mark.long) for cell in MORE)])
def test_mixed_adapters_have_the_bits_of_each_alone(adapters: Adapters, cell: str) -> None:
    llm = adapters.engine(**CELLS[cell], distributed_executor_backend="uniproc")
    adapters.check_mixed(llm)
    stats = llm.stats()
    llm.shutdown()
    if cell == "preemption":
        assert stats.num_preemptions > 0
    if cell == "hits":
        assert stats.prefix_cache_hits > 300
    if cell == "a tier":
        assert stats.connector["num_loads"] > 0


@pytest.mark.parametrize("limits", [{"max_loras": 1}, {"max_loras": 1, "max_cpu_loras": 2, "async_scheduling": True}])
def test_fewer_slots_than_adapters(adapters: Adapters, limits: dict[str, Any]) -> None:
    llm = adapters.engine(enable_prefix_caching=True, **limits)
    adapters.check_mixed(llm)
    llm.shutdown()


@pytest.mark.long
def test_the_pieces_of_one_tensor_are_one_projection(tmp_path: Path) -> None:
    """Mamba2 reads five parts of one tensor: their adapter is read once, and its rank may be the greatest."""
    path = make_checkpoint("granite4", tmp_path)
    llm = LLM(str(path), skip_tokenizer_init=True, enable_lora=True, max_lora_rank=512)
    name, target = next((n, t) for n, t in llm.info.lora_targets.items() if n.endswith("in_proj"))
    folder = write_adapter(tmp_path / "adapter", {name: (target.num_inputs, target.num_outputs)}, rank=512)
    plain, found = (
        answer(llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False, lora_request=lora)[0])
        for lora in (None, LoRARequest("a", 1, str(folder)))
    )
    assert plain != found
    llm.shutdown()


def test_an_adapter_that_cannot_be_read_again_fails_its_requests_alone(adapters: Adapters) -> None:
    llm = adapters.engine(max_loras=1)
    (prompt, params), one, other = requests()[0], *adapters.loras[1:]
    assert one is not None
    for lora in (one, other):
        llm.generate([prompt], params, use_tqdm=False, lora_request=lora)
    shutil.rmtree(llm._adapters.get(one.lora_name).folder)  # pyright: ignore
    for _ in range(2):
        failed, right = llm.generate([prompt] * 2, params, use_tqdm=False, lora_request=[one, None])
        assert "load the adapter again" in str(failed.error)
        assert answer(right) == adapters.expected[0][0]
        assert Adapters.answers(llm, [requests()[0]], [other]) == [adapters.expected[2][0]]
        llm.check_integrity()
    # It works again after it was loaded again, also while its slot has failed.
    assert llm.generate([prompt], params, use_tqdm=False, lora_request=one)[0].error is not None
    llm.generate([prompt], params, use_tqdm=False, lora_request=replace(one, lora_name="again"))
    assert Adapters.answers(llm, [requests()[0]], [one]) == [adapters.expected[1][0]]
    llm.shutdown()


@pytest.mark.parametrize("ranks", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("failing", [0, 1])
def test_an_adapter_that_one_rank_cannot_load_fails_its_requests_alone(
    adapters: Adapters, ranks: str, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = adapters.engine(distributed_executor_backend="uniproc", **{ranks: 2})
    (prompt, params), lost, other = requests()[0], *adapters.loras[1:]
    load, loading = LoraModel.load, dict[LoraModel, None]()

    def load_or_fail(model: LoraModel, slot: int, adapter: Adapter) -> None:
        loading[model] = None
        if lost is not None and adapter.name == lost.lora_name and list(loading).index(model) == failing:
            raise OSError("no space")
        load(model, slot, adapter)

    with monkeypatch.context() as patched:
        patched.setattr(LoraModel, "load", load_or_fail)
        for _ in range(2):
            outputs = llm.generate([prompt] * 3, params, use_tqdm=False, lora_request=[lost, other, None])
            assert "cannot be loaded: no space" in str(outputs[0].error)
            assert [answer(each) for each in outputs[1:]] == [adapters.expected[2][0], adapters.expected[0][0]]
            llm.check_integrity()
    assert Adapters.answers(llm, [requests()[0]], [lost]) == [adapters.expected[1][0]]
    llm.shutdown()


def test_an_adapter_does_not_wait_as_long_as_others_keep_coming(adapters: Adapters) -> None:
    async def run() -> None:
        llm = await AsyncLLM.start(str(adapters.path), **{**PLAIN, "enable_lora": True, "max_loras": 1})
        prompt, params = requests()[0]
        first, second = adapters.loras[1:]
        is_served = asyncio.Event()

        async def keep_coming() -> None:
            while not is_served.is_set():
                await collect(llm, prompt, params, first)

        tasks = [asyncio.create_task(keep_coming()) for _ in range(3)]
        await asyncio.sleep(0.3)
        found = await asyncio.wait_for(collect(llm, prompt, params, second), 30)
        is_served.set()
        await asyncio.gather(*tasks)
        assert found == adapters.expected[2][0]
        await llm.shutdown()

    asyncio.run(run())


def test_quantized_weights(tmp_path: Path, adapters: Adapters) -> None:
    """The adapters are added to the layers as they are: the same as to those of the decompressed twin."""
    quantized, twin = quantize_checkpoint(adapters.path, tmp_path, "packed with zero points")
    found: list[list[Answer]] = []
    for path in (quantized, twin):
        llm = LLM(str(path), **PLAIN, enable_lora=True)
        found.append(adapters.answers(llm, requests()[:3], adapters.loras))
        llm.shutdown()
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    arguments: dict[str, Any] = {"quantization": "int4", "quantize_activations": "int8", "num_threads": 1}
    return Adapters(tmp_path_factory.mktemp("rounded"), **arguments)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_threads": 2, "max_num_batched_tokens": 16},
        {"num_threads": 2, "tensor_parallel_size": 2, "async_scheduling": True},
    ],
    ids=["chunks", "two ranks"],
)
def test_adapters_of_layers_that_round_their_inputs(rounded: Adapters, changes: dict[str, Any]) -> None:
    llm = rounded.engine(**changes)
    rounded.check_mixed(llm)
    llm.shutdown()


def test_layers_round_their_inputs_with_an_adapter_and_without(rounded: Adapters) -> None:
    prompts, params = zip(*requests(), strict=True)
    llm = rounded.engine(enable_lora=False)
    outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    assert [answer(output) for output in outputs] == rounded.expected[0]
    llm.shutdown()
    llm = rounded.engine(quantize_activations=None)
    for lora, expected in zip(rounded.loras, rounded.expected, strict=True):
        found = rounded.answers(llm, requests(), [lora] * len(prompts))
        assert all(one != other for one, other in zip(found, expected, strict=True))
    llm.shutdown()


def test_adapters_of_layers_that_are_quantized_in_part(tmp_path: Path) -> None:
    """The rates of a gated delta net are in bfloat16, in one layer with gates in 4 bits, whose inputs are rounded."""
    path = make_checkpoint("qwen3.5", tmp_path, torch.bfloat16)
    path, _ = quantize_checkpoint(path, tmp_path, "packed with zero points")
    options: dict[str, Any] = {**PLAIN, "enable_lora": True, "quantize_activations": "int8"}
    llm = LLM(str(path), **options)
    sizes = {name: (target.num_inputs, target.num_outputs) for name, target in llm.info.lora_targets.items()}
    assert {"in_proj_z", "in_proj_a"} <= {name.rsplit(".", 1)[1] for name in sizes}
    lora = LoRARequest("adapter", 1, str(write_adapter(tmp_path / "adapter", sizes)))
    of = [request for request in requests()[:3] for _ in range(2)]
    loras = [None, lora] * 3
    alone = [Adapters.answers(llm, [request], [each])[0] for request, each in zip(of, loras, strict=True)]
    llm.shutdown()
    assert all(without != with_it for without, with_it in zip(alone[::2], alone[1::2], strict=True))
    llm = LLM(str(path), **{**options, "tensor_parallel_size": 2, "max_num_batched_tokens": 24})
    assert Adapters.answers(llm, of, loras) == alone
    llm.shutdown()


def test_kv_of_another_engine_is_that_of_the_adapter(adapters: Adapters, tmp_path: Path) -> None:
    common: dict[str, Any] = {"enable_prefix_caching": True, "distributed_executor_backend": "uniproc"}
    prefill = adapters.engine(kv_transfer_config=transfer_config("kv_producer"), tensor_parallel_size=2, **common)
    decode = adapters.engine(kv_transfer_config=transfer_config("kv_consumer"), **common)
    prompt, params = requests()[5]
    asked = replace(params, max_tokens=1, kv_transfer_params={"do_remote_decode": True})

    def handed_over(given: LoRARequest | None, taken: LoRARequest | None) -> tuple[Answer, int]:
        (first,) = prefill.generate([prompt], asked, use_tqdm=False, lora_request=given)
        wanted = replace(params, kv_transfer_params=first.kv_transfer_params)
        assert decode.reset_prefix_cache()
        (found,) = decode.generate([prompt], wanted, use_tqdm=False, lora_request=taken)
        assert found.error is None
        return answer(found), found.num_cached_tokens

    for lora, expected in zip(adapters.loras, adapters.expected, strict=True):
        assert handed_over(lora, lora) == (expected[5], (len(prompt) - 1) // 16 * 16)
    # Another adapter's KV is never given: the prompt is computed.
    assert handed_over(adapters.loras[1], adapters.loras[2]) == (adapters.expected[2][5], 0)
    assert handed_over(None, adapters.loras[1]) == (adapters.expected[1][5], 0)
    assert handed_over(adapters.loras[2], None) == (adapters.expected[0][5], 0)
    for llm in (prefill, decode):
        llm.check_integrity()
        llm.shutdown()


def test_adapters_with_one_name_in_turn_share_no_block(adapters: Adapters, tmp_path: Path) -> None:
    llm = adapters.engine(enable_prefix_caching=True)
    prompt, params = requests()[5]
    num_whole = (len(prompt) - 1) // 16 * 16
    for turn, number in enumerate((1, 2, 1)):
        lora = adapters.loras[number]
        assert lora is not None
        for again in range(2):
            (found,) = llm.generate([prompt], params, use_tqdm=False, lora_request=replace(lora, lora_name="one"))
            assert answer(found) == adapters.expected[number][5]
            # The last one's contents are known: its blocks are still there.
            assert found.num_cached_tokens == (num_whole if again or turn == 2 else 0)
        llm.unload_lora("one")
    # A salt that spells another scope is only a salt.
    (found,) = llm.generate([{"prompt_token_ids": prompt, "cache_salt": "one"}], params, use_tqdm=False)
    assert found.num_cached_tokens == 0
    llm.shutdown()


def test_bad_input(adapters: Adapters, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_lora_rank"):
        adapters.engine(max_lora_rank=0)
    llm = adapters.engine(max_lora_rank=3)
    with pytest.raises(ConfigError, match="max_lora_rank"):
        llm.generate([[1, 2]], use_tqdm=False, lora_request=adapters.loras[2])
    with pytest.raises(RequestError, match="2 prompts but 1 lora_request"):
        llm.generate([[1], [2]], use_tqdm=False, lora_request=[None])
    head = write_adapter(tmp_path / "head", {"lm_head": (96, 301)})
    with pytest.raises(ConfigError, match=r"/head: .* output heads"):
        llm.generate([[1]], use_tqdm=False, lora_request=LoRARequest("head", 1, str(head)))
    assert llm.generate([[1, 2]], SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids
    llm.shutdown()
    llm = adapters.engine(enable_lora=False)
    with pytest.raises(RequestError, match="enable_lora"):
        llm.generate([[1]], use_tqdm=False, lora_request=adapters.loras[1])
    llm.shutdown()


@pytest.mark.parametrize("more", [{}, pytest.param({"async_scheduling": True}, marks=pytest.mark.long)], ids=str)
def test_adapters_come_and_go_under_load(adapters: Adapters, more: dict[str, Any]) -> None:
    """Names change their contents while requests run; nothing is left of them."""

    async def run() -> None:
        llm = await AsyncLLM.start(str(adapters.path), **{**PLAIN, "enable_lora": True, "max_loras": 1, **more})
        folder: Path | None = None

        async def turn(client: int, number: int) -> None:
            lora, (prompt, params) = adapters.loras[1 + number % 2], requests()[number % 6]
            assert lora is not None
            name = f"client{client}"
            await llm.load_lora(name, lora.lora_path)
            nonlocal folder
            folder = Path(llm.lora(name).folder).parent  # pyright: ignore[reportOptionalMemberAccess]
            task = asyncio.create_task(collect(llm, prompt, params, LoRARequest(name)))
            if number % 3:
                await asyncio.sleep(0.01 * number)
                await llm.unload_lora(name)  # while it runs
                assert await task == adapters.expected[1 + number % 2][number % 6]
            else:
                await asyncio.sleep(0.01)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await llm.unload_lora(name)

        async def client(number: int) -> None:
            for each in range(6):
                await turn(number, number + each)

        await asyncio.gather(*map(client, range(4)))
        assert llm.loras == {}
        await llm.wait_until_idle()
        assert folder is not None
        for _ in range(100):
            if not os.listdir(folder):
                break
            await asyncio.sleep(0.1)
        assert os.listdir(folder) == []
        await llm.check_integrity()
        await llm.shutdown()
        assert not folder.exists()

    asyncio.run(run())


def test_requests_of_one_adapter_share_its_load(
    adapters: Adapters, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those that come while it is loaded wait for it, also if its folder is written in another way or the request that
    began the load is cancelled: a thread cannot be, and no other load may run beside it.
    """
    (prompt, params), one, two = requests()[0], *adapters.loras[1:]
    assert one is not None
    assert two is not None
    paths: list[str] = []
    busy, most, copy = 0, 0, AdapterStore.copy

    def slow_copy(store: AdapterStore, name: str, path: str) -> Adapter:
        nonlocal busy, most
        paths.append(path)
        busy += 1
        most = max(most, busy)
        time.sleep(0.3)
        try:
            return copy(store, name, path)
        finally:
            busy -= 1

    monkeypatch.setattr(AdapterStore, "copy", slow_copy)

    async def run() -> None:
        llm = await AsyncLLM.start(str(adapters.path), **{**PLAIN, "enable_lora": True})
        cancelled = asyncio.create_task(collect(llm, prompt, params, one))
        await asyncio.sleep(0.1)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        assert busy == 1
        found = await asyncio.gather(*(collect(llm, prompt, params, each) for each in (one, one, two, two)))
        assert found == [adapters.expected[number][0] for number in (1, 1, 2, 2)]
        assert (paths, most) == ([one.lora_path, two.lora_path], 1)
        again = replace(one, lora_path=f"{one.lora_path}/")
        assert await collect(llm, prompt, params, again) == adapters.expected[1][0]
        with pytest.raises(RequestError, match="other contents"):
            await collect(llm, prompt, params, replace(one, lora_path=two.lora_path))
        # The copy that a cancelled caller has left is known, and so it is removed.
        third = asyncio.create_task(llm.load_lora("third", str(shutil.copytree(one.lora_path, tmp_path / "third"))))
        await asyncio.sleep(0.1)
        third.cancel()
        await asyncio.gather(third, return_exceptions=True)
        while busy:
            await asyncio.sleep(0.05)
        folder = Path(llm.lora(one.lora_name).folder).parent  # pyright: ignore[reportOptionalMemberAccess]
        for name in list(llm.loras):
            await llm.unload_lora(name)
        for _ in range(100):
            if not os.listdir(folder):
                break
            await asyncio.sleep(0.1)
        assert os.listdir(folder) == []
        await llm.shutdown()

    asyncio.run(run())


def test_a_copy_stays_while_one_engine_may_read_it(adapters: Adapters) -> None:
    """Also if another engine is dead, or is being restarted."""

    class Engine:
        def __init__(self, answer: Any) -> None:
            self.answer = answer

        async def forget_adapter(self, digest: bytes) -> bool:
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    async def run() -> None:
        llm = await AsyncLLM.start(str(adapters.path), **{**PLAIN, "enable_lora": True})
        lora, replicas = adapters.loras[1], llm.replicas
        assert lora is not None
        for answers in ([True, False], [EngineDeadError("x"), False], [False, OverloadedError("x")]):
            await llm.load_lora("a", lora.lora_path)
            folder = Path(llm.lora("a").folder)  # pyright: ignore[reportOptionalMemberAccess]
            llm.replicas = tuple(map(Engine, answers))  # pyright: ignore[reportAttributeAccessIssue]
            await llm.unload_lora("a")
            await asyncio.sleep(0.2)
            assert folder.exists()
        llm.replicas = replicas
        for _ in range(100):
            if not folder.exists():
                break
            await asyncio.sleep(0.1)
        assert not folder.exists()
        await llm.shutdown()

    asyncio.run(run())


def test_a_copy_stays_that_was_used_while_an_engine_forgot_it(adapters: Adapters) -> None:
    """An engine forgets an adapter; before the others have answered, a request gets it that has not begun when the name
    is unloaded again.
    """

    class Slow:
        def __init__(self) -> None:
            self.asked, self.answer = asyncio.Event(), asyncio.Event()

        async def forget_adapter(self, digest: bytes) -> bool:
            self.asked.set()
            await self.answer.wait()
            return True

    async def run() -> None:
        llm = await AsyncLLM.start(str(adapters.path), **{**PLAIN, "enable_lora": True, "max_loras": 1})
        (first, second), (replica,) = adapters.loras[1:], llm.replicas
        assert first is not None
        assert second is not None
        prompt, params = requests()[0]
        await llm.load_lora("first", first.lora_path)
        await llm.load_lora("second", second.lora_path)
        slow = Slow()
        llm.replicas = (replica, slow)  # pyright: ignore[reportAttributeAccessIssue]
        await llm.unload_lora("first")
        await slow.asked.wait()
        llm.replicas = (replica,)
        endless = replace(params, max_tokens=60, ignore_eos=True)
        running = asyncio.create_task(collect(llm, prompt, endless, LoRARequest("second")))
        await llm.load_lora("first", first.lora_path)
        waiting = asyncio.create_task(collect(llm, prompt, params, LoRARequest("first")))
        await asyncio.sleep(0.02)  # it has been submitted, and waits for the other's slot
        await llm.unload_lora("first")
        assert not running.done()
        slow.answer.set()
        assert await waiting == adapters.expected[1][0]
        await running
        await llm.shutdown()

    asyncio.run(run())


async def collect(llm: AsyncLLM, prompt: Any, params: SamplingParams, lora: LoRARequest | None) -> Answer:
    outputs = [output async for output in llm.generate(prompt, params, lora_request=lora)]
    return answer(outputs[-1])


@pytest.fixture(scope="module")
def demo_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = projections(json.loads((resolve_model_path("demo") / "config.json").read_text()))
    return write_adapter(tmp_path_factory.mktemp("allowed") / "adapter", sizes, rank=8)


HEADS: list[dict[str, Any]] = [
    {"method": "mtp", "num_speculative_tokens": 2},
    {"method": "eagle3", "model": "demo/eagle3", "num_speculative_tokens": 2},
]


def test_heads_draft_without_the_adapter(demo_adapter: Path) -> None:
    """Drafts of heads that read the adapted model's states change no token, with an adapter and beside it."""
    lora = LoRARequest("a", 1, str(demo_adapter))
    prompts = ["Once upon a time", "The red box is in"] * 2
    found: list[list[list[int]]] = []
    for speculative in (None, *HEADS):
        llm = LLM("demo", enable_lora=True, max_model_len=256, speculative_config=speculative)
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=[None, None, lora, lora])
        found.append([output.outputs[0].token_ids for output in outputs])
        if speculative is not None:
            assert sum(output.num_accepted_tokens for output in outputs[:2]) > 0
            assert all(output.num_draft_tokens for output in outputs)
        llm.check_integrity()
        llm.shutdown()
    assert found[0] == found[1] == found[2]
    assert found[0][:2] != found[0][2:]


def test_the_server(demo_adapter: Path, tmp_path: Path) -> None:
    allowed = ("--lora-allowed-path", str(demo_adapter.parent))
    module = ("--lora-modules", json.dumps({"name": "first", "path": str(demo_adapter)}))
    with serve("--model", "demo", "--enable-lora", *module, *allowed) as server:

        def text(model: str, path: str = "/v1/completions") -> tuple[int, Any]:
            body = {"model": model, "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
            found = call(server.url, "POST", path, body)
            return found.status, found.json()["choices"][0]["text"] if found.status == 200 else found.json()

        def change(verb: str, **body: Any) -> tuple[int, Any]:
            found = call(server.admin_url, "POST", f"/v1/{verb}_lora_adapter", body)
            return found.status, found.json()

        base, first = text("demo"), text("first")
        assert base[0] == first[0] == 200
        assert base[1] != first[1]
        assert change("load", lora_name="second", lora_path=str(demo_adapter))[0] == 200
        cards = {card["id"]: card for card in call(server.url, "GET", "/v1/models").json()["data"]}
        assert cards["demo"]["parent"] is None
        assert cards["second"]["parent"] == "demo"
        assert cards["first"]["root"] == str(demo_adapter)
        assert call(server.url, "GET", "/v1/models/second").json()["parent"] == "demo"
        assert text("second") == first
        chat = {"model": "second", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        assert call(server.url, "POST", "/v1/chat/completions", chat).json()["model"] == "second"
        scrape = call(server.url, "GET", "/metrics").body.decode()
        assert 'max_lora="8",model_name="demo",running_lora_adapters="",waiting_lora_adapters=""' in scrape
        described = call(server.url, "GET", "/version").json()["engine"]
        assert described["max_loras"] == 8
        assert described["lora_bytes"] > 8 * sum(each.stat().st_size for each in demo_adapter.glob("*.safetensors"))
        assert "lora_targets" not in described
        assert change("unload", lora_name="second", lora_int_id=2)[0] == 200
        assert text("second")[0] == 404
        for name, path, words in (
            ("demo", str(demo_adapter), "own name"),
            ("x", str(tmp_path), "within a folder"),
            ("x", str(demo_adapter / ".." / ".." / "x"), "within a folder"),
            ("x", "a\0b", "path of a folder"),
            ("x", str(demo_adapter.parent), "adapter_config.json"),
            ("", str(demo_adapter), "lora_name"),
        ):
            status, error = change("load", lora_name=name, lora_path=path)
            assert status == 400, error
            assert words in error["error"]["message"]
        assert change("unload", lora_name="second")[0] == 400
        # The public port does not have the routes.
        assert call(server.url, "POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "y"}).status == 404
        assert text("first") == first
