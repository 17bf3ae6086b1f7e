"""Clients of other projects, each in a separate process, which writes JSON.

    python -m tests.integration.clients NAME URL [vectors]

The processes are separate because these libraries leave event loops and sockets open, which the tests treat as errors.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEMO_MODEL = Path(__file__).parents[2] / "src/penstock/demo"
QUESTION = "What is 2 + 3?"
WEATHER = "What is the weather in Oslo?"
STORY = "Once upon a time"
VECTOR_TEXTS = ["water", "a penstock leads water to a turbine"]
CITY_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Tells the weather in a city.", "parameters": CITY_SCHEMA},
}


def langchain(url: str) -> dict[str, Any]:
    """LangChain's chat model and its text model, with the fields that they set by themselves."""
    library = importlib.import_module("langchain_openai")
    common = {"model": "demo", "base_url": f"{url}/v1", "api_key": "none", "temperature": 0}
    model = library.ChatOpenAI(**common, max_tokens=40, stream_usage=True)
    several = model.batch([QUESTION, QUESTION])
    (call,) = model.bind_tools([TOOL], tool_choice="get_weather").invoke(WEATHER).tool_calls
    auto = model.bind_tools([TOOL]).invoke(WEATHER)
    turns = [
        ("system", "Be brief."),
        ("user", [{"type": "text", "text": WEATHER}]),
        auto,
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    ]
    shaped = model.with_structured_output({"title": "place", **CITY_SCHEMA}, method="json_schema").invoke(WEATHER)
    chunks = list(model.stream(QUESTION))
    return {
        "whole": model.invoke(QUESTION).content,
        "streamed": "".join(chunk.content for chunk in chunks),
        "usage": any(chunk.usage_metadata for chunk in chunks),
        "several": [each.content for each in several],
        "tool": [call["name"], sorted(call["args"])],
        "turns": model.invoke(turns).content,
        "shaped": sorted(shaped),
        "text": library.OpenAI(**common, max_tokens=8).invoke(STORY),
    }


def langchain_embeddings(url: str) -> dict[str, Any]:
    """LangChain's embeddings. By default they send token ids of OpenAI's tokenizer, which other models cannot use."""
    library = importlib.import_module("langchain_openai")
    common = {"model": "vectors", "base_url": f"{url}/v1", "api_key": "none", "check_embedding_ctx_length": False}
    embeddings = library.OpenAIEmbeddings(**common)
    return {
        "documents": embeddings.embed_documents(VECTOR_TEXTS),
        "query": embeddings.embed_query(VECTOR_TEXTS[0]),
        "short": library.OpenAIEmbeddings(**common, dimensions=16).embed_query(VECTOR_TEXTS[0]),
    }


def llama_index_embeddings(url: str) -> dict[str, Any]:
    """LlamaIndex's embeddings. They send `embed_batch_size` texts in a request, with spaces instead of line breaks."""
    library = importlib.import_module("llama_index.embeddings.openai")
    common = {"model_name": "vectors", "api_base": f"{url}/v1", "api_key": "none"}
    embeddings = library.OpenAIEmbedding(**common, embed_batch_size=1)
    return {
        "documents": embeddings.get_text_embedding_batch(VECTOR_TEXTS),
        "query": embeddings.get_query_embedding(VECTOR_TEXTS[0]),
        "short": library.OpenAIEmbedding(**common, dimensions=16).get_text_embedding(VECTOR_TEXTS[0]),
    }


def litellm(url: str) -> dict[str, Any]:
    """LiteLLM as a client of an OpenAI server, and of a vLLM server, which has another name there."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    library = importlib.import_module("litellm")
    common = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 40}
    messages = [{"role": "user", "content": QUESTION}]
    cached = [{"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}]
    found: dict[str, Any] = {}
    for name in ("openai/demo", "hosted_vllm/demo"):

        def ask(name: str = name, content: Any = messages, **fields: Any) -> Any:
            return library.completion(model=name, messages=content, **common, **fields)

        chunks = ask(stream=True, stream_options={"include_usage": True})
        forced = ask(content=[{"role": "user", "content": WEATHER}], tools=[TOOL], tool_choice="required")
        (call,) = forced.choices[0].message.tool_calls
        found[name] = {
            "whole": ask().choices[0].message.content,
            "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
            "tool": [call.function.name, sorted(json.loads(call.function.arguments))],
            "cached": ask(content=[{"role": "user", "content": cached}]).choices[0].message.content,
            "extra": ask(extra_body={"top_k": 3, "metadata": {"a": "b"}}, user="me").choices[0].message.content,
        }
    text = library.text_completion(model="text-completion-openai/demo", prompt=STORY, **{**common, "max_tokens": 8})
    found["text"] = text.choices[0].text
    return found


def llm(url: str) -> dict[str, Any]:
    """The model class of the `llm` command for servers of the OpenAI API."""
    plugin = importlib.import_module("llm.default_plugins.openai_models")
    model = plugin.Chat("demo", model_name="demo", api_base=f"{url}/v1")
    asked = {"key": "none", "temperature": 0, "max_tokens": 40}
    return {
        "whole": model.prompt(QUESTION, stream=False, **asked).text(),
        "streamed": "".join(model.prompt(QUESTION, **asked)),
        "text": plugin.Completion("demo-text", model_name="demo", api_base=f"{url}/v1").prompt(
            STORY, key="none", temperature=0, max_tokens=8
        ).text(),
    }  # fmt: skip


def guidellm(url: str) -> dict[str, Any]:
    """GuideLLM's benchmark, which reports the answer to each request."""
    os.environ.update(HF_HUB_OFFLINE="1", COLUMNS="200")
    command = importlib.import_module("guidellm.__main__").cli
    prompts = [{"prompt": STORY, "output_tokens_count": 8}] * 4
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        data, report = Path(folder, "prompts.jsonl"), Path(folder, "report.json")
        data.write_text("\n".join(map(json.dumps, prompts)))
        load = [f"--target={url}", f"--data={data}", f"--processor={DEMO_MODEL}", "--rate-type=throughput"]
        limits = ["--max-requests=4", "--disable-progress", f"--output-path={report}"]
        command.main(["benchmark", *load, *limits], standalone_mode=False)
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
    answers = benchmark["requests"]["successful"]
    return {
        "requests": benchmark["run_stats"]["requests_made"],
        "texts": [each["output"] for each in answers],
        "tokens": [each["output_tokens"] for each in answers],
    }


CLIENTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "guidellm": guidellm,
    "langchain_openai": langchain,
    "litellm": litellm,
    "llm": llm,
}
VECTOR_CLIENTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "langchain_openai": langchain_embeddings,
    "llama_index": llama_index_embeddings,
}

if __name__ == "__main__":
    clients = VECTOR_CLIENTS if sys.argv[3:] == ["vectors"] else CLIENTS
    sys.stdout.write(json.dumps(clients[sys.argv[1]](sys.argv[2])))
