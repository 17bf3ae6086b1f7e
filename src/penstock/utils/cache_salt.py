"""The cache salt that an API key makes of a client's."""

from __future__ import annotations

import hashlib


def scoped_salt(api_key: bytes, salt: str | None) -> str:
    """Within the key's scope, so that no key learns what others asked."""
    scope = hashlib.blake2b(api_key, digest_size=16, person=b"penstock-salt").hexdigest()
    return f"{scope}/{salt or ''}"
