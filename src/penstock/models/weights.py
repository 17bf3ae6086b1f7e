"""A checkpoint's tensors, by name, as the model's constructors ask for them.

A model is built whole: every layer takes its tensors out of a `Weights` view while it is constructed, naming the shape
that it expects. A tensor that is missing, misshapen or unreadable is one `ConfigError` line.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from penstock.config.model import read_json
from penstock.kernels.staging import CudaCopyQueue, Stager
from penstock.layers.linear import Linear
from penstock.utils.errors import ConfigError

_INDEX = "model.safetensors.index.json"
_PROGRESS_DELAY_SECONDS = 2.0
_DUMMY_STD = 0.02
_DUMMY_POOL = 1 << 22
_HOST = torch.device("cpu")


class WeightSource(Protocol):
    """Where tensors come from; they stay valid after it is closed."""

    def read(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The tensor in its stored dtype. Raises ConfigError when it is missing or has another shape."""
        ...

    def has(self, name: str) -> bool: ...

    def close(self) -> None: ...


class Delivery(Protocol):
    """How a stored tensor becomes the model's."""

    def one(self, stored: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...

    def joined(
        self, parts: Iterable[torch.Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """The parts one after the other along their first dimension, `shape` in all; they are read one by one."""
        ...


class DirectDelivery:
    """Leaves a tensor where it is if it may."""

    def one(self, stored: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return stored.to(device=device, dtype=dtype)

    def joined(
        self, parts: Iterable[torch.Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        tensors = [self.one(part, dtype, device) for part in parts]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


class StagedDelivery:
    """Allocates what the model keeps and nothing else, and fills it by a `Stager`."""

    def __init__(self, stager: Stager) -> None:
        self._stager = stager

    def one(self, stored: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.joined((stored,), stored.shape, dtype, device)

    def joined(
        self, parts: Iterable[torch.Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        out = torch.empty(tuple(shape), dtype=dtype, device=device)
        start = 0
        for part in parts:
            place = out[start : start + len(part)]
            if part.is_cpu:
                self._stager.copy(part.contiguous(), place)
            else:
                place.copy_(part)
            start += len(part)
        assert start == len(out), f"parts of {start} rows for {tuple(shape)}"
        return out


DIRECT = DirectDelivery()


@contextlib.contextmanager
def delivery_to(device: torch.device) -> Iterator[Delivery]:
    """The one that suits the device."""
    if device.type != "cuda":
        yield DIRECT
        return
    with contextlib.closing(Stager(CudaCopyQueue(device))) as stager:
        yield StagedDelivery(stager)


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
        delivery: Delivery = DIRECT,
    ) -> None:
        self._source = source
        self._dtype = dtype
        self._device = device
        self._deterministic = deterministic
        self._prefix = prefix
        self._delivery = delivery

    def __truediv__(self, part: str | int) -> Weights:
        rest = (self._deterministic, f"{self._prefix}{part}.", self._delivery)
        return Weights(self._source, self._dtype, self._device, *rest)

    def has(self, name: str) -> bool:
        """Whether there is a tensor `prefix + name`."""
        return self._source.has(self._prefix + name)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor `prefix + name`, of exactly this shape."""
        return self._delivery.one(self._source.read(self._prefix + name, shape), self._dtype, self._device)

    def tensors(self, rows: Mapping[str, int], *width: int) -> torch.Tensor:
        """[sum of rows, *width]: the tensors `prefix + name`, of [rows, *width] each, one after the other."""
        parts = (self._source.read(self._prefix + name, (count, *width)) for name, count in rows.items())
        return self._delivery.joined(parts, (sum(rows.values()), *width), self._dtype, self._device)

    def linear(self, outputs: Mapping[str, int], width: int, bias: bool = False) -> Linear:
        """The projections `outputs`, by name with how many features each has, of `width` inputs, as one layer."""
        weight = self.tensors({f"{name}.weight": count for name, count in outputs.items()}, width)
        if not bias:
            return self.linear_of(weight)
        return self.linear_of(weight, self.tensors({f"{name}.bias": count for name, count in outputs.items()}))

    def linear_of(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """A layer of a weight that is there already, [out_features, in_features]."""
        return Linear(weight, bias, self._deterministic)

    def integers(self, name: str, *shape: int) -> torch.Tensor:
        """The same as int64, for tensors of ids."""
        return self._source.read(self._prefix + name, shape).to(device=self._device, dtype=torch.int64)


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
    """Random weights that depend on nothing but the tensor's name: norms one, biases and d2t zero, the rest normal.

    They are made where they are wanted, and are the same everywhere.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        pool = torch.randn(_DUMMY_POOL, generator=torch.Generator().manual_seed(0)).mul_(_DUMMY_STD).bfloat16()
        self._pool = pool.to(device)

    def read(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        if len(shape) == 1:
            make = torch.zeros if name.endswith(("bias", "d2t")) else torch.ones
            return make(tuple(shape), device=self._device)
        count = torch.Size(shape).numel()
        pool = self._pool.roll(zlib.crc32(name.encode()) % _DUMMY_POOL)
        values = torch.empty(count, dtype=pool.dtype, device=self._device)
        num_whole = count // _DUMMY_POOL
        values[: num_whole * _DUMMY_POOL].view(num_whole, _DUMMY_POOL).copy_(pool.expand(num_whole, -1))
        values[num_whole * _DUMMY_POOL :].copy_(pool[: count % _DUMMY_POOL])
        return values.view(*shape)

    def has(self, name: str) -> bool:
        return True

    def close(self) -> None:
        self._pool = torch.empty(0)


def open_weights(folder: Path, load_format: str, device: torch.device = _HOST) -> WeightSource:
    """The source for `load_format` "auto" or "dummy", which makes its tensors on `device`."""
    return DummySource(device) if load_format == "dummy" else CheckpointSource(folder)


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
