"""Administration, on a loopback port of its own: nothing here can be reached through the public one."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.server.errors import JSONResponse, error_response
from penstock.server.service import service_of

router = APIRouter()


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request, reset_external: bool = False) -> Response:
    """Forgets all cached prefixes, with `?reset_external=true` those that the KV connector keeps too.

    409 while requests are running, and when the connector cannot forget.
    """
    if await service_of(request).llm.reset_prefix_cache(reset_connector=reset_external):
        return JSONResponse({"reset": True})
    return error_response(409, "requests are running (drain first, or try again), or the KV connector cannot forget")


@router.post("/drain")
async def drain(request: Request) -> Response:
    """Takes no new requests from now on; those that run go on. `GET /drain` tells how many."""
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
    """Takes new requests again; 409 once the server has been told to stop."""
    service = service_of(request)
    if service.is_stopping:
        return error_response(409, "the server is shutting down")
    service.is_draining = False
    return await drained(request)


@router.post("/check_integrity")
async def check_integrity(request: Request) -> Response:
    """Recomputes all derived state of scheduler and block pool; 500 and what disagrees, if anything does."""
    try:
        await service_of(request).llm.check_integrity()
    except AssertionError as error:
        return error_response(500, f"the engine's state disagrees with itself: {error}")
    return JSONResponse({"whole": True})
