"""The 3D convex as a primitive: what it begins as, what is culled, what densification counts, what splits become."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.kernels import Cameras
from ns_multigpu.core.types import Hits, Patch, Points
from ns_multigpu.plugin.model.densifiers import make_densifier
from ns_multigpu.plugin.model.options import SplatModelConfig
from ns_multigpu.primitives.convexes import functions
from ns_multigpu.primitives.convexes.densifier import FAINTER, SHARPER, SMALLER, ConvexParts, arms
from ns_multigpu.primitives.convexes.functions import Convexes, screen_radii
from ns_multigpu.primitives.convexes.init import DELTA, SIZE, STEEPNESS, initial_convexes
from ns_multigpu.primitives.densify.densifier import densification_info
from ns_multigpu.primitives.densify.regroup import grow_and_prune
from tests.strategies.scene import make_convexes, make_views

ALL = Convexes(sh_degree=3, depth=True)


def test_it_begins_as_a_sphere_of_corners_around_each_seed_point() -> None:
    """Opaque in the middle and faint at its corners, whatever the scene's unit and the camera."""
    g = torch.Generator().manual_seed(0)
    seeds = (torch.rand(40, 3, generator=g), torch.full((40, 3), 128.0))
    options: Any = {"sh_degree": 1, "count": 0, "extent": 1.0, "opacity": 0.2}
    apart = torch.cdist(seeds[0], seeds[0]).sort(1).values[:, 1:4].mean(1)
    for unit in (1.0, 50.0):
        made = initial_convexes((seeds[0] * unit, seeds[1]), generator=g, **options)
        corners = made["corners"].view(40, 6, 3)
        torch.testing.assert_close(corners.norm(dim=-1), (SIZE * unit * apart)[:, None].expand(40, 6))
        assert float(corners.mean(1).norm(dim=-1).max()) < 0.2 * unit * float(apart.max())
        torch.testing.assert_close(
            made["deltas"][:, 0].exp() * unit * apart, torch.full((40,), DELTA), rtol=1e-5, atol=0
        )
        steep = (made["deltas"] + made["sigmas"])[:, 0].exp() * (unit * apart) ** 2
        torch.testing.assert_close(steep, torch.full((40,), STEEPNESS), rtol=1e-5, atol=0)
        torch.testing.assert_close(made["opacities"].sigmoid(), torch.full((40, 1), 0.2))
        assert made["features_rest"].shape == (40, 3, 3)
    half = initial_convexes(seeds, generator=g, scale=0.5, **options)
    torch.testing.assert_close(half["corners"], initial_convexes(seeds, generator=g, **options)["corners"] / 2)
    with pytest.raises(ValueError, match="no point to start from"):
        initial_convexes((torch.zeros(0, 3), torch.zeros(0, 3)), generator=g, **options)


def test_culling_keeps_what_is_drawn_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_AT_ONCE", 128)
    points = make_convexes(300, torch.float64)
    points.params["means"].data *= 3
    views = make_views(3, torch.float64)
    kept = ALL.cull(points, views, [0, 1, 2])
    every = Hits(torch.arange(3).repeat_interleave(300).int(), torch.arange(300).repeat(3).int())
    assert 100 < len(kept) < 600
    assert bool((ALL.splat(points, kept, views).rows["radii"] > 0).all())
    whole = [Patch.whole(k, view) for k, view in enumerate(views)]
    pictures = [ALL.render(ALL.splat(points, hits, views), whole, views) for hits in (every, kept)]
    for expected, found in zip(*pictures, strict=True):
        torch.testing.assert_close(found.color, expected.color, rtol=0, atol=0)
    some = ALL.cull(points, views, [1])
    assert set(some.view_ids.tolist()) == {1} and len(some) == int((kept.view_ids == 1).sum())


def test_a_steps_rows_are_those_that_culling_keeps_and_marks_are_where_drawing_stopped() -> None:
    points = make_convexes(300, torch.float32)
    points.params["means"].data *= 3
    points.params["opacities"].data += 4  # many are opaque
    params, views = {name: value.detach() for name, value in points.params.items()}, make_views(2, torch.float32)
    kernels: Any = ALL.kernels(depth=True)
    sizes = [side for view in views for side in (view.width, view.height)]
    viewmats, Ks = (torch.stack([getattr(view, name) for view in views]) for name in ("viewmat", "K"))
    cameras = Cameras(viewmats, Ks, sizes, torch.zeros(2))
    rows = kernels.project(kernels.model(params, {n: (v, v) for n, v in params.items()}, {}, None), cameras, 700)
    kept = ALL.cull(Points(params), views, [0, 1])
    assert 100 < int(rows.count) == len(kept) < 600
    assert torch.equal(rows.view_ids[: len(kept)], kept.view_ids)
    assert torch.equal(rows.point_ids[: len(kept)], kept.point_ids)
    flat = [n for v, view in enumerate(views) for n in (v, 0, 0, view.width, view.height)]
    received = kernels.receive_local(rows, rows.view_ids, rows.point_ids)
    lists = kernels.intersect(received, flat, 100_000)
    marked, plain = (kernels.draw(received, lists, flat, mark) for mark in (True, False))
    whole = [Patch.whole(v, view) for v, view in enumerate(views)]
    with torch.no_grad():
        rendered = ALL.render(ALL.splat(Points(params), kept, views), whole, views, stops=True)
    stops = torch.cat([pixels.stops.flatten() for pixels in rendered if pixels.stops is not None])
    assert 30 < int(stops.sum()) < len(stops) - 30
    assert torch.equal(marked.alpha < 0, stops) and bool((plain.alpha >= 0).all())
    torch.testing.assert_close(plain.alpha, torch.cat([pixels.alpha.flatten() for pixels in rendered]))


def test_corners_count_from_their_own_mean() -> None:
    points, views = make_convexes(9, torch.float64), make_views(2, torch.float64)
    moved = {**points.params, "corners": points.params["corners"] + torch.tensor([0.3, -0.2, 0.5]).double().repeat(6)}
    hits = ALL.cull(points, views, [0])
    expected, found = (ALL.splat(one, hits, views).rows for one in (points, Points(moved)))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_densification_counts_the_gradient_of_moving_the_hull_on_the_screen() -> None:
    points, view = make_convexes(1, torch.float64, "cpu"), make_views(2, torch.float64)[0]
    with torch.no_grad():
        points.params["means"].zero_()
    weights = torch.rand(view.height, view.width, generator=torch.Generator().manual_seed(1)).double()
    splats = ALL.splat(points, ALL.cull(points, [view], [0]), [view])
    patch = Patch.whole(0, view)
    (ALL.render(splats, [patch], [view])[0].alpha[..., 0] * weights).sum().backward()
    info = densification_info(splats, [view], screen_radii)
    half = torch.tensor([view.width / 2, view.height / 2]).double()

    def shifted(by: float, axis: int) -> float:
        rows = {name: value.detach().clone() for name, value in splats.rows.items()}
        rows["means2d"][:, axis] += by
        return float((ALL.render(replace(splats, rows=rows), [patch], [view])[0].alpha[..., 0] * weights).sum())

    slopes = torch.tensor([(shifted(1e-6, axis) - shifted(-1e-6, axis)) / 2e-6 for axis in (0, 1)]).double()
    torch.testing.assert_close(info["gradients"], (slopes * half).norm()[None], rtol=1e-4, atol=1e-8)
    assert float(slopes.norm()) > 1e-3 and info["visible"].item() == 1
    assert info["radii"].item() == 0, "no rule is about sizes on the screen"


def test_a_split_makes_six_smaller_sharper_fainter_ones_at_the_corners() -> None:
    params: Any = {
        name: torch.nn.Parameter(value.detach()) for name, value in make_convexes(7, torch.float64).params.items()
    }
    before = {name: value.detach().clone() for name, value in params.items()}
    params["opacities"].data[:] = before["opacities"][:] = 1.0
    params["opacities"].data[5] = before["opacities"][5] = -5.0  # faint: pruned
    params["opacities"].data[6] = before["opacities"][6] = -3.0  # its parts would be faint
    config = SplatModelConfig(primitive="convex", densify_size_thresh=10.0)  # all are small: none is cloned
    rules: Any = make_densifier(config, 8, World.single(), 0)
    state = {
        "grad2d": torch.tensor([1.0, 0, 1, 0, 0, 0, 1]).double(), "count": torch.ones(7).double(), "scene_scale": 1.0,
        "radii": torch.zeros(7).double(),
    }  # fmt: skip
    done = grow_and_prune(rules, params, {}, state, 700, spent=("grad2d", "count", "radii"), split_rule=ConvexParts())
    assert done == (0, 3, 7)  # the faint one, and six parts of another
    assert len(params["means"]) == 3 + 2 * 6 and len(state["count"]) == 15
    assert torch.equal(params["means"][:3], before["means"][[1, 3, 4]])
    corners = arms(before["corners"])
    for n, parent in enumerate((0, 2)):
        parts = slice(3 + n, None, 2)  # first parts of both, then second ones, and so on
        torch.testing.assert_close(params["means"][parts].data, before["means"][parent] + corners[parent])
        shape = (before["corners"][parent] * SMALLER).expand(6, -1)
        torch.testing.assert_close(params["corners"][parts].data, shape)
        torch.testing.assert_close(
            params["sigmas"][parts].data, before["sigmas"][parent].expand(6, 1) + math.log(SHARPER)
        )
        assert torch.equal(params["deltas"][parts], before["deltas"][parent].expand(6, 1))
        faint = FAINTER * before["opacities"][parent].sigmoid().expand(6, 1)
        torch.testing.assert_close(params["opacities"][parts].data.sigmoid(), faint)


def test_large_convexes_are_pruned_by_their_corners_spread() -> None:
    parts, params = (
        ConvexParts(),
        {name: value.detach() for name, value in make_convexes(5, torch.float64).params.items()},
    )
    spread = params["corners"].view(5, 6, 3).std(1, correction=0).amax(-1)
    torch.testing.assert_close(parts.sizes(params), spread)
    torch.testing.assert_close(parts.sizes({"corners": params["corners"] * SMALLER}), parts.child_sizes(spread))


def test_convexes_have_their_thresholds() -> None:
    options: dict[str, Any] = {"densify_grad_thresh_convex": 0.3, "cull_alpha_thresh_convex": 0.04}
    made: Any = make_densifier(SplatModelConfig(primitive="convex", **options), 8, World.single(), 0)
    assert made.grow_grad2d == 0.3 and made.prune_opa == 0.04 and isinstance(made.split_rule, ConvexParts)
    other: Any = make_densifier(SplatModelConfig(**options), 8, World.single(), 0)
    assert other.grow_grad2d != 0.3 and other.prune_opa != 0.04
