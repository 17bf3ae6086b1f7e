"""Servers of encoders: vectors, and scores and ranks of a cross encoder, as clients request them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from penstock import LLM
from tests.integration.checkpoints import make_encoder_checkpoint, save_modules
from tests.integration.server_process import ServerProcess, serve
from tests.integration.test_encoders import CLASSIFIER, DOCUMENTS, MAX_MODEL_LEN, QUERY, save_word_pieces
from tests.integration.test_server_openai import call
from tests.integration.test_server_openai_errors import refused

TEXTS = ["water", "What moves the WATER ?", "a penstock moves the water " * 20]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Path:
    path = make_encoder_checkpoint("bert", folder)
    save_modules(path, "mean_tokens")
    save_word_pieces(path)
    return path


@pytest.fixture(scope="module")
def cross_encoder(folder: Path) -> Path:
    path = make_encoder_checkpoint("bert", folder, kind=CLASSIFIER, num_labels=1)
    save_word_pieces(path)
    return path


@pytest.fixture(scope="module")
def embedding_server(embedder: Path) -> Iterator[ServerProcess]:
    with serve(str(embedder), "--served-model-name", "vectors") as server:
        yield server
        assert call(f"{server.admin_url}/check_integrity", b"") == (200, {"whole": True})
        assert server.terminate() == 0
        assert not [line for line in server.log if "Traceback" in line]


@pytest.fixture(scope="module")
def scoring_server(cross_encoder: Path) -> Iterator[ServerProcess]:
    with serve(str(cross_encoder), "--served-model-name", "scores") as server:
        yield server


def test_embeddings_equal_those_of_the_engine(embedding_server: ServerProcess, embedder: Path) -> None:
    llm = LLM(str(embedder))
    wanted = llm.embed(TEXTS, use_tqdm=False)
    llm.shutdown()
    with OpenAI(base_url=f"{embedding_server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="vectors", input=TEXTS)
    assert [each.embedding for each in answer.data] == [each.outputs.embedding for each in wanted]
    assert answer.usage.prompt_tokens == sum(len(each.prompt_token_ids) for each in wanted)


def test_an_input_that_is_too_long(embedding_server: ServerProcess) -> None:
    body: dict[str, Any] = {"input": "water " * MAX_MODEL_LEN}
    error = refused(*call(f"{embedding_server.url}/v1/embeddings", body))
    assert f"{MAX_MODEL_LEN + 2} tokens; max_model_len={MAX_MODEL_LEN}" in error["message"]
    body["truncate_prompt_tokens"] = -1
    status, answer = call(f"{embedding_server.url}/v1/embeddings", body)
    assert (status, answer["usage"]["prompt_tokens"]) == (200, MAX_MODEL_LEN)


def test_the_server_reports_that_it_has_no_kv_cache(embedding_server: ServerProcess) -> None:
    assert "  KV cache   none: the model stores nothing\n" in embedding_server.log
    status, metrics = call(f"{embedding_server.url}/metrics")
    assert status == 200
    assert "vllm:kv_cache_usage_perc" in metrics
    assert call(f"{embedding_server.url}/dashboard")[0] == 200


@pytest.mark.long
def test_scores_and_ranks_of_a_cross_encoder(scoring_server: ServerProcess, cross_encoder: Path) -> None:
    llm = LLM(str(cross_encoder))
    wanted = [each.outputs.score for each in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    llm.shutdown()
    status, scores = call(f"{scoring_server.url}/score", {"queries": QUERY, "documents": DOCUMENTS})
    assert status == 200
    assert [each["score"] for each in scores["data"]] == wanted
    status, ranks = call(f"{scoring_server.url}/rerank", {"query": QUERY, "documents": DOCUMENTS, "top_n": 3})
    order = sorted(range(len(DOCUMENTS)), key=lambda number: -wanted[number])[:3]
    assert status == 200
    assert [each["index"] for each in ranks["results"]] == order
    assert [each["relevance_score"] for each in ranks["results"]] == [wanted[number] for number in order]
    refused(*call(f"{scoring_server.url}/v1/embeddings", {"input": "water"}))
