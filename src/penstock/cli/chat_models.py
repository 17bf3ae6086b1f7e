"""The backends of `penstock chat`: an engine in this process, or a server with the OpenAI API."""

from __future__ import annotations

import contextlib
import http
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from penstock.loadgen.stream import MALFORMED, error_message
from penstock.utils.errors import ConfigError, PeerError, PenstockError, RequestError

if TYPE_CHECKING:
    from penstock.frontend.llm import LLM
    from penstock.messages.sampling_params import SamplingParams

CONTEXT_FULL = "context_length_exceeded"
_LOOKUP_SECONDS = 30.0
_SILENCE_SECONDS = 600.0
_ERROR_CHARACTERS = 300
_MAX_ERROR_BYTES = 64 << 10
_UNREADABLE = (*MALFORMED, OSError, ValueError, http.client.HTTPException)

Message = dict[str, str]
Messages = Sequence[Message]


class ChatModel(Protocol):
    """Answers conversations. `context` is the maximum of prompt plus answer tokens, None if unknown."""

    context: int | None

    def count_tokens(self, messages: Messages) -> int | None:
        """Returns the number of prompt tokens of these messages, None if they cannot be counted."""
        ...

    def answer(self, messages: Messages) -> Generator[str, None, str | None]:
        """Yields the pieces of the answer and returns its finish reason. Closing it ends the answer.

        Raises RequestError, with the code `CONTEXT_FULL` if the messages are too long, and other PenstockErrors.
        """
        ...

    def close(self) -> None: ...


class LocalModel:
    """An engine in this process."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self._llm = llm
        self._params = params
        self.context: int | None = llm.max_model_len

    def count_tokens(self, messages: Messages) -> int | None:
        return len(self._tokens(messages))

    def answer(self, messages: Messages) -> Generator[str, None, str | None]:
        shown, reason = 0, None
        with contextlib.closing(self._llm.stream({"prompt_token_ids": self._tokens(messages)}, self._params)) as stream:
            for output in stream:
                completion = output.outputs[0]
                yield completion.text[shown:]
                shown, reason = len(completion.text), completion.finish_reason
                if output.error:
                    raise PenstockError(output.error)
        return reason

    def close(self) -> None:
        self._llm.shutdown()

    def _tokens(self, messages: Messages) -> list[int]:
        return self._llm.get_tokenizer().apply_chat_template(messages)


class RemoteModel:
    """A model of a server with the OpenAI API. `options` are the requested sampling parameters. Messages are counted by
    the server's /tokenize, if it has one. Raises ConfigError when the server cannot be reached or has no such model.
    """

    def __init__(self, url: str, api_key: str | None, name: str | None, options: Mapping[str, Any]) -> None:
        self._base = url.rstrip("/").removesuffix("/v1")
        if not self._base.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url} must begin with http:// or https://")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            if not (api_key.isascii() and api_key.isprintable()):
                raise ConfigError("--api-key (or PENSTOCK_API_KEY) must be printable ASCII, as headers are")
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._options = options
        self._can_count = True
        self.name, self.context = self._find(name)

    def count_tokens(self, messages: Messages) -> int | None:
        if self._can_count:
            with contextlib.suppress(PenstockError), _reading():
                return int(self._call("/tokenize", {"model": self.name, "messages": list(messages)})["count"])
            self._can_count = False
        return None

    def answer(self, messages: Messages) -> Generator[str, None, str | None]:
        body = {"model": self.name, "messages": list(messages), "stream": True, **self._options}
        reason: str | None = None
        with self._open("/v1/chat/completions", body, _SILENCE_SECONDS) as response, _reading():
            for event in _events(response):
                if event.get("error"):
                    raise RequestError(_error_message(event), None, _error_code(event))
                for choice in event.get("choices") or ():
                    # Text may have lone surrogates, which no terminal can show.
                    yield ((choice.get("delta") or {}).get("content") or "").encode(errors="replace").decode()
                    reason = choice.get("finish_reason") or reason
        return reason

    def close(self) -> None:
        """Does nothing: each request has its own connection."""

    def _find(self, name: str | None) -> tuple[str, int | None]:
        try:
            with _reading():
                models = {each["id"]: each.get("max_model_len") for each in self._call("/v1/models").get("data") or ()}
                known = ", ".join(models) or "none"
                for model, context in models.items():
                    if name in (None, model):
                        return model, None if context is None else int(context)
        except PenstockError as error:
            raise ConfigError(f"--url {self._base}: {error}") from None
        raise ConfigError(f"the server at {self._base} has no model {name or ''}; it has: {known}")

    def _call(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        with self._open(path, body, _LOOKUP_SECONDS) as response, _reading():
            return json.load(response)

    def _open(self, path: str, body: Mapping[str, Any] | None, timeout: float) -> http.client.HTTPResponse:
        """The response of a request; with a body it is a POST. Raises RequestError and PeerError."""
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self._base + path, data, self._headers)
            return urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            with error:
                raise _request_error(error) from None
        except urllib.error.URLError as error:
            raise PeerError(f"the server cannot be reached: {error.reason}") from None
        except (OSError, OverflowError, ValueError, http.client.HTTPException) as error:
            raise PeerError(f"the request cannot be sent: {error}") from None


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Raises PeerError if the connection breaks, or the answer has not the form of the OpenAI API."""
    try:
        yield
    except PenstockError:
        raise
    except _UNREADABLE as error:
        raise PeerError(f"the server's answer cannot be read: {error!r}") from None


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event. Raises PeerError when the stream ends before its end mark, and ValueError or
    RecursionError for an event that is not JSON.
    """
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if isinstance(event, dict):
            yield event
    raise PeerError("the connection ended before the answer did")


def _request_error(error: urllib.error.HTTPError) -> RequestError:
    if error.code == http.HTTPStatus.UNAUTHORIZED:
        return RequestError("the server refused the API key: pass --api-key KEY, or set PENSTOCK_API_KEY")
    text = ""
    with contextlib.suppress(*_UNREADABLE):
        text = error.read(_MAX_ERROR_BYTES).decode(errors="replace")
        body = json.loads(text)
        return RequestError(_error_message(body), None, _error_code(body))
    return RequestError(f"the server answered with status {error.code}: {text[:_ERROR_CHARACTERS].strip()}")


def _error_message(body: Any) -> str:
    return error_message(body)[:_ERROR_CHARACTERS]


def _error_code(body: Any) -> str | None:
    error = body.get("error", body) if isinstance(body, dict) else body
    code = error.get("code") if isinstance(error, dict) else None
    # Some servers have no error code for this, only a message.
    if code != CONTEXT_FULL and "context length" in _error_message(body).lower():
        return CONTEXT_FULL
    return code if isinstance(code, str) else None
