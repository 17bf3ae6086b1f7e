"""The HTTP client of the load generator, for OpenAI-compatible servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import msgspec

from penstock.loadgen.datasets import Sample
from penstock.loadgen.runner import wait_until
from penstock.loadgen.stream import MALFORMED, Outcome, ResponseStream, error_message, take_vector
from penstock.utils.clock import SystemClock
from penstock.utils.errors import ConfigError, PeerError
from penstock.utils.machine import allow_open_files
from penstock.utils.names import one_line

_REQUEST_TIMEOUT = 6 * 3600.0
_LOOKUP_TIMEOUT = 60.0
_MAX_LOOKUPS = 32
_RETRY_EVERY = 1.0
# Shorter than servers keep idle connections (5 s is common): a request must not meet one that is just being closed.
_KEEPALIVE = 2.0
_ERROR_CHARS = 300
_MAX_ERROR_BYTES = 64 << 10
_MAX_LOOKUP_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`max_model_len` is in tokens, None if the server does not state it."""

    name: str
    max_model_len: int | None


class Server:
    """An HTTP session with as many connections as there are requests in flight. An async context manager."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        self._base_url = base_url
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._clock = SystemClock()

    async def __aenter__(self) -> Self:
        allow_open_files()
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE)
        timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def find_model(self, name: str | None, patience: float = 0.0) -> ServedModel:
        """Returns the model `name`, or the first of `/v1/models`. Retries for `patience` seconds without an answer.

        Raises ConfigError if the server cannot be reached or lists no model.
        """
        deadline = self._clock.now() + patience
        while True:
            try:
                models = (await self.call("/v1/models")).get("data") or []
                break
            except ConfigError as error:
                if self._clock.now() >= deadline:
                    raise ConfigError(f"{error} (is the server up? is its address right?)") from None
                await wait_until(asyncio.get_running_loop().time() + _RETRY_EVERY)
        with contextlib.suppress(*MALFORMED, ValueError):
            for model in models:
                if name in (None, found := model["id"]) and found.isprintable():
                    limit = model.get("max_model_len")
                    return ServedModel(found, None if limit is None else int(limit))
        if name is None:
            raise ConfigError(f"{self._base_url}/v1/models lists no model: pass --model")
        return ServedModel(name, None)

    async def call(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns a JSON object; sends a POST if there is a body. Raises ConfigError for every failure."""
        url = self._base_url + path
        parts = BoundedBody(_MAX_LOOKUP_BYTES)
        try:
            data = None if body is None else json.dumps(body).encode()
            await self.exchange(path, data, parts.take, _LOOKUP_TIMEOUT)
            answer = json.loads(parts.data)
        except StatusError as error:
            raise ConfigError(f"{url} answered {error}") from None
        except (PeerError, ValueError, RecursionError) as error:
            raise ConfigError(f"{url}: {error}") from None
        if not isinstance(answer, dict):
            raise ConfigError(f"{url} did not answer with a JSON object")
        return answer

    async def generate(self, path: str, body: bytes, prompt_len: int) -> Outcome:
        """Sends one request and times its stream; failures are the outcome's `error`."""
        stream = ResponseStream(self._clock.now(), prompt_len)
        return stream.finish(await self._post(path, body, lambda data: stream.receive(data, self._clock.now())))

    async def embed(self, path: str, body: bytes, prompt_len: int) -> Outcome:
        """Sends one request for a vector and times its whole response; failures are the outcome's `error`."""
        outcome = Outcome(self._clock.now(), prompt_len, has_usage=True)
        parts = BoundedBody(_MAX_LOOKUP_BYTES)
        outcome.error = await self._post(path, body, parts.take)
        if not outcome.error:
            try:
                take_vector(parts.data, outcome)
            except ValueError as error:
                outcome.error = str(error)
        outcome.latency = self._clock.now() - outcome.started
        return outcome

    async def exchange(
        self, path: str, body: bytes | None, take: Callable[[bytes], None], timeout: float = _REQUEST_TIMEOUT
    ) -> None:
        """Sends a request, a POST if there is a body, and passes the answer's body to `take` as it arrives.

        Raises PeerError if there is no answer with status 200 within `timeout` seconds, StatusError if its status is
        another one, and PeerError for a ValueError of `take`. Redirects are not followed: they are errors too.
        """
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            async with self._session.request(
                "GET" if body is None else "POST",
                self._base_url + path,
                data=body,
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=timeout),
            ) as response:
                if response.status != 200:
                    raise StatusError(response.status, await _http_error(response))
                async for data in response.content.iter_any():
                    take(data)
        except TimeoutError:
            raise PeerError(f"no complete answer within {timeout:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as failure:
            raise PeerError(str(failure) or type(failure).__name__) from None

    async def _post(self, path: str, body: bytes, take: Callable[[bytes], None]) -> str:
        """Sends a request and reads its answer. Returns what has failed, or an empty string."""
        try:
            await self.exchange(path, body, take)
        except PeerError as failure:
            return str(failure)
        return ""


class StatusError(PeerError):
    """The server answered with another status than 200; the message contains the status and the server's reason."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class BoundedBody:
    """Collects the body of an answer. `take` raises ValueError when it becomes larger than `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._parts: list[bytes] = []
        self._room = max_bytes
        self._max_bytes = max_bytes

    def take(self, data: bytes) -> None:
        self._room -= len(data)
        if self._room < 0:
            raise ValueError(f"the answer is larger than {self._max_bytes >> 20} MiB")
        self._parts.append(data)

    @property
    def data(self) -> bytes:
        return b"".join(self._parts)


class ServerTokenizer:
    """A `Tokenizer` that asks the server's `/tokenize` and `/detokenize`, in vLLM's shapes.

    Raises ConfigError if the server lacks them.
    """

    def __init__(self, server: Server, model: str) -> None:
        self._server = server
        self._model = model
        self._slots = asyncio.Semaphore(_MAX_LOOKUPS)

    async def vocabulary(self) -> Sequence[int]:
        """Returns the tokens of texts of random letters, because no server lists its vocabulary."""
        rng = random.Random(0)
        texts = [
            " ".join("".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 8))) for _ in range(32))
            for _ in range(32)
        ]
        found = sorted({token_id for ids in await asyncio.gather(*map(self.encode, texts)) for token_id in ids})
        if not found:
            raise ConfigError("the server's /tokenize finds no tokens: pass --tokenizer FOLDER")
        return found

    async def encode(self, text: str) -> list[int]:
        return await self._ask("/tokenize", {"prompt": text, "add_special_tokens": False}, "tokens", list[int])

    async def decode(self, token_ids: Sequence[int]) -> str:
        return await self._ask("/detokenize", {"tokens": list(token_ids)}, "prompt", str)

    async def _ask(self, path: str, body: dict[str, Any], field: str, kind: Any) -> Any:
        try:
            async with self._slots:
                return msgspec.convert((await self._server.call(path, {"model": self._model, **body}))[field], kind)
        except (KeyError, msgspec.ValidationError):
            raise ConfigError(f"the server's {path} gave no valid {field!r}: pass --tokenizer FOLDER") from None
        except ConfigError as error:
            raise ConfigError(f"{error}; without {path}, pass --tokenizer FOLDER") from None


def request_body(sample: Sample, model: str, options: Mapping[str, Any]) -> bytes:
    """Returns the JSON of a streaming completion of ids or text; `chat_body` is its chat form."""
    return _body({"model": model, "prompt": sample.prompt}, sample, options)


def chat_body(sample: Sample, model: str, options: Mapping[str, Any]) -> bytes:
    """Returns the JSON of a streaming chat completion whose only message is the prompt."""
    return _body({"model": model, "messages": [{"role": "user", "content": sample.prompt}]}, sample, options)


def embedding_body(sample: Sample, model: str, options: Mapping[str, Any]) -> bytes:
    """Returns the JSON of a request for one vector, in base64, which is the shorter encoding."""
    return json.dumps({"model": model, "input": sample.prompt, "encoding_format": "base64", **options}).encode()


def _body(head: dict[str, Any], sample: Sample, options: Mapping[str, Any]) -> bytes:
    stream = {"max_tokens": sample.output_len, "stream": True, "stream_options": {"include_usage": True}}
    return json.dumps({**head, **stream, **options}).encode()


async def _http_error(response: aiohttp.ClientResponse) -> str:
    if target := response.headers.get("Location"):
        shown = one_line(target[:_ERROR_CHARS])
        return f"HTTP {response.status}: a redirect to {shown}: pass the address that it leads to"
    data = b""
    while len(data) < _MAX_ERROR_BYTES and (part := await response.content.read(_MAX_ERROR_BYTES - len(data))):
        data += part
    text = data.decode(errors="replace")
    with contextlib.suppress(ValueError, RecursionError):
        text = error_message(json.loads(text))
    return f"HTTP {response.status}: {one_line(text[:_ERROR_CHARS]) or response.reason}"
