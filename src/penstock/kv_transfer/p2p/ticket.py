"""The proof that a request may read KV of another engine, which travels through clients and proxies.

A ticket names one finished request of one life of one engine, and the prompt whose KV it stands for. It carries an
HMAC-SHA256 (RFC 2104) under the cluster key, so that only an engine of the cluster can make one. Only the engine that
issued it knows whether it is still valid and unused: a ticket has no expiry time, because that engine's deadline for
the blocks (`hold_seconds`) ends it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from array import array
from collections.abc import Sequence

import msgspec

from penstock.messages.kv_transfer import TransferId
from penstock.utils.errors import PeerError

_MAC_BYTES = 32
_MAX_LENGTH = 2048


class Ticket(msgspec.Struct, frozen=True):
    """`hold_id` names the blocks that the engine holds for it; `prompt_digest` is that of `digest_prompt`."""

    engine_id: str
    epoch: str
    hold_id: TransferId
    prompt_digest: bytes
    num_tokens: int


def digest_prompt(token_ids: Sequence[int], kv_scope: bytes) -> bytes:
    """Returns [16 bytes], equal for equal prompts whatever the block size, and different for different scopes."""
    tokens = array("q", token_ids).tobytes()
    return hashlib.blake2b(len(kv_scope).to_bytes(8, "little") + kv_scope + tokens, digest_size=16).digest()


class TicketOffice:
    """Issues and reads the tickets of one cluster."""

    def __init__(self, key: bytes) -> None:
        self._key = hashlib.sha256(b"penstock ticket\0" + key).digest()

    def issue(self, ticket: Ticket) -> str:
        payload = msgspec.msgpack.encode(ticket)
        return base64.urlsafe_b64encode(self._mac(payload) + payload).decode().rstrip("=")

    def read(self, text: str) -> Ticket:
        """Raises PeerError if the text is not a ticket of this cluster."""
        try:
            if len(text) > _MAX_LENGTH:
                raise ValueError
            data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
            mac, payload = data[:_MAC_BYTES], data[_MAC_BYTES:]
            if not hmac.compare_digest(mac, self._mac(payload)):
                raise PeerError("the ticket does not belong to this cluster: its signature is invalid")
            return msgspec.msgpack.decode(payload, type=Ticket)
        except (ValueError, binascii.Error, msgspec.DecodeError):
            raise PeerError("the ticket is malformed") from None

    def _mac(self, payload: bytes) -> bytes:
        return hmac.digest(self._key, payload, "sha256")
