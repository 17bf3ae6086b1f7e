"""The choice of experts equals that of each family's router in transformers, and of equal scores takes the first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeLiteConfig,
    GptOssConfig,
    Lfm2MoeConfig,
    MixtralConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeTopKRouter

from penstock.config.experts import BEST, SIGMOID, SOFTMAX, TOP_K_SOFTMAX, TWO_BEST, ExpertsConfig, read_experts
from penstock.kernels import native
from penstock.kernels.router import Router, least_sum
from penstock.kernels.triton.router import route

ISAS = (*native.instruction_sets(), "torch", "triton")
HIDDEN, LAYERS = 40, 2
COMMON = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_experts_per_tok": 4, "num_attention_heads": 4}
DEEPSEEK = {"moe_intermediate_size": 8, "routed_scaling_factor": 2.5, "n_routed_experts": 24}
GROUPS = {"n_group": 6, "topk_group": 2}


class _Lfm2Router(torch.nn.Module):
    """The router with the bias that its layer has."""

    def __init__(self, config: Lfm2MoeConfig) -> None:
        super().__init__()
        self.router = Lfm2MoeTopKRouter(config)
        self.e_score_correction_bias = torch.nn.Buffer(torch.zeros(config.num_experts))

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.router(hidden, self.e_score_correction_bias)


# name -> transformers' configuration, its router, and fields of the configuration
FAMILIES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeTopKRouter, {"num_experts": 17, "norm_topk_prob": True}),
    "qwen3_moe, not normalised": (Qwen3MoeConfig, Qwen3MoeTopKRouter, {"num_experts": 17, "norm_topk_prob": False}),
    "mixtral": (MixtralConfig, MixtralTopKRouter, {"num_local_experts": 8}),
    "deepseek_v2, greedy": (DeepseekV2Config, DeepseekV2TopkRouter, DEEPSEEK),
    "deepseek_v2, groups": (
        DeepseekV2Config,
        DeepseekV2TopkRouter,
        {**DEEPSEEK, **GROUPS, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3TopkRouter, {**DEEPSEEK, **GROUPS}),
    "deepseek_v3, not normalised": (
        DeepseekV3Config,
        DeepseekV3TopkRouter,
        {**DEEPSEEK, **GROUPS, "norm_topk_prob": False},
    ),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteTopkRouter, {**DEEPSEEK, "n_group": 1, "topk_group": 1}),
    "gpt_oss": (GptOssConfig, GptOssTopKRouter, {"num_local_experts": 19}),
    "lfm2_moe": (Lfm2MoeConfig, _Lfm2Router, {"num_experts": 18, "routed_scaling_factor": 1.5}),
}


Route = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def make_router(isa: str, config: ExpertsConfig, correction: torch.Tensor | None = None) -> Route:
    """Triton's interpreter runs one row after another, so its tests have few rows."""
    if isa == "triton":
        return partial(route, config=config, correction=correction, least_sum=least_sum(config))
    return Router(config, correction, lambda: None if isa == "torch" else native.library_for(isa))


@pytest.mark.parametrize("isa", [*native.instruction_sets(), "torch"])
def test_experts_have_scales_of_their_own(isa: str) -> None:
    config, random = config_of(num_experts=17), torch.Generator().manual_seed(0)
    logits, scales = torch.randn(30, 17, generator=random), torch.randn(17, generator=random)
    library = None if isa == "torch" else native.library_for(isa)
    ids, weights = Router(config, None, lambda: library)(logits)
    found_ids, found = Router(config, None, lambda: library, scales)(logits)
    assert torch.equal(found_ids, ids)
    assert torch.equal(found, weights * scales[ids])


def config_of(**fields: Any) -> ExpertsConfig:
    return ExpertsConfig(**{"top_k": 3, "intermediate_size": 8, "sparse_layers": (True,), **fields})


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_router_of_transformers(family: str, isa: str) -> None:
    make_config, make_module, fields = FAMILIES[family]
    config = make_config(**COMMON, **fields)
    module = make_module(config).eval()
    random = torch.Generator().manual_seed(0)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.copy_(torch.randn(tensor.shape, generator=random) * (0.3 if tensor.dim() > 1 else 0.1))
    read = read_experts(config.to_dict())
    assert read is not None
    hidden = torch.randn(60 if isa == "triton" else 200, HIDDEN, generator=random)
    with torch.inference_mode():
        logits, weights, ids = module(hidden)
    found_ids, found_weights = make_router(isa, read, getattr(module, "e_score_correction_bias", None))(logits)
    # Some of transformers' routers do not sort the experts of a token.
    order, expected_order = found_ids.argsort(-1), ids.argsort(-1)
    assert torch.equal(found_ids.gather(1, order), ids.gather(1, expected_order))
    torch.testing.assert_close(found_weights.gather(1, order), weights.gather(1, expected_order), rtol=2e-6, atol=1e-7)
    assert len({tuple(sorted(row)) for row in found_ids.tolist()}) > 20


SOME = [1.0, 3.0, 2.0, 3.0, 0.0, 3.0, 2.0, 2.0]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scores", [SOFTMAX, SIGMOID, TOP_K_SOFTMAX])
@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        (SOME, [1, 3, 5, 2, 6]),
        ([0.5] * 8, [0, 1, 2, 3, 4]),
        ([0.0, 1.0] * 4, [1, 3, 5, 7, 0]),
    ],
)
def test_of_equal_scores_the_first_is_chosen(isa: str, scores: str, logits: list[float], expected: list[int]) -> None:
    router = make_router(isa, config_of(num_experts=8, top_k=5, scores=scores))
    ids, _ = router(torch.tensor([logits] * 3))
    assert ids.tolist() == [expected] * 3


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("group_score", "expected"), [(BEST, [0, 1, 4, 5]), (TWO_BEST, [2, 3, 4, 5])])
def test_of_equal_groups_the_first_is_chosen(isa: str, group_score: str, expected: list[int]) -> None:
    # Best: 5, 4, 5, 5. Two best: 6, 8, 8, 8.
    logits = torch.tensor([[5.0, 1.0, 4.0, 4.0, 5.0, 3.0, 3.0, 5.0]])
    config = config_of(num_experts=8, top_k=4, num_groups=4, top_groups=2, group_score=group_score)
    ids, _ = make_router(isa, replace(config, scores=TOP_K_SOFTMAX))(logits)
    assert sorted(ids[0].tolist()) == expected


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scores", [SOFTMAX, SIGMOID, TOP_K_SOFTMAX])
@pytest.mark.parametrize("num_experts", [12, 128])
def test_a_row_does_not_depend_on_the_other_rows(isa: str, scores: str, num_experts: int) -> None:
    config = config_of(num_experts=num_experts, top_k=6, scores=scores, num_groups=4, top_groups=2)
    router = make_router(isa, config, torch.linspace(-0.1, 0.1, num_experts))
    rows = 30 if isa == "triton" else 1000
    logits = 3 * torch.randn(rows, num_experts, generator=torch.Generator().manual_seed(0))
    ids, weights = router(logits)
    for first, end in ((0, 1), (1, 3), (17, rows * 6 // 10), (rows - 1, rows)):
        part_ids, part_weights = router(logits[first:end].clone())
        assert torch.equal(part_ids, ids[first:end])
        assert torch.equal(part_weights, weights[first:end])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scores", [SOFTMAX, SIGMOID])
def test_logits_that_are_no_numbers_choose_experts_that_exist(isa: str, scores: str) -> None:
    router = make_router(isa, config_of(num_experts=8, scores=scores, num_groups=2, group_score=TWO_BEST))
    logits = torch.full((4, 8), torch.nan)
    logits[1, 3] = 1.0
    logits[2] = torch.inf
    logits[3] = -torch.inf
    ids, _ = router(logits)
    assert all(len(set(row)) == 3 and set(row) <= set(range(8)) for row in ids.tolist())


def test_all_sigmoids_may_be_zero() -> None:
    _, weights = make_router(ISAS[0], config_of(num_experts=8, scores=SIGMOID))(torch.full((1, 8), -1000.0))
    assert weights.tolist() == [[0.0, 0.0, 0.0]]
