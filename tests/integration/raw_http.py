"""Raw HTTP, for tests that send what no client library would, and that choose when and how much they read."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Answer:
    """A response; header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """Returns the OpenAI error object; AssertionError if the body has none."""
        found = self.json()["error"]
        assert set(found) == {"message", "type", "param", "code"}, found
        return found


def call(
    url: str,
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    context: ssl.SSLContext | None = None,
) -> Answer:
    """Sends one request on a new connection; a `body` that is not bytes is sent as JSON."""
    place = urlsplit(url)
    assert place.hostname is not None
    if context is None:
        connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
    else:
        connection = http.client.HTTPSConnection(place.hostname, place.port, timeout=60, context=context)
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
        response = connection.getresponse()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


def connect(url: str, receive_buffer: int | None = None) -> socket.socket:
    """Opens a connection; `receive_buffer` limits the unread data, in bytes."""
    place = urlsplit(url)
    connection = socket.socket()
    connection.settimeout(60)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((place.hostname, place.port))
    return connection


def send_raw(url: str, data: bytes) -> Answer:
    """Sends exactly these bytes and reads one answer."""
    with connect(url) as connection:
        connection.sendall(data)
        response = http.client.HTTPResponse(connection)
        response.begin()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())


def post_bytes(path: str, body: Any, headers: dict[str, str] | None = None) -> bytes:
    """Returns the bytes of a whole POST request."""
    data = json.dumps(body).encode()
    head = {
        "Host": "localhost",
        "Content-Type": "application/json",
        "Content-Length": str(len(data)),
        **(headers or {}),
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + data


class Stream:
    """A POST whose answer is read event by event, if at all."""

    def __init__(self, url: str, path: str, body: Any, receive_buffer: int | None = None) -> None:
        self._connection = connect(url, receive_buffer)
        self._connection.sendall(post_bytes(path, body))
        self._response = http.client.HTTPResponse(self._connection)

    def begin(self) -> int:
        """Waits for the status and returns it."""
        self._response.begin()
        return self._response.status

    def events(self) -> Iterator[Any]:
        """Yields the events' JSON, and "[DONE]" where the server sends it."""
        while line := self._response.readline():
            if line.startswith(b"data: "):
                data = line[6:].strip()
                yield "[DONE]" if data == b"[DONE]" else json.loads(data)

    def read(self) -> Answer:
        """Reads the whole answer, of which nothing may have been read yet."""
        self._response.begin()
        headers = {k.lower(): v for k, v in self._response.getheaders()}
        return Answer(self._response.status, headers, self._response.read())

    def close(self) -> None:
        """Closes the connection, even before the end of the answer."""
        self._response.close()
        self._connection.close()


def eventually(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Waits until `condition` holds; AssertionError if it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.01)
