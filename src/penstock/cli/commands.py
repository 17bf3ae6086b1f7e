"""The subcommands of `penstock`: each is a module of this folder with `DESCRIPTION`, `add_arguments` and `run`.

Only the module of the requested command is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Collection, Sequence

from penstock import __version__
from penstock.cli.parser import USAGE_ERROR, Parser
from penstock.utils.errors import PenstockError
from penstock.utils.interrupts import interrupts_end_at_once
from penstock.utils.names import nearest

SUMMARIES = {
    "serve": "serve a model over HTTP with the OpenAI API",
    "route": "one address for several engines",
    "chat": "talk to a model in the terminal",
    "generate": "complete one prompt",
    "bench": "measure throughput, latency, or a server under load",
    "verify": "check that batching, caching and drafts change no token",
    "audit": "check that any server answers from the right request's state",
    "simulate": "run the engine in a simulated world with faults",
    "demo-pd": "prefill and decode in two engines, behind one address",
}
_EPILOG = """\
MODEL is a checkpoint folder, a GGUF file or a Hugging Face model id; without it
the small built-in model runs. `penstock COMMAND --help` shows the flags of a
command.

examples:
  penstock serve                         the built-in model on 127.0.0.1:8000
  penstock chat path/or/model-id
  penstock generate --prompt "Once upon a time"
"""
_OWN_FLAGS = ("-h", "--help", "--version")


def make_parser(commands: Collection[str] = tuple(SUMMARIES)) -> Parser:
    """Builds the parser of the whole command line. Only the named commands are imported and have their flags."""
    parser = Parser(
        prog="penstock", usage="penstock COMMAND [flags]", description="Serves language models.", epilog=_EPILOG
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}", help="show the version")
    subparsers = parser.add_subparsers(
        title="commands", prog="penstock", dest="command", required=True, metavar="COMMAND"
    )
    for name, summary in SUMMARIES.items():
        child = subparsers.add_parser(name, help=summary)
        if name in commands:
            module = importlib.import_module(f"penstock.cli.{name.replace('-', '_')}")
            child.description = module.DESCRIPTION
            module.add_arguments(child)
    return parser


def run_command(argv: Sequence[str]) -> int:
    """Parses and runs. Returns the exit code; raises KeyboardInterrupt."""
    with interrupts_end_at_once():
        args = _make_parser_for(argv).parse_args(argv)
    if sys.stdin is None or sys.stdout is None:
        print("penstock: standard input or output is closed", file=sys.stderr)
        return USAGE_ERROR
    try:
        return args.run(args)
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return USAGE_ERROR
    except BrokenPipeError:
        # The reader of standard output has closed it (`penstock generate | head`): there is nothing left to write, and
        # the exit handler must not try either.
        sys.stderr.close()
        return 0
    except OSError as error:
        # Such as a full disk behind standard output; the files that the user named have been checked before.
        with contextlib.suppress(OSError):
            print(f"penstock: {error}", file=sys.stderr)
        return USAGE_ERROR


def _make_parser_for(argv: Sequence[str]) -> Parser:
    """Builds the parser with the flags of the first argument's command. Ends the process if that is not a command."""
    first = argv[0] if argv else ""
    parser = make_parser([first] if first in SUMMARIES else [])
    if not first:
        parser.error(f"name a command: {', '.join(SUMMARIES)}")
    if first not in SUMMARIES and first not in _OWN_FLAGS:
        if first.startswith("-"):
            near = nearest(first, _OWN_FLAGS)
            parser.error(f"unknown flag {first}{near or '; the flags of a command follow its name'}")
        parser.error(f"unknown command {first!r}{nearest(first, SUMMARIES) or '; known: ' + ', '.join(SUMMARIES)}")
    return parser
