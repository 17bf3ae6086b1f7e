"""Plants bugs by changing what a function or method does while the rest of the engine is the real one."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import pytest

Change = Callable[..., Any]
"""Called with the original function and the arguments of a call, self included; returns the result of the call."""


@dataclass(frozen=True)
class Patch:
    """`target` is "module:function" or "module:Class.method"; a property counts as a method."""

    target: str
    change: Change

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module, _, path = self.target.partition(":")
        *owners, name = path.split(".")
        holder: Any = functools.reduce(getattr, owners, importlib.import_module(f"penstock.{module}"))
        found = inspect.getattr_static(holder, name)
        function = found.fget if isinstance(found, property) else found
        assert isinstance(function, FunctionType), f"{self.target} is not a function"

        @functools.wraps(function)
        def changed(*args: Any, **kwargs: Any) -> Any:
            return self.change(function, *args, **kwargs)

        if owners:
            monkeypatch.setattr(holder, name, property(changed) if isinstance(found, property) else changed)
            return
        # Other modules have imported the function itself.
        for each in [each for key, each in sys.modules.items() if key.startswith("penstock.")]:
            if vars(each).get(name) is function:
                monkeypatch.setattr(each, name, changed)


Patches = tuple[Patch, ...]


def changes(target: str, change: Change) -> Patches:
    return (Patch(target, change),)


def returns(target: str, value: Any) -> Patches:
    """The function does nothing, and returns this."""
    return changes(target, lambda original, *args, **kwargs: value)


def skips(target: str) -> Patches:
    return returns(target, None)


def sets(target: str, attribute: str, value: Callable[[Any], Any]) -> Patches:
    """During a call of the method, an attribute of its object has the value that `value(self)` returns."""

    def change(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        kept = getattr(self, attribute)
        setattr(self, attribute, value(self))
        try:
            return original(self, *args, **kwargs)
        finally:
            setattr(self, attribute, kept)

    return changes(target, change)


def within(target: str, *inner: Patches) -> Patches:
    """The inner patches have an effect only during calls of the target."""
    running: list[str] = []

    def outer(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        running.append(target)
        try:
            return original(*args, **kwargs)
        finally:
            running.pop()

    def gated(change: Change) -> Change:
        return lambda original, *args, **kwargs: (
            change(original, *args, **kwargs) if running else original(*args, **kwargs)
        )

    return (*changes(target, outer), *(Patch(each.target, gated(each.change)) for each in sum(inner, ())))


@dataclass(frozen=True)
class Bug:
    """A planted bug; `scenario` is one that catches it."""

    name: str
    scenario: str
    patches: Patches


def bug(name: str, scenario: str, *patches: Patches) -> Bug:
    return Bug(name, scenario, sum(patches, ()))
