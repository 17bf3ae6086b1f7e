"""The length of a request's prompt, and which instances have it cached. An instance tokenizes the prompt."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.router import bodies
from penstock.router.dispatcher import Dispatcher
from penstock.router.http_client import AnswerLostError, Call, HttpUpstream, fetch
from penstock.router.instances import Role, State
from penstock.router.kv_subscriptions import KVSubscriptions
from penstock.router.pool import Member
from penstock.utils.errors import PeerError
from penstock.utils.held_blocks import PromptKeys, adapter_salt, scoped_salt
from penstock.utils.logging import get_logger

logger = get_logger(__name__)

_TIMEOUT_S = 2.0
# The tokens of a prompt that are looked up. Their keys are made at once, while no other request proceeds.
_MAX_LOOKED_UP = 1 << 17
_CHAT = "/v1/chat/completions"
# The fields that determine how messages become a prompt.
_TEMPLATE_FIELDS = (
    "model", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"
)  # fmt: skip


class Found(NamedTuple):
    """`token_ids` is empty if only their number is known. `cached`: how many of them instances have, by URL."""

    num_tokens: int
    token_ids: Sequence[int] = ()
    cached: Mapping[str, int] = {}


class EstimatedPrompts:
    """Estimates lengths; uses no caches and queries no instance."""

    async def look_up(self, incoming: bodies.ClientRequest) -> Found:
        return Found(incoming.estimate_tokens())


class TokenizedPrompts:
    """Queries `POST /tokenize` of an instance, if the answer can change the decision."""

    def __init__(self, dispatcher: Dispatcher, upstream: HttpUpstream, views: KVSubscriptions) -> None:
        self._dispatcher = dispatcher
        self._upstream = upstream
        self._views = views

    async def look_up(self, incoming: bodies.ClientRequest) -> Found:
        """Raises AnswerLostError."""
        estimated = Found(incoming.estimate_tokens())
        # If requests wait, they go to the next instance with room, so tokenizing would only add work.
        if self._dispatcher.num_queued or not any(self._views.num_blocks.values()):
            return estimated
        others = self._dispatcher.pool.without(incoming.model())
        ready = [each for each in self._dispatcher.pool if each.state is State.READY and each.url not in others]
        body = incoming.completion if _is_choice(ready) else None
        if body is None:
            return estimated
        tokens = await self._tokens(incoming, body, min(ready, key=lambda each: each.num_outstanding))
        first = tokens[:_MAX_LOOKED_UP]
        if not first or min(first) < 0 or max(first) >= 1 << 63:
            return estimated
        return Found(len(tokens), tokens, self._views.cached(PromptKeys(first, salts_of(incoming.headers, body))))

    async def _tokens(self, incoming: bodies.ClientRequest, body: Mapping[str, Any], member: Member) -> Sequence[int]:
        given = bodies.only_prompt(body) if incoming.path != _CHAT else None
        if isinstance(given, list):
            return given
        question = question_of(incoming.path, body, given)
        if question is None:
            return ()
        call = Call("POST", f"{member.url}/tokenize", bodies.headers_for_prefill(incoming.headers), question)
        try:
            status, _, content = await fetch(self._upstream, call, _TIMEOUT_S)
            return tokens_of(content) if status == 200 else ()
        except AnswerLostError:
            raise
        except PeerError as error:
            logger.info("%s does not tokenize: %s", member.url, error)
            return ()


def question_of(path: str, body: Mapping[str, Any], prompt: object) -> bytes | None:
    """Returns the body of `POST /tokenize`; None if it could not be answered."""
    if path == _CHAT:
        fields = {name: body[name] for name in _TEMPLATE_FIELDS if name in body}
        return json.dumps(fields).encode() if "messages" in body else None
    model = {"model": body["model"]} if "model" in body else {}
    return json.dumps({**model, "prompt": prompt}).encode() if isinstance(prompt, str) else None


class _Tokenized(msgspec.Struct):
    tokens: list[int]


_decode = msgspec.json.Decoder(_Tokenized).decode


def tokens_of(content: bytes) -> Sequence[int]:
    try:
        return _decode(content).tokens
    except (msgspec.MsgspecError, RecursionError):
        return ()


def salts_of(headers: bodies.Headers, body: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the salts that an instance may have used: if it requires keys, it scopes a request's salt by the key."""
    salt = body.get("cache_salt")
    salt = salt if isinstance(salt, str) else None
    salts = [salt]
    kind, _, value = {name.lower(): value for name, value in headers}.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        salts.append(scoped_salt(value.strip().encode("utf-8", "replace"), salt))
    model = body.get("model")
    if isinstance(model, str):
        # It may be an adapter.
        salts += [adapter_salt(model, each) for each in salts]
    return tuple(each or "" for each in salts)


def _is_choice(ready: Sequence[Member]) -> bool:
    """Returns whether there are two instances for the same part of a request; a decode instance can compute prompts."""
    roles = Counter(each.instance.role for each in ready)
    return max(roles.values(), default=0) > 1 or (Role.PREFILL in roles and Role.DECODE in roles)
