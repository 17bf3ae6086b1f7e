"""The runner's path on a GPU, in Triton's interpreter: the tokens of the CPU's path, and nobody waits for the device.

Most tests run the runner's own parts in the interpreter and the model by the kernels of the CPU, which are quick and
leave the same logits; one runs everything as a GPU would.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import penstock
from penstock import LLM, SamplingParams
from penstock.engine import build
from penstock.executor.uniproc import LaunchExecutor
from penstock.kernels import native
from penstock.runner import buffers, input_batch, model_runner, step_sampler
from penstock.runner.gpu import cudagraphs
from penstock.runner.gpu.inputs import GpuInputBuilder
from penstock.runner.gpu.sampler import CopiedOutput
from penstock.runner.model_runner import ModelRunner
from penstock.runner.step_sampler import TorchStepSampler
from tests.kernels.graph_emulator import EmulatedRecorder

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU stands in for the GPU")

DEMO_MODEL = Path(penstock.__file__).parent / "demo"
SOURCES = os.path.dirname(penstock.__file__)
FEW_BLOCKS = {"num_gpu_blocks_override": 11}
MTP = {"method": "mtp", "num_speculative_tokens": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
# What the step sampler's kernels do alone, and what a neighbour may bring that takes the general path.
PLAIN: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.1, "top_p": 0.8, "top_k": 100000},
    {"temperature": 0.7, "min_p": 0.05, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.0, "seed": -1},
)
OTHER: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7, "repetition_penalty": 1.2, "logprobs": 1, "max_tokens": 3},
    {"temperature": 0.0, "min_tokens": 3, "prompt_logprobs": 1, "max_tokens": 4},
)


def tokens_of(kinds: tuple[dict[str, Any], ...], max_tokens: int = 10, **engine_args: Any) -> list[list[int]]:
    """One request of each kind, of many lengths."""
    limits = {"dtype": "float32", "max_model_len": 128, "num_gpu_blocks_override": 60, "max_num_seqs": 6}
    llm = LLM(**{**limits, **engine_args})
    openings = ("Once upon a time there was a fox. " * 3, "What is 12 + 30?", "The key of Anna is in the red box. " * 5)
    texts = [openings[number % 3] + " 7" * number for number in range(len(kinds))]
    params = [
        SamplingParams(**{"seed": n, "max_tokens": max_tokens, "ignore_eos": True, **k}) for n, k in enumerate(kinds)
    ]
    outputs = llm.generate(texts, params, use_tqdm=False)
    llm.check_integrity()
    if "num_gpu_blocks_override" in engine_args:
        assert llm.stats().num_preemptions > 0
    llm.shutdown()
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def gpu_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner takes its parts for a GPU; a model's layers do not."""
    for module in (buffers, input_batch, step_sampler):
        monkeypatch.setattr(module, "has_gpu_kernels", lambda device: True)
    monkeypatch.setattr(build, "warm_up", lambda *args: None)


@pytest.fixture
def graphs(gpu_parts: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[EmulatedRecorder]]:
    """Steps of few tokens are replayed, for contexts up to two lengths."""
    with monkeypatch.context() as patched:
        use_graphs(patched)
        yield EmulatedRecorder
    native.library.cache_clear()


def use_graphs(patched: pytest.MonkeyPatch, contexts: tuple[int, ...] = (64, 128)) -> None:
    EmulatedRecorder.install(patched)
    patched.setattr(cudagraphs, "CudaGraphRecorder", EmulatedRecorder)
    patched.setattr(model_runner, "graph_contexts", lambda *args: () if args[2].enforce_eager else contexts)
    patched.setattr(EmulatedRecorder, "num_replays", 0)


@pytest.fixture(scope="module")
def plain_tokens() -> list[list[int]]:
    return tokens_of((*PLAIN, *OTHER))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "engine_args",
    [
        {"max_num_batched_tokens": 24},
        {"max_num_batched_tokens": 24, **FEW_BLOCKS},
        {"speculative_config": MTP, "max_num_batched_tokens": 32},
        {"speculative_config": NGRAM, **FEW_BLOCKS},
    ],
    ids=["chunks", "preemption", "mtp", "ngram-preemption"],
)
@pytest.mark.usefixtures("gpu_parts")
def test_the_same_tokens(plain_tokens: list[list[int]], engine_args: dict[str, Any], overlap: bool) -> None:
    assert tokens_of((*PLAIN, *OTHER), async_scheduling=overlap, **engine_args) == plain_tokens


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "engine_args",
    [
        {"max_num_batched_tokens": 24},
        {"max_num_batched_tokens": 24, **FEW_BLOCKS},
        {"speculative_config": MTP, "max_num_batched_tokens": 32},
    ],
    ids=["chunks", "preemption", "mtp"],
)
def test_the_same_tokens_from_graphs(
    graphs: type[EmulatedRecorder],
    plain_tokens: list[list[int]],
    engine_args: dict[str, Any],
    overlap: bool,
) -> None:
    assert tokens_of((*PLAIN, *OTHER), async_scheduling=overlap, **engine_args) == plain_tokens
    assert graphs.num_replays >= 5


@pytest.mark.usefixtures("graphs")
def test_the_same_drafts_from_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong draft changes no token, so what is proposed is compared itself; padding proposes nothing for anybody."""
    proposed: list[torch.Tensor] = []
    build = GpuInputBuilder.build

    def watched(self: GpuInputBuilder, plan: Any) -> Any:
        proposed.append(self._states.drafts[:-1].clone())
        return build(self, plan)

    monkeypatch.setattr(GpuInputBuilder, "build", watched)
    found = []
    for is_eager in (True, False):
        proposed.clear()
        tokens_of(PLAIN[:5], speculative_config=MTP, enforce_eager=is_eager)
        found.append(torch.stack(proposed))
    assert found[0].any()
    assert torch.equal(*found)


class NobodyWaits(TorchDispatchMode):
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
    """Triton's interpreter may read tensors; it is the device."""
    for name in ("tolist", "cpu", "item", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"):
        original = getattr(torch.Tensor, name)

        def guarded(self: torch.Tensor, *args: Any, name: str = name, original: Any = original) -> Any:
            caller = sys._getframe(1).f_code.co_filename
            assert not caller.startswith(SOURCES), f"Tensor.{name} waits for the device in {caller}"
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, guarded)


@pytest.mark.parametrize("speculative", [None, MTP], ids=["plain", "mtp"])
@pytest.mark.usefixtures("gpu_parts")
def test_nothing_is_read_back(
    plain_tokens: list[list[int]], speculative: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_DEBUG", "0")
    monkeypatch.setattr(TorchStepSampler, "sample", None)
    copied: list[bool] = []
    for name in ("execute_model", "sample_tokens"):
        original = getattr(LaunchExecutor, name)

        def watched(self: LaunchExecutor, argument: Any, original: Any = original) -> Any:
            with monkeypatch.context() as guard, NobodyWaits():
                refuse_reading(guard)
                result = original(self, argument)
            if result is not None:
                copied.append(isinstance(result._pending.sampled, CopiedOutput))
            return result

        monkeypatch.setattr(LaunchExecutor, name, watched)
    tokens = tokens_of(PLAIN, 5, async_scheduling=True, max_num_batched_tokens=48, speculative_config=speculative)
    assert tokens == [each[:5] for each in plain_tokens[: len(PLAIN)]]
    assert sum(copied) > 2


@pytest.mark.usefixtures("gpu_parts")
def test_a_model_without_numbers_fails_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What went wrong is told although nobody looks at the logits later."""
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
    assert len(first.outputs[0].token_ids) == 4
    llm.shutdown()


SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}


def of_small_model(folder: str, **engine_args: Any) -> list[list[int]]:
    """The built-in model's shape made smaller, with random weights."""
    kinds = ({"temperature": 0.0}, {"temperature": 0.8, "top_k": 5}, {"temperature": 0.0})
    model = {"model": folder, "tokenizer": str(DEMO_MODEL), "load_format": "dummy", "speculative_config": MTP}
    return tokens_of(kinds, 6, **model, max_num_seqs=3, max_num_batched_tokens=32, **engine_args)


def everything(folder: str, **engine_args: Any) -> list[list[int]]:
    """All kernels of a GPU, and graphs. The warm-up takes the same paths as the requests and longer."""
    build.warm_up = lambda *args: None
    with pytest.MonkeyPatch.context() as patched:
        use_graphs(patched, contexts=(128,))
        tokens = of_small_model(folder, async_scheduling=True, **engine_args)
        assert EmulatedRecorder.num_replays >= 2
    return tokens


@pytest.mark.parametrize("deterministic", [False, True])
def test_everything_in_the_interpreter(tmp_path: Path, deterministic: bool) -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | SMALL | {"num_key_value_heads": 1}))
    call = f"everything({str(tmp_path)!r}, deterministic={deterministic})"
    code = f"import json\nfrom {__name__} import everything\nprint(json.dumps({call}))"
    environment = {**os.environ, "PENSTOCK_CPU_ISA": "triton", "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == of_small_model(str(tmp_path))
