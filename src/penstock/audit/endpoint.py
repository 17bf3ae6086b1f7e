"""A server under audit: finds out what it serves, and asks it within the limits of rate, concurrency and time."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.audit.answers import Answer, AnswerReader
from penstock.loadgen.client import BoundedBody, Server, StatusError
from penstock.loadgen.runner import wait_until
from penstock.utils.errors import ConfigError, PeerError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_MAX_ANSWER_BYTES = 16 << 20
_WITHOUT_OPTION = (400, 422, 500, 501)
_WITHOUT_PATH = (404, 405, 501)
_REFUSED = (401, 403)
_NUM_TOP = (20, 5, 1, 0)
# Characters per token of any tokenizer; a server may count wrongly.
_FEWEST, _MOST = 0.5, 8.0
# A server's or a checkpoint's default penalties must not change the tokens, and ids make tokens unambiguous. Servers
# that refuse fields which they do not know get fewer of them.
_NO_PENALTY = {"repetition_penalty": 1.0}
_IDS = {"return_token_ids": True}
_EXTRAS = ({**_NO_PENALTY, **_IDS, "repeat_penalty": 1.0}, {**_NO_PENALTY, **_IDS}, _NO_PENALTY, {})


@dataclass(frozen=True, slots=True)
class Limits:
    """`concurrency` is in requests, `rate` in requests per second (infinity: no limit), `timeout` in seconds."""

    concurrency: int
    rate: float
    timeout: float


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: the texts of a conversation, the user's and the server's in turn, or the token ids of a prompt."""

    parts: tuple[str, ...]
    max_tokens: int
    is_streamed: bool = False
    prompt_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Served:
    """What the server serves. `num_top` log probabilities per token, 0 if it reports none; `has_echo`: it scores the
    tokens of a prompt; `has_ids`: it returns token ids. `max_model_len` is in tokens, None if it states none.
    """

    model: str
    max_model_len: int | None
    path: str = COMPLETIONS
    num_top: int = 0
    extras: Mapping[str, Any] = field(default_factory=dict[str, Any])
    has_echo: bool = False
    has_ids: bool = False
    characters_per_token: float = 2.0

    def describe(self) -> str:
        parts = [self.path, f"log probabilities of {self.num_top} tokens" if self.num_top else "no log probabilities"]
        parts += ["token ids"] if self.has_ids else []
        parts += ["echo"] if self.has_echo else []
        return ", ".join(parts)


class Endpoint:
    """A server whose abilities are known."""

    def __init__(self, server: Server, url: str, served: Served, limits: Limits, seed: int) -> None:
        self.url = url
        self.served = served
        self.num_requests = 0
        self._server = server
        self._limits = limits
        self._seed = seed
        self._slots = asyncio.Semaphore(limits.concurrency)
        self._next_time = 0.0

    @classmethod
    async def find(cls, server: Server, url: str, model: str | None, limits: Limits, seed: int, text: str) -> Endpoint:
        """Asks the server what it serves, in a dozen short requests about the prompt `text`.

        Raises ConfigError if it serves no model, or answers neither completions nor chats.
        """
        found = await server.find_model(model)
        endpoint = cls(server, url, Served(found.name, found.max_model_len), limits, seed)
        if not await endpoint._find_options(COMPLETIONS, text):
            await endpoint._find_options(CHAT, text)
        await endpoint._find_echo()
        return endpoint

    async def generate(self, ask: Ask) -> Answer:
        """Raises PeerError, StatusError if the server refused the request."""
        reader = AnswerReader()
        await self._send(ask, self.body(ask), reader)
        try:
            return reader.finish()
        except ValueError as error:
            raise PeerError(str(error)) from None

    async def top_after(self, ask: Ask, num_prompt_tokens: int | None) -> Mapping[str, float]:
        """Returns the log probabilities of the token after a prompt; none if the server reports none, or has divided
        the prompt into another number of tokens than `num_prompt_tokens`.
        """
        answer = await self.generate(replace(ask, max_tokens=1, is_streamed=False))
        counts = (answer.num_prompt_tokens, num_prompt_tokens)
        if None not in counts and counts[0] != counts[1]:
            return {}
        return answer.tokens[0].top if answer.tokens else {}

    async def echoed(self, text: str, end: str) -> float | None:
        """Returns the log probability of `end` after `text`, from the server's scores of a prompt, None if unknown."""
        ask = Ask((text + end,), 1)
        reader = AnswerReader()
        await self._send(ask, {**self.body(ask), "echo": True}, reader)
        try:
            tokens = list(reader.finish().tokens)[:-1]
        except ValueError as error:
            raise PeerError(str(error)) from None
        total, length = 0.0, 0
        while tokens and length < len(end):
            token = tokens.pop()
            if token.logprob is None:
                return None
            total += token.logprob
            length += len(token.text)
        return total if length == len(end) else None

    async def is_up(self) -> bool:
        try:
            await self._server.call("/v1/models")
        except ConfigError:
            return False
        return True

    async def wait_until_up(self) -> None:
        """Waits for as long as one request may take. Raises ConfigError."""
        await self._server.find_model(self.served.model, self._limits.timeout)

    def body(self, ask: Ask) -> dict[str, Any]:
        """The JSON of a request."""
        served = self.served
        body: dict[str, Any] = {"model": served.model, **self._prompt(ask), "max_tokens": ask.max_tokens}
        body |= {"temperature": 0, "seed": self._seed, **served.extras}
        if served.num_top:
            is_chat = served.path == CHAT
            body |= {"logprobs": True, "top_logprobs": served.num_top} if is_chat else {"logprobs": served.num_top}
        if ask.is_streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def curl(self, ask: Ask) -> str:
        """A command that repeats a request; a key is not in it."""
        data = shlex.quote(json.dumps(self.body(ask)))
        return f"curl -s {shlex.quote(self.url + self.served.path)} -H 'Content-Type: application/json' -d {data}"

    # ---- What the server serves ----

    async def _find_options(self, path: str, text: str) -> bool:
        """Finds the most informative request that the server accepts. Returns whether it serves completions; raises
        ConfigError if it does not serve chats.
        """
        refusal: PeerError | None = None
        for num_top, extras in ((number, fields) for number in _NUM_TOP for fields in _EXTRAS):
            self.served = replace(self.served, path=path, num_top=num_top, extras=extras)
            try:
                answer = await self.generate(Ask((text,), 4))
            except StatusError as error:
                if error.status in _REFUSED:
                    raise ConfigError(f"{self.url}{path} answered {error}: pass --api-key KEY") from None
                if error.status in _WITHOUT_PATH and path == COMPLETIONS:
                    return False
                if error.status not in _WITHOUT_OPTION:
                    raise ConfigError(f"{self.url}{path} answered {error}") from None
                refusal = error
                continue
            except PeerError as error:
                raise ConfigError(f"{self.url}{path}: {error}") from None
            if num_top and not answer.tokens:
                answer = await self._try_n_probs(text) or answer
            self._note(answer, text)
            return True
        if path == CHAT:
            raise ConfigError(f"{self.url}{path} answered {refusal}")
        return False

    async def _try_n_probs(self, text: str) -> Answer | None:
        """llama.cpp's completions take the number of log probabilities under this name."""
        before = self.served
        self.served = replace(before, extras={**before.extras, "n_probs": before.num_top})
        try:
            answer = await self.generate(Ask((text,), 4))
        except PeerError:
            answer = None
        if answer is None or not answer.tokens:
            self.served = before
            return None
        return answer

    def _note(self, answer: Answer, text: str) -> None:
        """Remembers what an answer shows about the server."""
        tops = [len(token.top) for token in answer.tokens]
        has_ids = bool(answer.prompt_ids) and all(token.token_id is not None for token in answer.tokens)
        self.served = replace(
            self.served,
            num_top=min(self.served.num_top, max(tops)) if tops else 0,
            has_ids=has_ids and bool(tops),
            characters_per_token=min(max(len(text) / (answer.num_prompt_tokens or len(text)), _FEWEST), _MOST),
        )

    async def _find_echo(self) -> None:
        if self.served.path == COMPLETIONS and self.served.num_top:
            try:
                score = await self.echoed("one two three", " four")
            except PeerError:
                score = None
            self.served = replace(self.served, has_echo=score is not None)

    # ---- One request ----

    def _prompt(self, ask: Ask) -> dict[str, Any]:
        if self.served.path == CHAT:
            roles = ("user", "assistant")
            return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(ask.parts)]}
        return {"prompt": list(ask.prompt_ids) or "".join(ask.parts)}

    async def _send(self, ask: Ask, body: Mapping[str, Any], reader: AnswerReader) -> None:
        async with self._slots:
            await self._wait_for_turn()
            self.num_requests += 1
            data, timeout = json.dumps(body).encode(), self._limits.timeout
            if ask.is_streamed:
                room = BoundedBody(_MAX_ANSWER_BYTES)

                def take(part: bytes) -> None:
                    room.take(part)
                    reader.take_stream(part)

                await self._server.exchange(self.served.path, data, take, timeout)
                return
            whole = BoundedBody(_MAX_ANSWER_BYTES)
            await self._server.exchange(self.served.path, data, whole.take, timeout)
        try:
            reader.take_whole(whole.data)
        except ValueError as error:
            raise PeerError(str(error)) from None

    async def _wait_for_turn(self) -> None:
        now = asyncio.get_running_loop().time()
        moment = max(now, self._next_time)
        self._next_time = moment + 1 / self._limits.rate
        await wait_until(moment)


def texts_of(parts: Sequence[str], more: str) -> tuple[str, ...]:
    """Returns the parts of a conversation whose last text is continued by `more`."""
    return (*parts[:-1], parts[-1] + more)
