"""Administration routes, served on a separate loopback port and not on the public one."""

from __future__ import annotations

import os
from pathlib import Path

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from penstock.server.errors import JSONResponse, error_response
from penstock.server.service import Service, service_of
from penstock.utils.errors import RequestError
from penstock.utils.names import is_unicode

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


class LoadLoraRequest(BaseModel):
    """vLLM's fields."""

    lora_name: str
    lora_path: str


class UnloadLoraRequest(BaseModel):
    """vLLM's fields; the number is not used."""

    lora_name: str
    lora_int_id: int | None = None


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(body: LoadLoraRequest, request: Request) -> Response:
    """Serves an adapter, of a folder within those of `--lora-allowed-path`, as a model of this name."""
    service = service_of(request)
    await service.load_lora(body.lora_name, _allowed(service, body.lora_path))
    return JSONResponse({"loaded": body.lora_name})


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(body: UnloadLoraRequest, request: Request) -> Response:
    """Ends the service of an adapter. Its running requests continue."""
    await service_of(request).llm.unload_lora(body.lora_name)
    return JSONResponse({"unloaded": body.lora_name})


def _allowed(service: Service, path: str) -> str:
    """Returns the path with its links resolved. Raises RequestError if it is outside the allowed folders."""
    allowed = service.args.lora_allowed_path
    if not allowed:
        raise RequestError(
            "adapters cannot be loaded at run time: start the server with --lora-allowed-path", "lora_path"
        )
    if "\0" in path or not is_unicode(path):
        raise RequestError("lora_path must be the path of a folder", "lora_path")
    found = os.path.realpath(path)
    if not any(Path(found).is_relative_to(os.path.realpath(folder)) for folder in allowed):
        raise RequestError("lora_path must be within a folder of --lora-allowed-path", "lora_path")
    return found


@router.post("/check_integrity")
async def check_integrity(request: Request) -> Response:
    """Recomputes all derived state of scheduler and block pool; returns 500 and the difference if there is one."""
    try:
        await service_of(request).llm.check_integrity()
    except AssertionError as error:
        return error_response(500, f"the engine's state is inconsistent: {error}")
    return JSONResponse({"whole": True})
