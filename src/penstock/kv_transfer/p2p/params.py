"""Reads `kv_transfer_params` of requests, as proxies for vLLM write them.

Serial ("NIXL style"): the proxy sends the request to P with `do_remote_decode`, gets P's answer, and passes its
`kv_transfer_params` on to D. Concurrent ("Mooncake style"): both get the request at once, with a common `transfer_id`,
and D gets the address of P.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from penstock.utils.errors import RequestError
from penstock.utils.hosts import is_host

_FIELD = "kv_transfer_params"
_MAX_TEXT = 4096
_MAX_SHOWN = 80
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,12}")

Address = tuple[str, int]
"""(host, port)"""


@dataclass(frozen=True, slots=True)
class RemoteDecode:
    """Another engine will decode: the KV is held for it. `rendezvous` is empty if that engine will use a ticket."""

    rendezvous: str = ""


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """Another engine has prefilled, or is doing so. `ticket` or `rendezvous` identifies the request there.

    `num_tokens` is the number of prompt tokens whose KV it has, None if it has all.
    """

    address: Address
    engine_id: str
    ticket: str = ""
    rendezvous: str = ""
    num_tokens: int | None = None


def read_params(params: Mapping[str, Any]) -> RemoteDecode | RemotePrefill | None:
    """Returns what the request asks for, or None. Raises RequestError that names a missing or invalid parameter."""
    is_decode, is_prefill = _flag(params, "do_remote_decode"), _flag(params, "do_remote_prefill")
    if is_decode and is_prefill:
        raise RequestError("do_remote_decode and do_remote_prefill exclude each other", _FIELD)
    if is_decode:
        return RemoteDecode(_text(params, "transfer_id"))
    if not is_prefill:
        return None
    rendezvous = _text(params, "transfer_id")
    if rendezvous:
        address = _url(params, "remote_bootstrap_addr")
        return RemotePrefill(address, _text(params, "remote_engine_id"), rendezvous=rendezvous)
    return RemotePrefill(
        address=(_host(params, "remote_host"), _integer(params, "remote_port", 1, 65535)),
        engine_id=_text(params, "remote_engine_id", is_required=True),
        ticket=_text(params, "ticket", is_required=True),
        num_tokens=_integer(params, "remote_num_tokens", 0, 1 << 40),
    )


def _flag(params: Mapping[str, Any], name: str) -> bool:
    value = params.get(name)
    if value is not None and not isinstance(value, bool):
        raise _refusal(name, "true or false", value)
    return bool(value)


def _text(params: Mapping[str, Any], name: str, is_required: bool = False) -> str:
    value = params.get(name)
    if value is None and not is_required:
        return ""
    # Neither control characters nor halves of surrogate pairs are printable.
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_TEXT or not value.isprintable():
        raise _refusal(name, f"printable text of at most {_MAX_TEXT} characters", value)
    return value


def _integer(params: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = params.get(name)
    if isinstance(value, str) and _DECIMAL.fullmatch(value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _refusal(name, f"an integer from {least} to {most}", value)
    return value


def _host(params: Mapping[str, Any], name: str) -> str:
    value = _text(params, name, is_required=True)
    if not is_host(value):
        raise _refusal(name, "an IP address or a host name", value)
    return value


def _url(params: Mapping[str, Any], name: str) -> Address:
    """Parses `http://host:port` or `host:port`."""
    value = _text(params, name, is_required=True)
    try:
        parts = urlsplit(value if "://" in value else f"http://{value}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port, is_plain = "", None, False
    else:
        # Nothing may follow the port, and no name of a user precede the host.
        is_plain = parts.scheme in ("http", "https") and value.isascii() and " " not in value
        is_plain = is_plain and "@" not in value and value.endswith((f":{port}", f":{port}/"))
    if not is_plain or not port or not is_host(host):
        raise _refusal(name, "an address such as http://127.0.0.1:8998", value)
    return host, port


def _refusal(name: str, wanted: str, value: object) -> RequestError:
    """Shows text and no other value, which may be large."""
    shown = (
        f"{value[:_MAX_SHOWN]!r}" if isinstance(value, str) else "nothing" if value is None else type(value).__name__
    )
    return RequestError(f"{name} in {_FIELD} must be {wanted}, got {shown}", _FIELD)
