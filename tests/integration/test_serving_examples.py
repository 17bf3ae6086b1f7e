"""The curl examples of README.md and docs/SERVING.md, against a server with the built-in model."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.server_process import ServerProcess, serve
from tests.integration.test_server_openai import call

ROOT = Path(__file__).parents[2]
_COMMAND = re.compile(r"^curl (?:-N )?localhost:8000/(?:[^\n]|\n(?!```|[a-z]))*", re.MULTILINE)


def examples(name: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns path and body of every curl command that posts."""
    found: list[tuple[str, dict[str, Any]]] = []
    for command in _COMMAND.findall((ROOT / name).read_text(encoding="utf-8")):
        words = shlex.split(command.replace("\\\n", " "), comments=False)
        url = next(word for word in words if word.startswith("localhost"))
        found.append((url.removeprefix("localhost:8000"), json.loads(words[words.index("-d") + 1])))
    return found


README, SERVING = examples("README.md"), examples("docs/SERVING.md")
WEATHER = [body for path, body in (*README, *SERVING) if path == "/v1/chat/completions" and "tools" in body]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serve() as server:
        yield server


def test_there_are_examples() -> None:
    assert len(WEATHER) == 2
    assert {path for path, _ in SERVING} == {
        "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body"), [*README, *SERVING], ids=lambda value: value if isinstance(value, str) else ""
)
def test_an_example_is_answered(server: ServerProcess, path: str, body: dict[str, Any]) -> None:
    status, answer = call(server.url + path, body)
    assert status == 200, answer
    if path == "/v1/completions":
        assert answer.endswith("data: [DONE]\n\n")
    elif body.get("stream"):
        assert "event: response.completed" in answer
        status, whole = call(server.url + path, {**body, "stream": False})
        assert (status, whole["output"][0]["content"][0]["text"]) == (200, '{"name": "Tom", "age": 12}')
        assert '{\\"name\\": \\"Tom\\", \\"age\\": 12}' in answer


def called(server: ServerProcess, body: dict[str, Any]) -> list[tuple[str, Any]]:
    status, answer = call(f"{server.url}/v1/chat/completions", body)
    assert status == 200, answer
    message = answer["choices"][0]["message"]
    calls = [
        (each["function"]["name"], json.loads(each["function"]["arguments"])) for each in message.get("tool_calls", ())
    ]
    assert answer["choices"][0]["finish_reason"] == ("tool_calls" if calls else "stop")
    return calls


@pytest.mark.parametrize("body", WEATHER, ids=["README", "SERVING"])
def test_the_built_in_model_calls_the_tool_of_the_examples(server: ServerProcess, body: dict[str, Any]) -> None:
    assert called(server, body) == [("get_weather", {"city": "Paris"})]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "question",
    ["What is the weather in Paris?", "What's the weather in Paris?", "How is the weather in Paris today?"],
)
def test_a_strict_tool_is_called_in_any_wording(server: ServerProcess, question: str) -> None:
    (tool,) = WEATHER[0]["tools"]
    strict = {**tool, "function": {**tool["function"], "strict": True}}
    messages = [{"role": "user", "content": question}]
    assert called(server, {"messages": messages, "tools": [strict]}) == [("get_weather", {"city": "Paris"})]
    status, answer = call(
        f"{server.url}/v1/chat/completions", {"messages": messages, "tools": [strict], "tool_choice": "none"}
    )
    assert status == 200
    message = answer["choices"][0]["message"]
    assert "tool_call" not in json.dumps(message)
    assert message["content"]
    assert called(server, {"messages": [{"role": "user", "content": "Tell me a story."}], "tools": [strict]}) == []


def test_the_messages_example_calls_the_tool(server: ServerProcess) -> None:
    body = next(body for path, body in SERVING if path == "/v1/messages")
    _, answer = call(f"{server.url}/v1/messages", body)
    assert [(block["type"], block.get("input")) for block in answer["content"]] == [("tool_use", {"city": "Paris"})]
