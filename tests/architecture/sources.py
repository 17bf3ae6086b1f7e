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


@functools.cache
def imports(tree: ast.Module, *, with_types: bool = False) -> frozenset[str]:
    """Returns every imported module, also inside functions; those under TYPE_CHECKING only `with_types`."""
    found: set[str] = set()
    for node in ast.walk(tree) if with_types else _walk_at_run_time(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def own_imports(module: str, *, with_types: bool = False) -> set[str]:
    """The package's other modules that a module imports, those of types included if asked for."""
    found = imports(modules()[module], with_types=with_types)
    names = {name.removeprefix("penstock.") for name in found if name.startswith("penstock.")}
    return {name for name in names if name in modules() and name != module}


def code_lines(tree: ast.Module) -> int:
    """Returns how many lines have code: no blank lines, comments, docstrings or imports."""
    lines: set[int] = set()
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) or _is_docstring(node):
            skipped.update(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, ast.stmt | ast.expr | ast.excepthandler | ast.arg | ast.match_case | ast.keyword):
            lines.update((node.lineno, node.end_lineno) if hasattr(node, "lineno") else ())
    return len(lines - skipped)


def _is_docstring(node: ast.AST) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text and isinstance(node.value.value, str)


def _walk_at_run_time(node: ast.AST):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _walk_at_run_time(child)
