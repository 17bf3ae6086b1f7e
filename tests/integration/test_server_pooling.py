"""Servers of pooling models: embeddings, classes, scores and ranks, as clients request them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import OpenAI

from penstock import LLM, PoolingParams
from penstock.server import limits
from penstock.server.openai.dialects import Effect
from penstock.server.pooling.dialect import POOLING_FIELDS
from tests.integration.checkpoints import (
    make_checkpoint,
    make_classifier_checkpoint,
    make_pooling_checkpoint,
    save_tokenizer,
)
from tests.integration.clients import VECTOR_CLIENTS, VECTOR_TEXTS
from tests.integration.raw_http import call as raw_call
from tests.integration.raw_http import eventually
from tests.integration.server_process import ServerProcess, serve
from tests.integration.test_server_clients import run as run_client
from tests.integration.test_server_openai import call
from tests.integration.test_server_openai_errors import refused
from tests.integration.test_serving_examples import ROOT, examples

MODEL = "qwen3-128"
MAX_MODEL_LEN = 240
KEY = "a-key-for-clients"
TEXTS = ["water", "a penstock leads water to a turbine", "x" * 200]
QUERY, DOCUMENTS = "what moves the water?", ["a pipe", "stars", "a turbine {query}", "stars"]
RERANKER = {"classifier_from_token": ["no", "yes"]}
GENERATING = (
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/responses", {"input": "a"}),
)
POOLING = (
    ("/v1/embeddings", {"input": "a"}),
    ("/pooling", {"input": "a"}),
    ("/classify", {"input": "a"}),
    ("/score", {"queries": "a", "documents": "b"}),
    ("/v1/score", {"text_1": "a", "text_2": "b"}),
    *((path, {"query": "a", "documents": ["b"]}) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Path:
    path = make_pooling_checkpoint(MODEL, folder)
    save_tokenizer(path)
    (path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "search: "}}))
    return path


@pytest.fixture(scope="module")
def server(embedder: Path) -> Iterator[ServerProcess]:
    with serve(str(embedder), "--max-model-len", str(MAX_MODEL_LEN), "--served-model-name", "vectors") as server:
        yield server
        assert server.terminate() == 0
        assert not [line for line in server.log if "Traceback" in line or "failed" in line]


@pytest.fixture(scope="module")
def reranker(folder: Path) -> Iterator[ServerProcess]:
    path = make_checkpoint(MODEL, folder)
    save_tokenizer(path)
    flags = ("--max-model-len", str(MAX_MODEL_LEN), "--pooler-config", json.dumps(RERANKER))
    with serve(str(path), *flags) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def llm(embedder: Path) -> Iterator[LLM]:
    llm = LLM(str(embedder), max_model_len=MAX_MODEL_LEN)
    yield llm
    llm.shutdown()


def post(server: ServerProcess, path: str, body: Any) -> Any:
    status, answer = call(server.url + path, body)
    assert status == 200, answer
    return answer


def vectors(llm: LLM, given: Any, **params: Any) -> list[list[float]]:
    return [each.outputs.embedding for each in llm.embed(given, PoolingParams(**params), use_tqdm=False)]


# ---- Vectors ----


@pytest.mark.spread(1)
@pytest.mark.parametrize("encoding_format", ["float", "base64", None])
def test_embeddings_of_openais_client_equal_those_of_the_engine(client: OpenAI, llm: LLM, encoding_format: Any) -> None:
    """Without a format the client requests base64 and decodes it."""
    fields = {} if encoding_format is None else {"encoding_format": encoding_format}
    for given in (TEXTS[0], TEXTS, [5, 6, 7], [[5, 6, 7], [8]]):
        answer = client.embeddings.create(model="vectors", input=given, **fields)
        found: list[Any] = [each.embedding for each in answer.data]
        if encoding_format == "base64":
            found = [np.frombuffer(base64.b64decode(each), "<f4").tolist() for each in found]
        assert found == vectors(llm, given)
        assert [(each.index, each.object) for each in answer.data] == [(i, "embedding") for i in range(len(found))]
        assert (answer.object, answer.model) == ("list", "vectors")
        prompts = llm.embed(given, use_tqdm=False)
        count = sum(len(each.prompt_token_ids) for each in prompts)
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)


@pytest.mark.parametrize("client", VECTOR_CLIENTS)
def test_embeddings_of_other_clients_equal_those_of_the_engine(server: ServerProcess, llm: LLM, client: str) -> None:
    found = run_client(client, server, "vectors")
    assert found["documents"] == vectors(llm, VECTOR_TEXTS)
    assert found["query"] == found["documents"][0]
    assert found["short"] == vectors(llm, VECTOR_TEXTS[0], dimensions=16)[0]


def test_fields_of_an_embedding(client: OpenAI, llm: LLM) -> None:
    short = client.embeddings.create(model="vectors", input=TEXTS[1], dimensions=16)
    assert short.data[0].embedding == vectors(llm, TEXTS[1], dimensions=16)[0]
    assert len(short.data[0].embedding) == 16

    def extra(text: str, **fields: Any) -> Any:
        return client.embeddings.create(model="vectors", input=text, extra_body=fields).data[0].embedding

    assert extra(TEXTS[1], normalize=False) == vectors(llm, TEXTS[1], normalize=False)[0]
    assert extra(TEXTS[1], prompt_name="query") == vectors(llm, f"search: {TEXTS[1]}")[0]
    assert extra("x" * 400, truncate_prompt_tokens=-1) == vectors(llm, "x" * (MAX_MODEL_LEN - 1))[0]
    assert extra(TEXTS[1], priority=3, user="me") == vectors(llm, TEXTS[1])[0]


def test_a_salt_separates_caches(server: ServerProcess) -> None:
    def num_cached(**fields: Any) -> int:
        body = {"input": "a text that no other test has, longer than a block", **fields}
        return post(server, "/v1/embeddings", body)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [num_cached(), num_cached() > 0, num_cached(cache_salt="a"), num_cached(cache_salt="a") > 0] == [0, 1, 0, 1]


def test_a_batch_and_its_cache(server: ServerProcess, llm: LLM) -> None:
    many = [f"{number} {TEXTS[1]}" for number in range(64)]
    body = {"input": many, "encoding_format": "base64"}
    found = [post(server, "/v1/embeddings", body) for _ in range(2)]
    assert found[0]["data"] == found[1]["data"]
    assert [np.frombuffer(base64.b64decode(each["embedding"]), "<f4").tolist() for each in found[1]["data"]] == vectors(
        llm, many
    )
    assert found[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 64 * 16
    assert found[1]["usage"]["completion_tokens"] == 0
    assert found[0]["id"].startswith("embd-")


def test_pooling(server: ServerProcess, llm: LLM) -> None:
    answer = post(server, "/pooling", {"input": TEXTS, "task": "embed", "dimensions": 8})
    assert [each["data"] for each in answer["data"]] == vectors(llm, TEXTS, dimensions=8)
    assert [each["object"] for each in answer["data"]] == ["pooling"] * 3
    packed = post(server, "/pooling", {"input": TEXTS[0], "encoding_format": "base64"})["data"][0]["data"]
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == vectors(llm, TEXTS[0])[0]


def test_the_server_describes_its_vectors(server: ServerProcess) -> None:
    summary = "vectors from the last token, of length 1"
    assert f"  answers    {summary}\n" in server.log
    assert raw_call(server.url, "GET", "/version").json()["engine"]["pooling"] == summary
    assert "use /v1/embeddings" in raw_call(server.url, "POST", "/embed", {"inputs": "a"}).error["message"]


def test_request_ids(server: ServerProcess) -> None:
    answer = raw_call(server.url, "POST", "/v1/embeddings", {"input": "a", "request_id": "mine"})
    assert answer.json()["id"] == "embd-mine"
    assert answer.headers["x-request-id"] == "mine"


# ---- Classes and scores ----


def test_classify(folder: Path) -> None:
    path = make_classifier_checkpoint(MODEL, folder, id2label={0: "cold", 1: "warm", 2: "hot"})
    save_tokenizer(path)
    llm = LLM(str(path), max_model_len=MAX_MODEL_LEN)
    wanted = llm.classify(TEXTS, use_tqdm=False)
    logits = llm.classify(TEXTS[0], PoolingParams(use_activation=False), use_tqdm=False)[0].outputs
    llm.shutdown()
    with serve(str(path), "--max-model-len", str(MAX_MODEL_LEN)) as server:
        answer = post(server, "/classify", {"input": TEXTS})
        assert answer["data"] == [
            {"index": index, "label": each.outputs.label, "probs": each.outputs.probs, "num_classes": 3}
            for index, each in enumerate(wanted)
        ]
        assert answer["usage"]["prompt_tokens"] == sum(len(each.prompt_token_ids) for each in wanted)
        raw = post(server, "/pooling", {"input": TEXTS[0], "task": "classify", "use_activation": False})
        assert raw["data"][0]["data"] == logits.probs
        for path_, body, words in (
            ("/v1/embeddings", {"input": "a"}, "is a classifier and makes no vectors"),
            ("/score", {"queries": "a", "documents": "b"}, "needs a classifier with one label, and this one has 3"),
            ("/pooling", {"input": "a", "dimensions": 2}, "dimensions belongs to vectors"),
        ):
            assert words in refused(*call(server.url + path_, body))["message"]


@pytest.fixture(scope="module")
def scores(folder: Path, reranker: ServerProcess) -> list[float]:
    llm = LLM(str(folder / MODEL), max_model_len=MAX_MODEL_LEN, pooler_config=RERANKER)
    found = [each.outputs.score for each in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    llm.shutdown()
    return found


@pytest.mark.spread(1)
@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_score(path: str, reranker: ServerProcess, scores: list[float]) -> None:
    sides = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))
    for query, document in sides:
        answer = post(reranker, path, {query: QUERY, document: DOCUMENTS})
        assert answer["data"] == [
            {"object": "score", "index": index, "score": score} for index, score in enumerate(scores)
        ]
    paired = post(reranker, path, {"queries": [QUERY, QUERY], "documents": DOCUMENTS[1:3]})
    assert [each["score"] for each in paired["data"]] == scores[1:3]
    assert [each["score"] for each in post(reranker, path, {"queries": QUERY, "documents": "stars"})["data"]] == [
        scores[1]
    ]
    assert paired["usage"]["prompt_tokens"] == 2 * (len(QUERY) + 2) + sum(map(len, DOCUMENTS[1:3]))


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(path: str, reranker: ServerProcess, scores: list[float]) -> None:
    order = sorted(range(4), key=lambda index: -scores[index])
    assert order.index(1) + 1 == order.index(3), "of equal documents the first one comes first"
    answer = post(reranker, path, {"query": QUERY, "documents": DOCUMENTS})
    wanted = [
        {"index": index, "relevance_score": scores[index], "document": {"text": DOCUMENTS[index]}} for index in order
    ]
    assert answer["results"] == wanted
    assert answer["meta"]["tokens"]["input_tokens"] == answer["usage"]["total_tokens"] > 0
    jina = {"query": QUERY, "documents": [{"text": text} for text in DOCUMENTS], "top_n": 2, "model": None}
    assert post(reranker, path, jina)["results"] == wanted[:2]
    cohere = {"query": QUERY, "documents": DOCUMENTS, "top_n": 9, "return_documents": False}
    assert post(reranker, path, cohere)["results"] == [
        {"index": each["index"], "relevance_score": each["relevance_score"]} for each in wanted
    ]
    error = refused(*call(reranker.url + path, {"query": "x" * 10**6, "documents": ["a"]}))
    assert (error["param"], "queries" in error["message"]) == ("query", False), error


def test_cosines_as_scores(server: ServerProcess, llm: LLM) -> None:
    answer = post(server, "/score", {"queries": QUERY, "documents": DOCUMENTS})
    wanted = [each.outputs.score for each in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    assert [each["score"] for each in answer["data"]] == wanted
    # Each text is computed once.
    assert answer["usage"]["prompt_tokens"] == sum(len(text) + 1 for text in {QUERY, *DOCUMENTS})


# ---- The documentation ----


def test_the_examples_and_the_fields_of_the_documentation() -> None:
    text = (ROOT / "docs/POOLING.md").read_text(encoding="utf-8")
    for row in POOLING_FIELDS:
        assert f"`{row.name}`" in text, row.name
    found = examples("docs/POOLING.md")
    assert {path for path, _ in found} == {"/v1/embeddings", "/pooling", "/score", "/rerank", "/classify"}
    with serve("--runner", "pooling") as server:
        for path, body in found:
            status, answer = call(server.url + path, body)
            # The built-in model has no classes.
            assert status == (400 if path == "/classify" else 200), answer


# ---- Errors ----


@pytest.mark.parametrize(("path", "body"), GENERATING)
def test_pooling_servers_refuse_generation(path: str, body: dict[str, Any], server: ServerProcess) -> None:
    assert "generates no tokens: use /v1/embeddings" in refused(*call(server.url + path, body))["message"]


def test_pooling_servers_refuse_messages(server: ServerProcess) -> None:
    body = {"max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
    status, answer = call(f"{server.url}/v1/messages", body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert "generates no tokens" in answer["error"]["message"]


@pytest.fixture(scope="module")
def generating() -> Iterator[ServerProcess]:
    with serve("--api-key", KEY) as server:
        yield server


@pytest.mark.parametrize(("path", "body"), POOLING)
def test_generating_servers_refuse_pooling(path: str, body: dict[str, Any], generating: ServerProcess) -> None:
    assert raw_call(generating.url, "POST", path, body).status == 401
    answer = raw_call(generating.url, "POST", path, body, {"Authorization": f"Bearer {KEY}"})
    message = refused(answer.status, answer.json())["message"]
    assert "generates tokens and does not pool: use /v1/chat/completions" in message


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", {}, "input"),
    ("/v1/embeddings", {"input": ""}, "input"),
    ("/v1/embeddings", {"input": []}, "input"),
    ("/v1/embeddings", {"input": ["a", ""]}, "input"),
    ("/v1/embeddings", {"input": [[]]}, "input"),
    ("/v1/embeddings", {"input": 5}, "input"),
    ("/v1/embeddings", {"input": [1, "a"]}, "input"),
    ("/v1/embeddings", {"input": [-1]}, "input"),
    ("/v1/embeddings", {"input": [10**6]}, "input"),
    ("/v1/embeddings", {"input": ["a", "x" * 300]}, "input"),
    ("/v1/embeddings", {"input": "\ud800"}, "input"),
    ("/v1/embeddings", {"input": ["a"] * (limits.MAX_POOLING_INPUTS + 1)}, "input"),
    ("/v1/embeddings", {"input": "a", "dimensions": 97}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 241}, "truncate_prompt_tokens"),
    ("/v1/embeddings", {"input": "a", "prompt_name": "passage"}, "prompt_name"),
    ("/v1/embeddings", {"input": "a", "dimension": 5}, "dimension"),
    ("/v1/embeddings", {"input": "a", "use_activation": True}, "use_activation"),
    ("/pooling", {"input": "a", "task": "token_embed"}, "task"),
    ("/pooling", {"input": "a", "use_activation": True}, "use_activation"),
    ("/score", {"queries": "a"}, ""),
    ("/score", {"queries": "a", "text_2": "b"}, ""),
    ("/score", {"queries": "a", "documents": "b", "text_1": "c"}, ""),
    ("/score", {"queries": ["a", "b"], "documents": ["c", "d", "e"]}, "queries"),
    ("/score", {"queries": "a", "documents": [""]}, "documents"),
    ("/score", {"queries": "a", "documents": "x" * 300}, "documents"),
    ("/rerank", {"query": "a", "documents": []}, "documents"),
    ("/rerank", {"query": ["a"], "documents": ["a"]}, "query"),
    ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
    ("/rerank", {"query": "a", "documents": [{"title": "a"}]}, "documents"),
]


@pytest.mark.parametrize(("path", "body", "param"), WRONG)
def test_invalid_requests(path: str, body: dict[str, Any], param: str, server: ServerProcess) -> None:
    assert (refused(*call(server.url + path, body))["param"] or "") == param


def test_an_unknown_model(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt' here; there is vectors"):
        client.embeddings.create(model="gpt", input="a")


def test_fields_of_other_clients(server: ServerProcess, llm: LLM) -> None:
    neutral = {row.name: row.neutral[0] for row in POOLING_FIELDS if row.neutral}
    inert = {row.name: {"any": 1} for row in POOLING_FIELDS if row.effect is Effect.INERT}
    answer = post(server, "/v1/embeddings", {"input": "a", **neutral, **inert})
    assert answer["data"][0]["embedding"] == vectors(llm, "a")[0]
    for row in POOLING_FIELDS:
        if row.effect is Effect.REFUSED:
            error = refused(*call(f"{server.url}/v1/embeddings", {"input": "a", row.name: 17}))
            assert (error["param"], row.note in error["message"]) == (row.name, True)


def test_metrics_count_requests_and_nothing_is_left(server: ServerProcess) -> None:
    def count(name: str) -> float:
        text = raw_call(server.url, "GET", "/metrics").body.decode()
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    names = (
        "vllm:prompt_tokens_total",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:time_to_first_token_seconds_count",
    )
    before = [count(name) for name in names]
    stopped = count("vllm:request_success_total")
    post(server, "/v1/embeddings", {"input": [[1, 2, 3], [4, 5]]})
    eventually(lambda: count(names[0]) == before[0] + 5, 10)
    assert count(names[1]) == before[1] + 2
    assert count(names[2]) == before[2] == 0
    assert count("vllm:request_success_total") == stopped + 2
    assert raw_call(server.admin_url, "GET", "/drain").json()["num_unfinished"] == 0
    assert raw_call(server.admin_url, "POST", "/check_integrity").json() == {"whole": True}
