"""Optional attention backends with fakes of their libraries: a whole engine gives the native backend's tokens."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from penstock import LLM, ConfigError, SamplingParams
from penstock.attention import select
from penstock.attention.native import NativeAttention
from penstock.config.engine import ExecutionConfig, SchedulerConfig
from penstock.messages.kv_cache_spec import KVCacheSpec
from penstock.runner.cpu.parts import cpu_parts
from penstock.runner.parts import DeviceParts
from penstock.worker import worker
from penstock.worker.parts import make_parts
from tests.integration.checkpoints import make_checkpoint
from tests.unit import attention_fakes
from tests.unit.attention_cases import MAX_MODEL_LEN, Case
from tests.unit.attention_fakes import BatchPrefillWithPagedKVCacheWrapper

BACKENDS = ("flash_attention", "flashinfer")
LIMITS = {"dtype": "float32", "max_model_len": 128, "num_gpu_blocks_override": 60, "max_num_seqs": 6}
SMALL_POOL = 11
MTP = {"method": "mtp", "num_speculative_tokens": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Makes the checkpoints before the libraries are faked, because transformers looks for them too."""
    folder = tmp_path_factory.mktemp("checkpoints")
    names = ("mistral-window", "qwen2-hybrid-window", "llama2-mha-80")
    return {name: {"model": str(make_checkpoint(name, folder)), "skip_tokenizer_init": True} for name in names}


@pytest.fixture(params=BACKENDS)
def backend(
    checkpoints: dict[str, dict[str, Any]], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Makes the CPU stand in for a Hopper GPU with the backend's library, which also computes in float32."""
    pretend(request.param, monkeypatch)
    return request.param


def cpu_with_libraries(device: torch.device) -> DeviceParts:
    """Returns the CPU's parts with a GPU's choice of attention."""
    check, make = partial(select.check_gpu_attention, device), partial(select.make_gpu_attention, device)
    return replace(cpu_parts(), check_attention=check, make_attention=make)


def pretend(name: str, monkeypatch: pytest.MonkeyPatch, capability: int = 9) -> None:
    module = f"penstock.attention.{name}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    for fake in attention_fakes.modules(name):
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(worker, "make_parts", cpu_with_libraries)
    monkeypatch.setattr(select, "_capability", lambda device: capability)
    limits = __import__(module, fromlist=["LIMITS"]).LIMITS
    monkeypatch.setattr(f"{module}.LIMITS", replace(limits, dtypes=("float32",)))


def tokens_of(prompts: list[Any], repeat: int = 1, **engine_args: Any) -> list[list[int]]:
    llm = LLM(**{**LIMITS, **engine_args})
    params = [
        SamplingParams(temperature=0.7 * (n % 2), seed=n, max_tokens=12, ignore_eos=True) for n in range(len(prompts))
    ]
    for _ in range(repeat):
        outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.check_integrity()
    if engine_args.get("num_gpu_blocks_override") == SMALL_POOL:
        assert llm.stats().num_preemptions > 0
    llm.shutdown()
    return [output.outputs[0].token_ids for output in outputs]


PROMPTS: list[Any] = [
    text + " 7" * number
    for number, text in enumerate(
        ("Once upon a time there was a fox. " * 3, "What is 12 + 30?", "The key of Anna is in the red box. " * 5) * 2
    )
]


@pytest.fixture(scope="module")
def native_tokens() -> list[list[int]]:
    return tokens_of(PROMPTS)


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    ("engine_args", "overlap"),
    [
        ({"max_num_batched_tokens": 24, "block_size": 32}, False),
        ({"max_num_batched_tokens": 24, "num_gpu_blocks_override": SMALL_POOL}, True),
        ({"speculative_config": MTP, "max_num_batched_tokens": 32}, True),
        ({"speculative_config": NGRAM, "num_gpu_blocks_override": SMALL_POOL}, False),
    ],
    ids=["chunks", "preemption", "mtp", "ngram-preemption"],
)
def test_tokens_equal_those_of_the_native_backend(
    backend: str, native_tokens: list[list[int]], engine_args: dict[str, Any], overlap: bool
) -> None:
    found = tokens_of(PROMPTS, attention_backend=backend, async_scheduling=overlap, **engine_args)
    assert found == native_tokens


@pytest.mark.parametrize(
    ("name", "speculative"), [("mistral-window", NGRAM), ("qwen2-hybrid-window", None)], ids=["ngram", "hybrid"]
)
def test_sliding_windows(
    backend: str, checkpoints: dict[str, dict[str, Any]], name: str, speculative: dict[str, Any] | None
) -> None:
    """Prompts are so long that blocks leave the window and are reused, or replaced by the null block on prefix hits."""
    model = checkpoints[name]
    prompts = [[(7 * i + n) % 90 + 1 for i in range(20 * n + 5)] for n in range(4)]
    with pytest.MonkeyPatch.context() as without_library:
        without_library.setattr(worker, "make_parts", make_parts)
        expected = tokens_of(prompts, **model)
    changes = {"attention_backend": backend, "speculative_config": speculative, "max_num_batched_tokens": 24}
    assert tokens_of(prompts, repeat=2, num_gpu_blocks_override=14, **changes, **model) == expected


def make(name: str, max_decode_query_len: int = 4) -> Any:
    num_drafts = max_decode_query_len - 1
    limits = SchedulerConfig(
        max_num_batched_tokens=64, max_num_seqs=8, max_model_len=MAX_MODEL_LEN, drafts=((8, num_drafts),)
    )
    return select.make_gpu_attention(torch.device("cpu"), limits, ExecutionConfig(attention_backend=name))


@pytest.mark.parametrize("window", [0, 1, 20])
@pytest.mark.parametrize("counts", [(1, 1, 1), (4, 4, 4), (3, 1, 40), (2, 2, 2)])
def test_a_batch_agrees_with_the_native_backend(backend: str, counts: tuple[int, ...], window: int) -> None:
    case = Case.random([7, 90, 47], counts, window=window)
    expected = case.run(NativeAttention())
    torch.testing.assert_close(case.run(make(backend)), expected, atol=2e-6, rtol=2e-5)


def test_the_libraries_are_refused_in_deterministic_engines(backend: str) -> None:
    with pytest.raises(ConfigError, match=f"attention_backend={backend} cannot be deterministic"):
        LLM(**LIMITS, attention_backend=backend, deterministic=True)


def test_padding_of_a_captured_batch(backend: str) -> None:
    """The results of padding rows are arbitrary."""
    case = Case.random([7, 90, 47], [1, 1, 1])
    found = case.padded(5).run(make(backend))
    torch.testing.assert_close(found[:3], case.run(NativeAttention()), atol=2e-6, rtol=2e-5)


def test_graphs_are_captured_for_the_longest_context(backend: str) -> None:
    assert make(backend).graph_contexts == (MAX_MODEL_LEN,)


def test_flash_attention_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend("flash_attention", monkeypatch)
    attention = make("flash_attention")
    module = "penstock.attention.flash_attention"
    monkeypatch.setattr(f"{module}.rotate_and_store", lambda *args: None)
    monkeypatch.setattr(f"{module}.flash_attn_with_kvcache", lambda q, *args, **kwargs: torch.empty_like(q))
    # Tensors on this device cannot be read.
    assert Case.random([7, 90], [3, 1], device="meta").run(attention).shape == (4, 256)


def test_flashinfer_plans_once_a_step_and_only_if_necessary(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend("flashinfer", monkeypatch)
    attention, plans = make("flashinfer"), BatchPrefillWithPagedKVCacheWrapper.plans
    for counts, number in (((1, 1), 0), ((4, 4), 0), ((3, 1), 1), ((2, 2), 1)):
        case = Case.random([7, 90], counts)
        for _ in range(3):
            case.run(attention)
        assert BatchPrefillWithPagedKVCacheWrapper.plans - plans == number
        plans += number


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "bfloat16"}, "does not serve dtype bfloat16: it serves float32; or choose attention_backend=triton"),
        ({"block_size": 72}, "does not serve block_size 72"),
        ({"checkpoint": "llama2-mha-80"}, "does not serve heads of size 80"),
    ],
)
def test_unsupported_shapes(
    backend: str,
    checkpoints: dict[str, dict[str, Any]],
    changes: dict[str, Any],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "checkpoint" in changes:
        changes = checkpoints[changes["checkpoint"]]
        module = f"penstock.attention.{backend}"
        monkeypatch.setattr(f"{module}.LIMITS", replace(sys.modules[module].LIMITS, head_sizes=(64,)))
    with pytest.raises(ConfigError, match=f"attention_backend={backend} {named}"):
        LLM(**{**LIMITS, "attention_backend": backend, **changes})


def test_too_many_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend("flashinfer", monkeypatch)
    case = Case.random([7], [1])
    case.heads = replace(case.heads, num_heads=34)
    with pytest.raises(ConfigError, match="at most 16 heads per KV head, and the model has 34 for 2"):
        case.run(make("flashinfer"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"softcap": 50.0}, "attn_logit_softcapping 50.0"),
        ({"sinks": torch.zeros(4)}, "attention sinks"),
        ({"spec": KVCacheSpec.latents(64, "float32")}, "latent attention"),
    ],
    ids=["softcap", "sinks", "latents"],
)
def test_kinds_of_attention_that_only_triton_has_are_refused(backend: str, change: dict[str, Any], named: str) -> None:
    case, attention = Case.random([7], [1]), make(backend)
    case.run(attention)
    case.heads = replace(case.heads, **change)
    with pytest.raises(ConfigError, match=f"attention_backend={backend} does not serve {named} here"):
        case.run(attention)


def test_an_unsupported_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend("flash_attention", monkeypatch, capability=10)
    with pytest.raises(ConfigError, match="flash_attention needs a Hopper GPU"):
        make("flash_attention")


def test_an_old_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend("flashinfer", monkeypatch)
    monkeypatch.delitem(sys.modules, "penstock.attention.flashinfer")
    monkeypatch.setattr(sys.modules["flashinfer.decode"], "xqa_batch_decode_with_kv_cache", lambda q, kv_cache: q)
    with pytest.raises(ConfigError, match=r"needs FlashInfer from 0\.6\.16 on \(the FlashInfer here is older\): pip"):
        make("flashinfer")


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("flash_attention", "FlashAttention 3 .*flash_attn_interface.*: its repository says how"),
        ("flashinfer", "FlashInfer .*: pip install 'penstock"),
    ],
)
def test_a_missing_library(name: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(name, monkeypatch)
    monkeypatch.delitem(sys.modules, f"penstock.attention.{name}")
    for fake in attention_fakes.modules(name):
        monkeypatch.setitem(sys.modules, fake.__name__, None)
    with pytest.raises(ConfigError, match=f"attention_backend={name} needs {named}"):
        LLM(**LIMITS, attention_backend=name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is a CPU")
@pytest.mark.parametrize("name", ["triton", *BACKENDS])
def test_gpu_backends_are_refused_on_a_cpu(name: str) -> None:
    with pytest.raises(ConfigError, match=f"attention_backend={name} does not run on a CPU"):
        LLM(**LIMITS, attention_backend=name)


def test_the_native_backend_is_refused_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match="native does not run on cuda:1: choose auto or triton"):
        select.check_gpu_attention(torch.device("cuda:1"), ExecutionConfig(attention_backend="native"))


def test_an_unknown_backend() -> None:
    with pytest.raises(ConfigError, match="attention_backend must be one of auto, triton"):
        LLM(**LIMITS, attention_backend="flash")
