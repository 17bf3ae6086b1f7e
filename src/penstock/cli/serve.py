"""`penstock serve`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from penstock.cli.dataclass_args import add_engine_args, add_server_args, engine_kwargs, server_args
from penstock.config import env
from penstock.utils import logging


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP, in the OpenAI API",
        description="Serves a model over HTTP, in the OpenAI API, with metrics and a dashboard.",
    )
    parser.add_argument("served", nargs="?", metavar="MODEL", help="the same as --model")
    add_server_args(parser)
    add_engine_args(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    # Imported here: the help text needs neither.
    import uvloop

    from penstock.server.run import serve

    logging.configure(env.log_level())
    if args.served is not None:
        args.model = args.served
    admin_keys = (*args.admin_api_key, *env.admin_api_keys())
    arguments = server_args(args, api_key=(*args.api_key, *env.api_keys()), admin_api_key=admin_keys)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(engine_kwargs(args), arguments, _announce))


def _announce(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
