"""Administration routes, served on a separate loopback port and not on the public one."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.server.errors import JSONResponse, error_response
from penstock.server.service import service_of

router = APIRouter()


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request, reset_external: bool = False) -> Response:
    """Clears the prefix cache and, with `?reset_external=true`, the KV connector's caches.

    Returns 409 while requests are running, or if the connector cannot clear its caches.
    """
    if await service_of(request).llm.reset_prefix_cache(reset_connector=reset_external):
        return JSONResponse({"reset": True})
    return error_response(409, "requests are running (drain first, or retry), or the KV connector cannot be reset")


@router.post("/drain")
async def drain(request: Request) -> Response:
    """Refuses new requests from now on; running requests continue. `GET /drain` returns how many there are."""
    service = service_of(request)
    service.is_draining = True
    return await drained(request)


@router.get("/drain")
async def drained(request: Request) -> Response:
    """Whether the server is draining, and how many requests it still has."""
    service = service_of(request)
    return JSONResponse({"draining": service.is_draining, "num_unfinished": service.llm.num_unfinished})


@router.post("/resume")
async def resume(request: Request) -> Response:
    """Accepts new requests again; returns 409 if the server is shutting down."""
    service = service_of(request)
    if service.is_stopping:
        return error_response(409, "the server is shutting down")
    service.is_draining = False
    return await drained(request)


@router.post("/check_integrity")
async def check_integrity(request: Request) -> Response:
    """Recomputes all derived state of scheduler and block pool; returns 500 and the difference if there is one."""
    try:
        await service_of(request).llm.check_integrity()
    except AssertionError as error:
        return error_response(500, f"the engine's state is inconsistent: {error}")
    return JSONResponse({"whole": True})
