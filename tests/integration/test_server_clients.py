"""Runs other projects' client libraries, unmodified, against the server. OpenAI's is in test_server_openai."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.clients import CLIENTS
from tests.integration.raw_http import call
from tests.integration.server_process import ServerProcess, serve

TOOL = ["get_weather", ["city"]]
FIVE = "2 + 3 = 5."


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serve() as server:
        yield server


def run(name: str, server: ServerProcess, *kind: str) -> dict[str, Any]:
    """Runs a client in a separate process; returns its output."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install -c constraints.txt -e '.[dev]'")
    command = [sys.executable, "-m", "tests.integration.clients", name, server.url, *kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_client_has_a_test() -> None:
    assert {f"test_{name}" for name in CLIENTS} <= set(globals())


def story(server: ServerProcess) -> str:
    body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    return call(server.url, "POST", "/v1/completions", body).json()["choices"][0]["text"]


@pytest.mark.long
def test_guidellm(server: ServerProcess) -> None:
    made = {"successful": 4, "errored": 0, "incomplete": 0, "total": 4}
    assert run("guidellm", server) == {"requests": made, "texts": [story(server)] * 4, "tokens": [8] * 4}


@pytest.mark.long
def test_langchain_openai(server: ServerProcess) -> None:
    found = run("langchain_openai", server)
    assert (found["whole"], found["streamed"], found["several"]) == (FIVE, FIVE, [FIVE, FIVE])
    assert found["usage"]
    assert (found["tool"], found["shaped"]) == (TOOL, ["city"])
    assert found["turns"]
    assert found["text"] == story(server)


@pytest.mark.long
def test_litellm(server: ServerProcess) -> None:
    found = run("litellm", server)
    assert found.pop("text") == story(server)
    for answers in found.values():
        assert answers == {"whole": FIVE, "streamed": FIVE, "tool": TOOL, "cached": FIVE, "extra": FIVE}


def test_llm(server: ServerProcess) -> None:
    assert run("llm", server) == {"whole": FIVE, "streamed": FIVE, "text": story(server)}
