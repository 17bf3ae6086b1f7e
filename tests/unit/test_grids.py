"""The parts of a grid that `make test` and `make test-long` run contain every value, or every pair of values."""

from __future__ import annotations

import itertools

import pytest

from tests.grids import graded_grid, grid

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


def test_a_graded_grid_has_every_value_in_the_quick_part_and_every_pair_in_the_quick_and_the_long_ones() -> None:
    cells = graded_grid(*PARAMETERS)
    assert [cell.values for cell in cells] == list(itertools.product(*PARAMETERS))
    quick = [cell.values for cell in cells if not cell.marks]
    pairs = [cell.values for cell in cells if not any(mark.name == "exhaustive" for mark in cell.marks)]
    assert len(quick) <= 4
    assert len(pairs) <= 18
    for place, values in enumerate(PARAMETERS):
        assert all(any(cell[place] == value for cell in quick) for value in values)
    for one, other in itertools.combinations(range(len(PARAMETERS)), 2):
        for wanted in itertools.product(PARAMETERS[one], PARAMETERS[other]):
            assert any((cell[one], cell[other]) == wanted for cell in pairs)
