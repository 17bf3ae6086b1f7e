"""Decides which blocks of KV are sent with a digest (`penstock.utils.digest`)."""

from __future__ import annotations

import enum

# A power of two, so that the low bits of a hash give an unbiased sample.
SAMPLED_ONE_IN = 16


class Attestation(enum.StrEnum):
    """Both ends reach the same decision because it depends on the key alone."""

    OFF = "off"
    SAMPLED = "sampled"
    ALL = "all"

    def covers(self, key: tuple[int, bytes]) -> bool:
        """Returns whether the block of this (KV group, evenly distributed block hash) has a digest."""
        if self is Attestation.SAMPLED:
            return (key[1][-1] + key[0]) % SAMPLED_ONE_IN == 0
        return self is Attestation.ALL
