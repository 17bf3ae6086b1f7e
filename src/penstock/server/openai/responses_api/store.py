"""Stored responses that clients can retrieve and continue: in memory, bounded, separate for each API key."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.server import limits


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it was sent, and the conversation up to and including it, without its instructions."""

    body: dict[str, Any]
    messages: list[dict[str, Any]]


class ResponseStore:
    """Stores the newest responses as JSON, up to a number and a size; evicts the least recently used one. An `owner` is
    an API key, or None if the server has none: responses are not accessible with other keys. Thread-safe.
    """

    def __init__(
        self, max_responses: int = limits.MAX_STORED_RESPONSES, max_bytes: int = limits.MAX_STORED_RESPONSE_BYTES
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[bytes | None, str], bytes] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, owner: bytes | None, response: StoredResponse) -> None:
        """Stores a response, in place of one with its id, unless it alone is larger than the store."""
        self.remove(owner, response.body["id"])
        data = msgspec.json.encode(response)
        if len(data) > self._max_bytes:
            return
        with self._lock:
            self._entries[owner, response.body["id"]] = data
            self._num_bytes += len(data)
            while len(self._entries) > self._max_responses or self._num_bytes > self._max_bytes:
                self._num_bytes -= len(self._entries.popitem(last=False)[1])

    def get(self, owner: bytes | None, response_id: str) -> StoredResponse | None:
        """Returns the response and marks it as used."""
        with self._lock:
            data = self._entries.get((owner, response_id))
            if data is None:
                return None
            self._entries.move_to_end((owner, response_id))
        return msgspec.json.decode(data, type=StoredResponse)

    def remove(self, owner: bytes | None, response_id: str) -> bool:
        """Deletes a response; returns whether there was one."""
        with self._lock:
            data = self._entries.pop((owner, response_id), b"")
            self._num_bytes -= len(data)
        return bool(data)
