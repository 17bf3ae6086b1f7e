"""Reads GGUF files, llama.cpp's: metadata, and tensors in blocks of quantized numbers. A model may be in several files.

The format's specification is `docs/gguf.md` in the repository ggml-org/ggml. Nothing in a file is trusted: a length, a
count or an offset that points beyond the file is an error before anything is allocated for it.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.utils.errors import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MOST_DIMENSIONS = 4
_MOST_NESTED = 4
_MOST_PARTS = 99999
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_STRING, _ARRAY = 8, 9
# The metadata's type -> its numpy type.
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}


@dataclass(frozen=True, slots=True)
class BlockType:
    """`values` numbers are stored in a block of `num_bytes` bytes."""

    name: str
    values: int
    num_bytes: int


# ggml's type -> how its numbers are stored; what is not here, Penstock does not read.
BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
}
# ggml's types that are not read, for the error.
_UNREAD = ["Q2_K", "Q3_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "IQ1_M"]
_NAMES = dict(zip((10, 11, *range(16, 24), 29), _UNREAD, strict=True))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`shape` is the outermost dimension first; `start` is the position of its bytes in the mapped `file`."""

    type: BlockType
    shape: tuple[int, ...]
    start: int
    file: mmap.mmap

    @property
    def row_bytes(self) -> int:
        """The bytes of a row, the innermost dimension."""
        return self.shape[-1] // self.type.values * self.type.num_bytes

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    @property
    def num_blocks(self) -> int:
        return self.num_bytes // self.type.num_bytes


class GGUFFile:
    """The metadata and the tensors of one file, which is mapped, not read; of a part, unless it is `open_gguf`'s."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file is not GGUF, is damaged, or has tensors of a type that is not read."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        self._at = 0
        if self._take(4) != _MAGIC:
            raise ConfigError(f"{path} is not a GGUF file: it does not begin with {_MAGIC.decode()}")
        version = self._integer(4)
        if version not in _VERSIONS:
            raise ConfigError(f"{path} has version {version} of GGUF, and Penstock reads {_VERSIONS}: convert it again")
        num_tensors, num_fields = self._integer(8), self._integer(8)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._string()
            self.metadata[name] = self._value(self._integer(4))
        self.tensors = self._read_directory(num_tensors)
        if sum(tensor.num_bytes for tensor in self.tensors.values()) > len(self._bytes):
            raise ConfigError(f"{path} is damaged: its tensors overlap")

    @contextmanager
    def mapped_rows(self, name: str, first: int, end: int) -> Generator[np.ndarray]:
        """Provides the stored bytes of some rows of a tensor, [rows, row_bytes] uint8, without a copy."""
        tensor = self.tensors[name]
        count, width = end - first, tensor.row_bytes
        start = tensor.start + first * width
        yield np.frombuffer(tensor.file, np.uint8, count * width, start).reshape(count, width)
        # Pages that have been read would count as memory of this process, beside the layers that are made of them.
        page = start - start % mmap.PAGESIZE
        if count * width:
            tensor.file.madvise(mmap.MADV_DONTNEED, page, start + count * width - page)

    def rows(self, name: str, first: int, end: int) -> np.ndarray:
        """Returns a copy of these bytes."""
        with self.mapped_rows(name, first, end) as rows:
            return rows.copy()

    @property
    def num_parts(self) -> int:
        """How many files the model is divided into. Raises ConfigError if the number is none."""
        count = self.metadata.get("split.count", 1)
        if type(count) is not int or count > _MOST_PARTS:
            raise ConfigError(f"{self.path}: split.count is {count!r}")
        return max(1, count)

    def add_parts(self, parts: Sequence[GGUFFile]) -> None:
        """Adds the tensors of the other parts. Raises ConfigError if they are not those of this file's model."""
        for number, part in enumerate(parts, 1):
            if part.num_parts != self.num_parts or part.metadata.get("split.no") != number:
                raise ConfigError(f"{part.path} is not part {number + 1} of {self.num_parts} of {self.path}")
            for name in part.tensors.keys() & self.tensors:
                raise ConfigError(f"{part.path} has the tensor {name!r} of another part")
            self.tensors.update(part.tensors)
        expected = self.metadata.get("split.tensors.count", len(self.tensors))
        if expected != len(self.tensors):
            raise ConfigError(f"{self.path} and its parts have {len(self.tensors)} tensors of {expected}")

    def _read_directory(self, num_tensors: int) -> dict[str, StoredTensor]:
        found: dict[str, tuple[int, tuple[int, ...], int]] = {}
        for _ in range(num_tensors):
            name = self._string()
            num_dimensions = self._integer(4)
            if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
                raise ConfigError(f"{self.path}: tensor {name!r} has {num_dimensions} dimensions")
            shape = tuple(self._integer(8) for _ in range(num_dimensions))[::-1]
            if name in found:
                raise ConfigError(f"{self.path} has two tensors {name!r}")
            found[name] = self._integer(4), shape, self._integer(8)
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ConfigError(f"{self.path}: general.alignment is {alignment!r}")
        begin = -(-self._at // alignment) * alignment
        return {name: self._locate(name, kind, shape, begin + offset) for name, (kind, shape, offset) in found.items()}

    def _locate(self, name: str, kind: int, shape: tuple[int, ...], start: int) -> StoredTensor:
        block = BLOCK_TYPES.get(kind)
        if block is None:
            named, known = _NAMES.get(kind, kind), ", ".join(each.name for each in BLOCK_TYPES.values())
            raise ConfigError(
                f"{self.path}: tensor {name!r} has ggml's type {named}, and Penstock reads {known}: use another file"
            )
        if shape[-1] % block.values or 0 in shape:
            raise ConfigError(
                f"{self.path}: tensor {name!r} has shape {list(shape)}, and its numbers are in blocks of {block.values}"
            )
        tensor = StoredTensor(block, shape, start, self._bytes)
        if start + tensor.num_bytes > len(self._bytes):
            raise ConfigError(f"{self.path} is truncated: tensor {name!r} ends beyond the file")
        return tensor

    # ---- The header ----

    def _take(self, count: int) -> bytes:
        if count > len(self._bytes) - self._at:
            raise ConfigError(f"{self.path} is truncated, or its header is damaged at byte {self._at}")
        self._at += count
        return self._bytes[self._at - count : self._at]

    def _integer(self, num_bytes: int) -> int:
        return int.from_bytes(self._take(num_bytes), "little")

    def _string(self) -> str:
        data = self._take(self._integer(8))
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise ConfigError(f"{self.path} has a text that is not UTF-8 before byte {self._at}") from None

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY and depth < _MOST_NESTED:
            element, count = self._integer(4), self._integer(8)
            if element in _NUMBERS:
                return self._numbers(element, count)  # [count], which takes no more memory than in the file
            # Every element takes eight bytes at least.
            if count > (len(self._bytes) - self._at) // 8:
                raise ConfigError(f"{self.path} is truncated, or its header is damaged at byte {self._at}")
            return [self._value(element, depth + 1) for _ in range(count)]
        if kind in _NUMBERS:
            number = self._numbers(kind, 1)[0]
            # The shortest decimal number that is stored so: what the converter has read from `config.json`.
            return float(str(number)) if number.dtype == np.float32 else number.item()
        raise ConfigError(f"{self.path}: its header has a value of the unknown type {kind} before byte {self._at}")

    def _numbers(self, kind: int, count: int) -> np.ndarray:
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)


def read_vector(file: GGUFFile, name: str) -> list[float]:
    """Returns the numbers of a tensor. Raises ConfigError if it is no list of float32."""
    tensor = file.tensors.get(name)
    if tensor is None or tensor.type.name != "F32" or len(tensor.shape) != 1:
        raise ConfigError(f"{file.path}: {name} must be F32 numbers in one dimension")
    return file.rows(name, 0, 1).view("<f4")[0].tolist()


def part_paths(path: Path) -> list[Path]:
    """Returns the files of a model of which one is given: by its name that one, or all its parts in order. Raises
    ConfigError if a part is missing.
    """
    named = _PART.fullmatch(path.name)
    count = 1 if named is None else int(named[3])
    if named is None or not 1 <= int(named[2]) <= count:
        return [path]
    paths = [path.with_name(f"{named[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    for each in paths:
        if not each.is_file():
            raise ConfigError(f"{each} is missing: {path.name} is one of {count} files, and all are needed")
    return paths


def open_gguf(path: Path) -> GGUFFile:
    """Opens a model by one of its files. Raises ConfigError as `GGUFFile` and `part_paths` do, and if a file is one of
    several and not named so.
    """
    first, *others = (GGUFFile(each) for each in part_paths(path))
    if first.num_parts != 1 + len(others):
        raise ConfigError(
            f"{path} is one of {first.num_parts} files, which are found by their names: give them those of llama.cpp, "
            f"as in NAME-00001-of-{first.num_parts:05}.gguf"
        )
    first.add_parts(others)
    return first
