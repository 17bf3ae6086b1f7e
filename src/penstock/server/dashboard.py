"""`GET /dashboard`: the page, and the snapshots of the engine that it draws, a few times a second."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import FileResponse, Response

from penstock import __version__
from penstock.frontend.replica import Replica
from penstock.metrics.request_log import Phase, RequestRecord
from penstock.server.errors import NotFoundError
from penstock.server.health import health_of
from penstock.server.middleware import PAGES
from penstock.server.service import Service, service_of
from penstock.server.sse import EventStream, event
from penstock.utils.errors import EngineDeadError, OverloadedError
from penstock.utils.math import cdiv

router = APIRouter()

_SECONDS_BETWEEN = 0.25
_SECONDS_SHOWN = 30.0
_MAX_REQUESTS = 200
_MAX_CELLS = 2048
# The engine core executes no step while it scans all blocks, so the map of a large pool is requested less often.
_SECONDS_PER_BLOCK = 2e-5


@router.get("/dashboard", include_in_schema=False)
async def page() -> Response:
    """Returns the page, a single file without external assets."""
    return FileResponse(PAGES["/dashboard"], media_type="text/html")


@router.get("/dashboard/events", include_in_schema=False)
async def events(request: Request, rank: int = 0) -> Response:
    """Streams snapshots of the engine with this data parallel rank as server-sent events until one side disconnects."""
    service = service_of(request)
    if not 0 <= rank < len(service.llm.replicas):
        raise NotFoundError(f"there is no engine {rank} here; there are {len(service.llm.replicas)}, counted from 0")
    return EventStream(_pictures(service, service.llm.replicas[rank]))


async def _pictures(service: Service, replica: Replica) -> AsyncGenerator[bytes, None]:
    maps: dict[str, Any] = {"blocks": {}, "experts": {}}
    maps_due = service.clock.now()
    while not service.closing.is_set():
        # When the engine has died, its last snapshot is shown until another one serves; the health shows the reason.
        if service.clock.now() >= maps_due:
            with contextlib.suppress(EngineDeadError, OverloadedError):
                experts = msgspec.to_builtins(await replica.expert_map())
                maps = {"blocks": await _blocks(replica), "experts": experts}
            maps_due = service.clock.now() + replica.info.num_blocks * _SECONDS_PER_BLOCK
        yield event({**_picture(service, replica), **maps})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(service.closing.wait(), _SECONDS_BETWEEN)


async def _blocks(replica: Replica) -> dict[str, Any]:
    info = replica.info
    found = await replica.block_map(_MAX_CELLS)
    return {
        "num_blocks": info.num_blocks,
        "block_size": info.block_size,
        "blocks_per_cell": cdiv(info.num_blocks, _MAX_CELLS),
        "cells": found.cells,
        "counts": found.counts,
    }


def _picture(service: Service, replica: Replica) -> dict[str, Any]:
    now = service.clock.now()
    found = health_of(service)
    records = [r for r in replica.log.recent() if r.ended is None or r.ended > now - _SECONDS_SHOWN]
    # Running requests are last, and are shown in preference to finished ones.
    shown = records[-_MAX_REQUESTS:]
    return {
        "time": now,
        "model": service.model_names[0],
        "version": __version__,
        "engine": replica.info.shown(),
        "num_replicas": len(service.llm.replicas),
        "uptime": service.clock.wall() - service.started,
        "health": {"status": found.status, "reason": found.reason},
        "stats": {**msgspec.structs.asdict(replica.stats), **service.rates.totals()},
        "rates": asdict(service.rates.rates()),
        "requests": [_request(record) for record in shown],
        "num_requests_not_shown": len(records) - len(shown),
    }


def _request(record: RequestRecord) -> dict[str, Any]:
    return {
        "id": record.request_id,
        "state": Phase.FINISHED if record.ended is not None else record.phases[-1][0],
        "finish_reason": record.finish_reason,
        "events": record.phases,
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_output_tokens": record.num_output_tokens,
        "num_cached_tokens": record.num_cached_tokens,
        "adapter": record.adapter,
    }
