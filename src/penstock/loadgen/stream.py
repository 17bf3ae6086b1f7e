"""One response, timed as its bytes arrive. Sans-IO: the caller reads the socket and passes the bytes and the time."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, json.JSONDecodeError)
"""The errors of reading JSON that is invalid, or has another form than expected."""


@dataclass(slots=True)
class Outcome:
    """The outcome of one request. Times are in seconds; `error` is empty if it succeeded.

    `itls` are the gaps between the chunks that carry output, however many tokens a chunk carries; `latency` runs from
    the sending to the last of them. If the server reports no usage, `has_usage` is False and each chunk counts as one
    token.
    """

    started: float
    prompt_len: int
    output_len: int = 0
    ttft: float = 0.0
    itls: list[float] = field(default_factory=list[float])
    latency: float = 0.0
    text: str = ""
    error: str = ""
    has_usage: bool = False

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first; 0 if there is only one."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0


class EventReader:
    """Splits a body into server-sent events. Raises ValueError for one that is larger than `max_bytes`."""

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self._max_bytes = max_bytes
        self._rest = b""

    def receive(self, data: bytes) -> list[bytes]:
        """Takes bytes as they arrive, divided anywhere. Returns the data of the events that are complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self._max_bytes:
            raise ValueError(f"an event is larger than {self._max_bytes >> 20} MiB")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class ResponseStream:
    """Reads the server-sent events of `/v1/completions` or `/v1/chat/completions`; `finish` returns the result."""

    def __init__(self, started: float, prompt_len: int) -> None:
        self._outcome = Outcome(started, prompt_len)
        self._texts: list[str] = []
        self._events = EventReader()
        self._newest = started
        self._ended = False

    def receive(self, data: bytes, now: float) -> None:
        """Takes bytes as they arrive, divided anywhere. Raises ValueError for an error event or an invalid one."""
        for event in self._events.receive(data):
            self._take_event(event, now)

    def finish(self, error: str = "") -> Outcome:
        """Ends the response; `error` is the failure that ended it early, if any."""
        outcome = self._outcome
        outcome.text = "".join(self._texts)
        outcome.latency = self._newest - outcome.started
        if not outcome.has_usage:
            outcome.output_len = len(self._texts)
        outcome.error = error
        if not error and not self._ended:
            outcome.error = "the stream ended before the response did"
        elif not error and not self._texts:
            outcome.error = "the response has no output"
        return outcome

    def _take_event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._ended = True
            return
        try:
            event = json.loads(data)
            choices, usage, error = event.get("choices"), event.get("usage"), event.get("error")
            if error:
                raise ValueError(f"the server reported: {error_message(event)}")
            if choices:
                self._take_choice(choices[0], now)
            if usage:
                self._take_usage(usage)
        except MALFORMED:
            raise ValueError(f"not an event of the OpenAI API: {data[:100]!r}") from None

    def _take_choice(self, choice: dict[str, Any], now: float) -> None:
        if choice.get("finish_reason"):
            self._ended = True
        message = choice.get("delta", choice)
        text = message.get("content") or message.get("reasoning_content") or message.get("text") or ""
        if not isinstance(text, str):
            raise TypeError("the text is not a string")
        if not text and message.get("role") and not self._ended:
            # A chat begins with a chunk that has the role and no token. Any other chunk without text is a token without
            # text: a special one, or a piece of a character.
            return
        if self._texts:
            self._outcome.itls.append(now - self._newest)
        else:
            self._outcome.ttft = now - self._outcome.started
        self._newest = now
        self._texts.append(text)

    def _take_usage(self, usage: dict[str, Any]) -> None:
        self._outcome.output_len = _count(usage["completion_tokens"])
        self._outcome.prompt_len = _count(usage.get("prompt_tokens", self._outcome.prompt_len))
        self._outcome.has_usage = True


def take_vector(body: bytes, outcome: Outcome) -> None:
    """Reads a response of `/v1/embeddings` into `outcome`. Raises ValueError if it has no vector."""
    try:
        response = json.loads(body)
        if not response["data"][0]["embedding"]:
            raise ValueError("the response has no vector")
        outcome.prompt_len = _count((response.get("usage") or {}).get("prompt_tokens", outcome.prompt_len))
    except MALFORMED:
        raise ValueError(f"not a response of /v1/embeddings: {body[:100]!r}") from None


def _count(value: Any) -> int:
    """Raises OverflowError for a number of tokens that cannot be one."""
    count = int(value)
    if not 0 <= count < 2**63:
        raise OverflowError(f"{count} tokens")
    return count


def error_message(body: Any) -> str:
    """Returns the message in an OpenAI error body, or the body as it is."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)
