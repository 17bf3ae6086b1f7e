"""`penstock demo-pd`: prefill and decode in two engines on this machine, behind one address."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

from penstock.cli.dataclass_args import add_model_argument
from penstock.cli.parser import port
from penstock.cli.startup import announce
from penstock.config import env
from penstock.utils.clock import SystemClock
from penstock.utils.errors import ConfigError
from penstock.utils.interrupts import interrupts_blocked, interrupts_end_at_once

DESCRIPTION = """\
Starts a prefill instance, a decode instance and a router in front of them. The
prompt of each request is computed in one engine, and its KV is pulled into the
other one, which generates the answer."""

_STYLES = {"serial": "NixlConnector", "concurrent": "MooncakeConnector"}
_START_SECONDS = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "penstock demo-pd [MODEL] [flags]"
    add_model_argument(parser, "a checkpoint folder or a Hugging Face model id (default: the built-in model)")
    parser.add_argument("--port", type=port, default=8000, help="the router's port on 127.0.0.1 (default: 8000)")
    parser.add_argument(
        "--style",
        choices=_STYLES,
        default="serial",
        help="how the router drives the instances: one after the other, or at once (default: serial)",
    )
    parser.add_argument(
        "--transport",
        choices=("sockets", "shared_memory", "nixl", "mooncake"),
        default="sockets",
        help="transport for KV: sockets (default), shared_memory, nixl, mooncake; the last two need libraries",
    )
    parser.add_argument(
        "--kv-cache-memory", default="256MB", metavar="SIZE", help="KV cache of each instance (default: 256MB)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with interrupts_end_at_once():
        # Imported here: the help text needs none of it.
        import asyncio

        from penstock.router.dispatcher import Limits
        from penstock.router.instances import Role, make_instance
        from penstock.router.service import Listening, RouterConfig, route
        from penstock.utils import logging

        logging.configure(env.log_level())
    ports: dict[str, int] = dict(zip(("prefill", "decode", "bootstrap"), _free_ports(3), strict=True))
    with contextlib.ExitStack() as stack:
        started = {name: stack.enter_context(_instance(name, args, ports)) for name in ("prefill", "decode")}
        for name, process in started.items():
            _wait_until_ready(name, process, ports[name])
        prefill, decode, bootstrap = (f"http://127.0.0.1:{port}" for port in ports.values())

        def on_listening(router: Listening) -> None:
            announce(
                f"Ready. Requests go to {router.url}/v1, and from there\n"
                f"  to the prefill instance  {prefill}/dashboard\n"
                f"  to the decode instance   {decode}/dashboard\n"
                "Ctrl-C ends all three."
            )

        instances = (
            make_instance(prefill, Role.PREFILL, bootstrap if args.style == "concurrent" else ""),
            make_instance(decode, Role.DECODE),
        )
        # Every prompt is to be moved, also a short one.
        config = RouterConfig(instances, port=args.port, limits=Limits(max_local_prefill=0))
        asyncio.run(route(config, on_listening))
    return 0


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def _instance(name: str, args: argparse.Namespace, ports: dict[str, int]) -> Iterator[subprocess.Popen[str]]:
    """Starts a server in a separate process and prefixes its messages with its name."""
    options: dict[str, object] = {"transport": args.transport}
    if args.style == "concurrent":
        options["bootstrap_port"] = ports["bootstrap"]
    config = {
        "kv_connector": _STYLES[args.style],
        "kv_role": "kv_producer" if name == "prefill" else "kv_consumer",
        "engine_id": name,
        "kv_connector_extra_config": options,
    }
    model = [] if args.positional_model is None else [args.positional_model]
    command = [sys.executable, "-m", "penstock.cli.main", "serve", *model]
    command += ["--port", str(ports[name]), "--kv-cache-memory", args.kv_cache_memory]
    command += ["--kv-transfer-config", json.dumps(config)]
    with interrupts_blocked():
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    threading.Thread(target=_show, args=(name, process), daemon=True).start()
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _show(name: str, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        announce(f"{name:>7} | {line.rstrip()}")


def _wait_until_ready(name: str, process: subprocess.Popen[str], port: int) -> None:
    """Raises ConfigError if the process ends first."""
    # Imported here: the help text needs no HTTP client.
    import urllib.request

    clock = SystemClock()
    deadline = clock.now() + _START_SECONDS
    ended = threading.Event()
    while clock.now() < deadline:
        if process.poll() is not None:
            raise ConfigError(f"the {name} instance has not started; its messages are above")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
            return
        ended.wait(0.1)
    raise ConfigError(f"the {name} instance was not ready within {_START_SECONDS:g} seconds")
