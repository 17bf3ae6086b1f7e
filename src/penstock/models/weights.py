"""A checkpoint's tensors, by name, as the model's constructors ask for them.

A model is built whole: every layer takes its tensors out of a `Weights` view while it is constructed, naming the shape
that it expects. A tensor that is missing, misshapen or unreadable is one `ConfigError` line.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from penstock.config.model import read_json
from penstock.layers.linear import Linear
from penstock.utils.errors import ConfigError

_INDEX = "model.safetensors.index.json"
_PROGRESS_DELAY_SECONDS = 2.0
_DUMMY_STD = 0.02
_DUMMY_POOL = 1 << 22


class WeightSource(Protocol):
    """Where tensors come from; they stay valid after it is closed."""

    def read(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The tensor in its stored dtype. Raises ConfigError when it is missing or has another shape."""
        ...

    def has(self, name: str) -> bool: ...

    def close(self) -> None: ...


class Weights:
    """A source under a prefix, delivering one dtype on one device. `weights / "model"` narrows the prefix.

    Layers that are made of it are `deterministic`, or as fast as they can be.
    """

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool = False,
        prefix: str = "",
    ) -> None:
        self._source = source
        self._dtype = dtype
        self._device = device
        self._deterministic = deterministic
        self._prefix = prefix

    def __truediv__(self, part: str | int) -> Weights:
        return Weights(self._source, self._dtype, self._device, self._deterministic, f"{self._prefix}{part}.")

    def has(self, name: str) -> bool:
        """Whether there is a tensor `prefix + name`."""
        return self._source.has(self._prefix + name)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor `prefix + name`, of exactly this shape."""
        stored = self._source.read(self._prefix + name, shape)
        return stored.to(device=self._device, dtype=self._dtype)

    def linear(self, outputs: Mapping[str, int], width: int, bias: bool = False) -> Linear:
        """The projections `outputs`, by name with how many features each has, of `width` inputs, as one layer."""
        weight = _join([self.tensor(f"{name}.weight", count, width) for name, count in outputs.items()])
        if not bias:
            return self.linear_of(weight)
        return self.linear_of(weight, _join([self.tensor(f"{name}.bias", count) for name, count in outputs.items()]))

    def linear_of(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """A layer of a weight that is there already, [out_features, in_features]."""
        return Linear(weight, bias, self._deterministic)

    def integers(self, name: str, *shape: int) -> torch.Tensor:
        """The same as int64, for tensors of ids."""
        return self._source.read(self._prefix + name, shape).to(device=self._device, dtype=torch.int64)


def _join(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


class CheckpointSource:
    """The safetensors files of a checkpoint folder: one file, or shards with an index."""

    def __init__(self, folder: Path) -> None:
        self._file_of = _locate(folder)
        self._folder = folder
        self._open_files = {file: _open(folder / file) for file in sorted(set(self._file_of.values()))}
        total = len(self._file_of)
        self._progress = tqdm(total=total, desc="loading weights", unit="tensor", delay=_PROGRESS_DELAY_SECONDS)

    def read(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        file = self._file_of.get(name)
        if file is None:
            raise ConfigError(f"{self._folder} has no tensor {name!r}: the checkpoint is incomplete or another model's")
        try:
            tensor = self._open_files[file].get_tensor(name)
        except SafetensorError as error:
            raise ConfigError(f"{self._folder / file}: cannot read {name!r}: {error}") from None
        if tuple(tensor.shape) != tuple(shape):
            raise ConfigError(
                f"{self._folder / file}: {name!r} has shape {list(tensor.shape)}, config.json asks for {list(shape)}"
            )
        self._progress.update()
        return tensor

    def has(self, name: str) -> bool:
        return name in self._file_of

    def close(self) -> None:
        self._progress.close()
        self._open_files.clear()


class DummySource:
    """Random weights that depend on nothing but the tensor's name: norms one, biases and d2t zero, the rest normal."""

    def __init__(self) -> None:
        self._pool = torch.randn(_DUMMY_POOL, generator=torch.Generator().manual_seed(0)).mul_(_DUMMY_STD).bfloat16()

    def read(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith(("bias", "d2t")) else torch.ones(shape)
        count = torch.Size(shape).numel()
        start = zlib.crc32(name.encode()) % _DUMMY_POOL
        repeated = self._pool.roll(start).repeat(-(-count // _DUMMY_POOL))
        return repeated[:count].view(*shape)

    def has(self, name: str) -> bool:
        return True

    def close(self) -> None:
        self._pool = torch.empty(0)


def open_weights(folder: Path, load_format: str) -> WeightSource:
    """The source for `load_format` "auto" or "dummy"."""
    return DummySource() if load_format == "dummy" else CheckpointSource(folder)


def checkpoint_bytes(folder: Path) -> int:
    """Bytes of the checkpoint's weight files."""
    return sum((folder / file).stat().st_size for file in set(_locate(folder).values()))


def _locate(folder: Path) -> dict[str, str]:
    """Tensor name -> file name. Raises ConfigError when files are missing or cannot be read."""
    index = read_json(folder / _INDEX)
    if index is not None:
        file_of = index.get("weight_map")
        if not isinstance(file_of, dict) or not all(isinstance(file, str) for file in file_of.values()):
            raise ConfigError(f"{folder / _INDEX} must map tensor names to file names in weight_map")
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"{folder} holds no *.safetensors file; other weight formats must be converted first")
        file_of = {name: file for file in files for name in _open(folder / file).keys()}  # noqa: SIM118
    missing = sorted({file for file in file_of.values() if not (folder / file).is_file()})
    if missing:
        raise ConfigError(f"{folder} lacks {len(missing)} weight file(s) named in {_INDEX}: {', '.join(missing[:3])}")
    return file_of


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is truncated or no safetensors file: {error}") from None
