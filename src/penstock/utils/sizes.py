"""Parsing and formatting of sizes in bytes."""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power
_AMBIGUOUS = tuple("kmgt")
_SIZE = re.compile(r"([0-9]+|[0-9]+\.[0-9]*|\.[0-9]+)\s*([a-z]*)")


def parse_size(text: str) -> int:
    """Bytes from a number and a unit: `5GB` (10^9 each), `512MiB` (2^20 each), `1.5 TiB`, or a plain number of bytes.

    Raises ValueError with a message that describes the accepted forms.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or match[2] not in (*_UNITS, *_AMBIGUOUS):
        raise ValueError(f"must be a size such as 5GB, 512MiB or 1048576, got {text!r}")
    number, unit = match.groups()
    if unit in _AMBIGUOUS:
        unit = unit.upper()
        raise ValueError(f"{text!r} is ambiguous: write {number}{unit}B (1000s) or {number}{unit}iB (1024s)")
    return int(number) * _UNITS[unit] if number.isdigit() else int(float(number) * _UNITS[unit])


def format_size(num_bytes: int) -> str:
    """The shortest exact form in binary units, else two digits of the largest unit: `16 MiB`, `4.66 GiB`."""
    units = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)]
    for unit, factor in units:
        if num_bytes >= factor:
            return f"{num_bytes // factor} {unit}" if num_bytes % factor == 0 else f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes} B"
