"""One chunk in one file, which is either complete or absent.

    head      magic, version, fingerprint of the model, key, bytes of payload, digest submitted with the payload
    seal      digest of head and payload
    zeros     to the end of the first page
    payload   the chunk

A file is written under a temporary name, flushed to the medium and then renamed, so a crash at any byte leaves at most
a temporary file. A reader accepts a file only if its head is the expected one and its seal is correct.

If the file system can do it and the chunk consists of whole pages, bytes move between memory and medium without the
page cache (O_DIRECT): the tier above is the cache, and filling another would take processor time from the model.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from penstock.kv_transfer.offload import OffloadKey
from penstock.utils.digest import DIGEST_BYTES, digest
from penstock.utils.errors import ConfigError
from penstock.utils.logging import get_logger

_MAGIC = b"PNSTK-KV"
_VERSION = 2
_MAX_FINGERPRINT_BYTES = 64
_MAX_HASH_BYTES = 32
# Magic, version; fingerprint and hash, each with its length; group, bytes of payload, the payload's digest.
_HEAD = struct.Struct(f"<8sIB{_MAX_FINGERPRINT_BYTES}sB{_MAX_HASH_BYTES}sIQB{DIGEST_BYTES}s")
_PAGE = 4096
assert _HEAD.size + DIGEST_BYTES <= _PAGE
_SUFFIX = ".kv"
_TEMPORARY_SUFFIX = ".tmp"

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ChunkOnDisk:
    key: OffloadKey
    last_use: float


@dataclass(frozen=True, slots=True)
class VerifiedChunk:
    """The payload is in place and verified; `attached_digest` is the one that it was written with."""

    attached_digest: bytes | None


class ChunkFolder:
    """The files of one model with chunks of one size: `fingerprint`, `chunk_bytes` and `kind` name the folder inside
    `root`.

    The methods may be called on any thread and for the same key at the same time, also by several processes: the last
    writer's file stays. They raise OSError for errors of the file system.

    Raises:
        ConfigError: the folder cannot be created or listed.
    """

    def __init__(self, root: Path, fingerprint: bytes, chunk_bytes: int, kind: str = "") -> None:
        assert 0 < len(fingerprint) <= _MAX_FINGERPRINT_BYTES, len(fingerprint)
        self._fingerprint = fingerprint
        self._chunk_bytes = chunk_bytes
        self.file_bytes = _PAGE + chunk_bytes
        try:
            self._folder = root.expanduser() / f"{fingerprint.hex()}-{chunk_bytes}{kind}"
            self._folder.mkdir(parents=True, exist_ok=True)
            self._found = self._scan()
            self._direct = 0 if chunk_bytes % _PAGE else _direct_flag(self._folder)
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"the folder of the disk tier cannot be used: {error}; name one in disk_path") from error

    def take_found(self) -> list[ChunkOnDisk]:
        """Returns the files present at the start, least recently used first."""
        found, self._found = self._found, []
        return found

    def write(self, key: OffloadKey, payload: memoryview, attached_digest: bytes | None) -> None:
        """Blocks until the file is on the medium; if it raises, the key's earlier file, if any, is unchanged.

        A payload of whole pages must be page-aligned.
        """
        head = self._head(key, attached_digest)
        temporary = self._folder / f"{uuid.uuid4().hex}{_TEMPORARY_SUFFIX}"
        try:
            # Someone may have emptied the root to free space.
            self._folder.mkdir(exist_ok=True)
            # Not closed here: an error's traceback may still refer to it.
            page = mmap.mmap(-1, _PAGE)
            page.write(_first_page(head, digest(head, payload)))
            with self._open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
                _write_all(file.fileno(), memoryview(page))
                _write_all(file.fileno(), payload)
                os.fsync(file.fileno())
            os.replace(temporary, self._path(key))
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def read(self, key: OffloadKey, payload: memoryview) -> VerifiedChunk | None:
        """Fills `payload`; None, with an undefined `payload`, unless the file is what `write` made for this key."""
        page = mmap.mmap(-1, _PAGE)
        with self._open(self._path(key), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW) as file:
            if os.fstat(file.fileno()).st_size != self.file_bytes:
                return None
            if not (_read_all(file.fileno(), memoryview(page)) and _read_all(file.fileno(), payload)):
                return None
            *_, num_attached, attached = _HEAD.unpack_from(page)
            attached_digest = attached if num_attached else None
            head = self._head(key, attached_digest)
            if page[:] != _first_page(head, digest(head, payload)):
                return None
            # Only the order after a restart depends on the file's time.
            with contextlib.suppress(OSError):
                os.utime(file.fileno())
            return VerifiedChunk(attached_digest)

    def remove(self, key: OffloadKey) -> None:
        """Removes the key's file if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(key))

    def _open(self, path: Path, flags: int) -> BinaryIO:
        return open(os.open(path, flags | self._direct, 0o666), "wb" if flags & os.O_WRONLY else "rb", buffering=0)

    def _head(self, key: OffloadKey, attached_digest: bytes | None) -> bytes:
        group, block_hash = key
        assert len(block_hash) <= _MAX_HASH_BYTES, len(block_hash)
        attached = attached_digest or b""
        assert len(attached) in (0, DIGEST_BYTES), len(attached)
        return _HEAD.pack(
            _MAGIC, _VERSION, len(self._fingerprint), self._fingerprint, len(block_hash), block_hash, group,
            self._chunk_bytes, len(attached), attached,
        )  # fmt: skip

    def _path(self, key: OffloadKey) -> Path:
        return self._folder / _name(key)

    def _scan(self) -> list[ChunkOnDisk]:
        """Deletes invalid files: temporary ones of an engine that died, and those of the wrong size.

        A live engine that shares the folder loses the store that it is writing, and counts it.
        """
        found: list[ChunkOnDisk] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    key, status = _key_of(entry.name), entry.stat(follow_symlinks=False)
                    if key is not None and entry.is_file(follow_symlinks=False) and status.st_size == self.file_bytes:
                        found.append(ChunkOnDisk(key, status.st_mtime))
                    else:
                        _remove_foreign(entry.path)
        return sorted(found, key=lambda chunk: chunk.last_use)


def _first_page(head: bytes, seal: bytes) -> bytes:
    return (head + seal).ljust(_PAGE, b"\0")


def _direct_flag(folder: Path) -> int:
    """Returns O_DIRECT if files in this folder can be opened with it."""
    flag = getattr(os, "O_DIRECT", 0)
    probe = folder / f"{uuid.uuid4().hex}{_TEMPORARY_SUFFIX}"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flag))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0
    finally:
        probe.unlink(missing_ok=True)
    return flag


def _remove_foreign(path: str) -> None:
    try:
        os.unlink(path)
    except OSError as error:
        _logger.warning("The disk tier ignores %s, which it did not write and cannot delete: %s", path, error)


def _name(key: OffloadKey) -> str:
    return f"{key[0]}-{key[1].hex()}{_SUFFIX}"


def _key_of(name: str) -> OffloadKey | None:
    group, _, block_hash = name.removesuffix(_SUFFIX).partition("-")
    try:
        key = (int(group), bytes.fromhex(block_hash))
    except ValueError:
        return None
    # Accepts only the exact spelling that `write` uses: with capitals, for example, a key would be found twice.
    return key if name == _name(key) and key[0] >= 0 and len(key[1]) <= _MAX_HASH_BYTES else None


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _read_all(descriptor: int, data: memoryview) -> bool:
    """Returns False if the file ends before `data` is full."""
    while data:
        count = os.readv(descriptor, [data])
        if count == 0:
            return False
        data = data[count:]
    return True
