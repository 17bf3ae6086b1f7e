"""`GET /query` on the control port, with which Mooncake-style proxies find an engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def query_answer(path: bytes, answer: Mapping[str, Any] | None) -> bytes:
    """Returns the HTTP response; 503 as long as there is no answer."""
    if path != b"/query":
        status, body = "404 Not Found", b'{"error": "there is only /query here"}'
    elif answer is None:
        status, body = "503 Service Unavailable", b'{"error": "the engine is starting"}'
    else:
        status, body = "200 OK", json.dumps(answer).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body
