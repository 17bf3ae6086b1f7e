"""Python's standard library as training code: it exists on every machine that runs this recipe."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from recipe.draw import is_held_out

# Packages that are not part of the library, and tables of data, would teach a small model more noise than Python. The
# library's tests are included if they are installed: a small model memorises code if it sees too little of it.
SKIPPED = frozenset({"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"})
LARGEST_BYTES = 150_000
SMALLEST_BYTES = 400


def source_paths(held_out: bool) -> list[Path]:
    """Returns the library's files of one split, sorted by name; about one file in ten is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, inner, files in os.walk(root):
        # Pruned in place so that installed packages, often a hundred times the library, are never visited.
        inner[:] = [name for name in inner if name not in SKIPPED]
        paths = [Path(folder, name) for name in files if name.endswith(".py")]
        found += [p for p in paths if is_held_out(p.relative_to(root).as_posix()) == held_out]
    return sorted(found)


def sources(held_out: bool, every: int = 1) -> Iterator[str]:
    """Yields the text of every `every`-th file, except files that are tiny, huge, dangling or not UTF-8."""
    for path in source_paths(held_out)[::every]:
        if path.exists() and SMALLEST_BYTES <= path.stat().st_size <= LARGEST_BYTES:
            try:
                yield path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
