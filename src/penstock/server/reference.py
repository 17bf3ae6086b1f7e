"""`GET /docs`: a page that shows the OpenAPI document, and asks no other server for anything."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, Response

router = APIRouter()

_PAGE = Path(__file__).parent / "static" / "docs.html"


@router.get("/docs", include_in_schema=False)
async def page() -> Response:
    """The page; it reads `/openapi.json`, with a key where the server needs one."""
    return FileResponse(_PAGE, media_type="text/html")
