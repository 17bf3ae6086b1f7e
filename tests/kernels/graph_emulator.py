"""Emulates CUDA graphs on a CPU: the launches of a function are recorded and replayed with the addresses and numbers
that they had. Whatever the function read on the CPU is frozen, as it is in a real graph.

The emulator records torch's operations, Triton's kernels in the interpreter, and the native kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.kernels import native
from penstock.runner.gpu.cudagraphs import RecordedGraph

T = TypeVar("T")
Launch = Callable[[], object]


class _Operations(TorchDispatchMode):
    """Records torch's operations, except those within launches that are recorded as a whole."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(first) if isinstance(leaf, torch.Tensor)]

        def again() -> None:
            repeated = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
            for result, new in zip(results, repeated, strict=True):
                # In-place operations and views leave their results where they were.
                if result.numel() and result.data_ptr() != new.data_ptr():
                    result.copy_(new)

        self._tape.append(again)
        return first


class Tape:
    """The current recording, if there is one."""

    def __init__(self) -> None:
        self._launches: list[Launch] | None = None

    def append(self, launch: Launch) -> None:
        if self._launches is not None:
            self._launches.append(launch)

    @contextmanager
    def recording(self) -> Iterator[list[Launch]]:
        self._launches = launches = []
        try:
            with _Operations(self):
                yield launches
        finally:
            self._launches = None

    def whole(self, launch: Launch) -> Any:
        """Records and runs a launch as a whole, without the operations within it."""
        self.append(launch)
        launches, self._launches = self._launches, None
        try:
            return launch()
        finally:
            self._launches = launches


class EmulatedRecorder:
    """A `GraphRecorder`; `install` must be called before anything with native kernels is built."""

    num_replays = 0
    _tape = Tape()

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu", device

    def record(self, run: Callable[[], T]) -> RecordedGraph[T]:
        with self._tape.recording() as launches:
            outputs = run()

        def replay() -> None:
            EmulatedRecorder.num_replays += 1
            for launch in launches:
                launch()

        return RecordedGraph(replay, outputs)

    @classmethod
    def install(cls, monkeypatch: pytest.MonkeyPatch) -> None:
        """Makes native and interpreted kernels recordable until the patch is undone."""
        tape, make = cls._tape, native.NativeLibrary.function

        def function(self: native.NativeLibrary, *args: Any, **kwargs: Any) -> Callable[..., Any]:
            call = make(self, *args, **kwargs)
            return lambda *values: tape.whole(lambda: call(*values))

        monkeypatch.setattr(native.NativeLibrary, "function", function)
        # Each library object caches its functions: a new one makes its own, which are recorded.
        native.library.cache_clear()

        from triton.runtime.interpreter import InterpretedFunction

        launch = InterpretedFunction.run

        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            return tape.whole(lambda: launch(self, *args, **kwargs))

        monkeypatch.setattr(InterpretedFunction, "run", run)
