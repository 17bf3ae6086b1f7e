"""Host names and addresses: their spelling, whether they name this machine, listening on one, and losing one."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket

_MAX_HOST_LENGTH = 253
_IDLE_SECONDS, _PROBE_SECONDS, _NUM_PROBES = 30, 10, 3
_HOST_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
# The standard library accepts any text as the zone of an IPv6 address, such as eth0 in fe80::1%eth0.
_ZONE = re.compile(r"[A-Za-z0-9_.-]{1,32}")


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


def is_ip_address(host: str) -> bool:
    _, percent, zone = host.partition("%")
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return not percent or _ZONE.fullmatch(zone) is not None
    return False


def is_host(text: str) -> bool:
    """Whether the text is an IP address or can be a host name."""
    # A name that ends in a number is a mistyped IP address.
    labels = text.removesuffix(".").split(".")
    is_name = all(map(_HOST_LABEL.fullmatch, labels)) and not labels[-1].isdigit()
    return is_ip_address(text) or (is_name and len(text) <= _MAX_HOST_LENGTH)


def canonical_host(host: str) -> str:
    """The one spelling of an address or of a name, by which hosts are compared. No name is looked up."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        name = host.lower().removesuffix(".")
    return "127.0.0.1" if name == "localhost" else name


def in_url(host: str) -> str:
    """The host as a URL spells it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def free_port(host: str = "127.0.0.1") -> int:
    """A port of this IP address of this machine that nothing listens on now."""
    with listen(host, 0, 1) as probe:
        return probe.getsockname()[1]


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """A socket that listens on this IP address; for a host name, on all interfaces. Raises OSError."""
    if is_ip_address(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=backlog)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)


def keep_alive(connection: socket.socket) -> None:
    """Has the kernel end a TCP connection within a minute of the loss of the peer's host, also while it is idle."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES)
