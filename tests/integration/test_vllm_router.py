"""vLLM's router in front of Penstock's engines: tokens are those of one engine, in both of its styles."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.integration.server_process import ServerProcess, serve

SECONDS = 60
MODEL = "demo"
STYLES = {"nixl": "NixlConnector", "mooncake": "MooncakeConnector"}
FACT = "Remember this. The key of Anna is in the red box. The key of Ben is under the old bridge. "
PROMPTS = [FACT * (number % 3 + 1) + f"Number {number}." for number in range(6)]
MESSAGES: Any = [{"role": "user", "content": FACT + "Where is the key of Ben?"}]


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def instance(style: str, name: str, **extra: Any) -> contextlib.AbstractContextManager[ServerProcess]:
    config = {
        "kv_connector": STYLES[style],
        "kv_role": "kv_producer" if name.startswith("p") else "kv_consumer",
        "engine_id": name,
        "kv_connector_extra_config": {"transport": "sockets", **extra},
    }
    return serve("--kv-cache-memory", "32MB", "--kv-transfer-config", json.dumps(config))


@contextlib.contextmanager
def router(*flags: str) -> Iterator[str]:
    """Starts the router; yields its URL once it has found all instances healthy."""
    port, metrics = free_ports(2)
    program = shutil.which("vllm-router", path=str(Path(sys.executable).parent))
    assert program is not None, "vllm-router is not installed: make .venv/.installed-dev"
    command = [program, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    command += ["--vllm-pd-disaggregation", "--policy", "round_robin", "--worker-startup-check-interval", "1", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        log.extend(process.stdout)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    url, waiting = f"http://127.0.0.1:{port}", threading.Event()
    try:
        for _ in range(SECONDS * 10):
            assert process.poll() is None, "".join(log)
            with (
                contextlib.suppress(urllib.error.URLError, OSError),
                urllib.request.urlopen(f"{url}/health", timeout=5),
            ):
                break
            waiting.wait(0.1)
        yield url
    finally:
        process.kill()
        process.wait()
        reading.join(10)
        assert process.stdout is not None
        process.stdout.close()


def metric(server: ServerProcess, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=SECONDS) as response:
        lines = response.read().decode().splitlines()
    found = [line for line in lines if f'name="{name}"' in line]
    return float(found[0].rpartition(" ")[2]) if found else 0.0


def answers(url: str) -> list[Any]:
    """Returns completions and chats, streamed and not, through OpenAI's client."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    found: list[Any] = []
    for number, prompt in enumerate(PROMPTS):
        # Seeded as well as greedy: tokens do not depend on the engine that computes the prompt.
        options: Any = {"model": MODEL, "max_tokens": 16, "temperature": number % 2, "seed": number}
        done = client.completions.create(prompt=prompt, **options)
        chunks = client.completions.create(prompt=prompt + " More.", stream=True, **options)
        found += [done.choices[0].text, "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)]
    options = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 20}
    found.append(client.chat.completions.create(**options).choices[0].message.content)
    stream: Any = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    found.append("".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices))
    return found


@pytest.mark.long
@pytest.mark.parametrize("style", STYLES)
def test_one_prefill_and_two_decode_instances(style: str) -> None:
    with serve("--kv-cache-memory", "32MB") as one:
        expected = answers(one.url)
    (bootstrap,) = free_ports(1)
    extra = {"bootstrap_port": bootstrap} if style == "mooncake" else {}
    with (
        instance(style, "p", **extra) as prefill,
        instance(style, "d1") as first,
        instance(style, "d2") as second,
    ):
        where = ["--prefill", prefill.url, *([str(bootstrap)] if style == "mooncake" else [])]
        where += ["--decode", first.url, "--decode", second.url]
        with router("--kv-connector", style, *where) as url:
            assert answers(url) == expected
        decodes = (first, second)
        loads = [metric(each, "p2p_consumer_completed") for each in decodes]
        unneeded = [metric(each, "p2p_consumer_not_needed") for each in decodes]
        assert all(loads), "one of the decode instances has loaded nothing"
        assert sum(loads) + sum(unneeded) == len(expected)
        assert [metric(each, "p2p_consumer_refused") for each in decodes] == [0, 0]
        assert metric(prefill, "p2p_held") == 0
