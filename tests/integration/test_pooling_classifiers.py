"""Classifiers and rerankers of decoder models: agreement with transformers, identical bits, and refusals."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from penstock import LLM, AsyncLLM, ConfigError, PoolingParams, RequestError
from penstock.config.model import load_model_config
from penstock.config.pooling import find_pooling
from tests.integration.checkpoints import (
    WRAPPERS,
    make_checkpoint,
    make_classifier_checkpoint,
    make_pooling_checkpoint,
    make_wrapper_checkpoint,
    save_tokenizer,
)
from tests.integration.test_pooling import MAX_MODEL_LEN, MODEL, PLAIN, PROMPTS, ranks

TEMPLATE = "Is it so? {query}\n{document} Answer {yes} or no:"
QUERY = "what moves {document} the water?"
DOCUMENTS = ["a penstock", "a {query} pipe with a gate", "stars", "x"]
ACTIVATIONS = {
    "regression": lambda logits: logits,
    "single_label_classification": lambda logits: logits.softmax(-1),
    "multi_label_classification": lambda logits: logits.sigmoid(),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("classifiers")


@pytest.fixture(scope="module")
def reranker(folder: Path) -> Path:
    """A generating model whose tokenizer has one token each for yes and no."""
    path = make_checkpoint(MODEL, folder)
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Path:
    path = make_pooling_checkpoint(MODEL, folder)
    save_tokenizer(path)
    prompts = {"prompts": {"query": "search: ", "document": ""}, "default_prompt_name": None}
    (path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return path


def make_llm(path: Path, **arguments: Any) -> LLM:
    return LLM(str(path), max_model_len=MAX_MODEL_LEN, **arguments)


@torch.inference_mode()
def logits_of(path: Path, prompt: list[int], dtype: torch.dtype) -> torch.Tensor:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype).eval()
    return model(torch.tensor([prompt]), use_cache=False).logits[0].float()


# ---- Agreement with transformers ----


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("name", "num_labels", "problem"),
    [
        ("qwen3-128", 3, None),
        ("llama3-gqa4-tied", 1, None),
        ("qwen3-gqa3-yarn", 4, "multi_label_classification"),
        ("qwen2-tied", 2, "single_label_classification"),
        ("llama-biases", 1, "regression"),
        ("mistral-window", 1, None),
    ],
)
def test_probabilities_agree_with_transformers(name: str, num_labels: int, problem: str | None, folder: Path) -> None:
    path = make_classifier_checkpoint(name, folder, torch.float32, num_labels, problem_type=problem)
    llm = make_llm(path, skip_tokenizer_init=True, max_num_batched_tokens=24)
    kind = problem or ("single_label_classification" if num_labels > 1 else "multi_label_classification")
    prompts = PROMPTS[:8]
    for prompt, output in zip(prompts, llm.classify(prompts, use_tqdm=False), strict=True):
        wanted = ACTIVATIONS[kind](logits_of(path, prompt, torch.float32))
        assert output.outputs.num_classes == num_labels
        np.testing.assert_allclose(output.outputs.probs, wanted, rtol=1e-3, atol=1e-4)
        assert output.outputs.label == f"LABEL_{int(wanted.argmax())}"
    (raw,) = llm.encode(prompts[3], PoolingParams(use_activation=False), use_tqdm=False)
    np.testing.assert_allclose(raw.outputs.data, logits_of(path, prompts[3], torch.float32), rtol=1e-3, atol=1e-3)
    llm.shutdown()


def test_bfloat16_and_names_of_labels(folder: Path) -> None:
    names = {0: "cold", 1: "warm", 2: "hot"}
    path = make_classifier_checkpoint(MODEL, folder, torch.bfloat16, 3, id2label=names)
    llm = make_llm(path, skip_tokenizer_init=True)
    for prompt, output in zip(PROMPTS[:6], llm.classify(PROMPTS[:6], use_tqdm=False), strict=True):
        wanted = logits_of(path, prompt, torch.bfloat16).softmax(-1)
        np.testing.assert_allclose(output.outputs.probs, wanted, atol=0.05)
        assert output.outputs.label == names[int(np.argmax(output.outputs.probs))]
    llm.shutdown()


@torch.inference_mode()
def probability_of_yes(path: Path, prompt: list[int], no: int, yes: int) -> float:
    """Returns the probability of `yes` against `no` as the next token, which is Qwen3-Reranker's score."""
    is_wrapper = "text_config" in json.loads((path / "config.json").read_text())
    of = transformers.AutoModelForImageTextToText if is_wrapper else transformers.AutoModelForCausalLM
    model = of.from_pretrained(path, dtype=torch.float32).eval()
    logits = model(torch.tensor([prompt]), use_cache=False).logits[0, -1]
    return float(logits[[no, yes]].softmax(-1)[1])


@pytest.mark.parametrize("name", [MODEL, "qwen2-tied", "granite", "qwen3_vl"])
def test_yes_or_no(name: str, tmp_path: Path) -> None:
    if name in WRAPPERS:
        # Small ones have no head of their own.
        path = make_wrapper_checkpoint(name, tmp_path, tie_word_embeddings=True)
    else:
        path = make_checkpoint(name, tmp_path)
    tokenizer = save_tokenizer(path)
    no, yes = tokenizer.token_to_id("no"), tokenizer.token_to_id("yes")
    template = TEMPLATE.replace("{yes}", "yes")
    # Rerankers of sentence-transformers list modules that are not those of vectors.
    (path / "modules.json").write_text(json.dumps([{"path": "", "type": "sentence_transformers.models.LogitScore"}]))
    llm = make_llm(path, pooler_config={"classifier_from_token": ["no", "yes"], "score_template": template})
    scores = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
    for document, found in zip(DOCUMENTS, scores, strict=True):
        text = f"Is it so? {QUERY}\n{document} Answer yes or no:"
        assert (found.prompt, found.prompt_token_ids) == (text, tokenizer.encode(text).ids)
        assert yes in found.prompt_token_ids
        wanted = probability_of_yes(path, found.prompt_token_ids, no, yes)
        assert found.outputs.score == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    llm.shutdown()


def test_pairs_without_a_template(reranker: Path) -> None:
    tokenizer = save_tokenizer(reranker)
    no, yes = tokenizer.token_to_id("no"), tokenizer.token_to_id("yes")
    config = json.dumps({"classifier_from_token": [no, yes]})
    llm = make_llm(reranker, pooler_config=config, enable_prefix_caching=False)
    queries = [f"{number} {QUERY}" for number in range(len(DOCUMENTS))]
    scores = llm.score(queries, DOCUMENTS, use_tqdm=False)
    for query, document, found in zip(queries, DOCUMENTS, scores, strict=True):
        assert found.prompt_token_ids == tokenizer.encode(query, document).ids
        wanted = probability_of_yes(reranker, found.prompt_token_ids, no, yes)
        assert found.outputs.score == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    ids = llm.score(QUERY, "x" * 400, PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)[0].prompt_token_ids
    assert ids == tokenizer.encode(QUERY, "x" * (MAX_MODEL_LEN - len(QUERY) - 2)).ids
    with pytest.raises(RequestError, match=r"the first text .* are 34 tokens: 20 leave no room for the second"):
        llm.score(QUERY, "x", PoolingParams(truncate_prompt_tokens=20))
    with pytest.raises(RequestError, match="max_model_len=240 allows at most 240"):
        llm.score(QUERY, "x" * 400)
    llm.shutdown()


def test_scores_of_an_embedding_model_are_cosines(embedder: Path) -> None:
    tokenizer = save_tokenizer(embedder)
    llm = make_llm(embedder)
    scores = llm.score(QUERY, DOCUMENTS, PoolingParams(prompt_name="query"), use_tqdm=False)
    (query,) = llm.embed(f"search: {QUERY}", use_tqdm=False)
    documents = llm.embed(DOCUMENTS, use_tqdm=False)
    for found, document in zip(scores, documents, strict=True):
        wanted = np.dot(query.outputs.embedding, document.outputs.embedding)
        assert found.outputs.score == pytest.approx(wanted, abs=1e-6)
        assert found.prompt_token_ids == query.prompt_token_ids + document.prompt_token_ids
    assert query.prompt_token_ids == tokenizer.encode(f"search: {QUERY}").ids
    llm.shutdown()


def test_prompts_by_name(embedder: Path) -> None:
    llm = make_llm(embedder)
    (named,) = llm.embed("water", PoolingParams(prompt_name="query"), use_tqdm=False)
    (written,) = llm.embed("search: water", use_tqdm=False)
    assert named.prompt == written.prompt == "search: water"
    assert named.outputs == written.outputs
    with pytest.raises(RequestError, match="prompt_name must be one of query, document, got 'passage'"):
        llm.embed("water", PoolingParams(prompt_name="passage"))
    with pytest.raises(RequestError, match="prompt_name needs a text input"):
        llm.embed([1, 2], PoolingParams(prompt_name="query"))
    llm.shutdown()
    file = embedder / "config_sentence_transformers.json"
    before = file.read_text()
    try:
        file.write_text(json.dumps({**json.loads(before), "default_prompt_name": "query"}))
        llm = make_llm(embedder)
        assert llm.embed("water", use_tqdm=False)[0].outputs == written.outputs
        assert llm.embed("water", PoolingParams(prompt_name="document"), use_tqdm=False)[0].prompt == "water"
        llm.shutdown()
    finally:
        file.write_text(before)


def test_truncation(embedder: Path) -> None:
    tokenizer = save_tokenizer(embedder)
    llm = make_llm(embedder)
    text = "water " * 100
    for given, length in ((-1, MAX_MODEL_LEN), (10, 10), (MAX_MODEL_LEN, MAX_MODEL_LEN)):
        params = PoolingParams(truncate_prompt_tokens=given)
        assert llm.embed(text, params, use_tqdm=False)[0].prompt_token_ids == [
            *tokenizer.encode(text, add_special_tokens=False).ids[: length - 1],
            tokenizer.token_to_id("<end>"),
        ]
        assert llm.embed([7] * 300, params, use_tqdm=False)[0].prompt_token_ids == [7] * length
    with pytest.raises(RequestError, match="must be -1 or at most max_model_len=240, got 241"):
        llm.embed(text, PoolingParams(truncate_prompt_tokens=241))
    llm.shutdown()


# ---- Identical bits ----


@pytest.mark.spread(1)
@pytest.mark.parametrize("kind", ["classifier", "tokens"])
def test_bits_do_not_depend_on_the_configuration(kind: str, folder: Path, reranker: Path) -> None:
    path, config = reranker, {"classifier_from_token": [3, 5]}
    if kind == "classifier":
        path, config = make_classifier_checkpoint(MODEL, folder), None

    def found(repeat: int = 1, **arguments: Any) -> bytes:
        llm = LLM(str(path), skip_tokenizer_init=True, pooler_config=config, **{**PLAIN, **arguments})
        outputs = [llm.encode(PROMPTS, use_tqdm=False) for _ in range(repeat)][-1]
        llm.shutdown()
        return b"".join(output.outputs.data.tobytes() for output in outputs)

    plain = found()
    assert found(max_num_seqs=1) == plain
    assert found(2, enable_prefix_caching=True, max_num_batched_tokens=16, async_scheduling=True) == plain
    for size in ((2, 1), (1, 2), (2, 2)):
        assert found(2, enable_prefix_caching=True, max_num_batched_tokens=48, **ranks(*size)) == plain


def test_async_llm(reranker: Path) -> None:
    config = {"classifier_from_token": ["no", "yes"]}
    llm = make_llm(reranker, pooler_config=config)
    wanted = [output.outputs.score for output in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    llm.shutdown()

    async def main() -> list[float]:
        limits: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "max_num_queued_requests": len(DOCUMENTS)}
        llm = await AsyncLLM.start(str(reranker), pooler_config=config, **limits)
        try:
            with pytest.raises(RequestError, match="5 inputs exceed max_num_queued_requests=4: send fewer"):
                await llm.score(QUERY, [*DOCUMENTS, "y"])
            with pytest.raises(RequestError, match="max_model_len=240 allows at most 240"):
                await llm.score(QUERY, ["a", "x" * 400])
            outputs = await llm.score(QUERY, DOCUMENTS)
            await asyncio.wait_for(llm.wait_until_idle(), 60)
            return [output.outputs.score for output in outputs]
        finally:
            await llm.shutdown()

    assert asyncio.run(main()) == wanted


# ---- Refusals ----


def test_tasks_of_other_models_are_refused(folder: Path, embedder: Path) -> None:
    classifier = make_llm(make_classifier_checkpoint(MODEL, folder), skip_tokenizer_init=True)
    with pytest.raises(RequestError, match="is a classifier and makes no vectors: ask it for classes"):
        classifier.embed([[1]])
    with pytest.raises(RequestError, match="needs a classifier with one label, and this one has 3"):
        classifier.score("a", "b")
    for field, value in (("dimensions", 3), ("normalize", True)):
        with pytest.raises(RequestError, match=f"{field} belongs to vectors"):
            classifier.classify([[1]], PoolingParams(**{field: value}))
    classifier.shutdown()
    vectors = make_llm(embedder)
    with pytest.raises(RequestError, match="makes vectors and has no classes: ask it for embeddings"):
        vectors.classify("a")
    with pytest.raises(RequestError, match="use_activation belongs to classifiers"):
        vectors.embed("a", PoolingParams(use_activation=False))
    with pytest.raises(RequestError, match="one query, or as many as documents: got 2 and 3"):
        vectors.score(["a", "b"], ["c", "d", "e"])
    for queries, documents, field in (("", "a", "queries"), ("a", [], "documents"), ("a", ["b", ""], "documents")):
        with pytest.raises(RequestError, match=f"{field} must be a text or texts"):
            vectors.score(queries, documents)
    vectors.shutdown()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "pooler_config is not JSON"),
        ("[]", "pooler_config must be an object"),
        ({"pooling": "LAST"}, "unknown key 'pooling' in pooler_config"),
        ({"pooling_type": "MAX"}, "must be one of LAST, MEAN, CLS, got 'MAX'"),
        ({"normalize": 1}, "normalize in pooler_config must be true or false"),
        ({"score_template": "{query}"}, "one {query} and one {document}"),
        ({"classifier_from_token": ["yes"]}, "must be two tokens"),
        ({"classifier_from_token": ["yes", "maybe"]}, "must be two different tokens"),
        ({"classifier_from_token": [5, 5]}, "must be two different tokens"),
        ({"classifier_from_token": [5, 301]}, "ids below 301"),
        ({"classifier_from_token": [5, True]}, "must be two different tokens"),
        ({"classifier_from_token": [5, 6], "pooling_type": "MEAN"}, "pooling_type must be LAST for the classifier"),
        (
            {"classifier_from_token": [5, 6], "normalize": True},
            "score_template needs a classifier .*, normalize vectors",
        ),
        ({"score_template": "{query} {document}"}, "score_template needs a classifier .*, normalize vectors"),
    ],
)
def test_invalid_pooler_configs(given: Any, message: str, reranker: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        make_llm(reranker, pooler_config=given)


@pytest.mark.parametrize("added", [5, [5], [{"content": "no"}]], ids=["number", "numbers", "no id"])
def test_tokens_are_not_found_in_a_damaged_vocabulary(added: Any, tmp_path: Path) -> None:
    shape = {"vocab_size": 301, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    config = {**shape, "model_type": "llama", "num_attention_heads": 4, "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    with pytest.raises(ConfigError, match="must be two different tokens"):
        find_pooling("pooling", {"classifier_from_token": ["no", "yes"]}, load_model_config(tmp_path))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["Qwen3ForTokenClassification"]}, "the only classifiers supported are"),
        ({"architectures": ["Qwen2ForProcessRewardModel"]}, "the only classifiers supported are"),
        ({"problem_type": "ranking"}, "has problem_type 'ranking'"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, "names the activation 'torch.nn.Tanh'"),
        ({"num_labels": 0, "id2label": None}, None),
        ({"num_labels": -1, "id2label": None}, "num_labels must be an integer from 1"),
        ({"id2label": {"0": "a"}}, r"has shape \[3, 96\], config.json asks for \[1, 96\]"),
    ],
)
def test_unsupported_classifiers(fields: dict[str, Any], message: str | None, tmp_path: Path) -> None:
    path = make_classifier_checkpoint(MODEL, tmp_path)
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    with pytest.raises(ConfigError, match=message):
        make_llm(path, skip_tokenizer_init=True)


def test_a_classifier_neither_generates_nor_accepts_another_head(folder: Path) -> None:
    path = make_classifier_checkpoint(MODEL, folder)
    with pytest.raises(ConfigError, match="has no output head: use runner=pooling"):
        make_llm(path, skip_tokenizer_init=True, runner="generate")
    with pytest.raises(ConfigError, match="has a classifier: leave classifier_from_token out"):
        make_llm(path, skip_tokenizer_init=True, pooler_config={"classifier_from_token": [1, 2]})
    with pytest.raises(ConfigError, match="pooler_config needs an engine that pools, not runner=generate"):
        make_llm(make_checkpoint(MODEL, folder), runner="generate", pooler_config={"pooling_type": "LAST"})


def test_the_activation_of_a_cross_encoder_is_that_of_its_config(folder: Path) -> None:
    identity = {"activation_fn": "torch.nn.modules.linear.Identity"}
    path = make_classifier_checkpoint("qwen3-gqa3-yarn", folder, num_labels=1, sentence_transformers=identity)
    logits = logits_of(path, PROMPTS[3], torch.float32)
    # sentence-transformers 5.4 and later write it to a file of its own, which comes first.
    for named, expected in ((None, logits), ("torch.nn.modules.activation.Sigmoid", logits.sigmoid())):
        if named is not None:
            (path / "config_sentence_transformers.json").write_text(json.dumps({"activation_fn": named}))
        llm = make_llm(path, skip_tokenizer_init=True)
        (found,) = llm.classify(PROMPTS[3], use_tqdm=False)
        assert found.outputs.probs == pytest.approx(expected.tolist(), rel=1e-3)
        llm.shutdown()
