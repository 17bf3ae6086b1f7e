"""The entry point of the `penstock` command. Everything is imported inside `main`, which handles interrupts."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 when a check failed, 2 for invalid arguments, 130 when interrupted."""
    try:
        from penstock.cli.commands import run_command

        return run_command(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        from penstock.utils.interrupts import EXIT_CODE

        if sys.stderr is not None:
            print(file=sys.stderr)
        return EXIT_CODE


if __name__ == "__main__":
    sys.exit(main())
