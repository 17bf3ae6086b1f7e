"""Grids of test parameters: `make test` and `make test-long` run a part with every value, `make test-all` all of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def exhaustive(*values: Any) -> Any:
    """One case of `pytest.mark.parametrize` that is left to `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def grid(*parameters: Sequence[Any], strength: int = 2) -> list[Any]:
    """Every combination of the parameters' values, for `pytest.mark.parametrize` with all their names.

    Combinations beyond a covering set are marked exhaustive. In that set, any `strength` values of as many parameters
    meet: it has every pair of values with 2, and every value with 1.
    """
    cells = list(itertools.product(*(range(len(values)) for values in parameters)))
    tuples = {cell: set(itertools.combinations(enumerate(cell), strength)) for cell in cells}
    missing: set[Any] = set().union(*tuples.values())
    kept: set[tuple[int, ...]] = set()
    while missing:
        best = max(cells, key=lambda cell: len(tuples[cell] & missing))
        kept.add(best)
        missing -= tuples[best]
    make = {True: pytest.param, False: exhaustive}
    return [
        make[cell in kept](*(values[index] for values, index in zip(parameters, cell, strict=True))) for cell in cells
    ]
