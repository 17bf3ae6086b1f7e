"""BERT, RoBERTa and XLM-RoBERTa: agreement with transformers, identical bits in every batch, and refusals."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import models, normalizers, pre_tokenizers, processors

from penstock import LLM, AsyncLLM, ConfigError, PoolingParams, RequestError
from penstock.core.scheduler import Scheduler
from tests.integration.checkpoints import COMMON, ENCODERS, make_encoder_checkpoint, save_modules

MAX_MODEL_LEN = 240
POOLED = {"lasttoken": lambda h: h[-1], "mean_tokens": lambda h: h.mean(0), "cls_token": lambda h: h[0]}
CLASSIFIER = transformers.AutoModelForSequenceClassification
CLASSIFIERS = [name for name in ENCODERS if name != "modernbert"]
QUERY = "what moves the water ?"
DOCUMENTS = ["a penstock", "a pipe with a gate moves the water", "stars", "a"]
WORDS = ("what", "moves", "the", "water", "?", "a", "pen", "##stock", "pipe", "with", "gate", "stars", "s", "##e")


def make_prompts() -> list[list[int]]:
    """Returns prompts of 1 token to the longest. The first ids are left out, because one of them is padding."""
    draw = random.Random(5)
    lengths = [1, 2, 16, 17, MAX_MODEL_LEN, 64, 65, *(draw.randint(3, 120) for _ in range(13))]
    return [[draw.randrange(3, COMMON["vocab_size"]) for _ in range(length)] for length in lengths]


PROMPTS = make_prompts()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoders")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    """Makes an embedding model that pools by the mean of all tokens."""
    path = make_encoder_checkpoint("bert", folder)
    save_modules(path, "mean_tokens")
    save_word_pieces(path)
    return path


@pytest.fixture(scope="module")
def cross_encoder(folder: Path) -> Path:
    path = make_encoder_checkpoint("bert", folder, kind=CLASSIFIER, num_labels=1)
    save_word_pieces(path)
    return path


def save_word_pieces(path: Path) -> tokenizers.Tokenizer:
    """Writes a tokenizer like BERT's: [CLS] first text [SEP]; the second text and its [SEP] are a second segment."""
    vocabulary = {word: number for number, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS))}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    # A file may request padding and truncation, as that of all-MiniLM-L6-v2 does.
    tokenizer.enable_padding(length=32)
    tokenizer.enable_truncation(8)
    tokenizer.save(str(path / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def save_unigrams(path: Path, padding: int) -> tokenizers.Tokenizer:
    """Writes a SentencePiece tokenizer with RoBERTa's format: one segment, with two separators between the texts."""
    specials = ["<s>", "</s>"]
    specials.insert(padding, "<pad>")
    pieces = [(word, 0.0) for word in (*specials, "<unk>")]
    pieces += [(f"\u2581{word}".replace("\u2581##", ""), -2.0 - number / 10) for number, word in enumerate(WORDS)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=3))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    names = [(name, specials.index(name)) for name in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=names
    )
    tokenizer.save(str(path / "tokenizer.json"))
    return tokenizer


# ---- Agreement with transformers ----


@torch.inference_mode()
def assert_agrees_with_transformers(path: Path, llm: LLM, dtype: torch.dtype, mode: str, tolerance: float) -> None:
    """In float32 the distances are about 3e-13, and with the other form of GELU about 3e-8."""
    model = transformers.AutoModel.from_pretrained(path, dtype=dtype).eval()
    for prompt, output in zip(PROMPTS, llm.embed(PROMPTS, use_tqdm=False), strict=True):
        wanted = POOLED[mode](model(torch.tensor([prompt])).last_hidden_state[0].double())
        found = torch.tensor(output.outputs.embedding, dtype=torch.float64)
        assert output.num_cached_tokens == 0
        assert abs(found.norm() - 1) < 1e-6
        assert 1 - torch.cosine_similarity(found, wanted, dim=0) < tolerance


@pytest.mark.spread(6)
@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-10), (torch.bfloat16, 1e-3)])
@pytest.mark.parametrize("mode", ["mean_tokens", "cls_token"])
def test_cosine_with_transformers(name: str, dtype: torch.dtype, tolerance: float, mode: str, folder: Path) -> None:
    path = make_encoder_checkpoint(name, folder, dtype)
    save_modules(path, mode)
    llm = LLM(str(path), skip_tokenizer_init=True)
    assert_agrees_with_transformers(path, llm, dtype, mode, tolerance)
    llm.check_integrity()
    llm.shutdown()


@pytest.mark.parametrize("activation", ["gelu_new", "gelu_pytorch_tanh"])
def test_other_activations(activation: str, folder: Path) -> None:
    path = make_encoder_checkpoint("bert", folder, hidden_act=activation)
    save_modules(path, "lasttoken")
    llm = LLM(str(path), skip_tokenizer_init=True)
    assert_agrees_with_transformers(path, llm, torch.float32, "lasttoken", 1e-10)
    llm.shutdown()


@pytest.mark.parametrize("name", ENCODERS)
def test_layer_norms_use_the_epsilon_of_the_checkpoint(name: str, folder: Path) -> None:
    """It is far above the variances of these weights; with a usual one, a wrong epsilon would not show."""
    path = make_encoder_checkpoint(name, folder, **{"norm_eps" if name == "modernbert" else "layer_norm_eps": 0.3})
    save_modules(path, "mean_tokens")
    llm = LLM(str(path), skip_tokenizer_init=True)
    assert_agrees_with_transformers(path, llm, torch.float32, "mean_tokens", 1e-10)
    llm.shutdown()


@pytest.mark.parametrize("name", ENCODERS)
def test_without_modules_the_first_token_is_used_and_an_output_head_ignored(name: str, folder: Path) -> None:
    path = make_encoder_checkpoint(name, folder, kind=transformers.AutoModelForMaskedLM)
    llm = LLM(str(path), skip_tokenizer_init=True)
    assert_agrees_with_transformers(path, llm, torch.float32, "cls_token", 1e-10)
    llm.shutdown()


def test_the_first_names_of_bert_s_layer_norms(folder: Path) -> None:
    path = make_encoder_checkpoint("bert", folder)
    file = path / "model.safetensors"
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {
        next((name.replace(old, new) for old, new in names.items() if name.endswith(old)), name): tensor
        for name, tensor in load_file(file).items()
    }
    assert sum(name.endswith(("gamma", "beta")) for name in tensors) > 4
    save_file(tensors, file, {"format": "pt"})
    llm = LLM(str(path), skip_tokenizer_init=True)
    assert_agrees_with_transformers(path, llm, torch.float32, "cls_token", 1e-10)
    llm.shutdown()


@torch.inference_mode()
def logits_of(path: Path, prompt: list[int], token_types: list[int] | None = None) -> torch.Tensor:
    model = CLASSIFIER.from_pretrained(path, dtype=torch.float32).eval()
    types = torch.tensor([token_types or [0] * len(prompt)])
    return model(torch.tensor([prompt]), token_type_ids=types).logits[0]


def test_the_classifier_of_a_modernbert_is_refused(folder: Path) -> None:
    path = make_encoder_checkpoint("modernbert", folder, kind=CLASSIFIER, num_labels=3)
    with pytest.raises(ConfigError, match="a ModernBertForSequenceClassification, whose classifier is not supported"):
        LLM(str(path), skip_tokenizer_init=True)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_probabilities_agree_with_transformers(name: str, folder: Path) -> None:
    path = make_encoder_checkpoint(name, folder, kind=CLASSIFIER, num_labels=3)
    llm = LLM(str(path), skip_tokenizer_init=True)
    for prompt, output in zip(PROMPTS[:8], llm.classify(PROMPTS[:8], use_tqdm=False), strict=True):
        wanted = logits_of(path, prompt).softmax(-1)
        np.testing.assert_allclose(output.outputs.probs, wanted, rtol=1e-4, atol=1e-5)
    llm.shutdown()


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_scores_of_pairs_agree_with_transformers(name: str, folder: Path) -> None:
    path = make_encoder_checkpoint(name, folder, kind=CLASSIFIER, num_labels=1)
    if name == "bert":
        tokenizer = save_word_pieces(path)
    else:
        tokenizer = save_unigrams(path, ENCODERS[name][1]["pad_token_id"])
    llm = LLM(str(path))
    outputs = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
    for document, output in zip(DOCUMENTS, outputs, strict=True):
        pair = tokenizer.encode(QUERY, document)
        assert output.prompt_token_ids == pair.ids
        wanted = logits_of(path, pair.ids, pair.type_ids).sigmoid()
        assert abs(output.outputs.score - float(wanted)) < 1e-5
    if name == "bert":
        # The segments affect the score.
        pair = tokenizer.encode(QUERY, DOCUMENTS[1])
        plain = logits_of(path, pair.ids).sigmoid()
        assert abs(outputs[1].outputs.score - float(plain)) > 1e-3
        (alone,) = llm.encode({"prompt_token_ids": pair.ids}, use_tqdm=False)
        assert abs(float(alone.outputs.data[0]) - float(plain)) < 1e-5
    llm.shutdown()


def test_texts_are_tokenized_with_their_special_tokens(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint))
    tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    text = "What moves the WATER ? a penstock with a gate"
    (output,) = llm.embed(text, use_tqdm=False)
    assert output.prompt_token_ids == tokenizer.encode(text).ids
    assert len(output.prompt_token_ids) > 8
    (short,) = llm.embed(text, PoolingParams(truncate_prompt_tokens=5), use_tqdm=False)
    assert short.prompt_token_ids == [*output.prompt_token_ids[:4], tokenizer.token_to_id("[SEP]")]
    llm.shutdown()


# ---- Identical bits ----


def vectors(path: Path, order: list[int] | None = None, one_by_one: bool = False, **arguments: Any) -> list[bytes]:
    llm = LLM(str(path), skip_tokenizer_init=True, **arguments)
    order = list(range(len(PROMPTS))) if order is None else order
    if one_by_one:
        outputs = [llm.encode(PROMPTS[number], use_tqdm=False)[0] for number in order]
    else:
        outputs = llm.encode([PROMPTS[number] for number in order], use_tqdm=False)
    llm.check_integrity()
    llm.shutdown()
    data = dict(zip(order, (output.outputs.data.tobytes() for output in outputs), strict=True))
    return [data[number] for number in range(len(PROMPTS))]


@pytest.fixture(
    scope="module", params=[("roberta", torch.float32), ("roberta", torch.bfloat16), ("modernbert", torch.bfloat16)]
)
def weights(request: pytest.FixtureRequest, folder: Path) -> Path:
    path = make_encoder_checkpoint(request.param[0], folder, request.param[1])
    save_modules(path, "mean_tokens")
    return path


@pytest.fixture(scope="module")
def alone(weights: Path) -> list[bytes]:
    return vectors(weights, one_by_one=True)


ROWS: dict[str, dict[str, Any]] = {
    "one batch": {"max_num_batched_tokens": 8192},
    "small steps": {"max_num_batched_tokens": MAX_MODEL_LEN},
    "three at once": {"max_num_seqs": 3},
    "another order": {"order": random.Random(2).sample(range(len(PROMPTS)), len(PROMPTS))},
    "two threads": {"num_threads": 2},
    "steps in flight": {"async_scheduling": True},
    "a worker process": {"distributed_executor_backend": "mp"},
    "two ranks": {"tensor_parallel_size": 2},
    "three ranks": {"tensor_parallel_size": 3},
}


@pytest.mark.spread(9)
@pytest.mark.parametrize("row", ROWS)
def test_bits_do_not_depend_on_batch_or_configuration(row: str, weights: Path, alone: list[bytes]) -> None:
    assert vectors(weights, **ROWS[row]) == alone


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_bits_do_not_depend_on_them_with_rounded_inputs(name: str, folder: Path) -> None:
    path = make_encoder_checkpoint(name, folder, torch.bfloat16)
    save_modules(path, "mean_tokens")
    rounded: dict[str, Any] = {"quantization": "int4", "quantize_activations": "int8"}
    alone = vectors(path, one_by_one=True, num_threads=1, **rounded)
    as_they_are = vectors(path, quantization="int4")
    assert all(one != other for one, other in zip(alone, as_they_are, strict=True))
    assert vectors(path, **ROWS["another order"], **ROWS["two threads"], **ROWS["small steps"], **rounded) == alone
    assert vectors(path, **ROWS["two ranks"], distributed_executor_backend="uniproc", **rounded) == alone


def test_a_step_contains_whole_prompts(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[dict[str, int]] = []
    schedule = Scheduler.schedule

    def watched(self: Scheduler, *args: Any) -> Any:
        plan = schedule(self, *args)
        if plan is not None and not plan.is_warm_up:
            steps.append(dict(plan.num_scheduled_tokens))
        return plan

    monkeypatch.setattr(Scheduler, "schedule", watched)
    llm = LLM(str(checkpoint), skip_tokenizer_init=True, max_num_batched_tokens=300)
    llm.encode(PROMPTS, use_tqdm=False)
    llm.shutdown()
    counts = [count for step in steps for count in step.values()]
    assert counts == [len(prompt) for prompt in PROMPTS]
    assert max(sum(step.values()) for step in steps) <= 300
    assert len(steps) > 2


@pytest.mark.spread(1)
def test_cancelled_requests_do_not_affect_others(weights: Path, alone: list[bytes]) -> None:
    async def run() -> list[bytes]:
        llm = await AsyncLLM.start(str(weights), skip_tokenizer_init=True, max_num_seqs=4)
        tasks = [
            asyncio.ensure_future(llm.encode(prompt, PoolingParams(), f"r{i}")) for i, prompt in enumerate(PROMPTS)
        ]
        await tasks[0]
        for task in tasks[1::2]:
            task.cancel()
        kept = [(await task).outputs.data.tobytes() for task in tasks[::2]]
        again = [(await llm.encode(prompt, PoolingParams(), f"s{i}")) for i, prompt in enumerate(PROMPTS)]
        assert [output.outputs.data.tobytes() for output in again] == alone
        await llm.shutdown()
        return kept

    assert asyncio.run(run()) == alone[::2]


# ---- Engines of encoders ----


def test_an_encoder_has_no_kv_cache(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), skip_tokenizer_init=True)
    assert (llm.info.num_blocks, llm.info.kv_cache_bytes) == (0, 0)
    assert llm.info.max_model_len == MAX_MODEL_LEN
    assert llm.info.pooling == "vectors from the mean of all tokens, of length 1"
    llm.shutdown()


def test_positions_up_to_the_padding_token_are_not_usable(folder: Path) -> None:
    path = make_encoder_checkpoint("xlm-roberta", folder)
    llm = LLM(str(path), skip_tokenizer_init=True)
    assert llm.info.max_model_len == 243 - 3
    llm.embed([4] * 240, use_tqdm=False)
    with pytest.raises(RequestError, match="the prompt has 241 tokens; max_model_len=240 allows at most 240"):
        llm.embed([4] * 241)
    llm.shutdown()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"runner": "generate"}, "BertModel, which is an encoder and generates nothing: use runner=pooling"),
    ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 is not supported with an encoder"),
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "needs an engine that generates"),
    (
        {"kv_transfer_config": {"kv_connector": "OffloadingConnector"}},
        "kv_transfer_config cannot be used here: the model is an encoder",
    ),
    (
        {"kv_events_config": {"enable_kv_cache_events": True}},
        "kv_events_config cannot be used here: the model is an encoder",
    ),
    (
        {"max_num_batched_tokens": 100},
        "max_num_batched_tokens=100 would split prompts of up to max_model_len=240 tokens, and the model is an encoder",
    ),
    ({"kv_cache_memory": 1 << 20}, "kv_cache_memory cannot be used here: the model is an encoder, which has no KV"),
    ({"num_gpu_blocks_override": 9}, "num_gpu_blocks_override cannot be used here: the model is an encoder"),
    ({"max_model_len": 241}, "max_model_len=241 is beyond the model's context of 240 tokens"),
    ({"pooler_config": {"classifier_from_token": [1, 2]}}, "has no output head for classifier_from_token"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[next(iter(arguments)) for arguments, _ in REFUSED])
def test_inapplicable_options_are_refused(arguments: dict[str, Any], message: str, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(checkpoint), skip_tokenizer_init=True, **arguments)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act of a bert must be one of gelu, gelu_new, .*, got 'relu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type must be absolute, got 'relative_key'"),
        ({"is_decoder": True}, "a bert with is_decoder or add_cross_attention is not supported"),
        ({"type_vocab_size": 0}, "type_vocab_size must be an integer of at least 1, got 0"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings must be an integer of at least 2, got 'many'"),
        ({"architectures": ["BertForTokenClassification"]}, "BertForTokenClassification; the only classifiers"),
        ({"architectures": ["BertForNextSentencePrediction"]}, "encoders served: .Model, .ForMaskedLM and"),
        ({"num_attention_heads": 32}, "head size of 3"),
    ],
)
def test_unsupported_variants_are_refused(
    fields: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    raw = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **fields}))
    with pytest.raises(ConfigError, match=message):
        LLM(str(tmp_path), skip_tokenizer_init=True, load_format="dummy")


def test_a_classifier_of_an_encoder_must_pool_the_first_token(cross_encoder: Path) -> None:
    with pytest.raises(ConfigError, match=r"pooling_type must be CLS for the classifier in .*, got MEAN"):
        LLM(str(cross_encoder), pooler_config={"pooling_type": "MEAN"})


@pytest.mark.parametrize("start", [0, 7, -1, True, "2"])
def test_a_second_text_must_begin_within_the_prompt(start: Any, cross_encoder: Path) -> None:
    llm = LLM(str(cross_encoder), skip_tokenizer_init=True)
    with pytest.raises(RequestError, match="second_text_start must be an integer from 1 to 6, within the prompt"):
        llm.encode({"prompt_token_ids": PROMPTS[5][:7], "second_text_start": start})
    llm.shutdown()


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_dummy_weights(name: str, folder: Path) -> None:
    path = make_encoder_checkpoint(name, folder, kind=CLASSIFIER, num_labels=2)
    llm = LLM(str(path), skip_tokenizer_init=True, load_format="dummy")
    outputs = llm.classify(PROMPTS[:4], use_tqdm=False)
    assert all(abs(sum(output.outputs.probs) - 1) < 1e-6 for output in outputs)
    llm.shutdown()
