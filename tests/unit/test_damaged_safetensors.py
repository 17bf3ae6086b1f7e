"""Damaged safetensors files are errors that name the file: no crash, and no memory beyond the file's size."""

from __future__ import annotations

import copy
import json
import random
import resource
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file

from penstock.config.model_path import resolve_model_path
from penstock.models.sources.checkpoint import CheckpointSource, checkpoint_bytes
from penstock.utils.errors import ConfigError

TENSORS = {"a.weight": torch.ones(8, 16), "b.weight": torch.ones(16).bfloat16(), "c": torch.ones(3, dtype=torch.int64)}
ROOM = 512 << 20
LENGTHS = (0, 1, 2**31, 2**40, 2**62, 2**63, 2**64 - 1, 100_000_001)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """An allocation as large as a damaged length fails."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


class Checkpoint:
    def __init__(self, folder: Path) -> None:
        self.file = folder / "model.safetensors"
        save_file(TENSORS, self.file)
        self.whole = self.file.read_bytes()
        self.length = struct.unpack("<Q", self.whole[:8])[0]
        self.header: dict[str, Any] = json.loads(self.whole[8 : 8 + self.length])

    def read(self, data: bytes) -> None:
        """Reads all tensors of a file with these bytes."""
        self.file.write_bytes(data)
        with closing(CheckpointSource(self.file.parent)) as source:
            for name, tensor in TENSORS.items():
                found = source.read(name, tensor.shape)
                assert found.shape == tensor.shape
                found.tolist()

    def with_header(self, text: bytes) -> bytes:
        return struct.pack("<Q", len(text)) + text + self.whole[8 + self.length :]

    def changed(self, name: str, **fields: Any) -> bytes:
        header = copy.deepcopy(self.header)
        header[name].update(fields)
        return self.with_header(json.dumps(header).encode())


@pytest.fixture
def checkpoint(tmp_path: Path, little_memory: None) -> Checkpoint:
    return Checkpoint(tmp_path)


def test_a_file_that_is_cut_off(checkpoint: Checkpoint) -> None:
    checkpoint.read(checkpoint.whole)
    for end in [*range(12), *range(12, len(checkpoint.whole), 61), len(checkpoint.whole) - 1]:
        with pytest.raises(ConfigError, match=r"model\.safetensors is truncated or not a safetensors file"):
            checkpoint.read(checkpoint.whole[:end])


@pytest.mark.parametrize("length", LENGTHS)
def test_a_length_of_the_header(checkpoint: Checkpoint, length: int) -> None:
    with pytest.raises(ConfigError, match=r"model\.safetensors is truncated or not"):
        checkpoint.read(struct.pack("<Q", length) + checkpoint.whole[8:])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data_offsets": [24, 10**9]}, "offset for tensor"),
        ({"data_offsets": [2**63 - 512, 2**63]}, "offset for tensor"),
        ({"data_offsets": [2**64 - 512, 2**64]}, "is truncated or not"),
        ({"data_offsets": [536, 24]}, "offset for tensor"),
        ({"data_offsets": [-1, 511]}, "is truncated or not"),
        ({"data_offsets": [0, 512]}, "offset for tensor"),  # it overlaps another
        ({"data_offsets": [24, 535]}, "is truncated or not"),
        ({"shape": [2**32, 2**32]}, "overflow"),
        ({"shape": [2**63, 2]}, "overflow"),
        ({"shape": [-8, -16]}, "is truncated or not"),
        ({"shape": [16, 8]}, r"'a\.weight' has shape \[16, 8\], config\.json asks for \[8, 16\]"),
        ({"shape": [8, 32], "dtype": "F16"}, r"'a\.weight' has shape \[8, 32\]"),
        ({"dtype": "F3"}, "unknown variant `F3`"),
        ({"dtype": 7}, "is truncated or not"),
    ],
)
def test_a_tensor_that_is_not_where_its_shape_says(
    checkpoint: Checkpoint, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        checkpoint.read(checkpoint.changed("a.weight", **fields))
    assert str(checkpoint.file) in str(caught.value)


@pytest.mark.parametrize("header", [b"[1]", b"[" * 100_000, b"{" * 100_000, b"\xff\xfe", b'{"__metadata__": 5}', b"{}"])
def test_a_header_that_is_none(checkpoint: Checkpoint, header: bytes) -> None:
    with pytest.raises(ConfigError, match=r"model\.safetensors is truncated or not"):
        checkpoint.read(checkpoint.with_header(header))


@pytest.mark.parametrize(("kind", "size"), [("F4", 64), ("F6_E2M3", 96), ("C64", 1024), ("BOOL", 128), ("U16", 256)])
def test_numbers_of_a_type_that_is_not_read(checkpoint: Checkpoint, kind: str, size: int) -> None:
    header = {"a.weight": {"dtype": kind, "shape": [8, 16], "data_offsets": [0, size]}}
    text = json.dumps({**header, "b.weight": {"dtype": "BF16", "shape": [16], "data_offsets": [size, size + 32]}})
    with pytest.raises(ConfigError, match=rf"model\.safetensors: 'a\.weight' has type {kind}"):
        checkpoint.read(struct.pack("<Q", len(text)) + text.encode() + bytes(size + 32))


def test_any_damage_of_the_header(checkpoint: Checkpoint) -> None:
    """Every byte may be anything."""
    rng, messages = random.Random(0), list[str]()
    for _ in range(1500):
        damaged = bytearray(checkpoint.whole)
        at, length = rng.randrange(8 + checkpoint.length), rng.choice((1, 2, 8))
        change = rng.choice((rng.randbytes(length), b"\xff" * length, b"9" * length, b"0" * length))
        damaged[at : at + length] = change
        try:
            checkpoint.read(bytes(damaged[: len(checkpoint.whole)]))
        except ConfigError as error:
            messages.append(str(error))
    assert len(messages) > 1000
    assert all(str(checkpoint.file.parent) in message for message in messages)


def test_files_that_have_one_tensor_are_refused_and_mistral_s_copy_is_not_read(tmp_path: Path) -> None:
    """A folder without an index may have several files; which of two tensors is meant, none of them says."""
    save_file(TENSORS, tmp_path / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in TENSORS.items()}, tmp_path / "consolidated.safetensors")
    num_bytes = sum(tensor.numel() * (8 if tensor.dtype == torch.int64 else 4) for tensor in TENSORS.values())
    assert checkpoint_bytes(tmp_path, torch.float32) == num_bytes
    with closing(CheckpointSource(tmp_path)) as source:
        assert torch.equal(source.read("c", (3,)), TENSORS["c"])
    save_file({"d": TENSORS["c"]}, tmp_path / "other.safetensors")
    with closing(CheckpointSource(tmp_path)) as source:
        assert source.has("d")
    save_file({"c": TENSORS["c"] + 1}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match=r"other.safetensors has the tensor 'c' of model.safetensors"):
        CheckpointSource(tmp_path)


@pytest.mark.parametrize("outside", ["../other/model.safetensors", "{}/other/model.safetensors", "sub/a", 5])
def test_an_index_names_files_of_its_own_folder(outside: Any, tmp_path: Path) -> None:
    """The file of another folder is whole, and none of this checkpoint."""
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in (own, other):
        folder.mkdir()
        save_file(TENSORS, folder / "model.safetensors")
    named = outside.format(tmp_path) if isinstance(outside, str) else outside
    for file in ("model.safetensors", named):
        index = {"weight_map": dict.fromkeys(TENSORS, "model.safetensors") | {"c": file}}
        (own / "model.safetensors.index.json").write_text(json.dumps(index))
        if file != named:
            assert checkpoint_bytes(own, torch.float32) > 0
    with pytest.raises(
        ConfigError, match=r"own/model\.safetensors\.index\.json must map .* to names of files beside it"
    ):
        CheckpointSource(own)


def test_a_model_is_downloaded_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """gpt-oss and Mistral's models have copies of the weights in the formats of their makers."""
    stored = ["config.json", "model-00001-of-00002.safetensors", "1_Pooling/config.json", "chat_template.jinja"]
    copies = ["original/model.safetensors", "consolidated.safetensors", "consolidated-00001-of-00002.safetensors"]
    found: list[str] = []

    def download(model: str, **patterns: Any) -> str:
        del patterns["revision"]
        found.extend(filter_repo_objects([*stored, *copies, "metal/model.bin"], **patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model_path("openai/gpt-oss-20b") == tmp_path
    assert found == stored
