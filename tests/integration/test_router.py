"""`penstock route` in front of real engines: the tokens of one engine, and conversations that stay with their KV."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from openai import InternalServerError, OpenAI

from tests.integration.server_process import ServerProcess, serve
from tests.integration.test_vllm_router import PROMPTS, answers, free_ports, instance, metric
from tests.unit.router_stubs import SECONDS

MEMORY = ("--kv-cache-memory", "32MB")


@dataclass
class Router:
    process: subprocess.Popen[str]
    url: str
    admin_url: str

    def get(self, path: str, *, is_admin: bool = False) -> Any:
        with urllib.request.urlopen((self.admin_url if is_admin else self.url) + path, timeout=SECONDS) as response:
            return response.read().decode()

    def instances(self) -> dict[str, Any]:
        return {each["url"]: each for each in json.loads(self.get("/instances", is_admin=True))["instances"]}

    def administer(self, path: str, **fields: Any) -> None:
        request = urllib.request.Request(self.admin_url + path, json.dumps(fields).encode(), method="POST")
        urllib.request.urlopen(request, timeout=SECONDS).close()

    def counter(self, name: str) -> float:
        lines = [line for line in self.get("/metrics").splitlines() if re.match(re.escape(name) + r"(\{| )", line)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        for _ in range(600):
            if condition(self.instances()):
                return
            threading.Event().wait(0.1)
        raise AssertionError(self.instances())


@contextlib.contextmanager
def route(*flags: str) -> Iterator[Router]:
    command = [sys.executable, "-m", "penstock.cli.main", "route", "--port", "0", "--admin-port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    log: list[str] = []
    urls: list[str] = []
    for line in process.stderr:
        log.append(line)
        urls += re.findall(r"routes (\S+)/v1 to|^Administration and status at (\S+)", line)
        if len(urls) == 2:
            break
    try:
        assert len(urls) == 2, "".join(log)
        yield Router(process, urls[0][0], urls[1][1])
    finally:
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        process.stderr.close()
        code = process.wait(SECONDS)
    assert code == 0, "".join(log) + rest
    assert "Traceback" not in "".join(log) + rest, rest


def ask(url: str) -> list[str]:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    options: Any = {"model": "demo", "max_tokens": 8, "temperature": 0}
    done = client.completions.create(prompt=PROMPTS[0], **options)
    chunks = client.completions.create(prompt=PROMPTS[1], stream=True, **options)
    return [done.choices[0].text, "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)]


@pytest.mark.long
def test_tokens_are_those_of_one_engine_while_instances_die() -> None:
    with (
        serve(*MEMORY) as one,
        instance("nixl", "p1") as p1,
        instance("nixl", "p2") as p2,
        instance("nixl", "d") as d,
        route(
            "--prefill", p1.url, "--prefill", p2.url, "--decode", d.url, "--dead-after", "1", "--max-local-prefill", "0"
        ) as router,
    ):
        assert answers(router.url) == answers(one.url)
        assert metric(d, "p2p_consumer_completed") > 0
        assert metric(d, "p2p_consumer_refused") == 0
        expected = ask(one.url)
        os.kill(p1.pid, signal.SIGKILL)
        assert ask(router.url) == expected
        assert router.counter("penstock_router_self_prefills_total") == 0, "the other prefill instance is still there"
        os.kill(p2.pid, signal.SIGKILL)
        assert ask(router.url) == expected
        assert router.counter("penstock_router_self_prefills_total") > 0
        assert router.counter("vllm_router_request_errors_total") == 0
        # One engine replaces all three.
        router.administer("/instances", url=one.url)
        router.until(lambda found: found[one.url]["state"] == "ready")
        os.kill(d.pid, signal.SIGKILL)
        assert ask(router.url) == expected
        router.administer("/drain", url=one.url)
        router.until(lambda found: found[d.url]["state"] == "dead")
        with pytest.raises(InternalServerError, match="no instance is left"):
            ask(router.url)


@pytest.mark.long
def test_short_prompts_are_computed_where_they_are_answered() -> None:
    with (
        instance("nixl", "p") as p,
        instance("nixl", "d") as d,
        route("--prefill", p.url, "--decode", d.url) as router,
    ):
        client = OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)
        options: Any = {"model": "demo", "max_tokens": 8, "temperature": 0, "stream": True}
        texts: list[str] = []
        for number in range(4):
            chunks = client.completions.create(prompt=f"{number}. The key of Anna is", **options)
            texts.append("".join(chunk.choices[0].text for chunk in chunks if chunk.choices))
        assert router.counter('penstock_router_prompts_total{computing="prefill"}') >= 1
        assert router.counter('penstock_router_prompts_total{computing="decode"}') >= 1
        assert router.counter("penstock_router_prefill_tokens_per_second") > 0
        direct = OpenAI(base_url=f"{p.url}/v1", api_key="none", max_retries=0)
        for number, text in enumerate(texts):
            chunks = direct.completions.create(prompt=f"{number}. The key of Anna is", **options)
            assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == text


@contextlib.contextmanager
def servers_with_events(count: int, *flags: str) -> Iterator[list[tuple[ServerProcess, str]]]:
    """Starts servers that publish KV events; yields each with the router's argument for it."""
    with contextlib.ExitStack() as stack:
        found: list[tuple[ServerProcess, str]] = []
        for _ in range(count):
            events, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
            config = {"enable_kv_cache_events": True, "endpoint": events, "replay_endpoint": replay}
            server = stack.enter_context(serve(*MEMORY, *flags, "--kv-events-config", json.dumps(config)))
            found.append((server, f"{server.url},events={events},replay={replay}"))
        yield found


def turn(client: OpenAI, messages: list[Any]) -> Any:
    """Adds a turn to a conversation; returns its usage."""
    done = client.chat.completions.create(model="demo", messages=messages, max_tokens=8, temperature=0)
    messages += [
        {"role": "assistant", "content": done.choices[0].message.content or "-"},
        {"role": "user", "content": "And what else do you know about it?"},
    ]
    return done.usage


def test_conversations_stay_where_their_kv_is() -> None:
    text = "The key of Anna is in the red box. The key of Ben is under the old bridge. " * 6
    with (
        servers_with_events(2) as servers,
        route(*(flag for _, text in servers for flag in ("--serve", text))) as router,
    ):
        client = OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)
        # Each instance gets one conversation: idle ones are chosen in turn, once the KV of the last one is known.
        talks: list[list[Any]] = [[{"role": "user", "content": f"{n}. {text}"}] for n in range(2)]
        for talk in talks:
            blocks = sum(each["blocks"] for each in router.instances().values())
            turn(client, talk)
            router.until(lambda found, known=blocks: sum(each["blocks"] for each in found.values()) > known)
        assert [each["requests"] for each in router.instances().values()] == [1, 1]
        for _ in range(3):
            for talk in (talks[1], talks[0]):
                usage = turn(client, talk)
                assert usage.prompt_tokens_details.cached_tokens > 0.5 * usage.prompt_tokens
        assert all(each["hit_rate"] > 0.4 for each in router.instances().values())
        measured = router.counter("penstock_router_cached_tokens_total")
        assert 0 < router.counter("penstock_router_expected_cached_tokens_total") <= measured
        # The blocks of a dead instance are forgotten.
        os.kill(servers[0][0].pid, signal.SIGKILL)
        usage = turn(client, talks[0])
        assert usage.completion_tokens > 0


@pytest.mark.long
def test_a_beginning_is_loaded_from_the_instance_that_has_it() -> None:
    both = {"kv_connector": "P2PConnector", "kv_role": "kv_both"}
    prompt = [number % 200 + 20 for number in range(620)]
    options: Any = {"model": "demo", "temperature": 0}
    endless: Any = {**options, "extra_body": {"ignore_eos": True}}
    with (
        servers_with_events(2, "--kv-transfer-config", json.dumps(both)) as servers,
        route(*(flag for _, text in servers for flag in ("--serve", text))) as router,
    ):
        has, _ = (server.url for server, _ in servers)
        direct = OpenAI(base_url=f"{has}/v1", api_key="none", max_retries=0)
        expected = direct.completions.create(prompt=[*prompt, 30, 31], max_tokens=8, **options).choices[0].text
        router.until(lambda found: found[has]["blocks"] >= len(prompt) // 16)
        client = OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)
        # The first measures how fast prompts are computed; all go where the prompt is, until that has too much to do.
        streams = []
        for number in range(3):
            stream = client.completions.create(prompt=[*prompt, number], max_tokens=900, stream=True, **endless)
            next(iter(stream))
            streams.append(stream)
        done = client.completions.create(prompt=[*prompt, 30, 31], max_tokens=8, **options)
        for stream in streams:
            stream.close()
        assert done.choices[0].text == expected
        assert done.usage is not None
        assert done.usage.prompt_tokens_details is not None
        assert done.usage.prompt_tokens_details.cached_tokens == len(prompt) // 16 * 16
        assert router.counter('penstock_router_prompts_total{computing="sibling"}') == 1
        assert metric(servers[1][0], "p2p_consumer_completed") == 1
