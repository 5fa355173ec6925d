"""Number of rows that overlap each patch: as `route_lines` counts them, on a CPU and on a GPU."""

import pytest
import torch

from cuda_ext import footprint_counts
from tests.cuda_ext.exchange.test_row_exchange import HEIGHT, WIDTH, Rows, make_rows
from tests.cuda_ext.graphs import check_replays

SIZES = [(1, 0, 1), (257, 3, 2), (5000, 5000, 7), (0, 10, 2), (100_000, 31, 3)]  # rows, padding, views


def grid(views: int, factor: int, halo: int, width: int = WIDTH, height: int = HEIGHT) -> list[int]:
    """Patch of each view with a halo, those of view 1 first."""
    numbers: list[int] = []
    for view in sorted(range(views), key=lambda v: (v != 1, v)):
        for y in range(factor):
            for x in range(factor):
                x0, y0 = x * width // factor, y * height // factor
                x1, y1 = (x + 1) * width // factor, (y + 1) * height // factor
                numbers += [view, max(0, x0 - halo), max(0, y0 - halo), min(width, x1 + halo), min(height, y1 + halo)]
    return numbers


def one_by_one(rows: Rows, patches: list[int]) -> list[int]:
    """Return a patch after the other, each as the only one of a rank."""
    found = []
    for k in range(0, len(patches), 5):
        _, counts = rows.route([0, *patches[k : k + 5]], 1)
        found.append(int(counts))
    return found


@pytest.mark.parametrize(("real", "padding", "views"), SIZES)
@pytest.mark.parametrize("factor", [1, 4])
def test_counts_are_those_of_routing(real: int, padding: int, views: int, factor: int) -> None:
    rows, patches = make_rows(real, padding, views), grid(views, factor, 16)
    found = footprint_counts(rows.view_ids, rows.count, rows.means2d, rows.radii, patches)
    assert found.dtype == torch.int64 and found.tolist() == one_by_one(rows, patches)
    assert real < 100 or int(found.min()) > 0


@pytest.mark.gpu
@pytest.mark.parametrize(("real", "padding", "views"), [*SIZES, (200_000, 77, 40)])
@pytest.mark.parametrize("factor", [1, 8, 20])
def test_gpu_counts_equal_cpu_counts(real: int, padding: int, views: int, factor: int) -> None:
    """20 x 20 patches of 40 views exceed the capacity of a block of threads."""
    rows, patches = make_rows(real, padding, views), grid(views, factor, 16)
    expected = footprint_counts(rows.view_ids, rows.count, rows.means2d, rows.radii, patches)
    there = rows.to("cuda")
    arguments = (there.view_ids, there.count, there.means2d, there.radii)
    assert torch.equal(footprint_counts(*arguments, patches).cpu(), expected)
    check_replays(lambda: [footprint_counts(*arguments, patches)])
