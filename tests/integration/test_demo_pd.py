"""`penstock demo-pd`: clients get the answers of one engine, also without the prefill instance."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from penstock.cli.commands import make_parser
from penstock.kv_transfer.p2p.connector import TRANSPORTS
from tests.integration.server_process import serve
from tests.integration.test_vllm_router import answers, free_ports
from tests.integration.transfer_libraries import with_library

SECONDS = 120


def test_the_demo_accepts_every_transport_of_the_connector() -> None:
    for transport in TRANSPORTS:
        assert make_parser().parse_args(["demo-pd", "--transport", transport]).transport == transport
    with pytest.raises(SystemExit):
        make_parser().parse_args(["demo-pd", "--transport", "pigeons"])


class Demo:
    """A running `demo-pd`. `urls` are those of the prefill and the decode instance."""

    def __init__(self, process: subprocess.Popen[str], url: str, urls: list[str]) -> None:
        self.process = process
        self.url = url
        self.urls = urls

    def counter(self, instance: int, name: str) -> float:
        with urllib.request.urlopen(f"{self.urls[instance]}/metrics", timeout=SECONDS) as response:
            lines = response.read().decode().splitlines()
        found = [line for line in lines if f'name="{name}"' in line]
        return float(found[0].rpartition(" ")[2]) if found else 0.0


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with serve("--kv-cache-memory", "32MB") as one:
        return answers(one.url)


@pytest.fixture(
    params=[
        ("serial", "sockets"),
        ("concurrent", "sockets"),
        with_library("nixl", ("serial", "nixl"), exhaustive=True),
        with_library("mooncake", ("concurrent", "mooncake"), exhaustive=True),
    ],
    ids="-".join,
)
def demo(request: pytest.FixtureRequest) -> Iterator[Demo]:
    (port,), (style, transport) = free_ports(1), request.param
    command = [sys.executable, "-m", "penstock.cli.main", "demo-pd", "--port", str(port), "--style", style]
    command += ["--transport", transport, "--kv-cache-memory", "32MB"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: list[str] = []
    for line in process.stderr:
        lines.append(line)
        if "Ctrl-C" in line:
            break
    text = "".join(lines)
    urls = re.findall(r"to the (?:prefill|decode) instance +(http://\S+)/dashboard", text)
    assert len(urls) == 2, text
    yield Demo(process, f"http://127.0.0.1:{port}", urls)
    process.send_signal(signal.SIGTERM)
    rest = process.stderr.read()
    process.stderr.close()
    assert process.wait(SECONDS) == 0, text + rest
    assert "Traceback" not in text + rest, rest


@pytest.mark.long
def test_answers_errors_and_the_end_of_the_prefill_instance(demo: Demo, expected: list[Any]) -> None:
    assert answers(demo.url) == expected
    client = OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["demo"]
    with pytest.raises(BadRequestError, match="max_tokens"):
        client.completions.create(model="demo", prompt="x", max_tokens=-1)
    with pytest.raises(BadRequestError, match="JSON"):
        client.post("/completions", content=b"{", cast_to=object)
    assert demo.counter(1, "p2p_consumer_completed") > 0
    assert demo.counter(1, "p2p_consumer_refused") == 0
    with urllib.request.urlopen(f"{demo.url}/version", timeout=SECONDS) as response:
        assert json.load(response)
    # The instance and its engine core, which ends with it.
    os.kill(find_server(demo, 0), signal.SIGKILL)
    assert answers(demo.url) == expected


def find_server(demo: Demo, instance: int) -> int:
    """Returns the process that listens at an instance's address."""
    port = demo.urls[instance].rpartition(":")[2]
    children = f"/proc/{demo.process.pid}/task/{demo.process.pid}/children"
    with open(children, encoding="utf-8") as file:
        pids = [int(pid) for pid in file.read().split()]
    for pid in pids:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8") as file:
            if port in file.read().split("\0"):
                return pid
    raise AssertionError(f"no process of {pids} has port {port}")
