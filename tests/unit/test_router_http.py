"""The router's HTTP, byte by byte: requests of clients, and connections to instances that are kept or break."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from penstock.router import http_client, http_server
from penstock.router.http_client import AnswerLostError, Call, HttpUpstream, fetch
from penstock.router.http_server import Request, Response, serving
from penstock.utils.errors import ConfigError, PeerError
from tests.unit.router_stubs import SECONDS, run, until

# ---- The server ----

OK = b"HTTP/1.1 200 OK\r\n"
BODY = b"Content-Length: 4\r\n\r\nbody"


async def echo(request: Request, response: Response) -> None:
    """Answers in two parts, without a Content-Length."""
    response.begin(200, ())
    response.write(f"{request.method} {request.target} ".encode(), False)
    response.write(request.body, True)


async def talk(sent: list[bytes], handler: Callable[[Request, Response], Awaitable[None]] = echo) -> bytes:
    """Sends each part after the answer to the previous one has begun, and reads until the server closes."""
    async with asyncio.timeout(SECONDS), serving(handler, "127.0.0.1", 0) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        answer = b""
        for part in sent:
            writer.write(part)
            await writer.drain()
            if part is not sent[-1]:
                answer += await reader.readuntil(b"\r\n\r\n")
        answer += await reader.read()
        writer.close()
        return answer


@pytest.mark.parametrize(
    ("host", "message"),
    [("", "host is empty: name the address"), ("foo..bar", r"cannot listen on foo..bar:0: .*label")],
    ids=["all interfaces", "no host name"],
)
def test_an_address_that_cannot_be_meant_is_refused(host: str, message: str) -> None:
    async def check() -> None:
        async with serving(echo, host, 0):
            pass

    with pytest.raises(ConfigError, match=message):
        run(check)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (
            b"POST /a?b=%2F HTTP/1.1\r\nConnection: close\r\n" + BODY,
            OK + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
            b"e\r\nPOST /a?b=%2F \r\n4\r\nbody\r\n0\r\n\r\n",
        ),
        (
            b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
            b"2\r\nbo\r\n2\r\ndy\r\n0\r\n\r\n",
            OK + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n8\r\nPOST /a \r\n4\r\nbody\r\n0\r\n\r\n",
        ),
        # A client of HTTP/1.0 gets no chunks.
        (b"POST /a HTTP/1.0\r\n" + BODY, OK + b"Connection: close\r\n\r\nPOST /a body"),
    ],
)
def test_requests_are_read_and_answered(sent: bytes, expected: bytes) -> None:
    async def check() -> None:
        assert await talk([sent]) == expected

    run(check)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def check() -> None:
        last = b"GET /last HTTP/1.1\r\nConnection: close\r\n\r\n"
        answer = await talk([b"".join(b"GET /%d HTTP/1.1\r\n\r\n" % number for number in range(3)) + last])
        assert [line for line in answer.split(b"\r\n") if line.startswith(b"GET")] == [
            b"GET /0 ", b"GET /1 ", b"GET /2 ", b"GET /last "
        ]  # fmt: skip

    run(check)


def test_a_request_that_offers_another_protocol_is_answered() -> None:
    """The first request of Java's client offers HTTP/2."""

    async def check() -> None:
        offer = b"POST /a HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n" + BODY
        answer = await talk([offer + b"GET /b HTTP/1.1\r\nConnection: close\r\n\r\n"])
        assert b"8\r\nPOST /a \r\n4\r\nbody\r\n0\r\n\r\n" in answer
        assert b"GET /b" in answer

    run(check)


def test_expect_100_continue_is_answered() -> None:
    async def check() -> None:
        head = b"POST /a HTTP/1.1\r\nConnection: close\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n"
        answer = await talk([head, b"body"])
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\n" + OK)

    run(check)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"CONNECT a:1 HTTP/1.1\r\n\r\n", 405),
        (b"GET /a HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"POST /a HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\nX: " + b"x" * 70_000, 431),
        (b"POST /a HTTP/1.1\r\nContent-Length: 70000000\r\n\r\n" + b"x" * 70_000_000, 413),
        (b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX: " + b"x" * 1_000_000, 431),
    ],
)
def test_invalid_and_oversized_requests_are_refused(sent: bytes, status: int) -> None:
    async def check() -> None:
        answer = await talk([sent])
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b"Connection: close" in answer

    run(check)


@pytest.mark.parametrize(
    ("sent", "is_answered"),
    [
        (b"", False),
        (b"POST /a HTTP/1.1\r\nX", False),
        (b"POST /a HTTP/1.1\r\nContent-Length: 10\r\n\r\nbody", False),
        (b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nbody", False),
        (b"POST /a HTTP/1.1\r\n" + BODY, True),
        (b"POST /a HTTP/1.1\r\n" + BODY + b"POST /b HTTP/1.1\r\nX", True),
        (b"POST /a HTTP/1.1\r\n" + BODY + b"POST /b HTTP/1.1\r\nContent-Length: 10\r\n\r\nbody", True),
    ],
)
def test_a_connection_whose_client_sends_nothing_more_is_closed(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, is_answered: bool
) -> None:
    for name in ("_HEAD_SECONDS", "_BODY_SECONDS", "_IDLE_SECONDS", "_SWEEP_SECONDS"):
        monkeypatch.setattr(http_server, name, 0.1)

    async def check() -> None:
        assert await talk([sent]) == (
            OK + b"Transfer-Encoding: chunked\r\n\r\n8\r\nPOST /a \r\n4\r\nbody\r\n0\r\n\r\n" if is_answered else b""
        )

    run(check)


def test_a_handlers_error_is_status_500_or_cuts_an_answer_that_has_begun() -> None:
    async def fail(request: Request, response: Response) -> None:
        if request.target == "/late":
            response.begin(200, ())
            response.write(b"a", False)
        raise ValueError("a fault")

    async def check() -> None:
        assert (await talk([b"GET /a HTTP/1.1\r\nConnection: close\r\n\r\n"], fail)).startswith(b"HTTP/1.1 500 ")
        with contextlib.suppress(ConnectionResetError):
            assert not (await talk([b"GET /late HTTP/1.1\r\n\r\n"], fail)).endswith(b"0\r\n\r\n")

    run(check)


def test_a_client_that_leaves_before_the_end_of_its_answer_is_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[object] = []
    monkeypatch.setattr(http_server.logger, "exception", lambda *args: failures.append(args))

    async def answer(_: Request, response: Response) -> None:
        response.begin(200, ())
        response.write(b"a", False)
        # The connection is closed while the answer is being sent.
        response.cut()
        response.write(b"", True)

    async def check() -> None:
        assert (await talk([b"GET /a HTTP/1.1\r\n\r\n"], answer)).endswith(b"1\r\na\r\n")
        assert not failures

    run(check)


# ---- The client ----


class Scripted:
    """A server that sends one of its scripted answers for each request, and counts its connections."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.num_connections = 0
        self.asked: list[bytes] = []
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Closes the connection after an answer that ends in a NUL, and in place of an empty answer."""
        self.num_connections += 1
        self.writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                self.asked.append(await reader.readuntil(b"\r\n\r\n"))
                answer = self.answers.pop(0)
                writer.write(answer.removesuffix(b"\0"))
                await writer.drain()
                if not answer or answer.endswith(b"\0"):
                    break
        writer.close()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[tuple[HttpUpstream, str]]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        async with asyncio.timeout(SECONDS), server, HttpUpstream() as upstream:
            yield upstream, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/a"
            for each in self.writers:
                each.close()


async def ask(upstream: HttpUpstream, url: str, method: str = "GET") -> tuple[int, bytes]:
    status, _, body = await fetch(upstream, Call(method, url), SECONDS)
    return status, body


MEASURED = OK + b"Content-Length: 2\r\n\r\nab"


@pytest.mark.parametrize(
    "answer",
    [
        MEASURED,
        OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n1\r\nb\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\nTrailer: x\r\n\r\n",
        b"HTTP/1.1 102 Processing\r\n\r\n" + MEASURED,
    ],
)
def test_a_connection_is_reused(answer: bytes) -> None:
    async def check() -> None:
        server = Scripted(*[answer] * 3)
        async with server.running() as (upstream, url):
            assert [await ask(upstream, url) for _ in range(3)] == [(200, b"ab")] * 3
            assert server.num_connections == 1

    run(check)


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        (OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nab", b"ab"),
        (OK + b"\r\nab\0", b"ab"),
        # The second answer would be taken for the answer to the next request.
        (MEASURED + MEASURED, b"ab"),
    ],
)
def test_a_connection_that_cannot_be_reused_is_replaced(answer: bytes, content: bytes) -> None:
    async def check() -> None:
        server = Scripted(*[answer] * 3)
        async with server.running() as (upstream, url):
            assert [await ask(upstream, url) for _ in range(3)] == [(200, content)] * 3
            assert server.num_connections == 3

    run(check)


def test_an_answer_to_head_has_no_body() -> None:
    async def check() -> None:
        async with Scripted(OK + b"Content-Length: 9\r\n\r\n").running() as (upstream, url):
            assert await ask(upstream, url, "HEAD") == (200, b"")

    run(check)


def test_a_kept_connection_that_ends_without_an_answer_fails_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "_MIN_IDLE_SECONDS", 0)

    async def check() -> None:
        server = Scripted(MEASURED, b"", MEASURED)
        async with server.running() as (upstream, url):
            assert [await ask(upstream, url) for _ in range(2)] == [(200, b"ab")] * 2
            assert (server.num_connections, len(server.asked)) == (2, 3)

    run(check)


@pytest.mark.parametrize(
    ("answers", "num_requests", "min_idle", "death"),
    [
        # A new connection was not used before, so its end is the instance's failure.
        ((b"",), 1, 0, 0),
        # So is that of a connection that was used just now.
        ((MEASURED, b""), 2, SECONDS, 0),
        # The request is sent once more, and then fails.
        ((MEASURED, b"", b""), 3, 0, 0),
        # A dying process may end both connections.
        ((MEASURED, b"", b""), 3, 0, SECONDS),
        # A request whose answer has begun is not sent again.
        ((MEASURED, b"HTTP/1.1 2\0"), 2, 0, 0),
        ((MEASURED, OK + b"Content-Length: 3\r\n\r\nab\0"), 2, 0, 0),
        ((MEASURED, OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n\0"), 2, 0, 0),
        ((MEASURED, b"nonsense\0"), 2, 0, 0),
        ((MEASURED, OK + b"X: " + b"x" * 70_000 + b"\0"), 2, 0, 0),
    ],
)
def test_a_missing_or_incomplete_answer_is_the_instances_failure(
    answers: list[bytes], num_requests: int, min_idle: float, death: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "_MIN_IDLE_SECONDS", min_idle)
    monkeypatch.setattr(http_client, "_DEATH_SECONDS", death)

    async def check() -> None:
        server = Scripted(*answers)
        async with server.running() as (upstream, url):
            for _ in range(min(1, len(answers) - 1)):
                await ask(upstream, url)
            with pytest.raises(AnswerLostError) as caught:
                await ask(upstream, url)
            assert len(server.asked) == num_requests
            assert caught.value.num_sent == (1 if death else num_requests - (len(answers) > 1))

    run(check)


def test_data_of_an_idle_connection_is_not_an_answer() -> None:
    async def check() -> None:
        server = Scripted(MEASURED, MEASURED)
        async with server.running() as (upstream, url):
            await ask(upstream, url)
            server.writers[0].write(OK + b"Content-Length: 3\r\n\r\nxyz")
            await until(lambda: server.writers[0].is_closing())
            assert await ask(upstream, url) == (200, b"ab")

    run(check)


def test_connections_that_are_not_used_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "_IDLE_SECONDS", 0.05)

    async def check() -> None:
        server = Scripted(MEASURED)
        async with server.running() as (upstream, url):
            await ask(upstream, url)
            await until(lambda: server.writers[0].is_closing())

    run(check)


def test_a_client_that_reads_slowly_slows_the_instance_down() -> None:
    async def check() -> None:
        size = 64 << 20
        server = Scripted(OK + b"Content-Length: %d\r\n\r\n" % size + b"x" * size)
        sizes: list[int] = []

        def take(part: bytes, _: bool) -> bool:
            sizes.append(len(part))
            return len(sizes) > 2

        async with server.running() as (upstream, url):
            with await upstream.ask(Call("GET", url)) as answer:
                for _ in range(2):
                    assert not await answer.pass_to(take)
                    await asyncio.sleep(0.1)
                # The transport reads up to 1 MiB at once beyond the limit.
                assert max(sizes) < http_client._MAX_BUFFERED_BYTES + (1 << 20)
                assert await answer.pass_to(take)
                assert sum(sizes) == size

    run(check)


def test_an_error_of_the_client_ends_the_answer_from_the_instance() -> None:
    async def check() -> None:
        server = Scripted(OK + b"Content-Length: 4\r\n\r\nab", MEASURED)
        taken: list[bytes] = []

        def take(part: bytes, _: bool) -> bool:
            taken.append(part)
            if len(taken) == 2:
                raise ConnectionResetError("the client has left")
            server.writers[0].write(b"c")
            return True

        async with server.running() as (upstream, url):
            with pytest.raises(ConnectionResetError, match="has left"), await upstream.ask(Call("GET", url)) as answer:
                await answer.pass_to(take)
            assert taken == [b"ab", b"c"]
            assert await ask(upstream, url) == (200, b"ab")
            assert server.num_connections == 2, "the first one still has a byte to send"

    run(check)


def test_an_end_that_arrives_while_the_client_is_slow_is_passed_on() -> None:
    async def check() -> None:
        server = Scripted(OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n")
        taken: list[tuple[bytes, bool]] = []

        def take(part: bytes, is_last: bool) -> bool:
            taken.append((part, is_last))
            return False

        async with server.running() as (upstream, url):
            with await upstream.ask(Call("GET", url)) as answer:
                assert not await answer.pass_to(take)
                server.writers[0].write(b"0\r\n\r\n")
                await asyncio.sleep(0.05)
                assert await answer.pass_to(take)
            assert taken == [(b"ab", False), (b"", True)]

    run(check)


def test_an_instance_that_does_not_answer_in_time_fails() -> None:
    async def check() -> None:
        async with Scripted(OK[:5]).running() as (upstream, url):
            with pytest.raises(PeerError, match="not answered in time"):
                await fetch(upstream, Call("GET", url), 0.05)

    run(check)
