"""The `penstock` command. Each subcommand is a module with `add_parser` and `run`."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from penstock import __version__
from penstock.cli import bench, chat, generate, serve, simulate, verify
from penstock.utils.errors import PenstockError

COMMANDS = (serve, generate, chat, bench, verify, simulate)
_MISTAKE = 2
_INTERRUPTED = 128 + signal.SIGINT


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, without a screenful of usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(_MISTAKE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="penstock", description="Serve language models; move their KV cache.")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 2 for a mistake in what was asked, 130 when interrupted."""
    args = make_parser().parse_args(argv)
    if sys.stdin is None or sys.stdout is None:
        print("penstock: standard input or output is closed", file=sys.stderr)
        return _MISTAKE
    try:
        return args.run(args)
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return _MISTAKE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader went away (`penstock generate | head`); nothing is left to write, nor may the exit handler try.
        sys.stderr.close()
        return 0
    except OSError as error:
        # A full disk behind standard output, say; files that the user named have been checked before.
        with contextlib.suppress(OSError):
            print(f"penstock: {error}", file=sys.stderr)
        return _MISTAKE


if __name__ == "__main__":
    sys.exit(main())
