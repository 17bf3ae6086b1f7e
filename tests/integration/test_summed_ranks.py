"""Ranks that divide the inputs of a layer and add their results, as on a GPU without `--deterministic`, on the CPU.

Only last bits may differ from one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import SamplingParams
from penstock.config.eagle3 import load_eagle3_config
from penstock.config.model import load_model_config
from penstock.config.model_path import resolve_model_path
from penstock.config.recurrent import recurrent_kind
from penstock.frontend.llm import LLM
from penstock.messages.kv_transfer import ShardId
from penstock.models.decoder import Decoder
from penstock.models.eagle3 import Eagle3Head
from penstock.models.interface import DraftHead
from penstock.models.mtp import build_mtp
from penstock.models.registry import build_model
from penstock.models.sources.opening import open_weights
from penstock.models.weights import Weights
from penstock.parallel.groups import ALONE, RankLinks, TensorGroup
from penstock.worker import worker
from penstock.worker.parts import make_parts
from tests.integration.checkpoints import CHECKPOINTS, ENCODERS, make_checkpoint, make_encoder_checkpoint, save_modules
from tests.integration.test_identity_speculation import DEMO, METHODS
from tests.unit.rank_harness import run_ranks, same_bits
from tests.unit.test_eagle3 import context_of, of_tokens

CPU = torch.device("cpu")
EAGLE3 = resolve_model_path("demo/eagle3")
# Ranks add their parts on GPUs alone, where models with recurrent layers are not served.
NAMES = [name for name, (kind, _) in CHECKPOINTS.items() if recurrent_kind({"model_type": kind}) is None]
LENGTH = 60  # longer than the checkpoints' windows
Build = Callable[[TensorGroup, bool], torch.Tensor]


def weights_of(path: Path, group: TensorGroup, divides_inputs: bool) -> Weights:
    return Weights(open_weights(path, "auto"), torch.float32, CPU, group=group, divides_inputs=divides_inputs)


@torch.inference_mode()
def logits_of(path: Path, group: TensorGroup, divides_inputs: bool) -> torch.Tensor:
    """Returns logits [LENGTH, vocabulary]."""
    config = load_model_config(path, "float32")
    weights = weights_of(path, group, divides_inputs)
    with closing(weights.source):
        model = build_model(config, weights)
    return model.compute_logits(hidden_of(model, config.vocab_size).hidden)


def hidden_of(model: Decoder, vocab_size: int) -> Any:
    ids = torch.randint(vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH)
    return model.forward(ids, positions, of_tokens(context_of(model), positions))


@torch.inference_mode()
def logits_of_head(method: str, group: TensorGroup, divides_inputs: bool) -> torch.Tensor:
    """Returns the logits of the built-in model's drafter after a whole prompt."""
    path = Path(DEMO)
    config = load_model_config(path, "float32")
    eagle3 = load_eagle3_config(EAGLE3, config)
    model = build_model(config, weights_of(path, group, divides_inputs), eagle3.aux_layers)
    head: DraftHead
    if method == "mtp":
        head = build_mtp(config, weights_of(path, group, divides_inputs), model)
    else:
        head = Eagle3Head(eagle3, weights_of(EAGLE3, group, divides_inputs), model)
    entered = head.enter(hidden_of(model, config.vocab_size))
    positions = torch.arange(LENGTH)
    next_ids = torch.arange(LENGTH) * 7 % config.vocab_size
    hidden = head.forward(entered, next_ids, positions, of_tokens(context_of(head), positions))
    return head.compute_logits(hidden)


def assert_ranks_agree(count: int, build: Build) -> None:
    """Asserts agreement with one rank, in float32, up to last bits."""

    def body(links: RankLinks, shard: ShardId) -> torch.Tensor:
        return build(links.group, True).clone()

    whole = build(ALONE, False)
    assert same_bits(build(ALONE, True), whole)
    found = run_ranks(1, count, body)
    scale = float(whole[whole.isfinite()].abs().max())
    for logits in found.values():
        assert same_bits(logits, found[0, 0])
        torch.testing.assert_close(logits, whole, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_every_architecture(name: str, count: int, tmp_path: Path) -> None:
    """Heads and intermediate features are uneven on 3 ranks; some have biases after attention and MLP."""
    path = make_checkpoint(name, tmp_path)
    assert_ranks_agree(count, lambda group, divides: logits_of(path, group, divides))


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_logits_of_drafters(method: str, count: int) -> None:
    assert_ranks_agree(count, lambda group, divides: logits_of_head(method, group, divides))


def test_layers_exchange_only_sums(tmp_path: Path) -> None:
    """Only embedding and logits are gathered, not the results of attention or the intermediate features."""
    path = make_checkpoint("llama-biases", tmp_path)
    calls: list[str] = []

    class Recorded:
        def __init__(self, group: TensorGroup) -> None:
            self.index, self.count, self.barrier = group.index, group.count, group.barrier
            self.group = group

        def gather_columns(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
            calls.append("gather")
            return self.group.gather_columns(part, sizes)

        def sum_parts(self, part: torch.Tensor) -> torch.Tensor:
            calls.append("sum")
            return self.group.sum_parts(part)

    def body(links: RankLinks, shard: ShardId) -> None:
        logits_of(path, Recorded(links.group) if shard == (0, 0) else links.group, True)

    run_ranks(1, 2, body)
    num_layers = load_model_config(path, "float32").num_hidden_layers
    assert calls == ["gather", *["sum"] * (2 * num_layers), "gather"]


# ---- Whole engines ----


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the engines' ranks, which are threads, divide inputs."""
    parts = replace(make_parts(CPU), divides_inputs=lambda execution: True)
    monkeypatch.setattr(worker, "make_parts", lambda device: parts)


def ranks(tp: int, pp: int = 1) -> dict[str, Any]:
    return {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "distributed_executor_backend": "uniproc"}


def greedy(**engine_args: Any) -> list[list[int]]:
    llm = LLM(dtype="float32", max_model_len=256, num_gpu_blocks_override=200, **engine_args)
    prompts = ["Once upon a time there was a fox", "What is 12 + 30?", "The key of Anna is in the red box. " * 3]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.check_integrity()
    if "speculative_config" in engine_args:
        assert llm.stats().speculation.num_accepted_tokens > 0
    llm.shutdown()
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.spread(4)
@pytest.mark.parametrize("method", [None, *METHODS])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (3, 1), (2, 2)])
def test_greedy_tokens_of_the_built_in_model(
    tp: int, pp: int, method: str | None, request: pytest.FixtureRequest
) -> None:
    options: dict[str, Any] = {}
    if method is not None:
        options["speculative_config"] = {**METHODS[method], "num_speculative_tokens": 2}
    expected = greedy(**options)
    request.getfixturevalue("sums")
    assert greedy(**ranks(tp, pp), **options) == expected


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = make_encoder_checkpoint(name, tmp_path)
    save_modules(path, "mean_tokens")

    def embed(**engine_args: Any) -> torch.Tensor:
        llm = LLM(str(path), skip_tokenizer_init=True, **engine_args)
        found = llm.embed([[5, 17, 99, 250], [7] * 40], use_tqdm=False)
        llm.shutdown()
        return torch.tensor([output.outputs.embedding for output in found])

    expected = embed()
    request.getfixturevalue("sums")
    torch.testing.assert_close(embed(**ranks(2)), expected, rtol=0, atol=1e-5)
