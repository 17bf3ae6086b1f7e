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
from collections.abc import Sequence
from pathlib import Path

from penstock.kv_transfer.p2p.params import Address
from penstock.utils.errors import ConfigError, PeerError
from penstock.utils.hosts import canonical_host, is_host, is_ip_address

_KEY_BYTES = 32
_MIN_KEY_BYTES = 16
_PORT = re.compile(r"[0-9]{1,5}")


def is_loopback(host: str) -> bool:
    """Returns whether the host is this one, by a name or an address that no other host can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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
    """The engines of one user on one host. Raises ConfigError unless the folder is exclusively this user's."""

    def __init__(self, folder: Path | None = None) -> None:
        self._announced: dict[Address, int] = {}
        self._folder = folder or Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir(mode=0o700)
        found = self._folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(f"{self._folder} must be a folder that only its owner can use: remove it, or set TMPDIR")

    def key(self) -> bytes:
        """Returns the key that all engines of the user share. The first one makes it."""
        path = self._folder / "cluster.key"
        if not path.exists():
            made = self._folder / f"cluster.key.{secrets.token_hex(8)}"
            with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
            # Another engine may have made one first: a link does not replace an existing file.
            with contextlib.suppress(FileExistsError):
                os.link(made, path)
            made.unlink()
        return path.read_bytes()

    def announce(self, address: Address) -> None:
        """Records that an engine listens there, until `withdraw` or the end of this process, however it ends."""
        for path in self._folder.glob("engine.*"):
            if not _is_locked(path):
                path.unlink(missing_ok=True)
        path = self._file(address)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            # Another process may have deleted the file in the meantime, as a stale one.
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                self._announced[address] = descriptor
                return
            os.close(descriptor)

    def withdraw(self, address: Address) -> None:
        self._file(address).unlink(missing_ok=True)
        os.close(self._announced.pop(address))

    def has(self, address: Address) -> bool:
        """Returns whether an engine of this user listens there."""
        return _is_locked(self._file(address))

    def _file(self, address: Address) -> Path:
        host, port = address
        return self._folder / f"engine.{host.replace(':', '_').replace('/', '_')}.{port}"


def _is_locked(path: Path) -> bool:
    """Returns whether a living process has announced this address."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except (OSError, ValueError):
        return False  # ValueError: an address that no path can spell, and so no process has announced
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
