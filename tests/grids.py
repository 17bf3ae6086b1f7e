"""Grids of test parameters: `make test` and `make test-long` run a covering part, `make test-all` runs all of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def exhaustive(*values: Any) -> Any:
    """Returns a case for `pytest.mark.parametrize` that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def grid(
    *parameters: Sequence[Any], strength: int = 2, others: pytest.MarkDecorator = pytest.mark.exhaustive
) -> list[Any]:
    """Returns every combination of the parameters' values, for `pytest.mark.parametrize` with all their names.

    Combinations outside a covering set are marked `others`. That set contains every combination of the values of any
    `strength` parameters: every pair of values with 2, and every value with 1.
    """
    cells = list(itertools.product(*(range(len(values)) for values in parameters)))
    tuples = {cell: set(itertools.combinations(enumerate(cell), strength)) for cell in cells}
    missing: set[Any] = set().union(*tuples.values())
    kept: set[tuple[int, ...]] = set()
    while missing:
        best = max(cells, key=lambda cell: len(tuples[cell] & missing))
        kept.add(best)
        missing -= tuples[best]
    marks = {True: (), False: others}
    return [
        pytest.param(
            *(values[index] for values, index in zip(parameters, cell, strict=True)), marks=marks[cell in kept]
        )
        for cell in cells
    ]
