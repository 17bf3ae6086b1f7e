"""Health, readiness, version and metrics, for supervisors, load balancers and dashboards."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock import __version__
from penstock.server.errors import JSONResponse
from penstock.server.openai.protocol import ERRORS
from penstock.server.service import Service, service_of

router = APIRouter()


@dataclass(frozen=True, slots=True)
class Health:
    """`status` is ok, draining, restarting, unhealthy or dead; `reason` explains why it is not ok."""

    status: str
    reason: str | None = None

    @property
    def is_alive(self) -> bool:
        """True also while the server drains or restarts its engine, when a supervisor must not kill it."""
        return self.status in ("ok", "draining", "restarting")


def health_of(service: Service) -> Health:
    """Checks progress, not only the process: an engine that has work but executes no step is unhealthy."""
    llm = service.llm
    if llm.death is not None:
        return Health("dead", str(llm.death))
    if llm.outage is not None:
        return Health("restarting", f"the engine is being started again after it failed: {llm.outage}")
    stalled = llm.seconds_without_progress
    if stalled > service.args.health_timeout:
        return Health("unhealthy", f"{llm.num_unfinished} requests wait, and no step was made for {stalled:.0f} s")
    if service.is_draining:
        return Health("draining", f"{llm.num_unfinished} requests are still running")
    return Health("ok")


@router.head("/health", include_in_schema=False)
@router.get("/health", responses=ERRORS)
async def health(request: Request) -> Response:
    """Returns 200 while the engine is alive and makes progress, or is being restarted; otherwise 503 and the reason."""
    found = health_of(service_of(request))
    return JSONResponse({"status": found.status, "reason": found.reason}, status_code=200 if found.is_alive else 503)


@router.head("/ready", include_in_schema=False)
@router.get("/ready", responses=ERRORS)
async def ready(request: Request) -> Response:
    """Returns 200 if new requests are accepted, otherwise 503, with what a router needs to know."""
    service = service_of(request)
    found = health_of(service)
    is_ready = found.status == "ok"
    # The route needs no key, and the metrics have the names too.
    names = () if service.args.protect_metrics else (*service.model_names, *service.llm.loras)
    body = {"ready": is_ready, "reason": found.reason, "models": names, "shares_kv": service.llm.info.shares_kv}
    return JSONResponse(body, status_code=200 if is_ready else 503)


@router.get("/version")
async def version(request: Request) -> Response:
    """Returns Penstock's version and the engine's configuration: device, kernels, dtype, context, KV cache."""
    return JSONResponse({"version": __version__, "engine": service_of(request).llm.info.shown()})


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Prometheus metrics, under the names of vLLM's dashboards."""
    body, content_type = service_of(request).metrics.render(request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": content_type})
