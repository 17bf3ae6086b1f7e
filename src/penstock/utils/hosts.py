"""Which host a name means."""

from __future__ import annotations

import ipaddress


def is_local_host(host: str) -> bool:
    """Whether a Host header, or the address of a listening socket, names this machine only."""
    name, colon, port = host.rpartition(":")
    name = name if colon and port.isdecimal() else host
    if name in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
