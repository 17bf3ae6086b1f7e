"""Derives a cache salt from an API key and the client's salt."""

from __future__ import annotations

import hashlib


def scoped_salt(api_key: bytes, salt: str | None) -> str:
    """Returns a salt scoped to the key, so that timing reveals nothing about the prompts of other keys."""
    scope = hashlib.blake2b(api_key, digest_size=16, person=b"penstock-salt").hexdigest()
    return f"{scope}/{salt or ''}"
