"""`GET /dashboard`: the page, and the pictures of the engine that it draws, a few times a second."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import FileResponse, Response

from penstock import __version__
from penstock.metrics.request_log import Phase, RequestRecord
from penstock.server.health import health_of
from penstock.server.service import Service, service_of
from penstock.server.sse import EventStream, event
from penstock.utils.errors import EngineDeadError
from penstock.utils.math import cdiv

router = APIRouter()

_PAGE = Path(__file__).parent / "static" / "dashboard.html"
_SECONDS_BETWEEN = 0.25
_SECONDS_SHOWN = 30.0
_MAX_REQUESTS = 200
_MAX_CELLS = 2048


@router.get("/dashboard", include_in_schema=False)
async def page() -> Response:
    """The page: one file that asks nobody else for anything."""
    return FileResponse(_PAGE, media_type="text/html")


@router.get("/dashboard/events", include_in_schema=False)
async def events(request: Request) -> Response:
    """Pictures of the engine as server-sent events, until one side hangs up."""
    return EventStream(_pictures(service_of(request)))


async def _pictures(service: Service) -> AsyncGenerator[bytes, None]:
    blocks: dict[str, Any] = {}
    while not service.closing.is_set():
        # When the engine has gone, its last picture stays; the health says what has happened.
        with contextlib.suppress(EngineDeadError):
            blocks = await _blocks(service)
        yield event({**_picture(service), "blocks": blocks})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(service.closing.wait(), _SECONDS_BETWEEN)


async def _blocks(service: Service) -> dict[str, Any]:
    cells = await service.llm.block_map(_MAX_CELLS)
    return {
        "num_blocks": service.llm.info.num_blocks,
        "block_size": service.llm.info.block_size,
        "blocks_per_cell": cdiv(service.llm.info.num_blocks, _MAX_CELLS),
        "cells": cells.decode(),
    }


def _picture(service: Service) -> dict[str, Any]:
    now = service.clock.now()
    found = health_of(service)
    records = [r for r in service.llm.log.recent() if r.ended is None or r.ended > now - _SECONDS_SHOWN]
    # Those that run are worth more than those that have ended, and they stand behind them.
    shown = records[-_MAX_REQUESTS:]
    return {
        "time": now,
        "model": service.model_names[0],
        "version": __version__,
        "health": {"status": found.status, "reason": found.reason},
        "stats": {**msgspec.structs.asdict(service.llm.stats), **service.rates.totals()},
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
    }
