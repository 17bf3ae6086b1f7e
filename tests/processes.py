"""Child processes of tests."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Starts a process, and kills it when the body ends, also by an exception; `options` are those of `Popen`.

    A process that outlived its test would fail another test: a `Popen` that is collected while its process runs gives a
    `ResourceWarning`, which is an error here, in whichever test the collection happens.
    """
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()
