"""`penstock serve`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from penstock.cli.dataclass_args import add_engine_args, add_model_argument, add_server_args, engine_kwargs, server_args
from penstock.cli.startup import announce, describe_engine
from penstock.config import env
from penstock.utils.interrupts import interrupts_end_at_once
from penstock.utils.machine import allow_open_files

if TYPE_CHECKING:
    from penstock.messages.engine_info import EngineInfo

DESCRIPTION = "Serves a model over HTTP with the OpenAI API, with metrics and a dashboard."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "penstock serve [MODEL] [flags]"
    add_model_argument(parser)
    add_server_args(parser)
    add_engine_args(parser, for_server=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    kwargs = engine_kwargs(args)
    admin_keys = (*args.admin_api_key, *env.admin_api_keys())
    arguments = server_args(args, api_key=(*args.api_key, *env.api_keys()), admin_api_key=admin_keys)
    # Until the server serves and handles signals itself, an interrupt ends it; the engine core ends with it.
    with interrupts_end_at_once():
        # Imported here: the help text needs neither.
        import asyncio

        import uvloop

        from penstock.server.run import serve
        from penstock.utils import logging

        allow_open_files()
        logging.configure(env.log_level())

        def on_loaded(info: EngineInfo) -> None:
            announce(describe_engine(kwargs["model"], info))

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(kwargs, arguments, announce, on_loaded))
