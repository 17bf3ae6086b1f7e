"""Records the native calls of a computation, and repeats them in one call.

The Python code between two kernels takes longer than a small kernel. It computes the same calls in every step of one
shape, but for the addresses of its inputs: so it runs once, and then its calls are repeated with other inputs.

Calls can be repeated if their functions are marked PENSTOCK_RECORDABLE (native/common.h). Torch may allocate tensors or
make views of them; if it computes anything, or another native function is called, there is no recording. Decisions of
the Python code are repeated as they were, so they may depend only on what the caller's key of a recording contains.
Memory that is allocated elsewhere and is no input, such as a weight, must live as long as the recording.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.kernels.native import NativeLibrary, library, recorded_by

_aten = torch.ops.aten
_ALLOCATIONS = (_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default)
_ALIGNMENT = 64
_CHUNK_BYTES = 1 << 20


class Workspace:
    """Memory of the tensors that recorded computations allocate. It is kept, and used again from its beginning after
    each `reset`, in turn with a second one: so a computation's result outlives the next computation, and no more.
    """

    def __init__(self) -> None:
        # Not tensors: they are no part of the model.
        self._chunks: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        self.reset(0)

    def reset(self, turn: int) -> None:
        self._current = self._chunks[turn % 2]
        self._number, self._used = 0, 0

    def allocate_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a contiguous tensor of its shape and dtype."""
        size = -(-max(tensor.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        while self._number < len(self._current) and self._used + size > len(self._current[self._number]):
            self._number, self._used = self._number + 1, 0
        if self._number == len(self._current):
            memory = np.zeros(max(size, _CHUNK_BYTES) + _ALIGNMENT, np.uint8)
            first = -memory.ctypes.data % _ALIGNMENT
            self._current.append(memory[first : len(memory) - _ALIGNMENT + first])
        data = self._current[self._number][self._used : self._used + tensor.nbytes]
        self._used += size
        if not tensor.nbytes:
            return tensor
        return torch.from_numpy(data).view(tensor.dtype).view(tensor.shape)


class Recording:
    """Recorded calls, divided into parts that can be repeated one at a time, in order."""

    def __init__(self, native: NativeLibrary, ends: Sequence[int], calls: _Calls, results: Sequence[torch.Tensor]):
        # The result of a part by its number. Not an attribute of tensors: they are no part of the model, whose memory
        # `penstock verify` compares.
        self.result = tuple(results).__getitem__
        self._num_parts = len(results)
        self._repeat = native.function("repeat", "pnp")
        self._ends = (0, *ends)
        self._calls = np.array(calls.functions, np.int64)  # [calls, (function, index of its first argument)]
        self._arguments = np.array(calls.arguments, np.int64)
        inputs = np.array(calls.inputs, np.int64).reshape(-1, 3)  # [.., (index of the argument, input, offset)]
        self._places, self._inputs, self._offsets = inputs.T.copy()

    def set_inputs(self, addresses: Sequence[int]) -> None:
        """Takes the addresses of the tensors that stand in the places of those recorded."""
        self._arguments[self._places] = np.array(addresses, np.int64)[self._inputs] + self._offsets

    def repeat(self, first: int = 0, end: int | None = None) -> torch.Tensor:
        """Repeats the parts [first, end) and returns the last one's result, in the memory of the recorded one."""
        begin, end = self._ends[first], self._num_parts if end is None else end
        calls = self._calls.ctypes.data + begin * self._calls.strides[0]
        self._repeat(calls, self._ends[end] - begin, self._arguments.ctypes.data)
        return self.result(end - 1)


class _Calls:
    """Calls as `Recording` takes them, collected while they are made (`CallRecorder`)."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self.functions: list[tuple[int, int]] = []
        self.arguments: list[int] = []
        self.inputs: list[tuple[int, int, int]] = []
        self.is_complete = True
        self._memory = [range(each.data_ptr(), each.data_ptr() + each.nbytes) for each in inputs]

    def add(self, library: NativeLibrary, name: str, arguments: str, values: Sequence[Any]) -> None:
        function = library.recordable(name)
        if function is None:
            self.is_complete = False
            return
        self.functions.append((function, len(self.arguments)))
        for letter, value in zip(arguments, values, strict=True):
            if letter == "p" and value is not None:
                number = next((i for i, memory in enumerate(self._memory) if value in memory), None)
                if number is not None:
                    self.inputs.append((len(self.arguments), number, value - self._memory[number].start))
            bits = struct.unpack("<q", struct.pack("<fi", value, 0))[0] if letter == "f" else int(value or 0)
            self.arguments.append(bits)


class _TorchOperations(TorchDispatchMode):
    """Gives tensors the workspace's memory, and marks the calls incomplete if torch computes something."""

    def __init__(self, calls: _Calls, workspace: Workspace) -> None:
        super().__init__()
        self._calls = calls
        self._workspace = workspace

    # Nothing is compiled here; torch would import its compiler, in seconds, to leave `__torch_dispatch__` out.
    _should_skip_dynamo = classmethod(lambda cls: False)  # pyright: ignore[reportAssignmentType]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        if func in _ALLOCATIONS:
            return self._workspace.allocate_like(result)
        # A tensor of Python's numbers is said to be a view, of memory that nothing keeps.
        if func is _aten.lift_fresh.default or not all(map(_is_view, func._schema.returns)):
            self._calls.is_complete = False
        return result


def _is_view(returned: Any) -> bool:
    return returned.alias_info is not None and not returned.alias_info.is_write


def record(
    parts: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    x: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    workspace: Workspace,
) -> tuple[torch.Tensor, Recording | None]:
    """Computes the parts, each from the one before, the first from `x`; returns the last one's result and a recording.

    `inputs` are all tensors, `x` included, that may be others when the recording is repeated. No part may return its
    argument or a view of it.
    """
    calls, ends, results = _Calls(inputs), list[int](), list[torch.Tensor]()
    with recorded_by(calls), _TorchOperations(calls, workspace):
        for turn, part in enumerate(parts):
            workspace.reset(turn)
            x = part(x)
            ends.append(len(calls.functions))
            results.append(x)
    return x, Recording(native, ends, calls, results) if calls.is_complete and (native := library()) else None
