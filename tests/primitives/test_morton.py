"""The order of points: what a code is made of, that it depends on the points alone, and that ranges of it are fair."""

import pytest
import torch
from torch import Tensor

from ns_multigpu.primitives.morton import (
    MORTON_BITS,
    MortonGrid,
    census,
    interleaved_codes,
    interleaved_order,
)

HALF = 1 << (MORTON_BITS - 1)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def grid_of(means: Tensor) -> MortonGrid:
    return MortonGrid.of(census(means).tolist())


def test_a_code_is_the_cell_s_hand_and_the_place_on_the_curve() -> None:
    g = torch.Generator().manual_seed(0)
    places = torch.cat([torch.randint(0, 2 * HALF, (50, 3), generator=g), torch.tensor([[0] * 3, [2 * HALF - 1] * 3])])
    means = (places.double() - HALF + 0.5) / HALF * 4.0
    grid = MortonGrid(half=2, cell=-5)  # 256 cells along each axis, of 1024 places each
    for place, code in zip(places.tolist(), interleaved_codes(means, grid).tolist(), strict=True):
        curve = sum(((place[axis] >> b) & 1) << (3 * b + axis) for b in range(MORTON_BITS) for axis in range(3))
        x, y, z = ((p - HALF) // 1024 for p in place)
        hand = int(f"{(x + 27 * y + 11 * z) % 64:06b}"[::-1], 2)
        assert code == (hand << 3 * MORTON_BITS) + curve
        assert 0 <= code < 1 << 60, "two bits of an int64 are free"


@pytest.mark.parametrize("power", [-200, -40, 0, 30, 126, 300])
def test_census_has_the_extent_of_points(power: int) -> None:
    means = torch.tensor([[0.0, 0.0, 0.0], [1.0, -0.3, 0.2], [0.1, -1.9999, 0.0]], dtype=torch.float64) * 2.0**power
    counts = census(means)
    assert int(counts.sum()) == 3 and int(counts[0]) >= 1
    found = {k - 128: int(n) for k, n in enumerate(counts) if n}
    reached = min(max(power + 1, -128), 127)
    assert max(found) == reached, "1 <= |x| < 2 ends at 2^1"
    grid = MortonGrid.of(counts.tolist())
    assert grid.half == reached and grid.cell <= grid.half + 1
    if -100 < power < 127:
        assert len(set(interleaved_codes(means, grid).tolist())) == 3


def test_no_points() -> None:
    none = torch.zeros(0, 3)
    assert census(none).sum() == 0
    assert len(interleaved_order(none)) == 0
    assert interleaved_codes(torch.zeros(3, 3), grid_of(torch.zeros(3, 3))).unique().numel() == 1


def test_nonfinite_positions_get_the_middle_code() -> None:
    points = drawn(4000, 3)
    points[5], points[6] = torch.nan, torch.inf
    assert sorted(interleaved_order(points).tolist()) == list(range(4000))
    middle = points.clone()
    middle[5:7] = 0.0
    assert torch.equal(interleaved_order(points), interleaved_order(middle))


def test_grid_is_independent_of_the_owners() -> None:
    points = torch.randn(5000, 3, generator=torch.Generator().manual_seed(1)) * 3
    parts = sum(census(part) for part in points.split([0, 17, 2000, 2983]))
    assert torch.equal(torch.as_tensor(parts), census(points))


def test_one_point_far_away_changes_nothing_for_the_others() -> None:
    points = drawn(4000, 3) - 0.4
    far = torch.cat([points, torch.tensor([[40.0, 0.0, 0.0]])])
    assert grid_of(far).cell == grid_of(points).cell
    kept = interleaved_order(far)
    assert float((kept[kept < 4000] == interleaved_order(points)).double().mean()) > 0.99


def test_neighbours_in_the_order_are_near() -> None:
    points = drawn(200_000, 3) * torch.tensor([1.0, 1.0, 0.01])
    apart = points[interleaved_order(points)].diff(dim=0).norm(dim=-1)
    assert float(apart.median()) < 0.02 * float(points.diff(dim=0).norm(dim=-1).median())


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_every_region_is_distributed_evenly(ranks: int) -> None:
    """Half the floor, a quarter, a stripe, a circle: each rank's range has its share of it."""
    points = drawn(200_000, 3, seed=2) * 2 - 1
    points[:, 2] *= 0.05 * (points[:, 0].abs() > 0.5)  # partly flat, partly not
    order = interleaved_order(points)
    owner = torch.empty_like(order)
    owner[order] = torch.arange(len(order)) * ranks // len(order)
    x, y = points[:, 0], points[:, 1]
    regions = {"half": x > 0, "quarter": (x > 0) & (y < 0), "stripe": y.abs() < 0.1, "circle": x * x + y * y < 0.09}
    for name, seen in regions.items():
        shares = torch.bincount(owner[seen], minlength=ranks).double() * ranks / int(seen.sum())
        assert float(shares.max()) < 1.15, (name, shares.tolist())
    plain = torch.sort(x, stable=True).indices  # what ranges of space make of it
    owner[plain] = torch.arange(len(order)) * ranks // len(order)
    assert int(torch.bincount(owner[x > 0], minlength=ranks).max()) * ranks > 1.5 * int((x > 0).sum())


def test_codes_are_independent_of_chunking(monkeypatch: pytest.MonkeyPatch) -> None:
    points = drawn(1000, 3, seed=4)
    whole, codes = census(points), interleaved_codes(points, grid_of(points))
    monkeypatch.setattr("ns_multigpu.primitives.morton._PIECE", 77)
    assert torch.equal(census(points), whole)
    assert torch.equal(interleaved_codes(points, grid_of(points)), codes)
