"""A CUDA graph for a CPU: what a function launches is recorded and launched again, with the addresses and numbers that
it had then. Whatever the function read on the CPU is frozen, as it is in a real graph.

It records torch's operations, Triton's kernels in the interpreter, and the native kernels.
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
    """Records torch's operations while nothing that is recorded as a whole is running."""

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
                # An operation in place, or a view, has left its result where it was.
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
        """Runs what is recorded as one, whatever it does within."""
        self.append(launch)
        launches, self._launches = self._launches, None
        try:
            return launch()
        finally:
            self._launches = launches


class EmulatedRecorder:
    """`GraphRecorder`; `install` must have been called before anything is built whose kernels are native."""

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
        """Lets native and interpreted kernels be recorded until the patch is undone."""
        tape, make = cls._tape, native.NativeLibrary.function

        def function(self: native.NativeLibrary, *args: Any, **kwargs: Any) -> Callable[..., Any]:
            call = make(self, *args, **kwargs)
            return lambda *values: tape.whole(lambda: call(*values))

        monkeypatch.setattr(native.NativeLibrary, "function", function)
        # Functions are kept by library: another one makes its own, which are recorded.
        native.library.cache_clear()

        from triton.runtime.interpreter import InterpretedFunction

        launch = InterpretedFunction.run

        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            return tape.whole(lambda: launch(self, *args, **kwargs))

        monkeypatch.setattr(InterpretedFunction, "run", run)
