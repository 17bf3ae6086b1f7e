"""Instances without an engine: they stream numbered tokens, and stop and start on command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys

from aiohttp import web


class StubInstance:
    """`POST /v1/completions` answers `{"prompt": NAME, "max_tokens": N}` with N events `{"name": NAME, "token": n}`.

    `stop` ends the listening socket and all connections at once, and `start` opens it again at the same port.
    """

    def __init__(self, token_seconds: float = 0.0) -> None:
        self._token_seconds = token_seconds
        self._runner: web.AppRunner | None = None
        self.port = 0
        self.num_deaths = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._health)
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=2048, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Idempotent."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        self.num_deaths += 1
        for site in list(runner.sites):
            await site.stop()
        assert isinstance(runner.server, web.Server)
        for connection in runner.server.connections:
            if connection.transport is not None:
                assert isinstance(connection.transport, asyncio.Transport)
                connection.transport.abort()
        await runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "reason": None, "ready": True})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        # A connection that `stop` has ended, or a client that has disconnected, needs no answer.
        with contextlib.suppress(ConnectionError):
            await response.prepare(request)
            for number in range(asked["max_tokens"]):
                await asyncio.sleep(self._token_seconds)
                await response.write(f"data: {json.dumps({'name': asked['prompt'], 'token': number})}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        return response


async def serve_on_command(count: int, token_seconds: float) -> None:
    """For a separate process: prints the URLs, and executes lines like `stop 3` and `start 3` until its input ends."""
    stubs = [StubInstance(token_seconds) for _ in range(count)]
    for stub in stubs:
        await stub.start()
    print(*(stub.url for stub in stubs), flush=True)
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    async for line in commands:
        what, number = line.decode().split()
        await (stubs[int(number)].stop if what == "stop" else stubs[int(number)].start)()
        print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(serve_on_command(int(sys.argv[1]), float(sys.argv[2])))
