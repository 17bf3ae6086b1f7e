"""What the router reads is what instances get: what could be read in two ways is refused or written anew."""

from __future__ import annotations

import gzip
import itertools
import json
from typing import Any

import pytest
from aiohttp import web
from yarl import URL

from penstock.router.bodies import ClientRequest
from tests.unit.router_stubs import PATH, STYLES, Client, Stub, decode, prefill, prefilled, routed, run, serve

CHAT = "/v1/chat/completions"
HANDOVER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_host": "::1",
    "remote_port": 80,
    "ticket": "t",
}
BODY: dict[str, Any] = {"prompt": "a", "max_tokens": 2, "kv_transfer_params": HANDOVER}
TEXT = json.dumps(BODY)


async def received(request: web.Request) -> web.StreamResponse:
    """Answers with what arrived."""
    head = {"path": request.raw_path, "type": request.headers.getall("Content-Type", [])}
    return web.json_response({**head, "body": (await request.read()).decode()})


async def send(client: Client, data: bytes, path: str = PATH, headers: Any = None, method: str = "POST") -> Any:
    url = URL(client.router.url + path, encoded=True)
    headers = {"Content-Type": "application/json"} if headers is None else headers
    async with client.session.request(method, url, data=data, headers=headers) as response:
        return response.status, await response.json(content_type=None)


REFUSED = {
    "nothing": b"",
    "not JSON": b"{'prompt': 'a'}",
    "not an object": b"[]",
    "null": b"null",
    "byte order mark": b"\xef\xbb\xbf" + TEXT.encode(),
    "UTF-16": TEXT.encode("utf-16"),
    "UTF-16 without a mark": TEXT.encode("utf-16-le"),
    "UTF-32": TEXT.encode("utf-32"),
    "UTF-7": b'+AHs-"prompt": "a"}',
    "Latin-1": '{"prompt": "ä"}'.encode("latin-1"),
    "surrogates in UTF-8": b'{"prompt": "\xed\xa0\x80"}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "temperature": -Infinity}',
    "a number too large for a double": b'{"prompt": "a", "temperature": 1e400}',
    "4,301 digits": b'{"prompt": "a", "seed": %s}' % (b"9" * 4301),
    "half a surrogate pair": rb'{"prompt": "\ud800"}',
    "half a surrogate pair in a name": rb'{"prompt": "a", "\udc00": 1}',
    "a control character": b'{"prompt": "\0"}',
    "a comment": b'{"prompt": "a" /* b */}',
    "a trailing comma": b'{"prompt": "a",}',
    "two values": b'{"prompt": "a"} {"prompt": "b"}',
    "a NUL at the end": TEXT.encode() + b"\0",
    "129 levels": b'{"prompt": "a", "tools": %s1%s}' % (b"[" * 128, b"]" * 128),
    "100,000 levels": b'{"prompt": "a", "tools": ' + b"[" * 100_000,
    "compressed": gzip.compress(TEXT.encode()),
}


@pytest.mark.parametrize("path", [PATH, CHAT])
def test_what_the_router_cannot_read_reaches_no_instance(path: str) -> None:
    async def check() -> None:
        stubs = [prefill(prefilled), decode(received), serve(received)]
        async with routed(*stubs) as client:
            for name, data in REFUSED.items():
                status, answer = await send(client, data, path)
                assert status == 400, name
                assert answer["error"].keys() == {"message", "type", "param", "code"}
                assert "must be a JSON object" in answer["error"]["message"]
                assert not sum(stub.num_requests for stub in stubs), name

    run(check)


def test_the_body_of_another_path_is_the_instances_to_read() -> None:
    async def check() -> None:
        async with routed(serve(received)) as client:
            for text in ("not JSON", "[1]", "\ufeff{}"):
                status, answer = await send(client, text.encode(), "/v1/embeddings")
                assert (status, answer["body"]) == (200, text)

    run(check)


HEADERS: list[tuple[list[tuple[str, str]], int]] = [
    ([], 200),
    ([("Content-Type", "application/x-www-form-urlencoded")], 200),
    ([("Content-Type", "application/json; charset=utf-16")], 200),
    ([("content-type", "Application/JSON")], 200),
    ([("Content-Type", "application/problem+json")], 200),
    ([("Content-Type", "application/json"), ("Content-Encoding", "identity")], 200),
    ([("Content-Type", "text/plain")], 400),
    ([("Content-Type", "multipart/form-data; boundary=a")], 400),
    ([("Content-Type", "application/jsonp")], 400),
    ([("Content-Type", "application/json"), ("Content-Type", "text/plain")], 400),
    ([("Content-Type", "application/json"), ("Content-Encoding", "gzip")], 400),
]


def test_a_model_is_not_searched_in_a_body_that_is_nested_too_deeply() -> None:
    for body, model in ((b'{"model": "m", "x": [[]]}', "m"), (b'{"x": %s}' % (b"[" * 10**5 + b"]" * 10**5), "")):
        assert ClientRequest("POST", "/v1/embeddings", "/v1/embeddings", (), body).model() == model


@pytest.mark.parametrize(("headers", "status"), HEADERS, ids=str)
def test_a_body_is_sent_as_json_whatever_its_headers(headers: list[tuple[str, str]], status: int) -> None:
    async def check() -> None:
        async with routed(serve(received)) as client:
            options = {"skip_auto_headers": ("Content-Type",)}
            url = client.router.url + PATH
            async with client.session.post(url, data=TEXT.encode(), headers=headers, **options) as response:
                assert response.status == status
                answer = await response.json()
            if status == 200:
                assert answer["type"] == ["application/json"]
                assert "do_remote" not in answer["body"]

    run(check)


SPELLINGS = {
    "twice": '{"prompt": "a", "kv_transfer_params": {}, "kv_transfer_params": {"do_remote_prefill": true}}',
    "twice, inside": '{"prompt": "a", "kv_transfer_params": {"do_remote_prefill": 0, "do_remote_prefill": true}}',
    "escaped": r'{"prompt": "a", "\u006bv_transfer_params": {"do_remote_\u0070refill": true, "do_remote_decode": 1}}',
    "spaced": ' \r\n\t{"prompt": "a",\n"kv_transfer_params" :{"do_remote_decode":true}}\r\n',
    "plain": TEXT,
    "empty": "{}",
}
TARGETS = [
    PATH,
    PATH + "/",
    PATH + "//",
    "/v1/c%6Fmpletions",
    "/v1%2fcompletions",
    "/%76%31/completions%2F",
    CHAT + "/",
]


@pytest.mark.parametrize("roles", ["serve", "decode", *STYLES])
def test_a_client_cannot_ask_for_a_handover_itself(roles: str) -> None:
    async def check() -> None:
        stubs: list[Stub] = [serve(received) if roles == "serve" else decode(received)]
        if roles in STYLES:
            stubs.append(prefill(prefilled, roles))
        async with routed(*stubs) as client:
            for target, text in itertools.product(TARGETS, SPELLINGS.values()):
                status, answer = await send(client, text.encode(), target + "?a=%2F")
                assert status == 200
                assert answer["path"] == (CHAT if "chat" in target else PATH) + "?a=%2F"
                assert answer["body"].count("kv_transfer_params") <= 1
                params = json.loads(answer["body"]).get("kv_transfer_params", {})
                if roles in ("serve", "decode"):
                    assert not params.keys() & {"do_remote_prefill", "do_remote_decode"}
                elif roles == "serial":
                    assert params == {"ticket": "t"}, "the parameters are those of the prefill instance"
                else:
                    assert params["remote_bootstrap_addr"] == stubs[1].url

    run(check)


def test_other_parameters_of_a_client_are_kept() -> None:
    async def check() -> None:
        async with routed(serve(received)) as client:
            for params, kept in (
                ({"offload_policy": "none", "do_remote_decode": True}, {"offload_policy": "none"}),
                (None, None),
                ("text", "text"),
                ([HANDOVER], [HANDOVER]),
            ):
                _, answer = await send(client, json.dumps({**BODY, "kv_transfer_params": params}).encode())
                assert json.loads(answer["body"])["kv_transfer_params"] == kept

    run(check)


@pytest.mark.parametrize(
    "text",
    [
        '{"prompt":"ä 💧 \\u0000 \\"\\\\","seed":18446744073709551616,"temperature":1e-7,"top_p":0.1,"a":-0.0}',
        '{"prompt":[1,2,3],"logit_bias":{"5":-100},"stream":false,"user":null,"top_k":-1,"tools":[{"a":{"b":[{}]}}]}',
    ],
)
def test_a_body_keeps_its_meaning(text: str) -> None:
    async def check() -> None:
        async with routed(serve(received)) as client:
            _, answer = await send(client, text.encode())
            assert json.loads(answer["body"]) == json.loads(text)
            assert repr(json.loads(answer["body"])) == repr(json.loads(text))

    run(check)


@pytest.mark.parametrize("target", [PATH + "#", PATH + "#?a", "/v1/completions%23#", "/v1/models#a"])
def test_a_target_with_a_fragment_is_refused(target: str) -> None:
    """An instance's server ends the path there, so that it would not be the one that was read here."""

    async def check() -> None:
        stub = serve(received)
        async with routed(stub) as client:
            reader, writer = await client.connect()
            head = f"POST {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            writer.write(head.encode())
            assert b" 400 " in (await reader.read()).split(b"\r\n")[0]
            writer.close()
            await writer.wait_closed()
            assert stub.num_requests == 0

    run(check)


@pytest.mark.parametrize("n", [2, "x"])
def test_several_answers_are_not_divided(n: object) -> None:
    async def check() -> None:
        p = prefill(prefilled)
        async with routed(p, decode(received)) as client:
            status, answer = await send(client, json.dumps({"prompt": "a", "n": n}).encode())
            assert (status, json.loads(answer["body"])) == (200, {"prompt": "a", "n": n})
            assert p.num_requests == 0

    run(check)
