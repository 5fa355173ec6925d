"""Tile ranges: every row once, equal work, whatever the views' number and sizes; and the work that they are cut by."""

from dataclasses import replace

import pytest
import torch

from ns_multigpu.core.assign.assignment import MOST_KEPT, TileRanges, ideal_cuts, stretches
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.assign.tile_work import TileWork
from ns_multigpu.core.exchange.exchanged_rows import ExchangedRows
from ns_multigpu.core.random import keyed_generator
from ns_multigpu.core.step.loss import photometric_loss
from ns_multigpu.core.types import SSIM_HALO, Hits, Patch, Splats, View
from tests.lib.overlaps import overlaps


def view(width: int, height: int, index: int = 0) -> View:
    return View(torch.eye(4), torch.eye(3), width, height, index=index)


def cut_rows(work: list[list[int]], ranks: int) -> list[list[tuple[int, int, int]]]:
    return stretches(ideal_cuts(work, ranks), [len(rows) for rows in work])


def random_work(seed: int) -> list[list[int]]:
    """Return some views, some without rows; even work, uneven work, or most of it in a few rows."""
    g = keyed_generator("work", seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    peak = (1, 10, 100_000)[seed % 3]
    return [[draw(0, 10) * (peak if draw(0, 8) == 0 else 1) for _ in range(draw(0, 12))] for _ in range(draw(0, 6))]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 16])
def test_every_row_once_and_equal_work(ranks: int) -> None:
    for seed in range(200):
        work = random_work(seed)
        found = cut_rows(work, ranks)
        assert len(found) == ranks and found == cut_rows(work, ranks)
        rows = [(v, row) for stretch in found for v, first, last in stretch for row in range(first, last)]
        assert rows == [(v, row) for v, amounts in enumerate(work) for row in range(len(amounts))]
        assert all(first < last for stretch in found for _, first, last in stretch)
        if not any(map(any, work)):
            work = [[1] * len(amounts) for amounts in work]
        shares = [sum(sum(work[v][first:last]) for v, first, last in stretch) for stretch in found]
        mean = sum(shares) / ranks
        largest = max((amount for amounts in work for amount in amounts), default=0)
        assert max(abs(share - mean) for share in shares) <= max(largest, mean / 16) + 1e-9, (seed, shares)


def test_one_view_by_all_and_a_view_each() -> None:
    assert cut_rows([[5] * 8], 4) == [[(0, 0, 2)], [(0, 2, 4)], [(0, 4, 6)], [(0, 6, 8)]]
    assert cut_rows([[3] * 5] * 3, 3) == [[(0, 0, 5)], [(1, 0, 5)], [(2, 0, 5)]]
    assert cut_rows([[2, 2], [2, 2], [2, 2]], 2) == [[(0, 0, 2), (1, 0, 1)], [(1, 1, 2), (2, 0, 2)]]
    # Nearly a view each: no slivers for the sake of one percent.
    assert cut_rows([[1] * 100, [1] * 102], 2) == [[(0, 0, 100)], [(1, 0, 102)]]
    assert cut_rows([[1] * 100, [1] * 120], 2) == [[(0, 0, 100), (1, 0, 10)], [(1, 10, 120)]]


def test_little_work_and_many_ranks() -> None:
    assert cut_rows([], 3) == [[], [], []]
    assert cut_rows([[0, 0, 0, 0]], 2) == [[(0, 0, 2)], [(0, 2, 4)]]
    assert sorted(cut_rows([[7, 7]], 4)) == [[], [], [(0, 0, 1)], [(0, 1, 2)]]
    assert cut_rows([[0, 9, 0]], 2) in ([[(0, 0, 1)], [(0, 1, 3)]], [[(0, 0, 3)], []])


def test_refusals() -> None:
    with pytest.raises(ValueError, match="0 ranks"):
        cut_rows([[1]], 0)
    with pytest.raises(ValueError, match="negative work, -2"):
        cut_rows([[1, -2]], 2)
    with pytest.raises(ValueError, match="3 counts for 2 rows"):
        TileWork().learn([view(20, 30)], [1, 2, 3])


def pixels_covered(plan: Plan, views: list[View]) -> list[torch.Tensor]:
    covered = [torch.zeros(v.height, v.width, dtype=torch.int32) for v in views]
    for patch in (patch for patches in plan.drawn for patch in patches):
        covered[patch.view][patch.y0 : patch.y1, patch.x0 : patch.x1] += 1
    return covered


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("sizes", [[(1, 1)], [(40, 35)], [(64, 49), (17, 16), (33, 100)], [(20, 30)] * 9, []])
def test_patches_cover_each_pixel_once(sizes: list[tuple[int, int]], ranks: int) -> None:
    views = [view(width, height, index) for index, (width, height) in enumerate(sizes)]
    work = TileWork(empty=1)
    for counts in (None, [index * 7 % 5 * 100 for index in range(sum(work.rows(v) for v in views))]):
        if counts is not None:
            work.learn(views, counts)
        plan = TileRanges(work).assign(views, ranks)
        assert len(plan.drawn) == ranks
        assert all(bool((one == 1).all()) for one in pixels_covered(plan, views))
        for patch in (patch for patches in plan.drawn for patch in patches):
            assert patch.y0 % 16 == 0 and (patch.y1 % 16 == 0 or patch.y1 == views[patch.view].height)
            assert patch == Patch.whole(patch.view, views[patch.view]) or patch.halo == SSIM_HALO


def test_observed_work_moves_the_cuts() -> None:
    views = [view(160, 160, 3)]
    work = TileWork(empty=1)
    assert [p[0].y1 for p in TileRanges(work).assign(views, 2).drawn] == [80, 160]
    work.learn(views, [0, 0, 0, 0, 0, 0, 0, 0, 1000, 1000])
    assert [p[0].y1 for p in TileRanges(work).assign(views, 2).drawn] == [144, 160]
    # Another height is another image: what is known of the old one says nothing.
    assert [p[0].y1 for p in TileRanges(work).assign([view(160, 320, 3)], 2).drawn] == [160, 320]


def test_unseen_views_count_by_their_area_at_the_rate_of_seen_ones() -> None:
    seen, unseen = view(32, 32, 0), view(64, 40, 1)
    work = TileWork(empty=1)
    assert work.estimate([seen, unseen]) == [[512, 512], [1024, 1024, 512]]
    work.learn([seen], [6, 14])
    # 20 intersections and 4 tiles on 1024 pixels; the unseen view's last row of tiles is cut in half.
    assert work.estimate([seen, unseen]) == [[8, 16], [24, 24, 12]]


def boxes(rows: list[tuple[int, float, float, int, int]]) -> Splats:
    """Splats by (view, x, y, half width, half height)."""
    view_ids = torch.tensor([row[0] for row in rows], dtype=torch.int32)
    ids = torch.arange(len(rows), dtype=torch.int32)
    means = torch.tensor([row[1:3] for row in rows], dtype=torch.float64).reshape(-1, 2)
    radii = torch.tensor([row[3:] for row in rows], dtype=torch.int32).reshape(-1, 2)
    return Splats(Hits(view_ids, ids), {"means2d": means, "radii": radii})


def test_counting_equals_counting_tile_by_tile() -> None:
    g = keyed_generator("boxes")
    views = [view(50, 70), view(16, 16), view(33, 20)]
    rows = [
        (v, float(x) * 90 - 20, float(y) * 110 - 20, int(rx), int(ry))
        for v in range(3)
        for x, y, rx, ry in zip(
            torch.rand(60, generator=g),
            torch.rand(60, generator=g),
            torch.randint(0, 30, (60,), generator=g),
            torch.randint(0, 30, (60,), generator=g),
            strict=True,
        )
    ]
    splats = boxes(rows)
    wanted: list[int] = []
    for position, one in enumerate(views):
        for top in range(0, one.height, 16):
            tiles = [
                Patch(position, left, top, min(left + 16, one.width), min(top + 16, one.height))
                for left in range(0, one.width, 16)
            ]
            wanted.append(sum(int(overlaps(splats, views, [tile]).sum()) for tile in tiles))
    assert sum(wanted) > 100
    assert TileWork().count(splats, views).tolist() == wanted
    assert TileWork().count(boxes([]), views).tolist() == [0] * len(wanted)
    assert TileWork().count(boxes([]), []).tolist() == []


def lines(splats: Splats, views: list[View], drawn: list[tuple[int, Patch]]) -> list[int]:
    return ExchangedRows().route(splats, views, drawn, 1)[0][0].tolist()


def test_a_splat_touches_the_halo_and_not_the_pixel_beyond() -> None:
    views = [view(64, 64)]
    patch = Patch(0, 0, 32, 64, 64, SSIM_HALO)  # rendered from row 27, whose centre is at 27.5
    rows = [(0, 30.0, 20.0, 3, 7), (0, 30.0, 20.0, 3, 8), (0, 30.0, 20.5, 3, 7), (0, 30.0, 40.0, 0, 9)]
    assert lines(boxes(rows), views, [(0, patch)]) == [-1, 0, 1, -1]
    assert lines(boxes(rows), views, []) == [-1] * 4
    assert lines(boxes([(1, 30.0, 40.0, 9, 9)]), [views[0], views[0]], [(0, patch)]) == [-1]


@pytest.mark.parametrize("height", [12, 33, 37, 49, 64])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_loss_of_bands_is_the_images(height: int, ranks: int) -> None:
    """Also of bands in which no SSIM window has its centre: the last rows of an image a little over whole tiles."""
    g = keyed_generator("bands", height)
    one = view(23, height)
    rgb = torch.rand(height, 23, 3, generator=g, dtype=torch.float64, requires_grad=True)
    target = torch.rand(height, 23, 3, generator=g, dtype=torch.float64)
    whole = photometric_loss(rgb, target, Patch.whole(0, one), one, 0.2)
    (wanted,) = torch.autograd.grad(whole, rgb)
    total = torch.zeros((), dtype=torch.float64)
    for patch in (patch for patches in TileRanges(TileWork()).assign([one], ranks).drawn for patch in patches):
        x0, y0, x1, y1 = patch.rendered(one)
        total = total + photometric_loss(rgb[y0:y1, x0:x1], target[y0:y1, x0:x1], patch, one, 0.2)
    (gradient,) = torch.autograd.grad(total, rgb)
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-14)


def seen_views(count: int, rows: int) -> tuple[TileWork, list[View]]:
    """Views with most of their work around the middle, not all at the same height."""
    work = TileWork(empty=0)
    views = [view(64, 16 * rows, index) for index in range(count)]
    for one in views:
        g = keyed_generator("heights", one.index)
        middle = rows / 2 + 6 * float(torch.randn((), generator=g))
        work.learn([one], [int(1000 / (1 + (row - middle) ** 2 / 1000)) for row in range(rows)])
    return work, views


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rounded_plans_are_few_and_nearly_balanced(ranks: int) -> None:
    work, views = seen_views(60, 90)
    ranges = TileRanges(work)
    plans, exact = set[str](), set[str]()
    for one in views * 2:
        amounts = work.counts[one.index]

        def most(plan: Plan, amounts: list[int] = amounts) -> int:
            return max(sum(sum(amounts[p.y0 // 16 : -(-p.y1 // 16)]) for p in patches) for patches in plan.drawn)

        alike, ideal = ranges.assign_alike([one], ranks), ranges.assign([one], ranks)
        assert most(alike) <= most(ideal) * 17 / 16
        assert all((c == 1).all() for c in pixels_covered(alike, [one]))
        plans.add(str(alike))
        exact.add(str(ideal))
    assert len(plans) <= MOST_KEPT
    assert ranks == 1 or 3 * len(plans) <= 2 * len(exact)


def test_rounded_plans_equal_those_of_a_resumed_run() -> None:
    work, views = seen_views(30, 90)
    ranges = TileRanges(work)
    for one in views[:20]:
        ranges.assign_alike([one], 3)
    resumed = TileRanges(TileWork(empty=0))
    resumed.load_state(ranges.state())
    assert [ranges.assign_alike([v], 3) for v in views] == [resumed.assign_alike([v], 3) for v in views]
    # Cuts of other ranks or other views are not made.
    for count, ranks in ((1, 2), (2, 3)):
        batch = [view(64, 400, 100 + k) for k in range(count)]
        assert ranges.assign_alike(batch, ranks) == TileRanges(TileWork(empty=0)).assign(batch, ranks)


def test_view_costs_survive_a_checkpoint() -> None:
    views = [View(torch.eye(4), torch.eye(3), 64, 40, index=index) for index in (5, 2)]
    one, other = TileRanges(TileWork()), TileRanges(TileWork())
    one.work.learn(views, [9, 1, 1, 4, 4, 7])
    other.load_state(one.state())
    assert other.work.counts == one.work.counts
    assert other.assign(views, 3) == one.assign(views, 3)


def test_plans_of_other_sizes_or_cuts_are_others() -> None:
    """A plan is found again by its cuts and the views' sizes; few are kept."""
    small, large = (View(torch.eye(4), torch.eye(3), 64, height, 0) for height in (64, 128))
    ranges = TileRanges(TileWork())
    one = ranges.assign([small], 2)
    assert ranges.assign([small], 2) is one and ranges.assign([large], 2) != one
    assert ranges.assign([replace(small, width=48)], 2) != one and ranges.assign([small], 3) != one
    for height in range(32, 32 + 16 * 100, 16):
        found = ranges.assign([replace(large, height=height)], 2)
        assert found.drawn[0][0].y1 == found.drawn[1][0].y0 and found.drawn[1][0].y1 == height
    assert len(ranges._plans) <= 64
    assert hash(one) == hash(Plan.of(one.drawn)) and one == Plan.of(one.drawn)
