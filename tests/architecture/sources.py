"""The package's source files as syntax trees, for the architecture tests."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "penstock"


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Returns module name without the package (`core.scheduler`) -> syntax tree."""
    trees = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        trees[name] = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return trees


def imports(tree: ast.Module) -> set[str]:
    """Returns every module imported at run time, also inside functions; TYPE_CHECKING blocks are left out."""
    found: set[str] = set()
    for node in _walk_at_run_time(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def own_imports(module: str) -> set[str]:
    """The package's other modules that a module imports at run time."""
    names = {name.removeprefix("penstock.") for name in imports(modules()[module]) if name.startswith("penstock.")}
    return {name for name in names if name in modules() and name != module}


def _walk_at_run_time(node: ast.AST):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _walk_at_run_time(child)
