"""Python's own standard library, as code to learn from: found on any machine that runs this recipe."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from recipe.draw import is_held_out

# Not the library's own, or tables of data: they would teach a small model more noise than Python. The library's tests
# stay in where they are installed: a small model learns code by heart when it sees too little of it.
SKIPPED = frozenset({"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"})
LARGEST_BYTES = 150_000
SMALLEST_BYTES = 400


def source_paths(held_out: bool) -> list[Path]:
    """The library's files of one split, in the order of their names; about one file in ten is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, inner, files in os.walk(root):
        # Pruned in place so that installed packages, often a hundred times the library, are never visited.
        inner[:] = [name for name in inner if name not in SKIPPED]
        paths = [Path(folder, name) for name in files if name.endswith(".py")]
        found += [p for p in paths if is_held_out(p.relative_to(root).as_posix()) == held_out]
    return sorted(found)


def sources(held_out: bool, every: int = 1) -> Iterator[str]:
    """The text of every `every`-th file, those left out that are tiny, huge, dangling or other than UTF-8."""
    for path in source_paths(held_out)[::every]:
        if path.exists() and SMALLEST_BYTES <= path.stat().st_size <= LARGEST_BYTES:
            try:
                yield path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
