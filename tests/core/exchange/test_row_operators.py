"""Rows are routed to any number of destinations, though one call of the kernels takes 32."""

import pytest
import torch

from cuda_ext.ops.exchange.row_exchange import MOST_RANKS
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.exchange.column_wire import ColumnRows
from ns_multigpu.core.exchange.row_operators import RowOperators
from ns_multigpu.core.types import Hits, Patch, Splats, View
from tests.lib.overlaps import overlaps

ROWS, VIEWS = 300, 2


def splats() -> Splats:
    g = torch.Generator().manual_seed(3)
    view_ids = torch.arange(ROWS, dtype=torch.int32) * VIEWS // ROWS
    means = torch.rand(ROWS, 2, generator=g, dtype=torch.float64) * 180 - 10
    radii = torch.randint(0, 9, (ROWS, 2), generator=g, dtype=torch.int32)
    return Splats(Hits(view_ids, torch.arange(ROWS, dtype=torch.int32)), {"means2d": means, "radii": radii})


@pytest.mark.parametrize("bands", [1, MOST_RANKS // VIEWS, 25])
def test_any_number_of_destinations(bands: int) -> None:
    """One patch each; and two patches, each of another view, to each destination of half as many."""
    views = [View(torch.eye(4), torch.eye(3), 160, 160, k) for k in range(VIEWS)]
    edges = torch.linspace(0, 160, bands + 1).int().tolist()
    patches = [Patch(k, 0, edges[b], 160, edges[b + 1], 2) for k in range(VIEWS) for b in range(bands)]
    own, operators = splats(), RowOperators()
    rows = ColumnRows.of(own)
    place = torch.empty(len(patches), ROWS, dtype=torch.int32)
    counts = torch.zeros(len(patches), dtype=torch.int64)
    for destinations, shared in ((len(patches), 1), (bands, VIEWS)):
        drawn = [(k % destinations, patch) for k, patch in enumerate(patches)]
        operators.route_patches(rows, views, drawn, place[:destinations], counts[:destinations])
        expected = [overlaps(own, views, [patch for to, patch in drawn if to == k]) for k in range(destinations)]
        for lines, wanted, count in zip(place, expected, counts, strict=False):
            assert torch.equal(lines >= 0, wanted) and int(count) == int(wanted.sum()) > 0
            assert lines[wanted].tolist() == list(range(int(count))), "their own order, without gaps"
        assert torch.equal(operators.count(rows, views, drawn, destinations), counts[:destinations])
        plan = Plan.of([patch for to, patch in drawn if to == k] for k in range(destinations))
        again = torch.empty_like(place[:destinations]), torch.zeros_like(counts[:destinations])
        operators.route(rows, views, plan, range(destinations), *again)
        assert torch.equal(again[0], place[:destinations]) and len(drawn) == shared * destinations
