"""The 2D Gaussian as a primitive: culling loses nothing, what counts for densification, normals, children of splits."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.kernels import Cameras
from ns_multigpu.core.schema import names
from ns_multigpu.core.types import Hits, Patch, Pixels, Points, View
from ns_multigpu.plugin.model.densifiers import make_densifier
from ns_multigpu.plugin.model.options import SplatModelConfig
from ns_multigpu.primitives.densify.densifier import densification_info
from ns_multigpu.primitives.densify.regroup import Fates, regroup
from ns_multigpu.primitives.deterministic import rotations
from ns_multigpu.primitives.registry import PRIMITIVES, RenderOptions
from ns_multigpu.primitives.surfels.functions import Surfels, screen_radii
from ns_multigpu.primitives.surfels.losses import normal_loss
from ns_multigpu.primitives.surfels.schema import CHANNELS
from tests.strategies.scene import make_surfels, make_views, through_lenses

ALL = Surfels(sh_degree=3, depth=True, channels=CHANNELS)


def test_schema_describes_a_point() -> None:
    kind, points = PRIMITIVES["2dgs"], make_surfels(5, torch.float64)
    assert (
        names(kind.schema) == tuple(name for name in names(PRIMITIVES["3dgs"].schema)) and Surfels.schema is kind.schema
    )
    assert all(points.params[one.name].shape[1] == one.shape[0] for one in kind.schema if one.shape[0] > 0)
    assert kind.make(RenderOptions(2, True, channels=("normals",))) == Surfels(2, True, channels=("normals",))
    with pytest.raises(ValueError, match="no channel 'colour'; they have normals, distortion, median"):
        Surfels(channels=("colour",))


@pytest.mark.parametrize("lenses", [False, True])
def test_culling_loses_nothing_that_shows_and_drops_some(lenses: bool) -> None:
    points = make_surfels(400, torch.float64)
    points.params["means"].data *= 3
    views = make_views(4, torch.float64)
    views = through_lenses(views) if lenses else views
    kept = ALL.cull(points, views, [0, 1, 2, 3])
    every = Hits(torch.arange(4).repeat_interleave(400).int(), torch.arange(400).repeat(4).int())
    assert 400 < len(kept) < 1400
    whole = [Patch.whole(k, view) for k, view in enumerate(views)]
    pictures = [ALL.render(ALL.splat(points, hits, views), whole, views) for hits in (every, kept)]
    for expected, found in zip(*pictures, strict=True):
        torch.testing.assert_close(found.color, expected.color, rtol=0, atol=0)
        torch.testing.assert_close(found.extra["distortion"], expected.extra["distortion"], rtol=0, atol=0)
    some = ALL.cull(points, views, [1, 3])
    assert set(some.view_ids.tolist()) == ({1} if lenses else {1, 3}), "means outside of a lens are not drawn"
    assert len(some) == int(((kept.view_ids == 1) | (kept.view_ids == 3)).sum())


def drawn(points: Points, view: View) -> tuple[Any, Pixels]:
    splats = ALL.splat(points, ALL.cull(points, [view], [0]), [view])
    return splats, ALL.render(splats, [Patch.whole(0, view)], [view])[0]


def test_densification_counts_the_centres_gradient_on_the_screen() -> None:
    """Moving a splat parallel to the image by a pixel, without its filter, changes the loss by the probe's gradient."""
    points, view = make_surfels(1, torch.float64), make_views(2, torch.float64)[0]
    points = Points({name: value.detach().clone().requires_grad_() for name, value in points.params.items()})
    with torch.no_grad():
        points.params["means"].zero_()
        points.params["opacities"].fill_(1.0)
    weights = torch.rand(view.height, view.width, generator=torch.Generator().manual_seed(1)).double()
    splats, pixels = drawn(points, view)
    (pixels.alpha[..., 0] * weights).sum().backward()
    info = densification_info(splats, [view], screen_radii)
    half = torch.tensor([view.width / 2, view.height / 2]).double()
    rows = dict(splats.rows)

    def shifted(by: float, axis: int) -> float:
        moved = rows["transforms"].detach().clone()
        moved[:, 3 * axis + 2] += by * moved[:, 8]
        again = replace(splats, rows={**rows, "transforms": moved})
        return float((ALL.render(again, [Patch.whole(0, view)], [view])[0].alpha[..., 0] * weights).sum())

    slopes = torch.tensor([(shifted(1e-6, axis) - shifted(-1e-6, axis)) / 2e-6 for axis in (0, 1)]).double()
    torch.testing.assert_close(info["gradients"], (slopes * half).norm()[None], rtol=1e-4, atol=1e-8)
    assert info["radii"].item() == float(screen_radii(splats)) / max(view.width, view.height) > 0


def test_normals_are_the_worlds_and_no_gradient_of_the_loss_goes_through_the_surface_alphas() -> None:
    points, view = make_surfels(1, torch.float64), make_views(2, torch.float64)[0]
    with torch.no_grad():
        points.params["means"].zero_()
    axis = rotations(points.params["quats"])[0, :, 2].detach()
    _, pixels = drawn(points, view)
    seen = pixels.alpha[..., 0] > 0.1
    normals = (pixels.extra["normals"] / pixels.alpha.clamp(min=1e-9))[seen].detach()
    towards = -torch.linalg.inv(view.viewmat)[:3, :3] @ torch.tensor([0.0, 0, 1]).double()
    expected = axis * torch.sign(axis @ towards)
    assert int(seen.sum()) > 10
    torch.testing.assert_close(normals, expected.expand_as(normals))
    alpha = pixels.alpha.detach().clone().requires_grad_()
    fixed = {name: value.detach().requires_grad_() for name, value in pixels.extra.items()}
    assert pixels.depth is not None
    loss = normal_loss(replace(pixels, alpha=alpha, extra=fixed, depth=pixels.depth.detach()), view)
    assert torch.autograd.grad(loss, alpha, allow_unused=True)[0] is None


def test_children_of_a_split_lie_in_their_parents_plane() -> None:
    params = {name: value.detach() for name, value in make_surfels(6, torch.float64).params.items()}
    split = torch.ones(6, dtype=torch.bool)
    none = ~split
    fates = Fates(torch.stack([none, none, split, split, split, none, split]), 0, 0, 6, 6, 0, 6)
    index_map = regroup(params, fates, torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(3)).double())
    normals = rotations(params["quats"])[:, :, 2].repeat(2, 1)
    assert float(index_map.offsets.norm(dim=1).min()) > 1e-3
    torch.testing.assert_close((index_map.offsets * normals).sum(1), torch.zeros(12).double(), atol=1e-12, rtol=0)


def test_each_kind_has_its_threshold() -> None:
    options: dict[str, Any] = {"densify_grad_thresh": 0.1, "densify_grad_thresh_2dgs": 0.2}
    for kind, threshold in (("3dgs", 0.1), ("2dgs", 0.2)):
        made: Any = make_densifier(SplatModelConfig(primitive=kind, **options), 8, World.single(), 0)  # type: ignore[arg-type]
        assert made.grow_grad2d == threshold


def test_discs_outside_of_the_frustum_give_no_rows() -> None:
    """A disc that crosses the camera's plane has no box on the screen: were it not culled, it would be looked for in
    every tile."""
    view = View(torch.eye(4), torch.tensor([[30.0, 0, 24], [0, 30.0, 16], [0, 0, 1]]), 48, 32)
    g = torch.Generator().manual_seed(3)
    params = {one.name: 0.1 * torch.randn(40, *one.sized(1), generator=g) for one in PRIMITIVES["2dgs"].schema}
    params["means"] = torch.randn(40, 3, generator=g) * torch.tensor([0.3, 0.3, 0.1]) + torch.tensor([0.0, 0, 3])
    params["scales"] -= 2.0
    outside = torch.arange(10)  # as deep as the camera's plane, and to its left
    params["means"][outside] = torch.tensor([-4.0, 0.0, 0.05])
    params["scales"][outside] = -3.5  # one standard deviation lies before the plane, three of most extend across it
    params["opacities"] += 4.0
    kind = Surfels(sh_degree=1)
    points = Points(params)
    hits = kind.cull(points, [view], [0])
    drawn = kind.splat(points, hits, [view]).rows["radii"]
    everywhere = kind.project(
        points, torch.zeros(40, dtype=torch.int32), torch.arange(40, dtype=torch.int32), view.viewmat[None],
        view.K[None], [48, 32],
    ).radii  # fmt: skip
    assert (everywhere[outside] >= 48).any(1).sum() > 3, "without culling they would be everywhere"
    kernels = kind.kernels()
    assert kernels is not None
    moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in params.items()}
    cameras = Cameras(view.viewmat[None], view.K[None], (48, 32), torch.zeros(1))
    rows = kernels.project(kernels.model(params, moments, {}, None), cameras, 64)
    count = int(rows.count)
    shown = hits.point_ids[(drawn != 0).any(1)]
    assert torch.equal(rows.point_ids[:count], shown) and not set(shown.tolist()) & set(outside.tolist())
