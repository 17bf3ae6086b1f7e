"""`penstock chat --url`: faults of the server and of the arguments end as errors that the conversation can show."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from penstock.cli.chat_models import RemoteModel
from penstock.utils.errors import ConfigError, PeerError, RequestError

DEEP = b"[" * 100_000
MESSAGES = [{"role": "user", "content": "Hello"}]


class Faulty(BaseHTTPRequestHandler):
    """Answers with the bytes that a test has chosen, and then closes the connection."""

    models: bytes
    answer: bytes
    status = 200
    length: int | None = None

    def do_GET(self) -> None:
        self._send(200, self.models)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send(self.status, self.answer)

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        if self.length is not None and status != 200:
            self.send_header("Content-Length", str(self.length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Faulty, "models", b'{"data": [{"id": "m", "max_model_len": "2048"}]}', raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Faulty) as httpd:
        threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
        httpd.shutdown()


@pytest.mark.parametrize(
    "models",
    [
        b"[]",
        b'"x"',
        b'{"data": ["m"]}',
        b'{"data": {"a": 1}}',
        b'{"data": [{"name": "m"}]}',
        b'{"data": [{"id": 5}]}',
        b'{"data": [{"id": "m", "max_model_len": 1e400}]}',
        DEEP,
    ],
    ids=lambda models: models[:40],
)
def test_a_malformed_list_of_models(models: bytes, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Faulty, "models", models)
    with pytest.raises(ConfigError, match=f"--url {server}: the server's answer cannot be read"):
        RemoteModel(server, None, None, {})


@pytest.mark.parametrize(
    "event",
    [
        b'{"choices": ["x"]}',
        b'{"choices": [{"delta": "x"}]}',
        b'{"choices": [{"delta": {"content": ["x"]}}]}',
        b"{nonsense",
        DEEP,
    ],
    ids=lambda event: event[:40],
)
def test_a_malformed_event(event: bytes, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Faulty, "answer", b"data: " + event + b"\n\ndata: [DONE]\n\n", raising=False)
    model = RemoteModel(server, None, None, {})
    assert (model.name, model.context) == ("m", 2048)
    with pytest.raises(PeerError, match="the server's answer cannot be read"):
        list(model.answer(MESSAGES))
    assert model.count_tokens(MESSAGES) is None


def test_lone_surrogates_are_replaced(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    event = json.dumps({"choices": [{"delta": {"content": "a\ud800b"}}]}).encode()
    monkeypatch.setattr(Faulty, "answer", b"data: " + event + b"\n\ndata: [DONE]\n\n", raising=False)
    assert list(RemoteModel(server, None, None, {}).answer(MESSAGES)) == ["a?b"]


@pytest.mark.parametrize(("body", "shown"), [(b'{"error":', 'status 500: {"error":'), (DEEP, r"status 500: \[\[\[")])
def test_an_error_that_is_cut_off_or_malformed(
    body: bytes, shown: str, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("answer", body), ("status", 500), ("length", len(body) + 100)):
        monkeypatch.setattr(Faulty, name, value, raising=False)
    with pytest.raises(RequestError, match=shown):
        list(RemoteModel(server, None, None, {}).answer(MESSAGES))


@pytest.mark.parametrize(
    ("url", "key", "message"),
    [
        ("http://[::1", None, "--url http://[::1: the request cannot be sent: Invalid IPv6 URL"),
        ("http://foo..bar", None, "--url http://foo..bar: the request cannot be sent: "),
        ("http://127.0.0.1:9/é", None, "--url http://127.0.0.1:9/é: the request cannot be sent: "),
        ("http://127.0.0.1:9", "ключ", "--api-key (or PENSTOCK_API_KEY) must be printable ASCII"),
        ("http://127.0.0.1:9", "a\nb", "--api-key (or PENSTOCK_API_KEY) must be printable ASCII"),
    ],
)
def test_invalid_addresses_and_keys(url: str, key: str | None, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RemoteModel(url, key, None, {})
    assert str(caught.value).startswith(message)
