"""The HTTP requests of the router: `Upstream` over aiohttp."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from types import TracebackType
from typing import Self

import aiohttp
from yarl import URL

from penstock.router.bodies import Headers
from penstock.router.exchange import Call
from penstock.utils.errors import PeerError

_CONNECT_SECONDS = 5.0
_MAX_HEAD_BYTES = 64 << 10


class HttpUpstream:
    """An async context manager, which must be entered before `open`."""

    async def __aenter__(self) -> Self:
        # A new connection for each request: one that was kept may be ended by the instance just when it is used again.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(
            connector=connector,
            # Bodies are passed on as they are.
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            max_line_size=_MAX_HEAD_BYTES,
            max_field_size=_MAX_HEAD_BYTES,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._session.close()

    @contextlib.asynccontextmanager
    async def open(self, call: Call) -> AsyncGenerator[HttpAnswer]:
        request = self._session.request(
            call.method,
            # As the client wrote it: what is escaped stays escaped.
            URL(call.url, encoded=True),
            data=call.body or None,
            headers=list(call.headers),
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(call.timeout, connect=_CONNECT_SECONDS),
        )
        try:
            response = await request
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _peer_error(error) from None
        try:
            yield HttpAnswer(response)
        finally:
            response.close()


class HttpAnswer:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.headers: Headers = tuple(response.headers.items())
        self._content = response.content

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._content.iter_any():
                yield chunk
        except (aiohttp.ClientError, OSError) as error:
            raise _peer_error(error) from None


def _peer_error(error: Exception) -> PeerError:
    """The text of a timeout is empty."""
    return PeerError(str(error) or ("it has not answered in time" if isinstance(error, TimeoutError) else repr(error)))
