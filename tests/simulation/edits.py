"""Plants bugs by replacing part of the real source with wrong code, like a change by hand."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from dataclasses import dataclass
from types import CodeType, FunctionType


@dataclass(frozen=True)
class Edit:
    """Replaces `old` by `new` in the source of `target`, "module:Class.method"."""

    target: str
    old: str
    new: str

    def function(self) -> FunctionType:
        module, _, path = self.target.partition(":")
        found = importlib.import_module(f"penstock.{module}")
        for name in path.split("."):
            found = inspect.getattr_static(found, name)
        if isinstance(found, property):
            found = found.fget
        assert isinstance(found, FunctionType), f"{self.target} is not a function"
        return found

    def code(self) -> CodeType:
        """Returns the function's code with the bug; set as its `__code__`, it takes effect wherever it was imported."""
        function = self.function()
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{self.target} no longer has {self.old!r}"
        tree = ast.parse(source.replace(self.old, self.new))
        assert isinstance(tree.body[0], ast.FunctionDef)
        tree.body[0].decorator_list.clear()
        scope: dict[str, FunctionType] = {}
        exec(compile(tree, f"<planted in {self.target}>", "exec"), function.__globals__, scope)
        return scope[function.__name__].__code__


@dataclass(frozen=True)
class Bug:
    """A planted bug; `scenario` is one that catches it."""

    name: str
    scenario: str
    edits: tuple[Edit, ...]


def bug(name: str, scenario: str, *edit: str) -> Bug:
    """Returns a bug; `edit` is target, old and new, once or several times."""
    edits = tuple(Edit(*edit[start : start + 3]) for start in range(0, len(edit), 3))
    return Bug(name, scenario, edits)
