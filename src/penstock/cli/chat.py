"""`penstock chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING

from penstock.cli.dataclass_args import add_engine_args, add_model_argument, changed_engine_flags, engine_kwargs
from penstock.cli.sampling_args import add_sampling_args, check_sampling, given_sampling, sampling_params
from penstock.cli.startup import announce, start_llm
from penstock.config import env
from penstock.config.model_path import BUILT_IN_MODEL
from penstock.utils.errors import ConfigError
from penstock.utils.interrupts import interrupts_end_at_once

if TYPE_CHECKING:
    from penstock.cli.chat_models import ChatModel, LocalModel, RemoteModel

DESCRIPTION = """\
Talks to a model: one that runs in this process or, with --url, one of a server
with the OpenAI API. /help in the chat lists its commands."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "penstock chat [MODEL] [flags]"
    add_model_argument(parser, "as --model; with --url the model's name on the server (default: its first model)")
    group = parser.add_argument_group("conversation")
    group.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    group.add_argument("--url", help="talk to the server at this address instead of loading a model")
    group.add_argument("--api-key", metavar="KEY", help="key for --url (or PENSTOCK_API_KEY)")
    add_sampling_args(parser)
    add_engine_args(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with interrupts_end_at_once():
        check_sampling(args)
        # Imported here: the help text needs no HTTP client.
        from penstock.cli.conversation import Conversation

        model: ChatModel = _start_local(args) if args.url is None else _connect(args)
    with contextlib.closing(model):
        _enable_line_editing()
        announce("/help lists the commands, Ctrl-D leaves.")
        opening = [] if args.system is None else [{"role": "system", "content": args.system}]
        Conversation(model, opening, args.max_tokens).run()
    return 0


def _start_local(args: argparse.Namespace) -> LocalModel:
    from penstock.cli.chat_models import LocalModel

    if args.api_key is not None:
        raise ConfigError("--api-key is for a server: pass --url too")
    llm = start_llm(args)
    return LocalModel(llm, sampling_params(args, llm.get_default_sampling_params()))


def _connect(args: argparse.Namespace) -> RemoteModel:
    from penstock.cli.chat_models import RemoteModel

    if flags := changed_engine_flags(args):
        raise ConfigError(f"{flags[0]} is for an engine in this process and cannot be used with --url")
    name = engine_kwargs(args)["model"]
    api_key = args.api_key or next(iter(env.api_keys()), None)
    chosen = None if name == BUILT_IN_MODEL and args.positional_model is None else name
    model = RemoteModel(args.url, api_key, chosen, given_sampling(args))
    context = "" if model.context is None else f", context {model.context:,} tokens"
    announce(f"Connected to {args.url}: {model.name}{context}")
    return model


def _enable_line_editing() -> None:
    """Makes `input` editable with the arrow keys, where the platform has readline."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
