"""Promise P4 for quantized weights: a checkpoint has the tokens of the values that it stands for, and whatever
schedules, stores, moves or reuses KV, or moves weights, changes none of them.

Cells are those of `test_identity_families`, compared with plain runs of the same checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.startup import describe_engine
from penstock.kernels.quantized import LayerWeight, QuantizedWeight
from penstock.models.weights import StoredWeight
from penstock.utils.errors import ConfigError
from penstock.worker import load
from tests.integration.checkpoints import quantize_in_blocks
from tests.integration.test_gguf_models import make_twins, weights_digest
from tests.integration.test_identity_families import (
    CELLS,
    EXPERT_CELLS,
    MODULE_CELLS,
    MTP,
    NGRAM,
    PAIRS,
    Families,
    cells,
    check_batches,
    check_cell,
    check_expert_cell,
    check_pair,
    check_twins,
    engine,
)
from tests.quantized_formats import FORMATS, mix_experts, quantize_checkpoint, quantize_experts, quantize_in_kinds

# Name -> the family whose weights are quantized. The experts of 4 bits are beside attention in W8A8.
WEIGHTS = {
    "W4": "qwen3-128",
    "W8A8": "qwen3-128",
    "Q4_K": "qwen3",
    "MXFP4 experts": "gpt-oss",
    "W4 experts": "qwen3-moe",
}
EXPERT_RANKS = {"tensor_parallel_size": 3, "enable_expert_parallel": True}
FORMATS_OF = {"W4": "packed with zero points", "W8A8": "int8 with int8 inputs"}


# Without the cells of the matrix.
W4_FAMILIES = {f"W4 {family}": family for family in ("youtu-latent", "deepseek-v3", "qwen3.5", "lfm2")}
# Name -> the file among those of `test_gguf_models`.
FILES = {"Q4_K": "qwen3, K types", "Q4_0": "llama"}


class Quantized(Families):
    """Has checkpoints of WEIGHTS, of W4_FAMILIES and of FILES as well."""

    def family(self, name: str) -> str:
        return {**FILES, **WEIGHTS, **W4_FAMILIES}.get(name, name)

    def path(self, name: str) -> Path:
        if self.family(name) == name:
            return super().path(name)
        folder = self.folder / name
        file = folder / "model.gguf" if name in FILES else folder / "quantized"
        if not file.exists():
            folder.mkdir()
            if name in FILES:
                # Q4_K beside Q5_K and Q6_K.
                make_twins(FILES[name], folder, file)
            elif name == "MXFP4 experts":
                quantize_experts(self.path("gpt-oss"), folder)
            elif name == "W4 experts":
                quantize_in_kinds(self.path("qwen3-moe"), folder, has_int8_inputs=True)
            else:
                quantize_checkpoint(
                    self.path(self.family(name)), folder, FORMATS_OF.get(name, "packed with zero points")
                )
        return file


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quantized]:
    folder = tmp_path_factory.mktemp("families")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield Quantized(folder)


@pytest.fixture(scope="module")
def rounding(tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    """The same with rounded activations."""
    return Quantized(tmp_path_factory.mktemp("rounding"), {"quantize_activations": "int8"})


# ---- The values that a format stands for ----


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("deepseek-v3", {}),
        ("deepseek-v3", {"tensor_parallel_size": 2, "enable_expert_parallel": True, "speculative_config": MTP}),
        ("qwen3-moe", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        ("qwen3.5-moe", {"speculative_config": MTP, "max_num_batched_tokens": 24}),
        ("lfm2-moe", {}),
        ("granite4-moe", {}),
        ("nemotron-h", {"speculative_config": NGRAM}),
        # A rank's key heads begin within a block.
        pytest.param("qwen3.5", {"tensor_parallel_size": 3}, marks=pytest.mark.long),
    ],
)
def test_fp8_blocks_are_the_values_they_stand_for(
    families: Quantized, tmp_path: Path, name: str, arguments: dict[str, Any]
) -> None:
    quantized, twin = quantize_in_blocks(families.path(name), tmp_path)
    assert check_twins(quantized, twin, arguments) != families.expected(name)


# Layers that stay quantized, and that do not; the rest differ in what the unit tests of formats cover.
QUICK = ("packed with zero points", "gptq in act-order", "auto-round with zero points", "float8")
QUANTIZED = [
    pytest.param("qwen3-128", name, {}, marks=() if name in QUICK else pytest.mark.long)
    for name in FORMATS
    if "inputs" not in name
]
QUANTIZED += [
    pytest.param("qwen3-moe", "packed", {"tensor_parallel_size": 3, "enable_expert_parallel": True}),
    # Parts of recurrent layers, whose inputs and outputs are divided and reordered as those of attention are not.
    pytest.param("qwen3.5", "gptq in act-order", {}),
    pytest.param("qwen3.5-moe", "packed with zero points", {}),
    pytest.param("qwen3-next", "gptq", {}),
    pytest.param("lfm2", "float8", {}),
    pytest.param("lfm2-moe", "packed with zero points", {}),
    pytest.param("granite4-moe", "gptq", {}),
    pytest.param("nemotron-h", "packed with zero points", {}),
    pytest.param("nemotron-h", "modelopt", {}),
    pytest.param("gemma4", "packed", {}, marks=pytest.mark.long),
    pytest.param("nemotron-h", "gptq with zero points", {"tensor_parallel_size": 2}, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("family", "name", "arguments"), QUANTIZED)
def test_quantized_weights_are_the_values_they_stand_for(
    families: Quantized, tmp_path: Path, family: str, name: str, arguments: dict[str, Any]
) -> None:
    check_twins(*quantize_checkpoint(families.path(family), tmp_path, name), arguments)


# Every last group is shorter.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("packed", "awq") else pytest.mark.long)
        for name in ("packed", "packed with zero points", "gptq", "gptq with zero points", "awq", "awq, symmetric")
    ],
)
def test_groups_of_64_are_the_values_they_stand_for(families: Quantized, tmp_path: Path, name: str) -> None:
    check_twins(*quantize_checkpoint(families.path("qwen3-128"), tmp_path, name, 64), {"tensor_parallel_size": 2})


@pytest.mark.parametrize(
    "arguments", [{}, pytest.param({"tensor_parallel_size": 3, "enable_expert_parallel": True}, marks=pytest.mark.long)]
)
def test_experts_in_4_bits_beside_attention_in_8_bits_and_routers_in_bfloat16(
    families: Quantized, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    """Only where the group of attention says so, its inputs are rounded too."""
    found: list[Any] = []
    for has_int8_inputs in (False, True):
        twins = quantize_in_kinds(families.path("qwen3-moe"), tmp_path / str(has_int8_inputs), has_int8_inputs)
        found.append(check_twins(*twins, arguments))
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("names", "arguments"),
    [
        (("packed", None), {}),
        ((None, "packed with zero points", "int8"), {"tensor_parallel_size": 2}),
        (("packed", None), EXPERT_RANKS),
        # Every rank has experts of one kind, which are packed as they are.
        (("int8",) * 3 + ("float8",) * 3 + ("packed",) * 3, EXPERT_RANKS),
    ],
)
def test_experts_in_several_formats_are_the_values_they_stand_for(
    families: Quantized, tmp_path: Path, names: tuple[str | None, ...], arguments: dict[str, Any]
) -> None:
    check_twins(*mix_experts(families.path("qwen3-moe"), tmp_path, *names), arguments)


@pytest.mark.parametrize(
    "names",
    [
        # Of as many bytes: of a move only other tokens would tell.
        ("int8",) * 3 + ("float8",) * 6,
        ("packed",) * 3 + ("packed with zero points",) * 6,
        # Of one rank.
        ("packed",) * 8 + (None,),
    ],
)
def test_experts_in_several_formats_do_not_move(
    families: Quantized, tmp_path: Path, names: tuple[str | None, ...]
) -> None:
    path, _ = mix_experts(families.path("qwen3-moe"), tmp_path, *names)
    with pytest.raises(
        ConfigError, match=r"model\.layers\.\d\.mlp are quantized in several ways.*leave it out"
    ) as raised:
        engine(path, **EXPERT_RANKS, enable_eplb=True)
    assert str(path) in str(raised.value)


def test_experts_in_4_bit_floats_are_the_values_they_stand_for(families: Quantized, tmp_path: Path) -> None:
    check_twins(*quantize_experts(families.path("gpt-oss"), tmp_path), {"tensor_parallel_size": 2})


@pytest.mark.parametrize(
    "name", ["packed with zero points", "awq", "auto-round", "gptq in act-order", "float8", "int8"]
)
def test_a_checkpoint_and_its_values_have_one_hash(families: Quantized, tmp_path: Path, name: str) -> None:
    path = families.path("qwen3-128")
    found = [weights_digest(each) for each in (path, *quantize_checkpoint(path, tmp_path, name))]
    assert found[0] != found[1] == found[2]


# ---- Cells of the matrix ----


@pytest.mark.parametrize(("name", "cell"), cells(list(WEIGHTS), [cell for cell in CELLS if cell not in MODULE_CELLS]))
def test_a_batch(families: Quantized, name: str, cell: str) -> None:
    check_cell(families, name, cell)


@pytest.mark.parametrize(("name", "cell"), cells(("MXFP4 experts", "W4 experts"), list(EXPERT_CELLS)))
def test_whole_experts_on_ranks(families: Quantized, name: str, cell: str) -> None:
    """Experts move between ranks while requests run, and their scales with them."""
    check_expert_cell(families, name, cell)


@pytest.mark.parametrize(("name", "pair"), cells(list(WEIGHTS), list(PAIRS)))
def test_a_prompt_in_one_engine_and_its_answer_in_another(families: Quantized, name: str, pair: str) -> None:
    check_pair(families, name, pair)


# ---- Cells with rounded activations ----

ROUNDED = ("W4", "Q4_K", "MXFP4 experts")
ROUNDED_CELLS: dict[str, dict[str, Any]] = {
    "chunks, one thread": {"num_threads": 1, "max_num_batched_tokens": 16},
    "ranks of two threads, drafts": {"num_threads": 2, "tensor_parallel_size": 2, "speculative_config": NGRAM},
}
LATENTS = {"self_attn.kv_b_proj (keys)", "self_attn.kv_b_proj (values)", "lm_head"}
# Layers with inputs as they are. Those of gates are a few rows beside others that are quantized.
AS_THEY_ARE = {
    "W4 youtu-latent": LATENTS,
    "W4 deepseek-v3": {*LATENTS, "mlp.gate"},
    "W4 qwen3.5": {"linear_attn.in_proj_z, in_proj_b, in_proj_a", "lm_head"},
    "W4 lfm2": {"feed_forward.w1, w3", "feed_forward.w2", "lm_head"},
}


@pytest.mark.parametrize(("name", "cell"), cells(ROUNDED, [cell for cell in CELLS if cell not in MODULE_CELLS]))
def test_a_batch_with_rounded_activations(rounding: Quantized, name: str, cell: str) -> None:
    check_cell(rounding, name, cell)


@pytest.mark.parametrize(("name", "cell"), cells(("MXFP4 experts", "W4 experts"), list(EXPERT_CELLS)))
def test_whole_experts_on_ranks_with_rounded_activations(rounding: Quantized, name: str, cell: str) -> None:
    check_expert_cell(rounding, name, cell)


@pytest.mark.parametrize(("name", "pair"), cells(ROUNDED, list(PAIRS)))
def test_rounded_activations_in_one_engine_and_another(rounding: Quantized, name: str, pair: str) -> None:
    check_pair(rounding, name, pair)


@pytest.mark.parametrize("name", [*ROUNDED, *W4_FAMILIES])
def test_rounded_activations_have_tokens_of_their_own(rounding: Quantized, families: Quantized, name: str) -> None:
    assert rounding.expected(name) != families.expected(name)


@pytest.mark.parametrize("cell", ROUNDED_CELLS)
@pytest.mark.parametrize("name", W4_FAMILIES)
def test_a_batch_of_a_family_with_rounded_activations(rounding: Quantized, name: str, cell: str) -> None:
    check_batches(rounding, name, ROUNDED_CELLS[cell])


def test_experts_beside_latents_on_ranks_with_rounded_activations(rounding: Quantized) -> None:
    check_expert_cell(rounding, "W4 deepseek-v3", "redundant experts")


@pytest.mark.parametrize(("name", "others"), AS_THEY_ARE.items())
def test_all_layers_with_quantized_weights_round_their_inputs(
    rounding: Quantized, monkeypatch: pytest.MonkeyPatch, name: str, others: set[str]
) -> None:
    rounded, dense = set[str](), set[str]()

    def record(layer: str, stored: StoredWeight, weight: LayerWeight) -> None:
        own = layer.partition(".layers.")[2].partition(".")[2] or layer
        if isinstance(weight, QuantizedWeight):
            assert weight.quantizes_inputs == "by group", layer
            rounded.add(own)
        else:
            dense.add(own)

    monkeypatch.setattr(load, "compare", record)
    engine(rounding.path(name), **rounding.arguments, check_weights=True).shutdown()
    assert dense == others
    assert len(rounded) >= 4


# ---- What is said of rounded activations ----

OPTION = {"quantize_activations": "int8"}


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("W8A8", {}, "compressed-tensors with int8 activations (W8A8 checkpoint)"),
        ("Q4_0", OPTION, "q4_0 with int8 activations (quantize_activations)"),
        ("Q4_0", {}, "q4_0"),
        ("W4 experts", OPTION, "compressed-tensors with int8 activations (W8A8 checkpoint, quantize_activations)"),
        # In another dtype weights are the values of the checkpoint, and inputs as they are.
        ("W8A8", {"dtype": "float32"}, "compressed-tensors"),
        ("qwen3-128", {**OPTION, "quantization": "int4"}, "int4 with int8 activations (quantize_activations)"),
    ],
)
def test_the_startup_line_says_what_rounds_activations(
    families: Quantized, name: str, arguments: dict[str, Any], words: str
) -> None:
    llm = engine(families.path(name), **arguments)
    lines = describe_engine(name, llm.info).splitlines()
    llm.shutdown()
    assert any(line.startswith(f"  weights    {words}, ") for line in lines), lines


def test_ranks_without_quantized_layers_round_nothing(families: Quantized, tmp_path: Path) -> None:
    """The first of three layers has no experts, and no other weights are quantized."""
    path, _ = mix_experts(families.path("deepseek-v2"), tmp_path, "packed")
    llm = engine(path, pipeline_parallel_size=3, **OPTION)
    assert llm.info.weights == "compressed-tensors with int8 activations (quantize_activations)"
    llm.shutdown()


@pytest.mark.parametrize("name", ["float8", "gptq in act-order"])
def test_rounding_no_activations_is_refused(families: Quantized, tmp_path: Path, name: str) -> None:
    path, _ = quantize_checkpoint(families.path("qwen3-128"), tmp_path, name)
    with pytest.raises(ConfigError, match=r"quantize_activations=int8 would change nothing: .* or leave it out"):
        engine(path, **OPTION)
