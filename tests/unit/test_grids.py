"""The part of a grid that `make test` runs contains every value, or every pair of values."""

from __future__ import annotations

import itertools

import pytest

from tests.grids import grid

PARAMETERS = (["a", "b", "c", "d"], [1, 3, 5], [{}, {"k": 1}], [False, True])


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 14), (4, 48)])
def test_the_kept_part_contains_every_combination_of_that_strength(strength: int, most: int) -> None:
    cells = grid(*PARAMETERS, strength=strength)
    assert [cell.values for cell in cells] == list(itertools.product(*PARAMETERS))
    kept = [cell.values for cell in cells if not cell.marks]
    assert len(kept) <= most
    for places in itertools.combinations(range(len(PARAMETERS)), strength):
        for wanted in itertools.product(*(PARAMETERS[place] for place in places)):
            assert any([cell[place] for place in places] == list(wanted) for cell in kept)
