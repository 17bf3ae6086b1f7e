"""The runner's GPU path in Triton's interpreter: it gives the tokens of the CPU path and does not wait for the device.

Most tests run the runner's own parts in the interpreter and the model with the CPU's kernels, which are fast and give
the same logits; the last ones run everything as a GPU would.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

import penstock
from penstock import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from penstock.config.model_path import resolve_model_path
from penstock.engine import build
from penstock.kernels import native
from penstock.runner import batch_shapes
from penstock.runner.cpu.parts import cpu_parts
from penstock.runner.gpu import cudagraphs
from penstock.runner.gpu.inputs import GpuInputBuilder
from penstock.runner.gpu.parts import gpu_parts as make_gpu_parts
from penstock.runner.gpu.sampling.outputs import CopiedOutput
from penstock.runner.model_runner import ModelRunner
from penstock.runner.outputs import NOT_FINITE, NOTHING_ALLOWED, StepOutput
from penstock.runner.parts import DeviceParts
from penstock.worker import worker
from penstock.worker.worker import Worker
from tests.grids import exhaustive
from tests.kernels.graph_emulator import EmulatedRecorder

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU stands in for the GPU")

DEMO_MODEL = Path(penstock.__file__).parent / "demo"
SOURCES = os.path.dirname(penstock.__file__)
FEW_BLOCKS = {"num_gpu_blocks_override": 11}
MTP = {"method": "mtp", "num_speculative_tokens": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
DRAWN = {**MTP, "draft_sample_method": "probabilistic"}
ITSELF = {**DRAWN, "method": "draft_model", "model": str(resolve_model_path("demo"))}
TOSSED = {**MTP, "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.7, 0.5]}
# The parameters of most requests, and all others.
PLAIN: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.1, "top_p": 0.8, "top_k": 100000},
    {"temperature": 0.7, "min_p": 0.05, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.0, "seed": -1},
)
GRAMMAR: dict[str, Any] = {"ignore_eos": False}
OTHER: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7, "repetition_penalty": 1.2, "logprobs": 1, "max_tokens": 3},
    {"temperature": 0.0, "min_tokens": 3, "prompt_logprobs": 1, "max_tokens": 4, "ignore_eos": False},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": -0.2},
    {"temperature": 0.9, "logit_bias": {5: 2.0, 300: 1.5, 90: -100.0}, "logprobs": 0},
    {"temperature": 1.0, "allowed_token_ids": [3, 50, 77, 400], "top_k": 2},
    {"temperature": 0.8, "bad_words": ["the", " fox", "was a"], "logprobs": 20},
    {"temperature": 0.9, "prompt_logprobs": 5, "max_tokens": 1},
    {
        "temperature": 0.0,
        "structured_outputs": StructuredOutputsParams(choice=["red", "blue"]),
        "logprobs": 3,
        **GRAMMAR,
    },
    {"temperature": 0.9, "structured_outputs": StructuredOutputsParams(regex=r"[a-z]{3}-\d{2,4}"), **GRAMMAR},
)


KINDS = (*PLAIN, *OTHER)
GREEDY, SEEDED, TOP_K, MIN_P = 0, 1, 2, 4
REPEATED, LATE_END, PENALISED, BIASED, ALLOWED, BAD_WORDS, PROMPT, CHOICE, REGEX = range(len(PLAIN), len(KINDS))


def outputs_of(
    numbers: Sequence[int] = range(len(KINDS)), max_tokens: int = 6, **engine_args: Any
) -> list[RequestOutput]:
    """Runs one request of each of these kinds, with many lengths."""
    limits = {"dtype": "float32", "max_model_len": 128, "num_gpu_blocks_override": 60, "max_num_seqs": 6}
    llm = LLM(**{**limits, **engine_args})
    openings = ("Once upon a time there was a fox. " * 3, "What is 12 + 30?", "The key of Anna is in the red box. " * 5)
    texts = [openings[number % 3] + " 7" * number for number in numbers]
    params = [
        SamplingParams(**{"seed": number, "max_tokens": max_tokens, "ignore_eos": True, **KINDS[number]})
        for number in numbers
    ]
    outputs = llm.generate(texts, params, use_tqdm=False)
    llm.check_integrity()
    # The engine counts the steps that were replayed.
    assert (llm.stats().num_graph_replays > 0) == (EmulatedRecorder.num_replays > 0)
    if "num_gpu_blocks_override" in engine_args:
        assert llm.stats().num_preemptions > 0
    llm.shutdown()
    return outputs


def tokens_in(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def check_outputs(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Asserts that tokens are equal, and log probabilities except for their last bits."""
    assert tokens_in(found) == tokens_in(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.outputs[0].finish_reason == other.outputs[0].finish_reason
        check_logprobs(one.outputs[0].logprobs, other.outputs[0].logprobs)
        check_logprobs(one.prompt_logprobs, other.prompt_logprobs)


def check_logprobs(found: Any, expected: Any) -> None:
    assert (found is None) == (expected is None)
    for one, other in zip(found or (), expected or (), strict=True):
        assert (one is None) == (other is None)
        described = [[(token, each.rank) for token, each in (place or {}).items()] for place in (one, other)]
        assert described[0] == described[1]
        values = [[each.logprob for each in (place or {}).values()] for place in (one, other)]
        assert values[0] == pytest.approx(values[1], abs=1e-4)


def gpu_parts_except_the_model(device: torch.device) -> DeviceParts:
    """Returns a GPU's parts, except those that compute the model's layers."""
    cpu = cpu_parts()
    return replace(
        make_gpu_parts(device),
        for_small_steps=cpu.for_small_steps,
        check_attention=cpu.check_attention,
        make_attention=cpu.make_attention,
    )


@pytest.fixture
def gpu_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the runner use its parts for a GPU, but not the model's layers."""
    monkeypatch.setattr(worker, "make_parts", gpu_parts_except_the_model)
    monkeypatch.setattr(build, "warm_up", lambda *args: None)


@pytest.fixture
def graphs(gpu_parts: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[EmulatedRecorder]]:
    """Replays steps of few tokens from graphs for two context lengths."""
    with monkeypatch.context() as patched:
        use_graphs(patched)
        yield EmulatedRecorder
    native.library.cache_clear()


def use_graphs(patched: pytest.MonkeyPatch, contexts: tuple[int, ...] = (64, 128)) -> None:
    """Emulates graphs of few shapes, because recording takes longer than the steps."""
    patched.setattr(batch_shapes, "_MIXED_SIZES", (16, 256))
    EmulatedRecorder.install(patched)
    patched.setattr(cudagraphs, "CudaGraphRecorder", EmulatedRecorder)
    patched.setattr("penstock.runner.gpu.parts.graph_contexts", lambda *args: () if args[2].enforce_eager else contexts)
    patched.setattr(EmulatedRecorder, "num_replays", 0)


@pytest.fixture(scope="module")
def plain_outputs() -> list[RequestOutput]:
    return outputs_of()


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("engine_args", "overlap", "numbers"),
    [
        ({"max_num_batched_tokens": 24}, False, range(len(KINDS))),
        ({**FEW_BLOCKS}, True, (SEEDED, TOP_K, REPEATED, PENALISED, ALLOWED, REGEX)),
        ({"speculative_config": MTP}, True, (SEEDED, MIN_P, LATE_END, PENALISED, BAD_WORDS, PROMPT, CHOICE, REGEX)),
        exhaustive(
            {"speculative_config": NGRAM, **FEW_BLOCKS}, False, (GREEDY, SEEDED, TOP_K, PENALISED, BIASED, CHOICE)
        ),
    ],
    ids=["chunks", "preemption-overlap", "mtp-overlap", "ngram-preemption"],
)
@pytest.mark.usefixtures("gpu_parts")
def test_outputs_equal_those_of_the_cpu(
    plain_outputs: list[RequestOutput], engine_args: dict[str, Any], overlap: bool, numbers: Sequence[int]
) -> None:
    found = outputs_of(numbers, async_scheduling=overlap, **engine_args)
    check_outputs(found, [plain_outputs[number] for number in numbers])


@pytest.mark.long
@pytest.mark.parametrize(
    ("speculative", "overlap"),
    [exhaustive(DRAWN, False), (DRAWN, True), (ITSELF, False), (TOSSED, True)],
    ids=["drawn", "drawn-overlap", "itself", "synthetic-overlap"],
)
def test_outputs_that_depend_on_drafts_equal_those_of_the_cpu(
    speculative: dict[str, Any], overlap: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The windows are those of the CPU, because tokens depend on them too."""
    monkeypatch.setattr(build, "warm_up", lambda *args: None)
    numbers = (GREEDY, SEEDED, TOP_K, BAD_WORDS, REGEX)
    args = {"async_scheduling": overlap, "speculative_config": speculative}
    expected = outputs_of(numbers, **args)
    request.getfixturevalue("gpu_parts")
    check_outputs(outputs_of(numbers, **args), expected)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("engine_args", "overlap", "numbers"),
    [
        ({"max_num_batched_tokens": 24}, False, range(len(PLAIN))),
        (
            {"max_num_batched_tokens": 24, "max_num_seqs": 6, **FEW_BLOCKS},
            True,
            (SEEDED, TOP_K, REPEATED, PENALISED, ALLOWED, REGEX),
        ),
        ({"speculative_config": MTP}, True, (SEEDED, MIN_P, LATE_END, PENALISED, BAD_WORDS, PROMPT, CHOICE)),
        exhaustive({"speculative_config": NGRAM}, False, (GREEDY, SEEDED, TOP_K, PENALISED)),
    ],
    ids=["chunks", "preemption-overlap", "mtp-overlap", "ngram"],
)
def test_outputs_from_graphs_equal_those_of_the_cpu(
    graphs: type[EmulatedRecorder],
    plain_outputs: list[RequestOutput],
    engine_args: dict[str, Any],
    overlap: bool,
    numbers: Sequence[int],
) -> None:
    found = outputs_of(numbers, async_scheduling=overlap, **{"max_num_seqs": 3, **engine_args})
    check_outputs(found, [plain_outputs[number] for number in numbers])
    assert graphs.num_replays >= 3


@pytest.mark.long
@pytest.mark.parametrize("speculative", [exhaustive(MTP), DRAWN], ids=["best", "drawn"])
@pytest.mark.usefixtures("graphs")
def test_graphs_propose_the_same_drafts(speculative: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong draft changes no token, so the drafts themselves are compared; padding proposes none."""
    proposed: list[torch.Tensor] = []
    build = GpuInputBuilder.build

    def watched(self: GpuInputBuilder, plan: Any) -> Any:
        proposed.append(self._states.drafts[:-1].clone())
        return build(self, plan)

    monkeypatch.setattr(GpuInputBuilder, "build", watched)
    found = []
    for is_eager in (True, False):
        proposed.clear()
        outputs_of(range(5), speculative_config=speculative, enforce_eager=is_eager, max_num_seqs=3)
        found.append(torch.stack(proposed))
    assert found[0].any()
    assert torch.equal(*found)


@pytest.mark.long
@pytest.mark.parametrize("speculative", [exhaustive(None), DRAWN], ids=["plain", "drawn"])
@pytest.mark.usefixtures("graphs")
def test_a_replayed_step_launches_nothing_besides_its_graphs(
    speculative: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exceptions are writes of new blocks and requests into the rows' tables, and rare sampling features."""
    launched: list[str] = []
    run = InterpretedFunction.run

    def watched(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        launched.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", watched)
    by_step: list[tuple[bool, bool, set[str], set[str]]] = []

    def names() -> set[str]:
        found = set(launched) - {"_scatter_staged"}
        launched.clear()
        return found

    execute_model, sample_tokens = Worker.execute_model, Worker.sample_tokens

    def executed(self: Worker, plan: Any) -> None:
        launched.clear()
        execute_model(self, plan)
        num_sampled_from = len(plan.num_scheduled_tokens) + sum(plan.num_draft_tokens.values())
        by_step.append((False, plan.total_num_scheduled_tokens > num_sampled_from, names(), set()))

    def sampled(self: Worker, grammars: Any) -> Any:
        result = sample_tokens(self, grammars)
        _, is_mixed, forward, _ = by_step.pop()
        is_replayed = isinstance(result, StepOutput) and result.is_replayed
        by_step.append((is_replayed, is_mixed, forward, names()))
        return result

    monkeypatch.setattr(Worker, "execute_model", executed)
    monkeypatch.setattr(Worker, "sample_tokens", sampled)

    def replayed(numbers: Sequence[int]) -> list[set[str]]:
        """Returns the launches after the forward passes of uniform steps."""
        by_step.clear()
        outputs_of(numbers, speculative_config=speculative, max_num_seqs=3)
        steps = [step for step in by_step if step[0]]
        assert not any(forward for _, _, forward, _ in steps)
        assert any(is_mixed for _, is_mixed, _, _ in steps)
        return [after for _, is_mixed, _, after in steps if not is_mixed]

    common = replayed((GREEDY, SEEDED, TOP_K, MIN_P))
    # Except for drafts after a step that verified none.
    assert len(common) >= 2
    assert sum(map(bool, common)) <= (speculative is not None)
    assert any("_adjust_logits" in names for names in replayed((GREEDY, PENALISED)))


class NoWaits(TorchDispatchMode):
    """Raises where an operation would make the CPU wait for a GPU."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "is_nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        assert name not in self.WAITING, f"{func} waits"
        assert func.__name__ != "repeat_interleave.Tensor" or (kwargs or {}).get("output_size"), f"{func} waits"
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        assert all(index is None or index.dtype != torch.bool for index in indices), "a mask as an index waits"
        return func(*args, **(kwargs or {}))


def refuse_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuses reads of tensors by Penstock; Triton's interpreter may read them, because it is the device."""
    for name in ("tolist", "cpu", "item", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"):
        original = getattr(torch.Tensor, name)

        def guarded(self: torch.Tensor, *args: Any, name: str = name, original: Any = original) -> Any:
            caller = sys._getframe(1).f_code.co_filename
            assert not caller.startswith(SOURCES), f"Tensor.{name} waits for the device in {caller}"
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, guarded)


@pytest.mark.long
@pytest.mark.parametrize(
    "speculative",
    [exhaustive(None), NGRAM, DRAWN, exhaustive(TOSSED)],
    ids=["plain", "ngram", "drawn", "synthetic"],
)
@pytest.mark.usefixtures("gpu_parts")
def test_steps_read_nothing_from_the_device(
    plain_outputs: list[RequestOutput], speculative: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_DEBUG", "0")
    copied: list[bool] = []
    for name in ("execute_model", "sample_tokens"):
        original = getattr(Worker, name)

        def watched(self: Worker, argument: Any, original: Any = original) -> Any:
            with monkeypatch.context() as guard, NoWaits():
                refuse_reading(guard)
                result = original(self, argument)
            if result is not None and isinstance(result, StepOutput):
                copied.append(isinstance(result.sampled, CopiedOutput))
            return result

        monkeypatch.setattr(Worker, name, watched)
    numbers = (SEEDED, TOP_K, *range(len(PLAIN), len(KINDS)))
    found = outputs_of(numbers, 3, async_scheduling=True, speculative_config=speculative)
    if speculative in (None, NGRAM):
        expected = tokens_in([plain_outputs[number] for number in numbers])
        assert [tokens[:3] for tokens in tokens_in(found)] == [tokens[:3] for tokens in expected]
    assert sum(copied) > 2


@pytest.mark.usefixtures("gpu_parts")
def test_nan_in_the_hidden_states_fails_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is reported although the logits are not read later."""
    forward = ModelRunner._forward

    def spoiled(self: ModelRunner, plan: Any) -> Any:
        state = forward(self, plan)
        if len(plan.num_scheduled_tokens) > 1:
            state.output.hidden[-1] = torch.nan
        return state

    monkeypatch.setattr(ModelRunner, "_forward", spoiled)
    llm = LLM(dtype="float32", max_model_len=256, num_gpu_blocks_override=100, max_num_seqs=4)
    first, second = llm.generate(
        ["One", "Two"], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), use_tqdm=False
    )
    assert [output.outputs[0].finish_reason for output in (first, second)] == ["length", "error"]
    assert second.error == NOT_FINITE
    assert len(first.outputs[0].token_ids) == 4
    llm.shutdown()


@pytest.mark.usefixtures("gpu_parts")
def test_a_request_that_allows_no_token_fails_alone() -> None:
    params = {"temperature": 0.0, "max_tokens": 4}
    impossible = {"structured_outputs": StructuredOutputsParams(choice=["red"]), "allowed_token_ids": [5]}
    llm = LLM(dtype="float32", max_model_len=256, num_gpu_blocks_override=100, max_num_seqs=4)
    both = [SamplingParams(**params, ignore_eos=True), SamplingParams(**params, **impossible)]
    first, second = llm.generate(["One", "Two"], both, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in (first, second)] == ["length", "error"]
    assert second.error == NOTHING_ALLOWED
    llm.shutdown()


SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}


def of_small_model(
    folder: str, numbers: Sequence[int] = (GREEDY, TOP_K, PENALISED), **engine_args: Any
) -> list[list[int]]:
    """Returns the tokens of a smaller version of the built-in model with random weights."""
    model = {"model": folder, "tokenizer": str(DEMO_MODEL), "load_format": "dummy", "speculative_config": MTP}
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 32}
    return tokens_in(outputs_of(numbers, **model, **limits, **engine_args))


def launched(folder: str) -> list[list[int]]:
    """Runs all kernels of a GPU, launched one by one."""
    build.warm_up = lambda *args: None
    return of_small_model(folder, (GREEDY, PENALISED), async_scheduling=True, enforce_eager=True)


def everything(folder: str, **engine_args: Any) -> list[list[int]]:
    """Runs all kernels of a GPU, and graphs. The warm-up is left out: it takes the same paths, and longer."""
    build.warm_up = lambda *args: None
    with pytest.MonkeyPatch.context() as patched:
        use_graphs(patched, contexts=(128,))
        tokens = of_small_model(folder, async_scheduling=True, **engine_args)
        assert EmulatedRecorder.num_replays >= 2
    return tokens


def make_small_model(folder: Path) -> str:
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | SMALL | {"num_key_value_heads": 1}))
    return str(folder)


def in_the_interpreter(function: str, *args: Any, module: str = __name__, **kwargs: Any) -> list[Any]:
    """Calls a module's function in a process in which all kernels are those of a GPU."""
    call = f"{function}(*{args!r}, **{kwargs!r})"
    code = f"import json\nfrom {module} import {function}\nprint(json.dumps({call}))"
    environment = {**os.environ, "PENSTOCK_CPU_ISA": "triton", "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.long
def test_every_kernel_in_the_interpreter(tmp_path: Path) -> None:
    folder = make_small_model(tmp_path)
    assert in_the_interpreter("launched", folder) == of_small_model(folder, (GREEDY, PENALISED))


SPARSE = {**SMALL, "moe_intermediate_size": 40, "num_experts_per_tok": 3, "rope_parameters": {"rope_theta": 1e4}}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24}
FAMILIES = {
    "qwen3_moe": {**SPARSE, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 7,
                  "norm_topk_prob": True},
    "deepseek_v3": {**SPARSE, **LATENT, "q_lora_rank": 24, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
                    "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
}  # fmt: skip


def make_family(family: str, folder: Path) -> str:
    """Writes the configuration of a small model with experts and, if the family has it, latent attention."""
    demo = json.loads((DEMO_MODEL / "config.json").read_text())
    common = {name: demo[name] for name in ("vocab_size", "rms_norm_eps", "max_position_embeddings")}
    config = {**common, "model_type": family, "tie_word_embeddings": False, **FAMILIES[family]}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def of_family(folder: str, **engine_args: Any) -> list[tuple[list[int], list[float]]]:
    """Returns the tokens of such a model with random weights, and their log probabilities."""
    build.warm_up = lambda *args: None
    limits = {"max_model_len": 64, "num_gpu_blocks_override": 30, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    llm = LLM(folder, tokenizer=str(DEMO_MODEL), load_format="dummy", dtype="float32", **limits, **engine_args)
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=0, ignore_eos=True)
    outputs = llm.generate(["Once upon a time there was a fox.", "What is 1?"], params, use_tqdm=False)
    llm.shutdown()
    found: list[tuple[list[int], list[float]]] = []
    for completion in (output.outputs[0] for output in outputs):
        assert completion.logprobs is not None
        chosen = zip(completion.logprobs, completion.token_ids, strict=True)
        found.append((completion.token_ids, [place[token].logprob for place, token in chosen]))
    return found


@pytest.mark.long
@pytest.mark.parametrize("deterministic", [False, exhaustive(True)])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_and_latents_in_the_interpreter(family: str, deterministic: bool, tmp_path: Path) -> None:
    folder = make_family(family, tmp_path)
    expected = of_family(folder)
    found = in_the_interpreter("of_family", folder, deterministic=deterministic, enforce_eager=True)
    for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(found, expected, strict=True):
        assert tokens == expected_tokens
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("deterministic", [False, True])
def test_everything_in_the_interpreter(tmp_path: Path, deterministic: bool) -> None:
    folder = make_small_model(tmp_path)
    assert in_the_interpreter("everything", folder, deterministic=deterministic) == of_small_model(folder)
