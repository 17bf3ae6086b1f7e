"""The LoRA adapters that a front end serves, by name.

The engine reads a private copy of an adapter's files, so that its tokens do not change with them. A copy is removed
when its adapter has been unloaded, no request has it, and the engine cores have forgotten it. Copies that a killed
process has left are removed when the next one makes its first copy.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.config.lora import CONFIG, WEIGHTS, LoraConfig, check_targets, read_adapter
from penstock.messages.adapters import Adapter, LoraTarget
from penstock.utils.errors import ConfigError, RequestError
from penstock.utils.names import is_unicode

_MAX_NAME_LENGTH = 256
_PIECE_BYTES = 1 << 20
_PREFIX = "penstock-lora-"  # of the folders with copies


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter for `LLM.generate` and `AsyncLLM.generate`, in vLLM's terms. `lora_path` is a folder that PEFT has
    written. `lora_int_id` is not used: the contents of its files identify an adapter.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


class AdapterStore:
    """Not thread-safe: one thread calls it."""

    def __init__(self, config: LoraConfig | None, targets: Mapping[str, LoraTarget]) -> None:
        """`config` is None if the engine has no adapters, `targets` are the projections that they may change."""
        self._config = config
        self._targets = targets
        self._by_name: dict[str, Adapter] = {}
        self._paths: dict[str, str] = {}
        # The adapters that were made of each copy, as long as anything has them: another tuple when one more is made.
        self._copies: dict[bytes, tuple[weakref.ref[Adapter], ...]] = {}
        self._folder: Path | None = None
        self._close: Callable[[], object] = lambda: None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def get(self, name: str) -> Adapter | None:
        return self._by_name.get(name)

    def path(self, name: str) -> str:
        """Returns the folder that a loaded adapter was read from."""
        return self._paths[name]

    def load(self, name: str, path: str) -> Adapter:
        """Copies and checks an adapter, and serves it under a name that is not in use, unless for the same contents.

        Raises RequestError if the engine has no adapters, or the name is in use or invalid, and ConfigError if its
        files are unsuitable or there is no room for a copy.
        """
        return self.add(path, self.copy(name, path))

    def copy(self, name: str, path: str) -> Adapter:
        """Copies and checks an adapter. Raises the errors of `load`. Other threads may call it, one at a time."""
        if self._config is None:
            raise RequestError("the engine was started without adapters: start it with enable_lora", "lora_request")
        is_text = isinstance(name, str) and name.isprintable() and is_unicode(name)
        if not is_text or not 0 < len(name) <= _MAX_NAME_LENGTH:
            raise RequestError(
                f"lora_name must be printable text of 1 to {_MAX_NAME_LENGTH} characters, got {str(name)[:40]!r}",
                "lora_name",
            )
        if not isinstance(path, str) or "\0" in path or not is_unicode(path):
            raise RequestError("lora_path must be the path of a folder, as text", "lora_path")
        return self._copy(name, path, self._config.max_rank)

    def add(self, path: str, adapter: Adapter) -> Adapter:
        """Serves a copied adapter under its name. Raises RequestError if that is in use."""
        name = adapter.name
        living = (each for each in self._copies.get(adapter.digest, ()) if each() is not None)
        self._copies[adapter.digest] = (*living, weakref.ref(adapter))
        known = self._by_name.get(name)
        if known is not None and known.digest != adapter.digest:
            raise RequestError(
                f"the name {name!r} is in use for an adapter with other contents: unload that first", "lora_name"
            )
        if known is None:
            self._by_name[name], self._paths[name] = adapter, path
        return self._by_name[name]

    def known(self, request: LoRARequest) -> Adapter | None:
        """Returns the adapter of a request if its name is known, and its path is the same or not given. Raises
        RequestError if nothing says where the adapter is.
        """
        if not isinstance(request, LoRARequest):
            raise RequestError(f"lora_request must be a LoRARequest, got {type(request).__name__}", "lora_request")
        known = self._by_name.get(request.lora_name)
        if known is not None and request.lora_path in ("", self._paths[request.lora_name]):
            return known
        if not request.lora_path:
            raise RequestError(f"there is no adapter {request.lora_name!r}: give its lora_path", "lora_request")
        return None

    def resolve(self, request: LoRARequest | None) -> Adapter | None:
        """Returns the adapter of a request, which is loaded if it is not known. Raises the errors of `load`."""
        if request is None:
            return None
        return self.known(request) or self.load(request.lora_name, request.lora_path)

    def unload(self, name: str) -> None:
        """Ends the use of a name; requests that have its adapter continue. Raises RequestError for an unknown name."""
        if self._by_name.pop(name, None) is None:
            raise RequestError(f"there is no adapter {name!r}", "lora_name")
        del self._paths[name]

    @property
    def has_unserved(self) -> bool:
        """Whether there are copies of adapters that have no name."""
        return len(self._copies) > len({adapter.digest for adapter in self._by_name.values()})

    def unused(self) -> list[tuple[bytes, object]]:
        """Returns the digests of adapters that have no name and no new request any more, and a token for `remove`."""
        served = {adapter.digest for adapter in self._by_name.values()}
        copies = [(digest, made) for digest, made in self._copies.items() if digest not in served]
        return [(digest, made) for digest, made in copies if all(each() is None for each in made)]

    def remove(self, digest: bytes, token: object) -> None:
        """Removes a copy that was unused, and that no engine core has read since. If it was used meanwhile it stays,
        also if it is unused again: a core may have a request that will read it.
        """
        if self._copies.get(digest) is token and (digest, token) in self.unused():
            del self._copies[digest]
            shutil.rmtree(self._place(digest), ignore_errors=True)

    def close(self) -> None:
        """Removes all copies; no request follows. Idempotent."""
        self._close()

    def _copy(self, name: str, path: str, max_rank: int) -> Adapter:
        copy: Path | None = None
        try:
            source = Path(path).expanduser()
            check_targets(read_adapter(source), self._targets, max_rank)  # before anything is copied
            if self._folder is None or not self._folder.is_dir():
                self._folder, lock = _make_folder(self._folder)
                # Also when the program exits.
                self._close = weakref.finalize(self, _remove_folder, self._folder, lock)
            copy = Path(tempfile.mkdtemp(dir=self._folder))
            digest = hashlib.sha256(b"penstock adapter\0")
            for file in (CONFIG, WEIGHTS):
                size = _copy_file(source / file, copy / file, digest)
                digest.update(size.to_bytes(8, "little"))
            # Errors name the folder that was given.
            check_targets(replace(read_adapter(copy), folder=source), self._targets, max_rank)
            place = self._place(digest.digest())
            place.mkdir(exist_ok=True)
            # Files that are there are replaced by the same, unless they were damaged: then the adapter works again.
            for file in (CONFIG, WEIGHTS):
                (copy / file).replace(place / file)
            return Adapter(name, digest.digest(), str(place))
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"the adapter in {path} cannot be copied: {error}") from None
        finally:
            if copy is not None:
                shutil.rmtree(copy, ignore_errors=True)

    def _place(self, digest: bytes) -> Path:
        assert self._folder is not None
        return self._folder / digest.hex()


def _make_folder(again: Path | None) -> tuple[Path, int]:
    """Returns a new folder and a descriptor that locks it, and removes those of processes that were killed. `again` is
    the path of one that has been removed, which is created again because engines refer to it.
    """
    for other in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # Other users' cannot be opened, and a link is not followed.
        with contextlib.suppress(OSError):
            lock = os.open(other, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(other, ignore_errors=True)
            finally:
                os.close(lock)
    while True:
        folder = again or Path(tempfile.mkdtemp(prefix=_PREFIX))
        if again is not None:
            again.mkdir(0o700)
        # Until it is locked, another process may take it for an abandoned one, and remove it.
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.is_dir():
                return folder, lock
            os.close(lock)


def _remove_folder(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _copy_file(source: Path, target: Path, digest: hashlib._Hash) -> int:
    """Copies a file and returns its size; `digest` is given what was written."""
    size = 0
    with source.open("rb") as stream, target.open("wb") as out:
        while piece := stream.read(_PIECE_BYTES):
            out.write(piece)
            digest.update(piece)
            size += len(piece)
    return size
