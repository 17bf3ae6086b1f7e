"""Runs the server: starts the engine, opens the ports, serves until a signal or the engine's death, and shuts down."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import signal
import socket
import ssl
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

import uvicorn

from penstock.config.server import ServerArgs
from penstock.frontend.async_llm import AsyncLLM
from penstock.messages.engine_info import EngineInfo
from penstock.metrics.prometheus import PrometheusMetrics
from penstock.metrics.rates import RecentRates
from penstock.metrics.request_log import EngineObserver
from penstock.metrics.tracing import make_tracer
from penstock.server.connections import Connection
from penstock.server.openai.reasoning_formats import make_reasoning_format
from penstock.server.openai.tool_calls.registry import make_format
from penstock.utils import logging
from penstock.utils.clock import SystemClock
from penstock.utils.errors import ConfigError, RequestError
from penstock.utils.hosts import in_url
from penstock.utils.machine import collect_rarely

if TYPE_CHECKING:
    from fastapi import FastAPI

    from penstock.server.service import Service

logger = logging.get_logger(__name__)

_LOOPBACK = "127.0.0.1"
_BACKLOG = 2048
# Clients that connect in this time still receive the reason; then the server exits with its exit code.
_DEATH_NOTICE_SECONDS = 3.0
_FLUSH_SECONDS = 5
_ENGINE_DIED = 1


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: here the effect of a signal depends on the engine's requests."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def serve(
    engine_args: dict[str, Any],
    args: ServerArgs,
    announce: Callable[[str], None],
    on_loaded: Callable[[EngineInfo], None],
) -> int:
    """Serves until SIGTERM or SIGINT, or until the engine dies. Returns the exit code.

    `announce` receives messages for the user: the server's address, and what it waits for when it stops. `on_loaded` is
    called once, before them.

    Raises ConfigError when the ports cannot be bound, or the engine cannot be built with these arguments.
    """
    args.check()
    if args.access_log:
        logging.enable_access_log("uvicorn.access")
    # Checked before the model is loaded, so that a port in use fails at once and not after minutes.
    _check_certificate(args)
    public = _bind(args.host, args.port)
    admin = None if args.admin_port is None else _bind(_LOOPBACK, args.admin_port)
    names = args.served_model_name or (engine_args["model"],)
    metrics, rates = PrometheusMetrics(names[0]), RecentRates()
    tracer = None if args.otlp_traces_endpoint is None else make_tracer(args.otlp_traces_endpoint, model=names[0])
    shared: list[EngineObserver] = [rates, *([] if tracer is None else [tracer])]
    announce(f"Loading {engine_args['model']} ...")
    starting = AsyncLLM.start(
        observers=lambda rank: [metrics.engine(rank), *shared],
        restart_on_failure=args.restart_on_failure,
        **engine_args,
    )
    # FastAPI and the routes take a second, in which the engine core starts.
    app, llm = await asyncio.gather(asyncio.to_thread(importlib.import_module, "penstock.server.app"), starting)
    try:
        on_loaded(llm.info)
        collect_rarely()
        service = _make_service(llm, args, names, metrics, rates)
        await _load_loras(service)
        servers = {public: _make_server(app.create_app(service), args)}
        if admin is not None:
            servers[admin] = _make_server(app.create_admin_app(service), args)
        for bound in servers:
            # From here on clients can connect: they wait in the backlog until the server accepts them.
            with _naming_address(*bound.getsockname()[:2]):
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                bound.listen(_BACKLOG)
        return await _run(service, servers, announce)
    finally:
        await llm.shutdown()
        if tracer is not None:
            await asyncio.to_thread(tracer.shutdown)


def _make_service(
    llm: AsyncLLM, args: ServerArgs, names: tuple[str, ...], metrics: PrometheusMetrics, rates: RecentRates
) -> Service:
    from penstock.server.service import Service

    for rank, replica in enumerate(llm.replicas):
        metrics.engine(rank).watch(replica)
    tokenizer = llm.get_tokenizer() if llm.has_tokenizer else None
    return Service(
        llm=llm,
        args=args,
        model_names=names,
        tool_format=make_format(args.tool_call_parser, tokenizer),
        reasoning=make_reasoning_format(args.reasoning_parser, tokenizer),
        metrics=metrics,
        rates=rates,
        clock=SystemClock(),
        started=int(SystemClock().wall()),
        closing=asyncio.Event(),
    )


async def _load_loras(service: Service) -> None:
    """Loads the adapters that are served from the start. Raises ConfigError."""
    for name, path in service.args.loras:
        try:
            await service.load_lora(name, path)
        except RequestError as error:
            raise ConfigError(f"lora_modules {name}={path}: {error}") from None


def _check_certificate(args: ServerArgs) -> None:
    """Raises ConfigError if the TLS files cannot be read, or do not belong together."""
    if args.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(args.ssl_certfile, args.ssl_keyfile)
    except OSError as error:
        names = f"ssl_certfile={args.ssl_certfile} and ssl_keyfile={args.ssl_keyfile}"
        raise ConfigError(f"{names} are not a PEM certificate and its key: {error.strerror or error}") from None


def _bind(host: str, port: int) -> socket.socket:
    """Returns a bound socket. Raises ConfigError that names the address."""
    with _naming_address(host, port):
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            # Without SO_REUSEADDR no other process can bind the port while this one loads its model.
            bound.bind(address)
        except OSError:
            # It is necessary while connections of an earlier server are still being closed.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
    return bound


@contextlib.contextmanager
def _naming_address(host: str, port: int) -> Generator[None, None, None]:
    """Turns an error of a socket, or of an invalid host name, into a ConfigError that names the address."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {in_url(host)}:{port}: {error.args[-1]}") from None


def _make_server(app: FastAPI, args: ServerArgs) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            http=Connection,
            log_config=None,
            access_log=args.access_log,
            server_header=False,
            backlog=_BACKLOG,
            ssl_certfile=args.ssl_certfile,
            ssl_keyfile=args.ssl_keyfile,
            timeout_graceful_shutdown=_FLUSH_SECONDS,
        )
    )


def _addresses(service: Service, public: socket.socket, admin: socket.socket | None = None) -> str:
    scheme = "http" if service.args.ssl_certfile is None else "https"
    url = f"{scheme}://{in_url(service.args.host)}:{public.getsockname()[1]}"
    lines = [f"Penstock serves {', '.join(service.model_names)} at {url}/v1 (dashboard: {url}/dashboard)"]
    if admin is not None:
        lines.append(f"Administration at {scheme}://{_LOOPBACK}:{admin.getsockname()[1]}")
    return "\n".join(lines)


async def _run(service: Service, servers: Mapping[socket.socket, _Server], announce: Callable[[str], None]) -> int:
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    announce(_addresses(service, *servers))
    serving = [asyncio.create_task(server.serve(sockets=[bound])) for bound, server in servers.items()]
    await _first(stop.wait(), service.llm.wait_until_dead(), *serving)
    if service.llm.death is None:
        await _drain(service, hurry, announce)
    else:
        logger.error("the engine is gone: %s", service.llm.death)
        await _first(stop.wait(), timeout=_DEATH_NOTICE_SECONDS)
    code = 0 if service.llm.death is None else _ENGINE_DIED
    service.closing.set()
    # Unfinished requests receive an error instead of a broken connection.
    await service.llm.shutdown()
    for server in servers.values():
        server.should_exit = True
    await asyncio.gather(*serving)
    return code


async def _drain(service: Service, hurry: asyncio.Event, announce: Callable[[str], None]) -> None:
    """Refuses new requests and waits for the running ones, until the timeout or a second signal."""
    service.is_draining = service.is_stopping = True
    if service.llm.num_unfinished:
        announce(
            f"Stopping: waiting up to {service.args.shutdown_timeout:g} s for the running requests "
            f"({service.llm.num_unfinished}); Ctrl-C or SIGTERM again stops now"
        )
    await _first(service.llm.wait_until_idle(), hurry.wait(), timeout=service.args.shutdown_timeout)


async def _first(*waits: Any, timeout: float | None = None) -> None:
    """Returns when one of these is done, or the time has passed."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for task in set(tasks).difference(waits):
        task.cancel()
