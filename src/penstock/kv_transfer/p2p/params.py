"""Reads `kv_transfer_params` of requests, as proxies for vLLM write them.

Serial ("NIXL style"): the proxy sends the request to P with `do_remote_decode`, gets P's answer, and passes its
`kv_transfer_params` on to D. Concurrent ("Mooncake style"): both get the request at once, with a common `transfer_id`,
and D gets the address of P.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from penstock.utils.errors import RequestError

_FIELD = "kv_transfer_params"
_MAX_TEXT = 4096

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
        address = _read_url(_text(params, "remote_bootstrap_addr", is_required=True))
        return RemotePrefill(address, _text(params, "remote_engine_id"), rendezvous=rendezvous)
    host = _text(params, "remote_host", is_required=True)
    return RemotePrefill(
        address=(host, _integer(params, "remote_port", 1, 65535)),
        engine_id=_text(params, "remote_engine_id", is_required=True),
        ticket=_text(params, "ticket", is_required=True),
        num_tokens=_integer(params, "remote_num_tokens", 0, 1 << 40),
    )


def _flag(params: Mapping[str, Any], name: str) -> bool:
    value = params.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {value!r}", _FIELD)
    return bool(value)


def _text(params: Mapping[str, Any], name: str, is_required: bool = False) -> str:
    value = params.get(name)
    if value is None and not is_required:
        return ""
    if not isinstance(value, str) or not value or len(value) > _MAX_TEXT:
        raise RequestError(f"do_remote_prefill needs {name}, a string, in {_FIELD}; got {value!r:.80}", _FIELD)
    return value


def _integer(params: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = params.get(name)
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise RequestError(f"do_remote_prefill needs {name}, an integer, in {_FIELD}; got {value!r:.80}", _FIELD)
    return value


def _read_url(text: str) -> Address:
    """Parses `http://host:port` or `host:port`. Raises RequestError."""
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        if parts.hostname and parts.port:
            return parts.hostname, parts.port
    except ValueError:
        pass
    raise RequestError(f"remote_bootstrap_addr must be an address such as http://127.0.0.1:8998, got {text!r}", _FIELD)
