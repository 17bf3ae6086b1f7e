"""Promise P4 for the families that the built-in model does not represent, on small random checkpoints in bfloat16.

Every cell compares tokens and log probabilities, bit for bit, with a plain run: one request at a time, whole prompts,
no cache, no overlap, one rank.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock import LLM, SamplingParams
from penstock.config.model_path import resolve_model_path
from penstock.messages.stats import SchedulerStats
from tests.grids import exhaustive, grid
from tests.integration.checkpoints import (
    COMMON,
    make_checkpoint,
    make_encoder_checkpoint,
    make_mtp_checkpoint,
    make_qwen_mtp_checkpoint,
)
from tests.integration.test_disaggregation import complete, disaggregated, transfer_config
from tests.integration.test_identity_ranks import answers, ranks

FAMILIES = (
    "qwen3-moe",
    "mixtral",
    "youtu-latent",
    "deepseek-v2",
    "deepseek-v3",
    "glm-flash",
    "phi3-longrope",
    "glm4",
    "granite",
    "smollm3",
    "olmo2",
    "olmo3",
    "exaone4",
    "ministral3",
    "cohere2",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4-shared",
    "gemma4-moe",
    "gpt-oss",
    "qwen3.5",
    "qwen3.5-moe",
    "qwen3-next",
    "lfm2",
    "lfm2-moe",
    "granite4",
    "granite4-moe",
    "nemotron-h",
)
# Those with recurrent layers: both engines must have the same block size.
HYBRIDS = ("qwen3.5", "qwen3.5-moe", "qwen3-next", "lfm2", "lfm2-moe", "granite4", "granite4-moe", "nemotron-h")
# Families whose layers are those of others, combined otherwise: `make test-all` runs the whole grids of them.
VARIANTS = ("gemma4-moe", "qwen3.5-moe", "qwen3-next", "lfm2-moe", "granite4-moe", "nemotron-h")
NUM_EXPERTS = {
    "qwen3-moe": 9,
    "mixtral": 5,
    "deepseek-v2": 8,
    "deepseek-v3": 12,
    "glm-flash": 10,
    "gemma4-moe": 7,
    "gpt-oss": 6,
    "qwen3.5-moe": 10,
    "lfm2-moe": 7,
    "granite4-moe": 6,
    "nemotron-h": 8,
}
# Those with a module for multi-token prediction.
WITH_MODULE = ("deepseek-v3", "glm-flash", "qwen3.5", "qwen3.5-moe", "qwen3-next")
MAX_TOKENS = 12
PLAIN: dict[str, Any] = {
    "max_model_len": 224,
    "max_num_batched_tokens": 512,
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "num_gpu_blocks_override": 100,
    "skip_tokenizer_init": True,
    # Processes for ranks have tests of their own (test_identity_ranks), and take most of a cell's time.
    "distributed_executor_backend": "uniproc",
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
MTP = {"method": "mtp", "num_speculative_tokens": 2}
TIER = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {"load_policy": "always", "cpu_bytes_to_use": 1 << 24},
}
CELLS: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 16},
    "overlap": {"async_scheduling": True, "max_num_batched_tokens": 48},
    "preemption": {"num_gpu_blocks_override": 17, "max_num_batched_tokens": 48, "async_scheduling": True},
    "hits": {"enable_prefix_caching": True, "max_num_batched_tokens": 48},
    "drafts": {"speculative_config": NGRAM, "async_scheduling": True},
    "module": {"speculative_config": MTP, "async_scheduling": True, "max_num_batched_tokens": 24},
    "ranks of stages, module": {"speculative_config": MTP, "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "two ranks": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    "three ranks, drafts": {"tensor_parallel_size": 3, "speculative_config": NGRAM, "max_num_batched_tokens": 24},
    "stages": {"pipeline_parallel_size": 2, "async_scheduling": True},
    "ranks of stages": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "enable_prefix_caching": True},
    "a tier": {"kv_transfer_config": TIER, "enable_prefix_caching": True, "num_gpu_blocks_override": 17},
}
EPLB = {"enable_expert_parallel": True, "enable_eplb": True}
EXPERT_CELLS: dict[str, dict[str, Any]] = {
    "experts of ranks": {"tensor_parallel_size": 3, "async_scheduling": True, "max_num_batched_tokens": 24},
    "experts of stages": {"tensor_parallel_size": 3, "pipeline_parallel_size": 2, "speculative_config": NGRAM},
    # In most families the first of three layers is dense, so that a stage has no experts.
    "a stage without experts": {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "async_scheduling": True},
    "redundant experts": {"tensor_parallel_size": 2, "enable_prefix_caching": True},
    "many redundant experts": {"tensor_parallel_size": 4, "max_num_batched_tokens": 32},
    "ranks in processes": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
}
# How often experts move: as soon as possible, and less often than a layer's moves take.
INTERVALS = {cell: 2 + number % 4 for number, cell in enumerate(EXPERT_CELLS)}
MODULE_CELLS = [cell for cell, arguments in CELLS.items() if arguments.get("speculative_config") is MTP]
# (tensor parallel, pipeline parallel) and block size of P, and of D.
PAIRS = {
    "alike": ((1, 1, 16), (1, 1, 16)),
    "ranks of P": ((2, 1, 32), (1, 1, 16)),
    "ranks of D": ((1, 1, 16), (3, 1, 32)),
    "ranks and stages": ((2, 1, 16), (1, 2, 32)),
    "more ranks of P": ((3, 2, 16), (2, 1, 16)),
}
# With windows in some layers, a request needs blocks of two groups.
WITH_TWO_GROUPS = (
    "olmo3",
    "exaone4",
    "cohere2",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4-shared",
    "gemma4-moe",
    "gpt-oss",
)
# Cells of every run besides those of the grid: norms and rotations that ranks or stages could divide wrongly.
ALWAYS = {
    ("olmo2", "three ranks, drafts"),
    ("smollm3", "ranks of stages"),
    ("gemma3", "ranks of stages"),
    ("gemma3", "a tier"),
    ("gemma3", "ranks of D"),
    ("gemma4", "preemption"),
    ("gemma4", "a tier"),
    ("gemma4-shared", "three ranks, drafts"),
    ("gemma4-shared", "ranks of stages"),
    ("gemma4-shared", "ranks and stages"),
    ("gpt-oss", "two ranks"),
    ("gpt-oss", "stages"),
    ("gpt-oss", "a tier"),
    ("gpt-oss", "ranks of P"),
    ("qwen3.5", "preemption"),
    ("qwen3.5", "drafts"),
    ("qwen3.5", "a tier"),
    ("qwen3.5", "ranks and stages"),
    ("granite4", "three ranks, drafts"),
    ("nemotron-h", "preemption"),
    ("nemotron-h", "ranks of stages"),
    ("nemotron-h", "a tier"),
}
Answer = tuple[list[int], list[dict[int, float]]]


def cells(names: Sequence[str], others: Sequence[str]) -> list[Any]:
    """Returns a grid that covers every value, with the cells of ALWAYS. `make test-long` adds a third of the others, in
    each row and in each column, and `make test-all` the rest, which for VARIANTS is all others.
    """
    made = []
    for place, each in enumerate(grid(names, others, strength=1, others=pytest.mark.long)):
        row, column = divmod(place, len(others))
        if each.values in ALWAYS:
            each = pytest.param(*each.values)
        elif each.marks and (each.values[0] in VARIANTS or (row + column) % 3):
            each = exhaustive(*each.values)
        made.append(each)
    return made


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Returns prompts, some of which share a beginning or repeat themselves; every other one is sampled. Answers to
    those that repeat themselves have few different tokens, so that some drafts of n-grams are right.
    """
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(COMMON["vocab_size"], (40,), generator=generator).tolist()
    made: list[tuple[list[int], SamplingParams]] = []
    for number, length in enumerate((5, 33, 16, 61, 48, 97)):
        own = torch.randint(COMMON["vocab_size"], (length,), generator=generator).tolist()
        repeats = number % 3 == 2
        params = SamplingParams(
            temperature=0.0 if number % 2 else 0.8,
            seed=number,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            logprobs=3,
            allowed_token_ids=own[:3] if repeats else None,
        )
        made.append((shared + own if number % 3 == 1 else own * 2 if repeats else own, params))
    return made


def answer(output: Any) -> Answer:
    (sequence,) = output.outputs
    return sequence.token_ids, [{token: each.logprob for token, each in at.items()} for at in sequence.logprobs]


def expert_arguments(name: str, cell: str) -> dict[str, Any]:
    """Adds as many redundant experts as make the slots a multiple of the ranks, and in some cells more."""
    arguments = EXPERT_CELLS[cell]
    ranks, least = arguments["tensor_parallel_size"], {"many redundant experts": 8, "redundant experts": 1}.get(cell, 0)
    redundant = least + -(NUM_EXPERTS[name] + least) % ranks
    eplb = {"num_redundant_experts": redundant, "window_size": 4, "step_interval": INTERVALS[cell]}
    return {**arguments, **EPLB, "eplb_config": eplb}


def drafts_of(name: str) -> dict[str, Any]:
    return {"speculative_config": MTP} if name in WITH_MODULE else {}


def engine(path: Path, **changes: Any) -> LLM:
    return LLM(str(path), **{**PLAIN, **changes})


@dataclass
class Families:
    """Checkpoints, and the answers of their plain runs with some arguments, made when they are asked for."""

    folder: Path
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    plain: dict[str, list[Answer]] = field(default_factory=dict[str, list[Answer]])

    def family(self, name: str) -> str:
        """Returns the family of a name; a subclass has others than families."""
        return name

    def path(self, name: str) -> Path:
        folder = self.folder / name
        if not folder.exists():
            make = make_mtp_checkpoint if name in WITH_MODULE else make_checkpoint
            if name in WITH_MODULE and name in HYBRIDS:
                make = make_qwen_mtp_checkpoint
            make(name, self.folder, torch.bfloat16)
        return folder

    def expected(self, name: str) -> list[Answer]:
        if name not in self.plain:
            llm = engine(self.path(name), **self.arguments)
            self.plain[name] = [answer(complete(llm, prompt, params)) for prompt, params in requests()]
            llm.shutdown()
        return self.plain[name]


def check_twins(quantized: Path, twin: Path, arguments: dict[str, Any]) -> list[Answer]:
    """Returns the answers of both."""
    found: list[list[Answer]] = []
    for path, changes in ((twin, {}), (quantized, arguments)):
        llm = engine(path, **changes)
        found.append([answer(complete(llm, prompt, params)) for prompt, params in requests()])
        llm.shutdown()
    assert found[0] == found[1]
    return found[0]


def check_batches(families: Families, name: str, arguments: dict[str, Any]) -> SchedulerStats:
    """Runs all requests at once, and again on what the first time left in a cache. Returns the engine's counts."""
    llm = engine(families.path(name), **{**families.arguments, **arguments})
    prompts, params = zip(*requests(), strict=True)
    for _ in range(2):
        outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
        llm.check_integrity()
        assert [answer(output) for output in outputs] == families.expected(name)
    stats = llm.stats()
    llm.shutdown()
    return stats


def check_cell(families: Families, name: str, cell: str) -> SchedulerStats:
    """Does so for a cell of CELLS, in which what it is about must happen."""
    arguments = dict(CELLS[cell])
    if families.family(name) in WITH_TWO_GROUPS and "num_gpu_blocks_override" in arguments:
        arguments["num_gpu_blocks_override"] = 32
    stats = check_batches(families, name, arguments)
    if cell == "preemption":
        assert stats.num_preemptions > 0
    if cell == "hits":
        assert stats.prefix_cache_hits > 100
    if cell == "a tier":
        assert stats.connector["num_loads"] > 0
    return stats


def check_expert_cell(families: Families, name: str, cell: str, **options: Any) -> None:
    """Does so for a cell of EXPERT_CELLS, in which experts move between the ranks."""
    stats = check_batches(families, name, {**options, **expert_arguments(families.family(name), cell)})
    assert stats.experts.num_moved > 0
    assert stats.experts.num_failed == 0


def check_pair(families: Families, name: str, pair: str, transport: str = "sockets", **options: Any) -> None:
    """Computes prompts in one engine of PAIRS, and their answers in the other, which loads their whole blocks."""
    engines: list[LLM] = []
    has_states = families.family(name) in HYBRIDS
    for role, (tp, pp, block_size) in zip(("kv_producer", "kv_consumer"), PAIRS[pair], strict=True):
        block_size = 16 if has_states else block_size
        ranks = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "block_size": block_size}
        moving = {"kv_transfer_config": transfer_config(role, transport), "enable_prefix_caching": True}
        engines.append(engine(families.path(name), **families.arguments, **moving, **ranks, **options))
    prefill, decode = engines
    num_loaded = 0
    for (prompt, params), wanted in zip(requests(), families.expected(name), strict=True):
        assert decode.reset_prefix_cache()
        found = disaggregated(prefill, decode, prompt, params)
        assert answer(found) == wanted
        assert found.num_cached_tokens == (len(prompt) - 1) // block_size * block_size
        num_loaded += found.num_cached_tokens > 0
    assert decode.stats().connector["p2p_consumer_completed"] == num_loaded
    assert prefill.stats().connector["p2p_held"] == 0
    for llm in engines:
        llm.check_integrity()
        llm.shutdown()


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    return Families(tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize(
    ("name", "cell"),
    cells(FAMILIES, [cell for cell in CELLS if cell not in MODULE_CELLS]) + cells(WITH_MODULE, MODULE_CELLS),
)
def test_a_batch(families: Families, name: str, cell: str) -> None:
    stats = check_cell(families, name, cell)
    if "speculative_config" in CELLS[cell]:
        # Only drafts of n-grams are right now and then: those of a module have all tokens to choose from.
        counts = stats.speculation
        assert (counts.num_draft_tokens if cell in MODULE_CELLS else counts.num_accepted_tokens) > 0


@pytest.mark.parametrize(("name", "cell"), cells(list(NUM_EXPERTS), list(EXPERT_CELLS)))
def test_whole_experts_on_ranks(families: Families, name: str, cell: str) -> None:
    check_expert_cell(families, name, cell, **drafts_of(name))


@pytest.mark.parametrize(("name", "pair"), cells(FAMILIES, list(PAIRS)))
def test_a_prompt_in_one_engine_and_its_answer_in_another(families: Families, name: str, pair: str) -> None:
    check_pair(families, name, pair, **drafts_of(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_turns_of_a_conversation_hit_the_cache(families: Families, name: str) -> None:
    """Promise P9: a turn computes the question alone, and the rest of a block. Other engines cache nothing of some
    families, and say nothing.
    """
    llm = engine(families.path(name), enable_prefix_caching=True)
    generator = torch.Generator().manual_seed(2)
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0, logprobs=3)
    conversation: list[int] = []
    turns: list[tuple[list[int], Answer]] = []
    for length in (70, 9, 30, 21, 5, 13):
        num_known = max(0, len(conversation) - 1) // 16 * 16
        conversation += torch.randint(COMMON["vocab_size"], (length,), generator=generator).tolist()
        found = complete(llm, conversation, params)
        assert found.num_cached_tokens == num_known
        turns.append((list(conversation), answer(found)))
        conversation += found.outputs[0].token_ids
    stats = llm.stats()
    assert stats.prefix_cache_hits == 80 + 96 + 144 + 176 + 192
    assert stats.prefix_cache_queries == 70 + 91 + 133 + 166 + 183 + 208
    assert llm.reset_prefix_cache()
    prompt, hit = turns[1]
    recomputed = complete(llm, prompt, params)
    assert (answer(recomputed), recomputed.num_cached_tokens) == (hit, 0)
    llm.shutdown()


@pytest.fixture(scope="module")
def models_with_text(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Arguments of engines with random models that have the built-in model's tokens."""
    demo, folder = resolve_model_path("demo"), tmp_path_factory.mktemp("text")
    vocab_size = json.loads((demo / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    kind = transformers.AutoModelForCausalLM
    paths = {
        name: make_encoder_checkpoint(name, folder, torch.bfloat16, kind, vocab_size=vocab_size)
        for name in ("qwen3-moe", "deepseek-v2")
    }
    return {name: {"model": str(path), "tokenizer": str(demo)} for name, path in paths.items()}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("qwen3-moe", ranks(2, 2)),
        ("deepseek-v2", {"max_num_batched_tokens": 20, "async_scheduling": True}),
        pytest.param("deepseek-v2", {**ranks(2, 2, "mp"), "enable_expert_parallel": True}, marks=pytest.mark.long),
    ],
)
def test_grammars_and_log_probabilities_of_prompts(
    models_with_text: dict[str, dict[str, Any]], name: str, arguments: dict[str, Any]
) -> None:
    model = models_with_text[name]
    for one, other in zip(answers(**model), answers(**model, **arguments), strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
        assert one.prompt_logprobs == other.prompt_logprobs


def test_grouped_query_drafts_of_a_model_with_latents(families: Families) -> None:
    """The KV of an EAGLE-3 head, with keys and values, follows the blocks of latents to another engine."""
    path = families.path("deepseek-v3")
    head = families.folder / "eagle3"
    head.mkdir()
    shape = {**COMMON, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    shape.update(num_attention_heads=4, num_key_value_heads=2, head_dim=16, dtype="bfloat16", draft_vocab_size=301)
    (head / "config.json").write_text(json.dumps({**shape, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}))
    eagle3 = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}
    common: dict[str, Any] = {"load_format": "dummy", "enable_prefix_caching": True}
    plain = engine(path, load_format="dummy")
    prefill = engine(path, speculative_config=eagle3, kv_transfer_config=transfer_config("kv_producer"), **common)
    decode = engine(path, speculative_config=eagle3, kv_transfer_config=transfer_config("kv_consumer"), **common)
    for prompt, params in requests():
        found = disaggregated(prefill, decode, prompt, params)
        assert answer(found) == answer(complete(plain, prompt, params))
        assert found.num_cached_tokens == (len(prompt) - 1) // 16 * 16
    assert decode.stats().speculation.num_draft_tokens > 0
    for llm in (plain, prefill, decode):
        llm.shutdown()
