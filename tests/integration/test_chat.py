"""`penstock chat` and Ctrl-C, in a real terminal."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.integration.server_process import serve
from tests.integration.terminal import CTRL_C, CTRL_D, PENSTOCK, Terminal, in_terminal

SMALL = ("--max-model-len", "128", "--kv-cache-memory", "20MB")
INTERRUPTED = 130


def converse(terminal: Terminal) -> str:
    """Holds the conversation of both tests; returns what the terminal showed."""
    terminal.say(b"/help")
    terminal.say(b"/hlep")
    terminal.say(b"What is 123 + 456?")
    terminal.read_until(b"579")
    terminal.say(b"What is \\")
    terminal.read_until(b". ")
    terminal.type(b"2 + 2?\n")
    terminal.read_until(b"4")
    terminal.say(b'"""')
    for line in (b"Hello", b'What are you?"""'):
        terminal.read_until(b". ")
        terminal.type(line + b"\n")
    terminal.read_until(b"I am Penstock's small built-in demonstration model")
    terminal.say(b"What is 100 + 100?")
    terminal.read_until(b"200")
    terminal.say(b"What is 200 + 200?")
    terminal.read_until(b"400")
    terminal.say(b"Tell me a story.")
    terminal.read_until(b"[the answer ends here")
    terminal.say(b"word " * 200)
    terminal.say(b"/clear")
    terminal.read_until(b"> ")
    terminal.type(CTRL_D)
    assert terminal.wait() == 0
    shown = terminal.shown.decode().replace("\r\n", "\n")
    assert "/clear   forgets the conversation" in shown
    assert "unknown command /hlep; did you mean /help?" in shown
    assert "[the context of 128 tokens is full: the oldest turn was dropped from the conversation]" in shown
    assert "penstock: the message makes a prompt of " in shown
    assert "The conversation is empty again." in shown
    return shown


def test_a_conversation_with_an_engine_in_the_process() -> None:
    with in_terminal([*PENSTOCK, "chat", "demo", "--temperature", "0", "--max-tokens", "30", *SMALL]) as terminal:
        shown = converse(terminal)
    assert shown.startswith("Loading demo ...\n  model ")
    assert "[the answer ends here: it has reached --max-tokens or the end of the context]" in shown


def test_a_conversation_with_a_server() -> None:
    with serve(*SMALL, "--api-key", "sesame") as server:
        command = [*PENSTOCK, "chat", "--url", f"{server.url}/v1", "--temperature", "0", "--max-tokens", "30"]
        with in_terminal(command, {"PENSTOCK_API_KEY": "sesame"}) as terminal:
            shown = converse(terminal)
        assert shown.startswith(f"Connected to {server.url}/v1: demo, context 128 tokens\n")
        with in_terminal([*command, "--api-key", "wrong"]) as terminal:
            assert terminal.wait() == 2
        assert b"the server refused the API key: pass --api-key" in terminal.shown


def test_ctrl_c_stops_an_answer_and_clears_a_line() -> None:
    with in_terminal([*PENSTOCK, "chat", "--max-model-len", "512", "--kv-cache-memory", "20MB"]) as terminal:
        terminal.say(b"Tell me a long story.")
        terminal.read_until(b"\n")  # after the question
        terminal.read_until(b" ")
        terminal.type(CTRL_C)
        terminal.read_until(b"> ")
        terminal.type(b"not this")
        terminal.read_until(b"not this")
        terminal.discard_line()
        terminal.say(b"What is 123 + 456?")
        terminal.read_until(b"579")
        terminal.say(b"/exit")
        assert terminal.wait() == 0
    assert b"Traceback" not in terminal.shown


STARTS = {
    "serve": ("serve", "--port", "0", "--kv-cache-memory", "20MB"),
    "chat": ("chat", "--kv-cache-memory", "20MB"),
    "simulate": ("simulate", "--count", "300", "--jobs", "2"),
    "verify": ("verify", "--soak", "1"),
}


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", STARTS)
def test_ctrl_c_during_the_start_ends_without_a_traceback(name: str) -> None:
    """Tries several moments, from the first import to the start of child processes and the load of the model."""
    for delay in (0.15, 0.3, 0.6, 1.2, 2.4, *((12.0,) if name == "verify" else ())):
        with in_terminal([*PENSTOCK, *STARTS[name]]) as terminal:
            time.sleep(delay)
            terminal.type(CTRL_C)
            if name == "chat":
                terminal.type(CTRL_D)  # at its prompt, Ctrl-C only discards a line
            code = terminal.wait()
        # A slow machine has not begun to run Penstock's code; a fast one has started the server.
        assert code in (0, INTERRUPTED) or delay < 0.5, (delay, terminal.shown)
        assert b"Traceback" not in terminal.shown or b"penstock" not in terminal.shown, (delay, terminal.shown)


class Foreign(BaseHTTPRequestHandler):
    """A server of another project: it has no /tokenize, states no context length, and refuses long conversations."""

    protocol_version = "HTTP/1.1"
    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "foreign"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            self._answer(404, {"detail": "Not Found"})
            return
        self.asked.append(body)
        if len(body["messages"]) > 3:
            self._answer(400, {"error": {"message": "This model's maximum context length is 9 tokens.", "code": None}})
            return
        if body["messages"][-1]["content"] == "break":
            self._stream([b'data: {"choices": [{"delta": {"content": "half"}}]}\n\n'])
            return
        chunks = [{"choices": [{"delta": {"role": "assistant"}}]}, {"choices": [{"delta": {"content": "fine"}}]}]
        end: dict[str, Any] = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
        self._stream([f"data: {json.dumps(each)}\n\n".encode() for each in (*chunks, end)] + [b"data: [DONE]\n\n"])

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, events: list[bytes]) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        for event in events:
            self.wfile.write(event)
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def foreign() -> Iterator[str]:
    Foreign.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Foreign) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_server_of_another_project(foreign: str) -> None:
    with in_terminal([*PENSTOCK, "chat", "--url", foreign, "--system", "Be brief."]) as terminal:
        for text in (b"one", b"two", b"break", b"three"):
            terminal.say(text)
        terminal.say(b"/exit")
        assert terminal.wait() == 0
    shown = terminal.shown.decode()
    assert f"Connected to {foreign}: foreign\r\n" in shown
    assert "[the context is full: the oldest turn was dropped from the conversation]" in shown
    assert "penstock: the connection ended before the answer did" in shown
    sent = [[message["content"] for message in body["messages"]] for body in Foreign.asked]
    assert sent[0] == ["Be brief.", "one"]
    # Refused with the first turn, then sent without it.
    assert sent[1:3] == [["Be brief.", "one", "fine", "two"], ["Be brief.", "two"]]
    assert sent[-1] == ["Be brief.", "three"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "the server cannot be reached"),
        (["--url", "127.0.0.1:9"], "must begin with http://"),
        (["--url", "http://127.0.0.1:9", "--max-model-len", "64"], "--max-model-len is for an engine in this process"),
        (["--api-key", "x"], "pass --url too"),
    ],
)
def test_invalid_arguments(arguments: list[str], message: str) -> None:
    with in_terminal([*PENSTOCK, "chat", *arguments]) as terminal:
        assert terminal.wait() == 2
    assert message in terminal.shown.decode()
