"""The prompts of scores, without an engine: pairs of texts, joined by a tokenizer or in a template, and truncated."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers

from penstock.config.sentence_transformers import Prompts, read_max_tokens
from penstock.frontend.input_processor import InputProcessor
from penstock.frontend.pooling import PoolingProcessor
from penstock.frontend.scoring import plan_scores
from penstock.messages.pooling_params import PoolingParams
from penstock.messages.requests import EngineRequest
from penstock.tokenizer.tokenizer import LARGE_CHARACTERS, Tokenizer, Truncation
from penstock.utils.errors import RequestError
from tests.integration.checkpoints import save_tokenizer
from tests.integration.test_encoders import WORDS, save_unigrams, save_word_pieces

MAX_MODEL_LEN = 24
Save = Callable[[Path], tokenizers.Tokenizer]
SAVES: list[Save] = [save_word_pieces, lambda path: save_unigrams(path, 1), save_tokenizer]


class Front:
    """What a classifier with one label makes of pairs of texts."""

    def __init__(self, path: Path, template: str | None = None) -> None:
        prompts = Prompts({"query": "water "}, "query")
        config: Any = SimpleNamespace(head=SimpleNamespace(labels=("score",)), prompts=prompts, score_template=template)
        save_word_pieces(path)
        self.tokenizer = Tokenizer(path, 1000, MAX_MODEL_LEN, pools=True)
        self.encoded: list[str] = []
        encode = self.tokenizer._encode
        self.tokenizer._encode = self._noting(encode)
        self.pooling = PoolingProcessor(config, 64)
        self.processor = InputProcessor(
            tokenizer=self.tokenizer,
            vocab_size=1000,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=frozenset(),
            seed=0,
            pooling=config,
        )

    def _noting(self, encode: Callable[..., tokenizers.Encoding]) -> Callable[..., tokenizers.Encoding]:
        def noted(text: str, add_special_tokens: bool) -> tokenizers.Encoding:
            self.encoded.append(text)
            return encode(text, add_special_tokens)

        return noted

    def requests(self, query: str, documents: list[str], **params: Any) -> list[tuple[str | None, EngineRequest]]:
        prompts = plan_scores(self.pooling, query, documents, PoolingParams(**params)).prompts
        made = [self.processor.process_pooling(str(number), *prompt) for number, prompt in enumerate(prompts)]
        return [(each.prompt, each.children[0]) for each in made]


def test_a_query_is_encoded_once_for_all_documents(tmp_path: Path) -> None:
    front = Front(tmp_path)
    requests = front.requests("a the", ["water", "a", "the"])
    assert front.encoded == ["water a the", "water", "a", "the"], "the first text is the prompt before queries"
    assert [request.second_text_start for _, request in requests] == [5, 5, 5]
    assert [front.tokenizer.decode(request.prompt_token_ids, False) for _, request in requests] == [
        f"[CLS] water a the [SEP] {document} [SEP]" for document in ("water", "a", "the")
    ]


@pytest.mark.parametrize("template", [None, "the {query} a {document}"])
def test_a_pair_keeps_its_cache_salt(template: str | None, tmp_path: Path) -> None:
    prompt = {"prompt": "a", "second_text": "the", "cache_salt": "mine"}
    made = Front(tmp_path, template).processor.process_pooling("r", prompt, PoolingParams())
    assert made.children[0].cache_salt == "mine"


def test_a_query_that_is_too_long_is_refused_before_the_second_document(tmp_path: Path) -> None:
    front = Front(tmp_path)
    with pytest.raises(RequestError, match=f"the prompt has 25 tokens; max_model_len={MAX_MODEL_LEN}") as caught:
        front.requests("a " * 20, ["the"] * 100)
    assert (len(front.encoded), caught.value.code) == (2, "context_length_exceeded")


def test_a_template_is_the_whole_prompt(tmp_path: Path) -> None:
    """The prompt before queries is in the template's place of the query, and nowhere else."""
    front = Front(tmp_path, "the {query} a {document}")
    assert [text for text, _ in front.requests("pipe", ["{query}", "the"])] == [
        "the water pipe a {query}",
        "the water pipe a the",
    ]
    with pytest.raises(RequestError, match="would cut off the end of the engine's score_template"):
        front.requests("pipe", ["the"], truncate_prompt_tokens=5)


def test_a_query_without_end_is_named(tmp_path: Path) -> None:
    """Before it is tokenized."""
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path, 1000, 64, pools=True)
    long = "a" * LARGE_CHARACTERS
    for texts, field in (((long, "a"), "queries"), (("a", long), "prompt")):
        with pytest.raises(RequestError, match="which are at least") as caught:
            tokenizer.encode_pair(*texts)
        assert caught.value.field == field


@pytest.mark.parametrize("pair", [{"second_text": 1}, {"second_text": ""}, {"prompt": "", "second_text": "a"}])
def test_two_texts_are_text(pair: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="prompt and second_text must be two texts, neither of them empty"):
        Front(tmp_path).processor.process_pooling("r", {"prompt": "a", **pair}, PoolingParams())


@pytest.mark.parametrize("save", SAVES)
def test_truncation_removes_what_the_library_removes(save: Save, tmp_path: Path) -> None:
    save(tmp_path)
    tokenizer, rng = Tokenizer(tmp_path, 1000, 512, pools=True), random.Random(1)
    backend = tokenizer.backend
    num_special = [backend.num_special_tokens_to_add(is_pair=is_pair) for is_pair in (False, True)]
    for _ in range(300):
        first, second = (" ".join(rng.choices([*WORDS, "pipe?"], k=rng.randrange(1, 9))) for _ in range(2))
        length, keeps_end = rng.randrange(1, 40), rng.random() < 0.5
        texts = [backend.encode(text, add_special_tokens=False) for text in (first, second)]
        room = length - len(texts[0].ids) - num_special[1]
        if room > 0:
            texts[1].truncate(room)
            whole = backend.post_process(texts[0], texts[1])
            start = whole.type_ids.index(1) if 1 in whole.type_ids else None
            assert tokenizer.encode_pair(first, second, Truncation(length)) == (whole.ids, start)
        texts[0].truncate(max(0, length - num_special[0]), direction="left" if keeps_end else "right")
        truncation = Truncation(length, keeps_end)
        assert tokenizer.encode(first, truncation=truncation) == truncation.cut(backend.post_process(texts[0]).ids)


def test_a_long_document_is_truncated_without_joining_its_parts_with_the_query(tmp_path: Path) -> None:
    """40,000 words after a query of 400 took 33 seconds, in which nothing else ran, and 4.5 GB."""
    save_word_pieces(tmp_path)
    tokenizer = Tokenizer(tmp_path, 1000, 512, pools=True)
    began = time.process_time()
    token_ids, _ = tokenizer.encode_pair("a " * 400, "the " * 40_000, Truncation(404))
    assert time.process_time() - began < 4
    assert token_ids == tokenizer.encode_pair("a " * 400, "the")[0]


@pytest.mark.parametrize(
    ("file", "stored", "pools", "is_lowered"),
    [
        ("tokenizer_config.json", {"do_lower_case": True}, False, True),
        ("tokenizer_config.json", {"do_lower_case": False}, True, False),
        ("tokenizer_config.json", {}, True, None),
        ("sentence_bert_config.json", {"do_lower_case": True}, True, True),
        ("sentence_bert_config.json", {"do_lower_case": True}, False, None),
        ("sentence_bert_config.json", {"do_lower_case": False}, True, None),
    ],
)
@pytest.mark.parametrize("is_lowering", [False, True])
def test_texts_are_lower_case_where_the_checkpoint_says_so(
    file: str, stored: dict[str, Any], pools: bool, is_lowered: bool | None, is_lowering: bool, tmp_path: Path
) -> None:
    save_word_pieces(tmp_path)
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    described["normalizer"]["lowercase"] = is_lowering
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    (tmp_path / file).write_text(json.dumps(stored))
    lowers = is_lowering if is_lowered is None else is_lowered
    tokenizer = Tokenizer(tmp_path, 1000, pools=pools)
    assert (tokenizer.encode("Water") == tokenizer.encode("water")) == lowers


def test_any_tokenizer_is_lowered_for_vectors(tmp_path: Path) -> None:
    save_unigrams(tmp_path, 1)
    (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    tokenizer = Tokenizer(tmp_path, 1000, pools=True)
    assert tokenizer.encode("Water THE") == tokenizer.encode("water the")


@pytest.mark.parametrize(("stored", "length"), [(512, 512), (2, 2), (1, None), (0, None), ("512", None), (True, None)])
def test_the_longest_input_that_a_checkpoint_names(stored: Any, length: int | None, tmp_path: Path) -> None:
    """An engine needs room for two tokens."""
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": stored}))
    assert read_max_tokens(tmp_path) == length
