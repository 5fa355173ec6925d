"""Owners of the rows of a step's views."""

import pytest

from ns_multigpu.cells.sharing import share_rows


def test_one_view_is_cut_evenly() -> None:
    assert share_rows([8], [{0: 9, 1: 9, 2: 9, 3: 9}], 4) == [[(0, 2)], [(2, 4)], [(4, 6)], [(6, 8)]]
    assert share_rows([5], [{1: 9, 2: 9}], 3) == [[None], [(0, 2)], [(2, 5)]], "by those alone that see it"
    assert share_rows([2], [{}], 3) == [[(0, 1)], [(1, 2)], [None]], "an invisible view"


def test_views_are_not_split_if_balance_is_equal() -> None:
    both = {0: 9, 1: 9}
    assert share_rows([6, 6], [both, both], 2) == [[(0, 6), None], [None, (0, 6)]]
    assert share_rows([6, 6], [{0: 9, 1: 1}, {0: 9}], 2) == [[None, (0, 6)], [(0, 6), None]], "few come first"


def test_rank_that_draws_most_of_a_view_owns_it() -> None:
    assert share_rows([6, 6], [{0: 2, 1: 9}, {0: 9, 1: 2}], 2) == [[None, (0, 6)], [(0, 6), None]]


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_every_row_has_an_owner(ranks: int) -> None:
    rows = [5, 1, 7, 3]
    seen = [{r: 5 + r for r in range(ranks) if (view + r) % 3} for view in range(4)]
    spans = share_rows(rows, seen, ranks)
    for view, count in enumerate(rows):
        parts = sorted(span for of in spans if (span := of[view]) is not None)
        assert [row for a, b in parts for row in range(a, b)] == list(range(count))
        assert not seen[view] or all(r in seen[view] for r in range(ranks) if spans[r][view] is not None)
