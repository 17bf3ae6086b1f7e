"""Calls of the native library as a file, and `native_calls.cpp`, which makes them with any of its instruction sets.

calls = NativeCalls()
out = calls.result("name", torch.empty(4, 64))
calls.add("rms_norm", "ppppnnnfii", x, None, weight, out, 4, 64, 1, 1e-6, 0, 0)
calls.run([program], library, "avx2", folder)["name"]
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("native_calls.cpp")
Argument = torch.Tensor | float | int | None


class NativeCalls:
    """Every tensor becomes a buffer of its own; the same tensor is the same buffer in all calls."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._pointers: list[tuple[int, int, int]] = []
        self._calls: list[bytes] = []
        self._results: dict[str, torch.Tensor] = {}

    def result(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor, whose buffer `run` returns under this name."""
        assert name not in self._results, name
        self._results[name] = tensor
        return tensor

    def struct(self, fields: str, *values: Argument) -> torch.Tensor:
        """Returns a structure of C. `fields` has a letter for each, as in `NativeLibrary.function`."""
        packed = b"".join(
            struct.pack("<f" if letter == "f" else "<q", 0 if value is None or letter == "p" else value)
            for letter, value in zip(fields, values, strict=True)
        )
        made = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        for number, (letter, value) in enumerate(zip(fields, values, strict=True)):
            if letter == "p" and isinstance(value, torch.Tensor):
                assert "f" not in fields[:number], "a word for each field so far"
                self._pointers.append((self._buffer(made), 8 * number, self._buffer(value)))
        return made

    def add(self, name: str, arguments: str, *values: Argument) -> None:
        """Adds a call; `arguments` is as in `NativeLibrary.function`."""
        integers, floats = b"", b""
        for letter, value in zip(arguments, values, strict=True):
            if isinstance(value, torch.Tensor):
                integers += struct.pack("<qq", 1, self._buffer(value))
            elif letter == "f":
                floats += struct.pack("<fi", value, 0)
            else:
                integers += struct.pack("<qq", 0, value or 0)
        counted = struct.pack("<q", len(integers) // 16) + integers + struct.pack("<q", len(floats) // 8) + floats
        self._calls.append(name.encode().ljust(64, b"\0") + counted)

    def run(self, command: Sequence[str], library: Path, isa: str, folder: Path) -> dict[str, torch.Tensor]:
        """Makes the calls with one instruction set of a library, by the program that `command` starts."""
        (folder / "calls").write_bytes(self._file())
        subprocess.run([*command, str(library), isa, str(folder / "calls"), str(folder / isa)], check=True, timeout=300)
        content, found, start = (folder / isa).read_bytes(), {}, 0
        for buffer in self._buffers:
            for name, tensor in self._results.items():
                if tensor is buffer:
                    data = bytearray(content[start : start + tensor.nbytes])
                    found[name] = torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape)
            start += buffer.nbytes
        return found

    def _buffer(self, tensor: torch.Tensor) -> int:
        for number, known in enumerate(self._buffers):
            if known is tensor:
                return number
        self._buffers.append(tensor)
        return len(self._buffers) - 1

    def _file(self) -> bytes:
        parts = [struct.pack("<q", len(self._buffers))]
        for buffer in self._buffers:
            content = buffer.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            parts += [struct.pack("<q", len(content)), content, bytes(-len(content) % 8)]
        parts += [struct.pack("<q", len(self._pointers)), *(struct.pack("<qqq", *each) for each in self._pointers)]
        return b"".join([*parts, struct.pack("<q", len(self._calls)), *self._calls])
