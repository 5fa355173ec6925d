"""Counts by where splats begin and end tell how many reach any band."""

import pytest
import torch

from cuda_ext.ops.row_spans import row_spans
from ns_multigpu.core.row_spans import spans_length, tile_rows
from ns_multigpu.core.travelling_rows import touches
from ns_multigpu.core.types import TILE, Hits, Patch, Splats, View

SIZES = [(70, 45), (33, 64), (16, 16)]


@pytest.mark.parametrize("sizes", [SIZES, SIZES[:1] * 3])
@pytest.mark.parametrize("padding", [0, 37])
def test_any_band(sizes: list[tuple[int, int]], padding: int) -> None:
    g = torch.Generator().manual_seed(4)
    rows = 400
    means2d = torch.rand(rows, 2, generator=g) * 110 - 20
    means2d[:9] = means2d[:9].round() + 0.5  # edges at centres of pixels
    radii = torch.randint(0, 25, (rows, 2), generator=g, dtype=torch.int32)
    layers = torch.randint(0, 3, (rows,), generator=g, dtype=torch.int32)
    views = [View(torch.eye(4), torch.eye(3), *size, index=k) for k, size in enumerate(sizes)]
    real = slice(0, rows - padding)
    splats = Splats(Hits(layers[real], layers[real]), {"means2d": means2d[real], "radii": radii[real]})
    count = torch.tensor([rows - padding]) if padding else None
    spans = row_spans(layers, means2d, radii, sizes, count)
    assert len(spans) == spans_length(sizes)
    at = 0
    for k, view in enumerate(views):
        high = tile_rows(view.height)
        begins, ends = spans[at : at + high], spans[at + high : at + 2 * high]
        at += 2 * high
        assert int(begins.sum()) == int(ends.sum()) > 5
        for first in range(high):
            for end in range(first + 1, high + 1):
                band = Patch(k, 0, first * TILE, view.width, min(end * TILE, view.height))
                assert int(touches(splats, views, [band]).sum()) == int(begins[:end].sum() - ends[:first].sum())
