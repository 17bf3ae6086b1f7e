"""Which blocks of KV travel with a digest (`penstock.utils.digest`)."""

from __future__ import annotations

import enum

# A power of two, so that the low bits of a hash are a fair draw.
SAMPLED_ONE_IN = 16


class Attestation(enum.StrEnum):
    """Both ends come to the same answer because it depends on the key alone."""

    OFF = "off"
    SAMPLED = "sampled"
    ALL = "all"

    def covers(self, key: tuple[int, bytes]) -> bool:
        """Whether the block of this (KV group, block hash) has a digest; the hash must be evenly distributed."""
        if self is Attestation.SAMPLED:
            return (key[1][-1] + key[0]) % SAMPLED_ONE_IN == 0
        return self is Attestation.ALL
