"""`GET /docs`: a page that shows the OpenAPI document and loads nothing from other servers."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, Response

router = APIRouter()

_PAGE = Path(__file__).parent / "static" / "docs.html"


@router.get("/docs", include_in_schema=False)
async def page() -> Response:
    """Returns the page; it reads `/openapi.json`, with a key if the server requires one."""
    return FileResponse(_PAGE, media_type="text/html")
