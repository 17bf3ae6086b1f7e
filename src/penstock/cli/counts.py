"""Counts on the command line."""

from __future__ import annotations

import argparse


def count(text: str, low: int = 1) -> int:
    """A command-line count."""
    value = int(text)
    if value < low:
        raise argparse.ArgumentTypeError(f"must be at least {low}, got {value}")
    return value


def count_from_zero(text: str) -> int:
    """A command-line count that may be zero."""
    return count(text, low=0)
