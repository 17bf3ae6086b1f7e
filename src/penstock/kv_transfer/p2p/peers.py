"""The cluster key, and the addresses of engines: an address in a client's request alone never causes a connection.

On one host no configuration is needed. The first engine of a user makes a key in a folder that only this user can read,
and every engine that listens records its address there. Between hosts the operator provides a key file and a list of
peers; without them the engine does not start.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path

from penstock.kv_transfer.p2p.params import Address
from penstock.utils.errors import ConfigError, PeerError
from penstock.utils.hosts import canonical_host, is_host, is_ip_address
from penstock.utils.logging import get_logger

_logger = get_logger(__name__)

REFRESH_SECONDS = 300.0
_KEY_BYTES = 32
_MIN_KEY_BYTES = 16
_PORT = re.compile(r"[0-9]{1,5}")


def is_loopback(host: str) -> bool:
    """Returns whether the host is this one, by a name or an address that no other host can reach."""
    return host == "localhost" or (is_ip_address(host) and ipaddress.ip_address(host).is_loopback)


def read_cluster_key(path: Path) -> bytes:
    """Returns the key. Raises ConfigError if the file cannot be read, is too short, or can be read by others.

    A file that root owns may be readable by a group, like secrets mounted for the user of a container.
    """
    try:
        found = path.stat()
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cluster_key_file cannot be read: {error}") from None
    if len(key) < _MIN_KEY_BYTES:
        raise ConfigError(f"cluster_key_file {path} has {len(key)} bytes and needs {_MIN_KEY_BYTES} or more")
    if found.st_mode & (stat.S_IROTH if found.st_uid == 0 and os.getuid() else stat.S_IRGRP | stat.S_IROTH):
        raise ConfigError(f"cluster_key_file {path} can be read by other users: run chmod 600 {path}")
    return key


class LocalCluster:
    """The engines of one user on one host. Raises ConfigError unless the folder is exclusively this user's, or can be
    made.

    The folder is a temporary one and not the user's runtime directory: a service or a cron job may have none, and it is
    emptied when the user's last session ends, while engines continue. Cleaners remove what has not changed for days
    from a temporary folder, so a running engine calls `refresh`. One thread at a time calls the methods but `has`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._announced: dict[Address, int] = {}
        self._key: bytes | None = None
        self._refresh_at = 0.0
        self._folder = folder or Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
        self._make_folder()

    def _make_folder(self) -> None:
        with _usable(self._folder), contextlib.suppress(FileExistsError):
            self._folder.mkdir(mode=0o700)
        found = self._folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(f"{self._folder} must be a folder that only its owner can use: remove it, or set TMPDIR")

    def key(self) -> bytes:
        """Returns the key that all engines of the user share. The first one makes it.

        Raises ConfigError if it cannot be read or made, or is incomplete.
        """
        path = self._folder / "cluster.key"
        with _usable(self._folder):
            if not path.exists():
                self._write_key(path, secrets.token_bytes(_KEY_BYTES))
            self._key = path.read_bytes()
        # After a loss of power a file may be empty, and an empty key would admit every user of this host.
        if len(self._key) < _KEY_BYTES:
            raise ConfigError(f"{path} is incomplete: remove it, and restart all engines of this user")
        return self._key

    def _write_key(self, path: Path, key: bytes) -> None:
        made = path.with_name(f"cluster.key.{secrets.token_hex(8)}")
        with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(key)
        # Another engine may have written one first: a link does not replace an existing file.
        with contextlib.suppress(FileExistsError):
            os.link(made, path)
        made.unlink()

    def announce(self, address: Address) -> None:
        """Records that an engine listens there, until `withdraw` or the end of this process, however it ends.

        Raises ConfigError if the folder cannot be written.
        """
        with _usable(self._folder):
            for path in self._folder.glob("engine.*"):
                _is_locked(path, removes_stale=True)
            self._announced[address] = self._lock(address)

    def _lock(self, address: Address) -> int:
        """Returns a descriptor of the address's file, which is made and locked."""
        path = self._file(address)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            # Another process may have deleted the file in the meantime, as a stale one.
            if _is_file(path, descriptor):
                return descriptor
            os.close(descriptor)

    def refresh(self, now: float) -> None:
        """Makes what this engine has written look used, and writes again what has been removed.

        Cheap, and does nothing within `REFRESH_SECONDS` of the last time; `now` is in seconds of any one clock. What
        fails is logged, and tried again the next time.
        """
        if now < self._refresh_at:
            return
        self._refresh_at = now + REFRESH_SECONDS
        try:
            self._make_folder()
            os.utime(self._folder)
            if self._key is not None:
                self._refresh_key(self._key)
            for address, descriptor in self._announced.items():
                if _is_file(self._file(address), descriptor):
                    os.utime(descriptor)
                else:
                    self._announced[address] = self._lock(address)
                    os.close(descriptor)
        except (OSError, ConfigError) as error:
            _logger.warning("other engines of this user may not find this one: %s", error)

    def _refresh_key(self, key: bytes) -> None:
        path = self._folder / "cluster.key"
        if not path.exists():
            self._write_key(path, key)
        if path.read_bytes() != key:
            _logger.warning("%s has been replaced: restart this engine to connect it with newer ones", path)
        os.utime(path)

    def withdraw(self, address: Address) -> None:
        os.close(self._announced.pop(address))
        # Another engine may listen there by now.
        _is_locked(self._file(address), removes_stale=True)

    def has(self, address: Address) -> bool:
        """Returns whether an engine of this user listens there. Raises PeerError if that cannot be found out."""
        try:
            return _is_locked(self._file(address))
        except OSError as error:
            raise PeerError(f"the engines of this host cannot be looked up: {error}") from error

    def _file(self, address: Address) -> Path:
        host, port = address
        return self._folder / f"engine.{host.replace(':', '_').replace('/', '_')}.{port}"


def _is_file(path: Path, descriptor: int) -> bool:
    """Returns whether the path still names the file of this descriptor."""
    return path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())


@contextlib.contextmanager
def _usable(folder: Path) -> Generator[None]:
    """Raises ConfigError if the folder cannot be used."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{folder} cannot be used: {error}: free some space, or set TMPDIR") from error


def _is_locked(path: Path, *, removes_stale: bool = False) -> bool:
    """Returns whether a living process has announced this address; else the file may be removed. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # While it is locked here, a process that announces the address waits, and then finds that its file has gone.
        if removes_stale and _is_file(path, descriptor):
            path.unlink()
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


class PeerList:
    """The addresses that may be dialled: configured ones, and on this host those that engines have announced.

    Addresses are compared as they are written. A name is looked up only when its engine is dialled.
    """

    def __init__(self, configured: Sequence[str], local: LocalCluster | None) -> None:
        self._configured = {_parse(each) for each in configured}
        self._local = local

    def resolve(self, address: Address) -> Address:
        """Returns the address to dial. Raises PeerError if it is not in the list."""
        host, port = address
        address = (canonical_host(host), port)
        if address in self._configured:
            return address
        if self._local is not None and is_loopback(address[0]) and self._local.has(address):
            return address
        raise PeerError(f"{host}:{port} is not in the list of peers: add it to peers in kv_connector_extra_config")


def _parse(text: str) -> Address:
    """Parses HOST:PORT. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not is_host(host) or not _PORT.fullmatch(port) or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"peers must be addresses such as 10.0.0.1:5600 or prefill-0.prefill:5600, got {text!r}")
    return canonical_host(host), int(port)


def check_host(host: str) -> str:
    """Returns the address or name by which others reach `kv_ip`. Raises ConfigError for the unspecified address."""
    host = canonical_host(host)
    if is_ip_address(host) and ipaddress.ip_address(host).is_unspecified:
        raise ConfigError(f"kv_ip must be an address or a name by which other engines reach this one, not {host}")
    return host
