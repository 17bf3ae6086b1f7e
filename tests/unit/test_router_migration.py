"""Streams that another instance continues: one stream for the client, whatever happens to the instances."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from msgspec.structs import replace

from penstock.router import bodies
from penstock.router.dispatcher import Limits
from penstock.router.exchange import Timeouts
from penstock.router.health import HealthConfig
from penstock.router.reported_stream import ReportedStream
from penstock.utils.errors import PeerError
from penstock.utils.stream_reports import ASK, STREAM_HEADER, ReportKind, StreamName, header_value, name_of, report_line
from tests.unit.router_stubs import (
    PATH,
    STYLES,
    Client,
    Handler,
    Stub,
    decode,
    half,
    prefill,
    prefilled,
    routed,
    run,
    serve,
    until,
)

TOKENS = [3, 14, 15, 92, 65, 35]
BODY = {"prompt": "a", "stream": True, "max_tokens": len(TOKENS)}
NAME = header_value(StreamName("same", "cmpl-1", 7))


def chunk(token_id: int) -> bytes:
    return b"data: " + json.dumps({"id": "cmpl-1", "text": f"<{token_id}>"}).encode() + b"\n\n"


WHOLE = b"".join(map(chunk, TOKENS)) + b"data: [DONE]\n\n"
Fault = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


async def cut(request: web.Request, _: web.StreamResponse) -> None:
    assert request.transport is not None
    request.transport.abort()


async def cut_within_an_event(request: web.Request, response: web.StreamResponse) -> None:
    await response.write(report_line(ReportKind.TOKENS, [99]) + b'data: {"text": "<9')
    await cut(request, response)


async def cut_before_the_end(request: web.Request, response: web.StreamResponse) -> None:
    """Sends the last token, but not the end of the stream."""
    await response.write(report_line(ReportKind.LAST, TOKENS[-1:]) + chunk(TOKENS[-1]))
    await cut(request, response)


async def die_within(_: web.Request, response: web.StreamResponse) -> None:
    await response.write(report_line(ReportKind.DIED) + b'\ndata: {"error": {}}\n\ndata: [DONE]\n\n')


async def stop(_: web.Request, __: web.StreamResponse) -> None:
    await asyncio.Event().wait()


def without_events(asked: str) -> str:
    """Returns the name of a stream without how many of its events have been received."""
    name = name_of(asked)
    assert name is not None
    return header_value(replace(name, num_events=0))


def instance(num_tokens: int | None = None, fault: Fault = cut, name: str = NAME) -> Handler:
    """Generates `num_tokens` more of the answer, and then has a fault; without a number it generates all."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked = request.headers.get(STREAM_HEADER)
        given = body.get("output_token_ids", [])
        if asked not in (None, ASK) and without_events(asked) != name:
            return web.Response(status=409, text="other arithmetic")
        headers = {"Content-Type": "text/event-stream", **({} if asked is None else {STREAM_HEADER: name})}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        assert given == TOKENS[: len(given)], given
        rest = TOKENS[len(given) :]
        for place, token_id in enumerate(rest):
            if place == num_tokens:
                await fault(request, response)
                return response
            kind = ReportKind.LAST if place == len(rest) - 1 else ReportKind.TOKENS
            await response.write((b"" if asked is None else report_line(kind, [token_id])) + chunk(token_id))
            await asyncio.sleep(0.001)
        await response.write(b"data: [DONE]\n\n")
        return response

    return answer


async def ask(client: Client, body: Any = None) -> bytes:
    async with client.session.post(client.router.url + PATH, json=body or BODY) as response:
        assert response.status == 200
        assert STREAM_HEADER not in response.headers
        return await response.read()


async def migrations(client: Client, reason: str, outcome: str = "continued") -> float:
    return await client.metric(f'penstock_router_migrations_total{{outcome="{outcome}",reason="{reason}"}}')


@pytest.mark.parametrize("fault", [cut, cut_within_an_event, die_within])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_the_client_sees_one_stream(fault: Fault, num_tokens: int) -> None:
    async def check() -> None:
        first, second = serve(instance(num_tokens, fault)), serve(instance())
        async with routed(first, second) as client:
            assert await ask(client) == WHOLE
            assert (first.num_requests, second.num_requests) == (1, 1)
            assert second.bodies[0] == {**BODY, "output_token_ids": TOKENS[:num_tokens]}
            assert second.headers[0][STREAM_HEADER] == header_value(
                StreamName("same", "cmpl-1", 7, num_events=num_tokens)
            )
            assert await migrations(client, "died") == 1
            assert await client.metric(f'vllm_router_requests_total{{route="{PATH}"}}') == 1

    run(check)


def test_nothing_of_an_end_is_sent_that_is_not_complete() -> None:
    async def check() -> None:
        first, second = serve(instance(len(TOKENS) - 1, cut_before_the_end)), serve(instance())
        async with routed(first, second) as client:
            assert await ask(client) == WHOLE
            assert second.bodies[0]["output_token_ids"] == TOKENS[:-1]

    run(check)


@pytest.mark.parametrize("style", STYLES)
def test_both_halves_are_repeated_and_the_prompt_is_prefilled_without_the_output(style: str) -> None:
    async def check() -> None:
        p, first, second = prefill(prefilled, style), decode(instance(2)), decode(instance())
        body = {**BODY, "prompt_logprobs": 1}
        async with routed(p, first, second) as client:
            assert await ask(client, body) == WHOLE
            assert "kv_transfer_params" in second.bodies[0]
            assert second.bodies[0]["output_token_ids"] == TOKENS[:2]
            assert "prompt_logprobs" not in second.bodies[0], "the client has them"
            assert [each["max_tokens"] for each in p.bodies] == [1, 1]
            assert not any("output_token_ids" in each for each in p.bodies)

    run(check)


def test_output_that_the_client_gave_comes_first() -> None:
    async def check() -> None:
        first, second = serve(instance(2)), serve(instance())
        async with routed(first, second) as client:
            body = {**BODY, "output_token_ids": TOKENS[:1]}
            assert await ask(client, body) == WHOLE[len(chunk(TOKENS[0])) :]
            assert second.bodies[0]["output_token_ids"] == TOKENS[:3]

    run(check)


async def is_cut(client: Client, body: Any = None) -> bool:
    try:
        await ask(client, body)
    except aiohttp.ClientPayloadError:
        return True
    return False


def test_migrations_are_bounded() -> None:
    async def check() -> None:
        stubs = [serve(instance(1)) for _ in range(4)]
        async with routed(*stubs, limits=Limits(max_migrations=2)) as client:
            assert await is_cut(client)
            assert sum(stub.num_requests for stub in stubs) == 3
            assert await migrations(client, "died", "failed") == 1
            assert await client.metric(
                f'vllm_router_request_errors_total{{error_type="cut",route="{PATH}"}}'
            ) == 1  # fmt: skip

    run(check)


def test_a_request_that_kills_instances_before_it_progresses_ends_two_more_at_most() -> None:
    async def check() -> None:
        stubs = [serve(instance(2)), *(serve(instance(0)) for _ in range(4))]
        async with routed(*stubs, limits=Limits(max_migrations=9, max_retries=9)) as client:
            assert await is_cut(client)
            assert sum(stub.num_requests for stub in stubs) <= 3

    run(check)


@pytest.mark.parametrize(
    ("second", "fields"),
    [
        (instance(name=header_value(StreamName("other", "cmpl-1", 7))), {}),
        (half, {}),
    ],
    ids=["other arithmetic", "another engine"],
)
def test_what_cannot_be_continued_ends_as_before(second: Handler, fields: dict[str, Any]) -> None:
    async def check() -> None:
        stubs = [serve(instance(2)), serve(second)]
        async with routed(*stubs) as client:
            assert await is_cut(client, {**BODY, **fields})

    run(check)


def test_streams_of_other_engines_and_without_migration_pass_unchanged() -> None:
    async def check() -> None:
        async def plain(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b": a comment\n\ndata: {}\n\nda")
            await response.write(b"ta: [DONE]\n\n")
            return response

        stub = serve(plain)
        async with routed(stub) as client:
            assert await ask(client) == b": a comment\n\ndata: {}\n\ndata: [DONE]\n\n"
            assert stub.headers[0][STREAM_HEADER] == ASK
        stub = serve(instance())
        async with routed(stub, timeouts=Timeouts(migrate=None)) as client:
            assert await ask(client) == WHOLE
            assert STREAM_HEADER not in stub.headers[0]

    run(check)


async def learned(client: Client, stubs: list[Stub]) -> None:
    """Lets every instance answer a stream, so that the router knows that they give the same tokens."""
    while not all(stub.num_requests for stub in stubs):
        assert await ask(client) == WHOLE


@pytest.mark.parametrize("reason", ["drained", "stopped"])
def test_a_stream_leaves_an_instance_that_drains_or_stops(reason: str) -> None:
    async def check() -> None:
        stubs = [serve(instance()), serve(instance())]
        health = HealthConfig(interval=0.05, timeout=0.2, dead_after=60)
        async with routed(*stubs, health=health, timeouts=Timeouts(migrate=0.2)) as client:
            await learned(client, stubs)
            for stub in stubs:
                stub.num_requests = 0
                stub.handler = instance(2, stop)
            asking = asyncio.create_task(ask(client))
            await until(lambda: any(stub.num_requests for stub in stubs))
            busy, other = sorted(stubs, key=lambda stub: -stub.num_requests)
            other.handler = instance()
            await asyncio.sleep(0.1)
            if reason == "drained":
                await client.admin("/drain", url=busy.url)
            else:
                busy.health = None
            assert await asking == WHOLE
            assert await migrations(client, reason) == 1
            await until(lambda: busy.num_cancelled == 1)

    run(check)


def test_what_is_known_of_an_instance_ends_with_it() -> None:
    """Another engine at its address may give the same tokens."""

    async def check() -> None:
        may_die = asyncio.Event()

        async def wait(request: web.Request, response: web.StreamResponse) -> None:
            await may_die.wait()
            await cut(request, response)

        first, second = serve(instance()), serve(instance(name=header_value(StreamName("other", "cmpl-1", 7))))
        async with routed(first, second) as client:

            async def is_ready() -> bool:
                return await client.state_of(second) == "ready"

            await learned(client, [first, second])
            await client.admin("/remove", url=second.url)
            assert await client.state_of(second) == "removed"
            first.handler, second.handler = instance(2, wait), instance()
            first.num_requests = second.num_requests = 0
            asking = asyncio.create_task(ask(client))
            await until(lambda: first.num_requests == 1)
            await client.admin("/instances", url=second.url)
            await until(is_ready)
            may_die.set()
            assert await asking == WHOLE
            assert second.num_requests == 1

    run(check)


@pytest.mark.parametrize("max_migrations", [0, 3])
def test_a_draining_instance_keeps_the_streams_that_no_other_can_continue(max_migrations: int) -> None:
    async def check() -> None:
        may_end = asyncio.Event()

        async def wait(request: web.Request, response: web.StreamResponse) -> None:
            await may_end.wait()
            for token_id in TOKENS[2:]:
                await response.write(report_line(ReportKind.TOKENS, [token_id]) + chunk(token_id))
            await response.write(b"data: [DONE]\n\n")

        first, second = serve(instance()), serve(instance())
        async with routed(first, second, limits=Limits(max_migrations=max_migrations)) as client:
            if not max_migrations:
                await learned(client, [first, second])
            for stub in (first, second):
                stub.num_requests = 0
                stub.handler = instance(2, wait)
            asking = asyncio.create_task(ask(client))
            await until(lambda: first.num_requests + second.num_requests > 0)
            await asyncio.sleep(0.05)
            await client.admin("/drain", url=(first if first.num_requests else second).url)
            await asyncio.sleep(0.2)
            may_end.set()
            assert await asking == WHOLE
            assert first.num_requests + second.num_requests == 1

    run(check)


@pytest.mark.parametrize("report", [b": tokens x", b": tokens 1.5", b": nonsense 5", b": tokens \xff"])
def test_an_invalid_report_is_the_instances_failure(report: bytes) -> None:
    with pytest.raises(PeerError, match="report of the stream is invalid"):
        ReportedStream().feed(report + b"\ndata: {}\n\n", False)


def test_a_stream_does_not_depend_on_how_it_arrives() -> None:
    sent = b"".join(report_line(ReportKind.TOKENS, [each]) + chunk(each) for each in TOKENS[:-1])
    sent += report_line(ReportKind.TOKENS, [8]) + b"\n" + report_line(ReportKind.LAST, TOKENS[-1:]) + chunk(TOKENS[-1])
    sent += b"data: [DONE]\n\n"
    for size in (1, 7, 64, len(sent)):
        stream = ReportedStream()
        parts = [sent[start : start + size] for start in range(0, len(sent), size)]
        assert b"".join(stream.feed(part, False) for part in parts[:-1]) + stream.feed(parts[-1], True) == WHOLE
        assert stream.token_ids == [[*TOKENS[:-1], 8]]


def test_events_without_a_report_belong_to_the_next_one_that_has_one() -> None:
    stream = ReportedStream()
    assert stream.feed(b"event: begun\ndata: {}\n\ndata: 1\n\n", False) == b""
    stream.restart()
    assert (stream.num_events, stream.num_tokens) == (0, 0), "the client has received nothing"
    sent = b"event: begun\ndata: {}\n\n" + report_line(ReportKind.TOKENS, [5]) + b"data: 1\n\ndata: 2\n\n"
    assert stream.feed(sent, False) == b"event: begun\ndata: {}\n\ndata: 1\n\n"
    assert (stream.num_events, stream.token_ids) == (2, [[5]])
    assert stream.feed(b"data: error\n\n", True) == b"data: 2\n\ndata: error\n\n", "the body is complete"


def test_completions_are_reported_and_end_one_by_one() -> None:
    stream = ReportedStream(3)
    both = report_line(ReportKind.TOKENS, [1]) + report_line(ReportKind.TOKENS, [2, 3], 2) + b"data: a\n\n"
    assert stream.feed(both, False) == b"data: a\n\n"
    assert stream.feed(report_line(ReportKind.LAST, [4], 2) + b"data: b\n\n", False) == b"data: b\n\n"
    assert (stream.token_ids, stream.finished) == ([[1], [], [2, 3, 4]], {2})
    body = {"n": 3, "prompt_logprobs": 1, "output_token_ids": [[7], [8], [9]], "finished_choices": []}
    given = {"output_token_ids": [[7, 1], [8], [9, 2, 3, 4]], "finished_choices": [2]}
    assert bodies.continued(body, stream.token_ids, stream.finished) == {"n": 3, **given}
    last = report_line(ReportKind.LAST, [5]) + report_line(ReportKind.LAST, [6], 1) + b"data: c\n\n"
    assert stream.feed(last, False) == b""
    assert stream.token_ids == [[1], [], [2, 3, 4]], "nothing of an end that may be repeated"
    assert stream.feed(b"data: [DONE]\n\n", True) == b"data: c\n\ndata: [DONE]\n\n"
    with pytest.raises(PeerError, match="not among the 3"):
        ReportedStream(3).feed(report_line(ReportKind.TOKENS, [1], 3) + b"data: a\n\n", False)


@pytest.mark.parametrize(("num_completions", "is_followed"), [(1024, True), (1025, False)])
def test_the_completions_that_the_router_follows_are_bounded(num_completions: int, is_followed: bool) -> None:
    """It keeps the tokens of each, and a request may name any number: beyond the bound, a report of one is an error."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", STREAM_HEADER: NAME})
        await response.prepare(request)
        await response.write(report_line(ReportKind.TOKENS, [1], num_completions - 1) + chunk(1))
        return response

    async def check() -> None:
        async with routed(serve(answer)) as client:
            asking = ask(client, {**BODY, "n": num_completions})
            if is_followed:
                assert await asking == chunk(1)
            else:
                with pytest.raises(aiohttp.ClientError):
                    await asking

    run(check)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_other_apis_continue_too_and_whole_answers_begin_again(path: str) -> None:
    async def check() -> None:
        first, second = serve(instance(2)), serve(instance())
        async with routed(first, second) as client:
            body = {"input": "a", "messages": [], "stream": True}
            assert await client.ask(path, body) == (200, WHOLE)
            assert second.bodies[0] == {**body, "output_token_ids": TOKENS[:2]}
        first, second = serve(instance(0)), serve(prefilled)
        async with routed(first, second) as client:
            for _ in range(2):
                status, _ = await client.ask(path, {"input": "a"})
                assert status == 200
            assert STREAM_HEADER not in second.headers[0]

    run(check)


def test_a_client_that_leaves_while_its_stream_moves_ends_it() -> None:
    async def check() -> None:
        first, second = serve(instance(2)), serve(instance(0, stop))
        async with routed(first, second) as client:
            asking = asyncio.create_task(ask(client))
            await until(lambda: second.num_requests == 1)
            asking.cancel()
            await until(lambda: second.num_cancelled == 1)
            error = f'vllm_router_request_errors_total{{error_type="client_left",route="{PATH}"}}'
            assert await client.metric(error) == 1

    run(check)


async def write_the_rest(request: web.Request, response: web.StreamResponse) -> None:
    """Ends an answer that had a fault after two tokens."""
    given = (await request.json()).get("output_token_ids", [])
    for token_id in TOKENS[len(given) + 2 :]:
        await response.write(report_line(ReportKind.TOKENS, [token_id]) + chunk(token_id))
    await response.write(b"data: [DONE]\n\n")


def test_no_more_streams_leave_an_instance_than_others_have_room_for() -> None:
    """One that left would wait for a place, and be cut when none is free in time."""

    async def check() -> None:
        may_end = asyncio.Event()

        async def wait(request: web.Request, response: web.StreamResponse) -> None:
            await may_end.wait()
            await write_the_rest(request, response)

        stubs = [serve(instance()), serve(instance())]
        async with routed(*stubs, limits=Limits(max_outstanding=2, queue_timeout=0.2)) as client:
            await learned(client, stubs)
            for stub in stubs:
                stub.num_requests = 0
                stub.handler = instance(2, wait)
            asking = [asyncio.create_task(ask(client)) for _ in range(3)]
            await until(lambda: sum(stub.num_requests for stub in stubs) == 3)
            busy, other = sorted(stubs, key=lambda stub: -stub.num_requests)
            await asyncio.sleep(0.1)
            await client.admin("/drain", url=busy.url)
            await until(lambda: other.num_requests == 2)
            await asyncio.sleep(0.5)
            may_end.set()
            assert await asyncio.gather(*asking) == [WHOLE] * 3
            assert busy.num_cancelled == 1

    run(check)


def test_a_stream_stays_if_the_other_instance_has_restarted_with_another_model() -> None:
    async def check() -> None:
        may_end = asyncio.Event()

        async def wait(request: web.Request, response: web.StreamResponse) -> None:
            await may_end.wait()
            await write_the_rest(request, response)

        first, second = serve(instance()), serve(instance())

        async def becomes(state: str) -> None:
            async def is_it() -> bool:
                return await client.state_of(second) == state

            await until(is_it)

        async with routed(first, second) as client:
            await learned(client, [first, second])
            second.health = "restarting"
            await becomes("starting")
            first.num_requests, first.handler = 0, instance(2, wait)
            asking = asyncio.create_task(ask(client))
            await until(lambda: first.num_requests == 1)
            second.handler, second.health = instance(name=header_value(StreamName("other", "cmpl-1", 7))), "ok"
            await becomes("ready")
            await client.admin("/drain", url=first.url)
            await asyncio.sleep(0.2)
            may_end.set()
            assert await asking == WHOLE

    run(check)


@pytest.mark.parametrize(("path", "fields"), [("/drain", {}), ("/remove", {"now": True})], ids=["drained", "removed"])
def test_a_complete_answer_that_the_client_has_yet_to_read_stays_complete(path: str, fields: dict[str, Any]) -> None:
    """Whatever happens to its instance: more would be taken for the next answer on the connection."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={STREAM_HEADER: NAME})
        await response.prepare(request)
        await response.write(report_line(ReportKind.TOKENS, TOKENS[:1]) + chunk(TOKENS[0]))
        await response.write(report_line(ReportKind.LAST, TOKENS[1:2]) + b"data: " + b"x" * (8 << 20) + b"\n\n")
        return response

    async def check() -> None:
        stubs = [serve(instance()), serve(instance())]
        async with routed(*stubs) as client:
            await learned(client, stubs)
            for stub in stubs:
                stub.num_requests, stub.handler = 0, answer
            data = json.dumps(BODY).encode()
            head = f"POST {PATH} HTTP/1.1\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
            reader, writer = await client.connect()
            writer.write(head.encode() + data)
            live = client.router.dispatcher._live
            await until(lambda: any(each.target is not None and each.target.is_sent for each in live))
            busy, other = sorted(stubs, key=lambda stub: -stub.num_requests)
            await client.admin(path, url=busy.url, **fields)
            await asyncio.sleep(0.2)
            received = await reader.read()
            writer.close()
            assert received.endswith(b"x\n\n\r\n0\r\n\r\n")
            assert other.num_requests == 0

    run(check)
