"""The tensors of a checkpoint's safetensors files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from penstock.config.model import read_json
from penstock.models.sources.source import ALL, Part, progress_of
from penstock.utils.errors import ConfigError

_INDEX = "model.safetensors.index.json"
PLAIN_TYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16")
_SIZES = {"I64": 8, "I32": 4, "I16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1}
# Those that torch has; readers of quantized weights know more of them.
TYPES = (*PLAIN_TYPES, "F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8")


class CheckpointSource:
    """The safetensors files of a checkpoint folder: one file, or shards with an index."""

    def __init__(self, folder: Path, types: Sequence[str] = TYPES) -> None:
        """`types` are those that are accepted: numbers of 8 bits mean nothing to a reader without scales."""
        self._types = types
        self._file_of = _locate(folder)
        self.folder = folder
        self._open_files = {file: _open(folder / file) for file in sorted(set(self._file_of.values()))}
        self._progress = progress_of(len(self._file_of))

    def read(self, name: str, shape: Sequence[int], part: Part = ALL) -> torch.Tensor:
        if (found := self.shape(name)) != tuple(shape):
            raise ConfigError(f"{self._file(name)}: {name!r} has shape {[*found]}, config.json asks for {[*shape]}")
        try:
            stored = self._open_files[self._file_of[name]].get_slice(name)
            kind = stored.get_dtype()
            if kind not in self._types:
                raise ConfigError(f"{self._file(name)}: {name!r} has type {kind}, which needs a quantization_config")
            self._progress.update()
            return stored[part]
        except SafetensorError as error:
            raise ConfigError(f"{self._file(name)}: cannot read {name!r}: {error}") from None

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape. Raises ConfigError if it is missing."""
        if name not in self._file_of:
            raise ConfigError(f"{self.folder} has no tensor {name!r}: the checkpoint is incomplete or another model's")
        try:
            return tuple(self._open_files[self._file_of[name]].get_slice(name).get_shape())
        except SafetensorError as error:
            raise ConfigError(f"{self._file(name)}: cannot read {name!r}: {error}") from None

    def _file(self, name: str) -> Path:
        return self.folder / self._file_of[name]

    def has(self, name: str) -> bool:
        return name in self._file_of

    def close(self) -> None:
        self._progress.close()
        self._open_files.clear()


def checkpoint_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Returns the bytes of the tensors in a folder's safetensors files, with floats of 16 to 64 bits in `dtype`."""
    total = 0
    for file in set(_locate(folder).values()):
        opened = _open(folder / file)
        for name in opened.keys():  # noqa: SIM118
            stored = opened.get_slice(name)
            total += math.prod(stored.get_shape()) * _SIZES.get(stored.get_dtype(), dtype.itemsize)
    return total


def _locate(folder: Path) -> dict[str, str]:
    """Returns tensor name -> file name. Raises ConfigError if files are missing or cannot be read."""
    index = read_json(folder / _INDEX)
    if index is not None:
        file_of = index.get("weight_map")
        # A name that leads out of the folder would be another checkpoint's file, or any other.
        if not isinstance(file_of, dict) or any(Path(str(file)).name != file for file in file_of.values()):
            raise ConfigError(f"{folder / _INDEX} must map tensor names to names of files beside it in weight_map")
    else:
        # Mistral's models have the same weights once more, under other names.
        files = sorted({path.name for path in folder.glob("*.safetensors")} - {"consolidated.safetensors"})
        if not files:
            raise ConfigError(f"{folder} holds no *.safetensors in Hugging Face's format: convert its weights first")
        file_of = dict[str, str]()
        for file in files:
            for name in _open(folder / file).keys():  # noqa: SIM118
                if file_of.setdefault(name, file) != file:
                    raise ConfigError(f"{folder / file} has the tensor {name!r} of {file_of[name]}: remove one of them")
    missing = sorted({file for file in file_of.values() if not (folder / file).is_file()})
    if missing:
        raise ConfigError(f"{folder} lacks {len(missing)} weight file(s) named in {_INDEX}: {', '.join(missing[:3])}")
    return file_of


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is truncated or not a safetensors file: {error}") from None
