"""Builds the public app and the administration app from routes, error handlers and middleware."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, Response

from penstock import __version__
from penstock.server import admin, dashboard, errors, health
from penstock.server.anthropic import routes as anthropic
from penstock.server.anthropic.edge import MessagesEdge
from penstock.server.envelope import Envelope
from penstock.server.middleware import OPEN_PATHS, PAGES, Accounting, Authentication, BodyLimit, LocalHosts
from penstock.server.openai import chat, completions, models
from penstock.server.openai.responses_api import routes as responses
from penstock.server.pooling import ranking, vectors
from penstock.server.service import Service
from penstock.server.sse import ClientGone

_DESCRIPTION = "An OpenAI-compatible server. Bearer authentication if the server was started with a key."
# nginx's status for a connection that the client closed; no client receives it.
_CLIENT_CLOSED = 499


def create_app(service: Service) -> FastAPI:
    """Builds the public app."""
    app = _make_app(service, "Penstock")
    apis = (chat.router, completions.router, responses.router, anthropic.router, models.router)
    pooling = (vectors.router, ranking.router)
    for router in (*apis, *pooling, health.router, dashboard.router):
        app.include_router(router)
    # Requests pass through the middleware in reverse order of addition.
    app.add_middleware(BodyLimit, max_bytes=service.args.max_body_bytes)
    open_paths = OPEN_PATHS if service.args.protect_metrics else (*OPEN_PATHS, "/metrics")
    _add_access_control(app, service, service.args.api_key, service.args.is_loopback, open_paths)
    app.add_middleware(MessagesEdge)
    if service.args.allowed_origin:
        origins = list(service.args.allowed_origin)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(Envelope, ignores_unknown_fields=service.args.ignore_unknown_fields)
    app.add_middleware(Accounting, metrics=service.metrics)
    return app


def create_admin_app(service: Service) -> FastAPI:
    """Builds the app for the administration port, which is always on loopback."""
    app = _make_app(service, "Penstock administration")
    app.include_router(admin.router)
    app.add_middleware(BodyLimit, max_bytes=service.args.max_body_bytes)
    _add_access_control(app, service, service.args.admin_api_key, is_loopback=True)
    app.add_middleware(Envelope, ignores_unknown_fields=False)
    return app


def _make_app(service: Service, title: str) -> FastAPI:
    # The library's built-in pages load scripts from the internet.
    app = FastAPI(title=title, version=__version__, description=_DESCRIPTION, docs_url=None, redoc_url=None)
    app.state.service = service
    errors.install(app)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """Returns a page that shows `/openapi.json`, with a key if the server requires one, and loads nothing else."""
        return FileResponse(PAGES["/docs"], media_type="text/html")

    @app.exception_handler(ClientGone)
    async def on_client_gone(_: Request, __: ClientGone) -> Response:
        return Response(status_code=_CLIENT_CLOSED)

    return app


def _add_access_control(
    app: FastAPI, service: Service, keys: Sequence[str], is_loopback: bool, open_paths: Sequence[str] = ()
) -> None:
    if keys:
        app.add_middleware(Authentication, keys=keys, open_paths=open_paths)
    elif is_loopback:
        app.add_middleware(LocalHosts, origins=service.args.allowed_origin)
