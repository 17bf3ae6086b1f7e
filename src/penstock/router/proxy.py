"""A proxy in front of a prefill and a decode instance, in the two styles in which the field's proxies drive them.

Serial (as for vLLM's NixlConnector): the prefill instance gets the request with one output token, and what it answers
about its KV goes with the request to the decode instance. Concurrent (as for vLLM's MooncakeConnector): both get the
request at once, with a name in common by which they find each other.

A prefill instance that fails, cannot be reached or does not answer in time costs no request: the decode instance
computes the prompt itself. Everything that is not a completion goes to the decode instance.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from penstock.utils.logging import get_logger

logger = get_logger(__name__)

STYLES = ("serial", "concurrent")
_COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
_MAX_BODY_BYTES = 64 << 20
_CONNECT_SECONDS = 5.0
_FORWARDED = ("Authorization", "X-Request-Id", "Content-Type", "Accept")
# What the one token of the prefill instance does not need. Tools stay: they are a part of the prompt.
_NOT_FOR_PREFILL = ("stream_options", "min_tokens", "response_format")


@dataclass(frozen=True, slots=True)
class Instances:
    """Base URLs; `bootstrap` is where the prefill instance answers `GET /query`, which the concurrent style needs."""

    prefill: str
    decode: str
    bootstrap: str = ""


class Proxy:
    """`style` is one of `STYLES`. `prefill_timeout`: seconds that a prompt may take in the prefill instance."""

    def __init__(self, instances: Instances, style: str, prefill_timeout: float = 60.0) -> None:
        self._instances = instances
        self._style = style
        self._prefill_limit = aiohttp.ClientTimeout(prefill_timeout, connect=_CONNECT_SECONDS)
        self._query_limit = aiohttp.ClientTimeout(min(prefill_timeout, _CONNECT_SECONDS))
        self._background: set[asyncio.Task[None]] = set()
        self.app = web.Application(client_max_size=_MAX_BODY_BYTES)
        self.app.cleanup_ctx.append(self._open_session)
        for path in _COMPLETIONS:
            self.app.router.add_post(path, self._complete)
        self.app.router.add_route("*", "/{path:.*}", self._forward)

    def serve(self, host: str, port: int) -> None:
        """Until SIGINT or SIGTERM. Raises OSError when the port is in use."""
        web.run_app(self.app, host=host, port=port, print=None)

    async def _open_session(self, app: web.Application) -> AsyncIterator[None]:
        limit = aiohttp.ClientTimeout(total=None, connect=_CONNECT_SECONDS)
        # A new connection for each request: one that was kept may be ended by the instance just when it is used again.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=limit) as self._session:
            yield

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        try:
            body = json.loads(data)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return await self._pass_on(request, data)  # the decode instance says what is wrong
        headers = _headers(request)
        prefill = self._prefill_serially if self._style == "serial" else self._prefill_beside
        answer = await prefill(request.path, body, headers)
        if isinstance(answer, web.Response):
            return answer
        return await self._pass_on(request, json.dumps({**body, **answer}).encode())

    async def _prefill_serially(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> dict[str, Any] | web.Response:
        """The decode instance's parameters, or the client's error."""
        asked = _prefill_body(body, {"do_remote_decode": True, "do_remote_prefill": False})
        try:
            async with self._session.post(
                self._instances.prefill + path, json=asked, headers=headers, timeout=self._prefill_limit
            ) as response:
                if 400 <= response.status < 500:
                    return web.Response(
                        status=response.status, body=await response.read(), content_type=response.content_type
                    )
                response.raise_for_status()
                params = (await response.json()).get("kv_transfer_params")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            logger.warning("the prefill instance failed, the decode instance computes the prompt: %s", _text(error))
            params = None
        return {} if params is None else {"kv_transfer_params": params}

    async def _prefill_beside(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> dict[str, Any] | web.Response:
        """Lets the prefill instance begin, and returns the decode instance's parameters."""
        transfer_id = f"xfer-{uuid.uuid4().hex}"
        try:
            async with self._session.get(f"{self._instances.bootstrap}/query", timeout=self._query_limit) as response:
                response.raise_for_status()
                engine_id = (await response.json(content_type=None))["0"]["engine_id"]
        except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
            logger.warning(
                "the prefill instance cannot be found, the decode instance computes the prompt: %s", _text(error)
            )
            return {}
        asked = _prefill_body(body, {"do_remote_decode": True, "transfer_id": transfer_id})
        task = asyncio.create_task(self._post(self._instances.prefill + path, asked, headers))
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        params = {
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_bootstrap_addr": self._instances.bootstrap,
            "remote_engine_id": engine_id,
        }
        return {"kv_transfer_params": params}

    async def _post(self, url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        try:
            async with self._session.post(url, json=body, headers=headers, timeout=self._prefill_limit) as response:
                await response.read()
        except (aiohttp.ClientError, OSError) as error:
            logger.warning("the prefill instance failed: %s", _text(error))

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        return await self._pass_on(request, await request.read())

    async def _pass_on(self, request: web.Request, data: bytes) -> web.StreamResponse:
        """The decode instance's answer, as it comes."""
        url = self._instances.decode + request.path_qs
        passed = web.StreamResponse()
        try:
            async with self._session.request(
                request.method, url, data=data, headers=_headers(request), allow_redirects=False
            ) as response:
                passed.set_status(response.status)
                passed.content_type = response.content_type
                for name in ("Location", "Retry-After", "X-Request-Id"):
                    if name in response.headers:
                        passed.headers[name] = response.headers[name]
                await passed.prepare(request)
                async for chunk in response.content.iter_any():
                    await passed.write(chunk)
                await passed.write_eof()
        except (aiohttp.ClientError, OSError) as error:
            if not passed.prepared:
                message = f"the decode instance does not answer: {_text(error)}"
                return web.json_response({"error": {"message": message, "type": "server_error"}}, status=503)
            # Its client sees by the connection's end that something is missing.
            logger.warning("an answer has been cut: %s", _text(error))
            if request.transport is not None:
                request.transport.close()
        return passed


def _text(error: Exception) -> str:
    """That of a timeout is empty."""
    return str(error) or type(error).__name__


def _headers(request: web.Request) -> dict[str, str]:
    return {name: request.headers[name] for name in _FORWARDED if name in request.headers}


def _prefill_body(body: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """The same request for one token, in one piece."""
    asked = {name: value for name, value in body.items() if name not in _NOT_FOR_PREFILL}
    limits = {name: 1 for name in ("max_tokens", "max_completion_tokens") if name in body} or {"max_tokens": 1}
    return {**asked, **limits, "stream": False, "kv_transfer_params": dict(params)}
