"""A mixture of experts as a layer's part: read from its configuration and checkpoint, and equal to transformers'."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from penstock.config.expert_parallel import ExpertParallelConfig
from penstock.config.experts import ExpertsConfig, read_experts
from penstock.config.families import SILU
from penstock.config.model import ModelConfig, load_model_config
from penstock.models.experts import Experts, sparse_mlp
from penstock.models.parts import GatedMLP
from penstock.models.sources.dummy import DummySource
from penstock.models.sources.source import ALL, Part
from penstock.models.weights import Weights, WeightsDigest, compare
from penstock.parallel.groups import TensorGroup
from penstock.utils.errors import ConfigError
from tests.integration.checkpoints import make_checkpoint

CPU = torch.device("cpu")
HIDDEN, INNER, NUM_EXPERTS, TOP_K = 48, 40, 8, 3
QWEN3 = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 4,
    "topk_group": 2,
}


def read(raw: dict[str, Any], **changes: Any) -> ExpertsConfig:
    config = read_experts({**raw, **changes})
    assert config is not None
    return config


@pytest.mark.parametrize(
    ("raw", "changes", "sparse"),
    [
        (QWEN3, {}, [True] * 4),
        (QWEN3, {"mlp_only_layers": [0, 2]}, [False, True, False, True]),
        (QWEN3, {"decoder_sparse_step": 2}, [False, True, False, True]),
        (QWEN3, {"decoder_sparse_step": 3, "mlp_only_layers": None}, [False, False, True, False]),
        (DEEPSEEK, {"first_k_dense_replace": 3}, [False, False, False, True]),
        (DEEPSEEK, {"first_k_dense_replace": 1, "moe_layer_freq": 2}, [False, False, True, False]),
        (DEEPSEEK, {"model_type": "glm4_moe_lite"}, [False, True, True, True]),
        (
            DEEPSEEK,
            {"model_type": "glm4_moe_lite", "mlp_layer_types": ["sparse", "dense", "dense", "sparse"]},
            [True, False, False, True],
        ),
    ],
)
def test_which_layers_are_sparse(raw: dict[str, Any], changes: dict[str, Any], sparse: list[bool]) -> None:
    config = read(raw, **changes)
    assert [config.is_sparse(layer) for layer in range(4)] == sparse
    # A draft module's layer comes after the model's own.
    assert config.is_sparse(4)


@pytest.mark.parametrize(
    ("raw", "changes", "message"),
    [
        (QWEN3, {"num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than the 8 experts"),
        (QWEN3, {"num_experts_per_tok": 0}, "num_experts_per_tok must be an integer of at least 1, got 0"),
        (QWEN3, {"num_experts": "8"}, "num_experts must be an integer of at least 1, got '8'"),
        (QWEN3, {"moe_intermediate_size": -1}, "moe_intermediate_size must be an integer of at least 1, got -1"),
        (QWEN3, {"hidden_act": "gelu"}, "the activation of a qwen3_moe with experts must be silu"),
        (QWEN3, {"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer of at least 1, got 0"),
        (DEEPSEEK, {"scoring_func": "tanh"}, "scoring_func of a deepseek_v3 must be sigmoid, got 'tanh'"),
        (DEEPSEEK, {"topk_method": "greedy"}, "topk_method of a deepseek_v3 must be noaux_tc, got 'greedy'"),
        (
            DEEPSEEK,
            {"model_type": "deepseek_v2", "topk_method": "random"},
            "topk_method of a deepseek_v2 must be greedy or group_limited_greedy, got 'random'",
        ),
        (
            DEEPSEEK,
            {"model_type": "deepseek_v2", "norm_topk_prob": True},
            "norm_topk_prob must be false for deepseek_v2",
        ),
        (DEEPSEEK, {"n_group": 3}, "n_group=3 does not divide the 8 experts"),
        (DEEPSEEK, {"topk_group": 5}, "topk_group=5 is more than n_group=4"),
        (DEEPSEEK, {"num_experts_per_tok": 5}, "leaves 4 experts to choose from, and num_experts_per_tok=5"),
        (DEEPSEEK, {"n_group": 8}, "n_group=8 leaves one expert in a group"),
        (DEEPSEEK, {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types must say dense or sparse for 4 layers"),
        ({**QWEN3, "model_type": "gpt_oss", "intermediate_size": 8}, {"swiglu_limit": 5}, "swiglu_limit must be 7.0"),
    ],
)
def test_what_cannot_be_is_refused_in_words(raw: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(raw, **changes)


def test_models_without_experts_have_none() -> None:
    assert read_experts({**QWEN3, "model_type": "qwen3"}) is None


class TensorSource:
    """Tensors in memory as a checkpoint."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def read(self, name: str, shape: Sequence[int], part: Part = ALL) -> torch.Tensor:
        if name not in self.tensors:
            raise ConfigError(f"no tensor {name!r}")
        if list(self.tensors[name].shape) != list(shape):
            raise ConfigError(f"{name!r} has shape {list(self.tensors[name].shape)}, not {list(shape)}")
        return self.tensors[name][part]

    def has(self, name: str) -> bool:
        return name in self.tensors

    def close(self) -> None:
        pass


def unfused(tensors: dict[str, torch.Tensor], gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"):
    """Stores every expert by itself."""
    made = dict(tensors)
    both, downs = made.pop("mlp.experts.gate_up_proj"), made.pop("mlp.experts.down_proj")
    for expert in range(len(both)):
        made[f"mlp.experts.{expert}.{gate}.weight"], made[f"mlp.experts.{expert}.{up}.weight"] = both[expert].chunk(2)
        made[f"mlp.experts.{expert}.{down}.weight"] = downs[expert]
    return made


def as_mixtral(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    renamed = unfused(tensors, "w1", "w3", "w2")
    return {name.replace("mlp.", "block_sparse_moe."): tensor for name, tensor in renamed.items()}


LAYOUTS = {"fused": dict, "one by one": unfused, "Mixtral's": as_mixtral}
SHAPE = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_experts_per_tok": TOP_K,
    "intermediate_size": INNER,
    "moe_intermediate_size": INNER,
}
# name -> transformers' module, its configuration, and what Penstock reads of it
BLOCKS: dict[str, tuple[Callable[[Any], torch.nn.Module], str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_moe": (Qwen3MoeSparseMoeBlock, "qwen3_moe", {"num_experts": NUM_EXPERTS, "norm_topk_prob": True}, {}),
    "mixtral": (MixtralSparseMoeBlock, "mixtral", {"num_local_experts": NUM_EXPERTS}, {}),
    "deepseek_v3": (
        DeepseekV3MoE,
        "deepseek_v3",
        {"n_routed_experts": NUM_EXPERTS, "n_group": 2, "topk_group": 1, "n_shared_experts": 2},
        {},
    ),
    # With a gate of the shared expert; otherwise it routes like Qwen3.
    "qwen2_moe": (
        Qwen2MoeSparseMoeBlock,
        "qwen2_moe",
        {"num_experts": NUM_EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 56},
        {"shared_intermediate_size": 56, "has_shared_gate": True},
    ),
}


def make_block(name: str, dtype: torch.dtype) -> tuple[torch.nn.Module, ModelConfig, dict[str, torch.Tensor]]:
    """Returns transformers' module, the configuration, and its tensors, fused."""
    make, model_type, fields, ours = BLOCKS[name]
    config = transformers.AutoConfig.for_model(model_type, **SHAPE, **fields)
    config._experts_implementation = "eager"
    module = make(config).eval().to(dtype)
    random = torch.Generator().manual_seed(0)
    tensors = {f"mlp.{key}": value for key, value in module.state_dict().items()}
    for key, tensor in tensors.items():
        tensor.copy_(torch.randn(tensor.shape, generator=random) * (0.1 if "bias" in key else tensor.shape[-1] ** -0.5))
    raw = config.to_dict() | {"model_type": "qwen3_moe" if model_type == "qwen2_moe" else model_type}
    experts = read_experts(raw)
    assert experts is not None
    changed = {field: getattr(experts, field) for field in experts.__dataclass_fields__} | ours
    return module, make_config(ExpertsConfig(**changed)), tensors


def make_config(experts: ExpertsConfig) -> ModelConfig:
    fields = dict.fromkeys(ModelConfig.__dataclass_fields__)
    fields |= {"path": Path("checkpoint"), "model_type": "test", "hidden_size": HIDDEN, "mlp_bias": False}
    fields |= {"activation": SILU}
    return ModelConfig(**{**fields, "experts": experts})  # pyright: ignore[reportArgumentType]


def load(config: ModelConfig, tensors: dict[str, torch.Tensor], dtype: torch.dtype, **options: Any) -> Experts:
    return Experts(config, Weights(TensorSource(tensors), dtype, CPU, check=compare, **options))


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_block_of_transformers(name: str, dtype: torch.dtype) -> None:
    module, config, tensors = make_block(name, dtype)
    x = torch.randn(1, 50, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.inference_mode():
        expected = module(x)[0]
        found = load(config, tensors, dtype)(x[0])
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    else:
        # A few rows may choose another expert, because transformers rounds some routers' logits.
        errors = (found.float() - expected.float()).abs().amax(-1)
        assert errors.median() < 0.02
        assert (errors > 0.05).sum() <= 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_checkpoints_are_equal(layout: str) -> None:
    _, config, tensors = make_block("qwen3_moe", torch.bfloat16)
    x = torch.randn(20, HIDDEN).bfloat16()
    with torch.inference_mode():
        expected = load(config, tensors, torch.bfloat16)(x)
        assert torch.equal(load(config, LAYOUTS[layout](tensors), torch.bfloat16)(x), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_missing_and_misshapen_experts_are_refused(layout: str) -> None:
    _, config, tensors = make_block("qwen3_moe", torch.float32)
    stored = LAYOUTS[layout](tensors)
    for name in stored:
        rest = {other: tensor for other, tensor in stored.items() if other != name}
        missing = "no router" if name.endswith(".gate.weight") else "no tensor"
        with pytest.raises(ConfigError, match=missing):
            load(config, rest, torch.float32)
        with pytest.raises(ConfigError, match="has shape"):
            load(config, {**rest, name: stored[name][..., :-1]}, torch.float32)


class Ranks:
    """The group of one of `count` threads, which meet at every gather."""

    def __init__(self, index: int, count: int, parts: list[Any], barrier: threading.Barrier) -> None:
        self.index, self.count = index, count
        self._parts, self._barrier = parts, barrier

    def gather_columns(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        assert part.shape[1] == sizes[self.index]
        self._parts[self.index] = part
        self._barrier.wait()
        whole = torch.cat(self._parts, -1)
        self._barrier.wait()
        return whole


def divided(count: int, work: Callable[[TensorGroup], Any]) -> list[Any]:
    """Returns the result of every rank."""
    parts, barrier, found = [None] * count, threading.Barrier(count), [None] * count

    def run(index: int) -> None:
        with torch.inference_mode():
            found[index] = work(Ranks(index, count, parts, barrier))  # pyright: ignore[reportArgumentType]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("layout", ["fused", "one by one"])
def test_ranks_change_no_bit_and_read_every_row_once(name: str, layout: str) -> None:
    _, config, tensors = make_block(name, torch.bfloat16)
    stored = LAYOUTS[layout](tensors)
    x = torch.randn(20, HIDDEN).bfloat16()
    whole = WeightsDigest(True)
    with torch.inference_mode():
        expected = load(config, stored, torch.bfloat16, digest=whole)(x)
    for count in (2, 3, 4):
        digests = [WeightsDigest(True) for _ in range(count)]
        found = divided(
            count,
            lambda group, digests=digests: load(
                config, stored, torch.bfloat16, group=group, digest=digests[group.index]
            )(x),
        )
        assert all(torch.equal(each, expected) for each in found)
        assert totals(*digests) == totals(whole)


def totals(*digests: WeightsDigest) -> dict[str, tuple[int, int]]:
    """Returns for every tensor how many rows are read, and the sum of their digests; rows that all ranks read once."""
    rows = {(row.name, row.first, row.end): row for digest in digests for row in digest.rows()}
    found: dict[str, tuple[int, int]] = {}
    for row in rows.values():
        count, total = found.get(row.name, (0, 0))
        total = (total + int.from_bytes(row.digest, "big")) % (1 << 128)
        found[row.name] = count + row.end - row.first, total
    return found


def test_the_digest_covers_every_expert() -> None:
    for layout, make in LAYOUTS.items():
        _, config, tensors = make_block("qwen3_moe", torch.bfloat16)
        stored = make(tensors)
        digests: list[dict[str, tuple[int, int]]] = []
        for change in (None, *stored):
            changed = {name: tensor + (name == change) for name, tensor in stored.items()}
            digest = WeightsDigest(True)
            load(config, changed, torch.bfloat16, digest=digest)
            digests.append(totals(digest))
        assert set(stored) == digests[0].keys(), layout
        for name, found in zip(stored, digests[1:], strict=True):
            assert {other for other in stored if found[other] != digests[0][other]} == {name}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3-moe", tmp_path_factory.mktemp("checkpoints"))


def test_dense_layers_are_plain_and_dummy_weights_work(qwen3: Path) -> None:
    config = load_model_config(qwen3)
    layers = Weights(DummySource(CPU), torch.float32, CPU) / "model" / "layers"
    made = [sparse_mlp(config, layers / layer, layer) for layer in range(config.num_hidden_layers)]
    assert [type(part) for part in made] == [Experts, GatedMLP, Experts]
    x = torch.randn(7, config.hidden_size)
    with torch.inference_mode():
        assert all(part(x).isfinite().all() for part in made)
        assert not torch.equal(made[0](x), made[2](x))


def test_experts_divided_among_gpus_are_refused(qwen3: Path) -> None:
    config = load_model_config(qwen3)
    parallel = ExpertParallelConfig(num_experts=9, num_redundant=0, num_ranks=1)
    weights = Weights(DummySource(CPU), torch.float32, torch.device("meta"), expert_parallel=parallel)
    with pytest.raises(ConfigError, match="enable_expert_parallel divides experts among ranks on a CPU only"):
        Experts(config, weights / "model" / "layers" / 0)
