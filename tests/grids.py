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
    kept = _covering(parameters, strength)
    return [_param(parameters, cell, () if cell in kept else others) for cell in _product(parameters)]


def graded_grid(*parameters: Sequence[Any]) -> list[Any]:
    """Returns every combination of three or more parameters' values. `make test` runs every value, `make test-long`
    every pair of values, and `make test-all` the rest.
    """
    values, pairs = _covering(parameters, 1), _covering(parameters, 2)
    marks = {cell: pytest.mark.long if cell in pairs else pytest.mark.exhaustive for cell in _product(parameters)}
    return [_param(parameters, cell, () if cell in values else mark) for cell, mark in marks.items()]


def _product(parameters: Sequence[Sequence[Any]]) -> list[tuple[int, ...]]:
    """Returns the cells of a grid: the index of each parameter's value."""
    return list(itertools.product(*(range(len(values)) for values in parameters)))


def _covering(parameters: Sequence[Sequence[Any]], strength: int) -> set[tuple[int, ...]]:
    """Returns cells with every combination of the values of any `strength` parameters."""
    cells = _product(parameters)
    tuples = {cell: set(itertools.combinations(enumerate(cell), strength)) for cell in cells}
    missing: set[Any] = set().union(*tuples.values())
    kept: set[tuple[int, ...]] = set()
    while missing:
        best = max(cells, key=lambda cell: len(tuples[cell] & missing))
        kept.add(best)
        missing -= tuples[best]
    return kept


def _param(parameters: Sequence[Sequence[Any]], cell: tuple[int, ...], marks: Any) -> Any:
    return pytest.param(*(values[index] for values, index in zip(parameters, cell, strict=True)), marks=marks)
