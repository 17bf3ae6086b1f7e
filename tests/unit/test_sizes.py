"""Sizes in bytes with units, as flags accept them and help texts show them."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

from penstock.cli.parser import format_size, size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1048576", 1 << 20),
        ("17B", 17),
        ("5GB", 5_000_000_000),
        ("5 gb", 5_000_000_000),
        ("512MiB", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("2TiB", 2 << 40),
        (".5KiB", 512),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_are_exact(text: str, num_bytes: int) -> None:
    assert size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "5GBB", "1e9", "five", "5 5GB", "٥GB", "0x10"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="must be a size such as 5GB"):
        size(text)


def test_an_ambiguous_unit_is_refused_with_both_meanings() -> None:
    with pytest.raises(ArgumentTypeError, match=r"5GB .* or 5GiB"):
        size("5G")


def test_sizes_are_shown_in_binary_units() -> None:
    assert [format_size(n) for n in (17, 16 << 20, 3 << 29, 5_000_000_000)] == [
        "17 B",
        "16 MiB",
        "1.50 GiB",
        "4.66 GiB",
    ]
