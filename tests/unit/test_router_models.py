"""Several models behind one address."""

from __future__ import annotations

import pytest
from aiohttp import web

from penstock.router.health import Reply, reported
from tests.unit.router_stubs import PATH, Client, Handler, Stub, decode, prefill, prefilled, routed, run, serve


def named(*models: str, status: int = 200) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            data = [{"id": model, "object": "model"} for model in models]
            return web.json_response({"object": "list", "data": data}, status=status)
        return web.json_response({"by": models[0]})

    return answer


def instance(*models: str, status: int = 200) -> Stub:
    stub = serve(named(*models, status=status))
    stub.models = list(models)
    return stub


async def answering(client: Client, path: str = PATH, **body: object) -> object:
    async with client.session.post(client.router.url + path, json={"prompt": "a", **body}) as response:
        return (await response.json())["by"]


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/v1/embeddings", "/v1/responses"])
def test_a_request_goes_to_its_model(path: str) -> None:
    async def check() -> None:
        a, b = instance("a", "alias"), instance("b")
        async with routed(a, b) as client:
            for model, name in (("a", "a"), ("b", "b"), ("alias", "a"), ("b", "b"), ("b", "b"), ("a", "a")):
                assert await answering(client, path, model=model) == name
            await answering(client, path, model="unknown")
            await answering(client, path, model=5)
            await answering(client, path)
            assert a.num_requests + b.num_requests == 9

    run(check)


def test_models_of_all_groups_are_listed() -> None:
    async def check() -> None:
        async with routed(instance("a", "alias"), instance("a", "alias"), instance("b")) as client:
            async with client.session.get(client.router.url + "/v1/models") as response:
                listed = await response.json()
            assert sorted(each["id"] for each in listed["data"]) == ["a", "alias", "b"]
        async with (
            routed(instance("a"), instance("b", status=401)) as client,
            client.session.get(client.router.url + "/v1/models") as response,
        ):
            assert response.status == 401

    run(check)


def test_a_model_whose_instances_are_gone_is_not_replaced_by_another() -> None:
    async def check() -> None:
        a, b = instance("a"), instance("b")
        async with routed(a, b) as client:
            await client.admin("/drain", url=a.url)
            status, body = await client.ask(body={"prompt": "x", "model": "a"})
            assert (status, b"no instance is left" in body) == (503, True)
            assert b.num_requests == 0

    run(check)


def test_halves_are_paired_within_a_model() -> None:
    async def check() -> None:
        stubs = [prefill(prefilled), prefill(prefilled), decode(named("a")), decode(named("b"))]
        for stub, model in zip(stubs, ("a", "b", "a", "b"), strict=True):
            stub.models = [model]
        async with routed(*stubs) as client:
            for _ in range(3):
                assert await answering(client, model="b") == "b"
            assert [stub.num_requests for stub in stubs] == [0, 3, 0, 3]

    run(check)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"models": 5}', b'{"models": [1]}', b"\xff", b'{"a": ' + b"[" * 99_999])
def test_an_instance_that_reports_no_models_serves_any(body: bytes) -> None:
    assert reported(Reply(200, body)) == ((), False)
