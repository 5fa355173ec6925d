"""4D Gaussians: what they are at a moment, when they are culled, how they split, and what they have to do with options
and captures."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nerfstudio.cameras.cameras import Cameras

import cuda_ext
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.schema import names
from ns_multigpu.core.types import Patch, Points, Splats, View
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.model.surfaces import check_primitive
from ns_multigpu.plugin.model.time_notes import frames_note, times_note
from ns_multigpu.primitives.densify.densifier import ReplicatedDensifier
from ns_multigpu.primitives.densify.regroup import SHRINK
from ns_multigpu.primitives.deterministic import rotations
from ns_multigpu.primitives.gaussians.functions import CUTOFF, Gaussians
from ns_multigpu.primitives.gaussians.init import initial_gaussians
from ns_multigpu.primitives.moving.densifier import MovingSplitRule
from ns_multigpu.primitives.moving.functions import MovingGaussians
from ns_multigpu.primitives.moving.init import initial_moving
from ns_multigpu.primitives.moving.schema import SCHEMA
from ns_multigpu.primitives.moving.turning import turn
from ns_multigpu.primitives.registry import PRIMITIVES
from tests.strategies.scene import make_moving_points, make_views, through_lenses

F64 = torch.float64


def rows_of(kind: MovingGaussians | Gaussians, points: Points, views: list[View]) -> Splats:
    return kind.splat(points, kind.cull(points, views, range(len(views))), views)


def test_at_first_they_stand_still_and_look_as_3d_gaussians_do() -> None:
    generators = [torch.Generator().manual_seed(2) for _ in range(2)]
    seeds = (torch.rand(60, 3) * 2 - 1, torch.randint(0, 256, (60, 3)).float())
    first = initial_moving(seeds, sh_degree=3, count=0, extent=1, generator=generators[0])
    assert set(first) == set(names(SCHEMA)) and 0.2 < float(first["times"].mean()) < 0.8
    # Shorter than the capture: those that are not are never split in time, and cannot learn what moves.
    torch.testing.assert_close(first["durations"].exp().square(), torch.full((60, 1), 0.2))
    first["durations"] += 20  # always there
    still = initial_gaussians(seeds, sh_degree=3, count=0, extent=1, generator=generators[1])
    views = make_views(3, torch.float32)
    mine = rows_of(MovingGaussians(), Points(first), views)
    theirs = rows_of(Gaussians(), Points(still), views)
    both = set(zip(theirs.hits.view_ids.tolist(), theirs.hits.point_ids.tolist(), strict=True))
    place = [
        k
        for k, hit in enumerate(zip(mine.hits.view_ids.tolist(), mine.hits.point_ids.tolist(), strict=True))
        if hit in both
    ]
    assert len(place) == len(theirs) > 50  # it may cull less
    for name, rows in theirs.rows.items():
        torch.testing.assert_close(mine.rows[name][place], rows, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lenses", [False, True])
def test_it_culls_what_is_not_there_and_nothing_else_that_shows(lenses: bool) -> None:
    points, views = make_moving_points(400, F64, seed=3), make_views(4, F64)
    views = through_lenses(views) if lenses else views
    kind = MovingGaussians(depth=True)
    hits = kind.cull(points, views, [0, 2, 3])
    assert set(hits.view_ids.tolist()) <= {0, 2, 3} and 20 < len(hits) < 700
    keys = hits.view_ids.long() * 400 + hits.point_ids
    assert bool((keys[1:] > keys[:-1]).all())
    ids = torch.arange(1600, dtype=torch.int32)
    every = kind.splat(points, type(hits)(ids // 400, ids % 400), views)
    drawn = every.rows["radii"][:, 0] > 0
    wanted = {int(k) for k in drawn.nonzero()[:, 0] if int(k) // 400 != 1}
    assert wanted <= {int(k) for k in keys} and len(wanted) > 100
    moment = kind.moment(points, hits.view_ids, hits.point_ids, torch.tensor([v.time for v in views], dtype=F64))
    assert float(moment.opacities.detach().min()) >= 1 / 255


def test_points_appear_move_and_disappear() -> None:
    """A point with a velocity: it is drawn where it is by then, and not at all long before and after."""
    motion = torch.tensor([[1.0, 0.0, 0.3, 0.0]], dtype=F64)
    params = {name: value.detach()[:1].clone() for name, value in make_moving_points(1, F64).params.items()}
    params |= {
        "means": torch.zeros(1, 3, dtype=F64), "times": torch.full((1, 1), 0.5, dtype=F64),
        "quats": torch.tensor([[1.0, 0, 0, 0]], dtype=F64), "motions": motion,
        "scales": torch.full((1, 3), -1.5, dtype=F64), "durations": torch.full((1, 1), -2.3, dtype=F64),
        "opacities": torch.full((1, 1), 3.0, dtype=F64),
    }  # fmt: skip
    points, kind = Points(params), MovingGaussians()
    (view,) = make_views(1, F64)

    def at(time: float) -> Splats:
        return rows_of(kind, points, [View(view.viewmat, view.K, view.width, view.height, time=time)])

    early, middle, late = (at(time).rows for time in (0.4, 0.5, 0.6))
    moved, back = late["means2d"] - middle["means2d"], early["means2d"] - middle["means2d"]
    assert float(moved.norm()) > 1 and torch.allclose(moved, -back, atol=0.3)
    assert float(early["opacities"]) < float(middle["opacities"]) > float(late["opacities"])
    assert len(at(0.0)) == len(at(1.0)) == 0


def test_colours_change_with_time() -> None:
    points, (view,) = make_moving_points(50, F64, seed=1), make_views(1, F64)
    still = torch.tensor([[1.0, 0, 0, 0]], dtype=F64).repeat(50, 1)
    params = {**points.params, "durations": torch.full((50, 1), 9.0, dtype=F64), "motions": still}

    def colors(time: float, degree: int) -> torch.Tensor:
        seen = View(view.viewmat, view.K, view.width, view.height, time=time)
        return rows_of(MovingGaussians(sh_degree=degree), Points(params), [seen]).rows["features"]

    assert float((colors(0.0, 1) - colors(0.3, 1)).abs().max()) > 0.05
    torch.testing.assert_close(colors(0.0, 1), colors(1.0, 1))  # the period is 1
    torch.testing.assert_close(colors(0.0, 0), colors(0.3, 0))  # not before degree 1


def test_extents_bound_a_point_at_all_times() -> None:
    points = make_moving_points(40, F64, seed=5)
    kind, ids = MovingGaussians(), torch.arange(40, dtype=torch.int32)
    extents = kind.extents(points)
    reached = torch.zeros(40, 3, dtype=F64)
    for time in torch.linspace(-3, 4, 701, dtype=F64):
        moment = kind.moment(points, torch.zeros_like(ids), ids, time[None])
        presence = moment.opacities / kind.activated(points, "opacities")[:, 0]
        rest = (CUTOFF**2 + 2 * presence.log()).clamp(min=0).sqrt()[:, None]
        away = (moment.means - points.params["means"]).abs() + rest * moment.axes.square().sum(-1).sqrt()
        reached = torch.maximum(reached, torch.where(rest > 0, away, 0.0).detach())
    assert bool((reached <= extents * (1 + 1e-9)).all()) and float((reached / extents).min()) > 0.98


def test_quats_turn_a_point_with_its_motion_in_space() -> None:
    params = {name: value.detach() for name, value in make_moving_points(20, F64, seed=4).params.items()}
    params |= {"scales": torch.zeros(20, 3, dtype=F64), "durations": torch.zeros(20, 1, dtype=F64)}
    one = torch.tensor([[1.0, 0, 0, 0]], dtype=F64).repeat(20, 1)
    unturned = turn({**params, "quats": one})
    turned = turn(params)
    torch.testing.assert_close(turned[:, 0], unturned[:, 0])
    torch.testing.assert_close(turned[:, 1:], rotations(params["quats"]) @ unturned[:, 1:])


def test_drawing_is_that_of_3d_gaussians() -> None:
    points, views = make_moving_points(80, torch.float32), make_views(2, torch.float32)
    kind = MovingGaussians(sh_degree=2, depth=True)
    splats = rows_of(kind, points, views)
    patches = [Patch.whole(0, views[0]), Patch(1, 3, 4, 20, 22, halo=5)]
    mine, theirs = (
        kind.render(splats, patches, views),
        Gaussians(sh_degree=2, depth=True).render(splats, patches, views),
    )
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one.color, other.color) and torch.equal(one.depth, other.depth)  # type: ignore[arg-type]


def test_split_children_are_smaller_in_space_and_time() -> None:
    torch.manual_seed(0)
    points = make_moving_points(6, torch.float32, seed=2)
    params = {name: torch.nn.Parameter(value.detach()) for name, value in points.params.items()}
    before = {name: value.detach().clone() for name, value in params.items()}
    adam = {name: torch.optim.Adam([value]) for name, value in params.items()}
    rules = ReplicatedDensifier(
        grow_grad2d=0.5, grow_scale3d=0.0, prune_opa=0.0, refine_start_iter=-1, refine_every=1, reset_every=1000,
        split_rule=MovingSplitRule(), world=World.single(), pause_refine_after_reset=0,
    )  # fmt: skip
    state = rules.initialize_state()
    rules.statistics(params, state)
    state["grad2d"][2], state["count"][2] = 1.0, 1.0
    rules.refine_when_due(params, adam, state, 10, 1)
    assert len(params["means"]) == 7 and rules.changes == {"duplicated": 0, "split": 1, "pruned": 0}
    kept = [0, 1, 3, 4, 5]
    for name, value in params.items():
        assert torch.equal(value[:5], before[name][kept]), name
        if name in ("scales", "durations"):
            torch.testing.assert_close(value[5:].exp(), before[name][2].exp().expand(2, -1) / SHRINK)
        elif name not in ("means", "times"):
            assert torch.equal(value[5:], before[name][2].expand_as(value[5:])), name
    away = torch.cat([params["times"] - before["times"][2], params["means"] - before["means"][2]], dim=-1)[5:].detach()
    assert bool((away.abs() > 0).all())
    # By the parent's own axes the draws are normal numbers.
    drawn = torch.linalg.solve(turn({name: value[2:3] for name, value in before.items()}), away.T).squeeze(0)
    assert 0.01 < float(drawn.abs().max()) < 5


def test_children_of_permanent_points_keep_their_time() -> None:
    points = make_moving_points(5, torch.float32, seed=2)
    still = torch.tensor([[1.0, 0, 0, 0]]).repeat(5, 1)
    params = {name: value.detach() for name, value in points.params.items()} | {"motions": still}
    params["durations"] = torch.tensor([-0.1, 0.0, 0.1, -2.0, 2.0])[:, None]
    rule, drawn = MovingSplitRule(), torch.ones(2, 5, 4)
    offsets = rule.offsets(params, drawn)
    assert (offsets[..., 3].abs() > 1e-3).tolist() == [[True, False, False, True, False]] * 2
    assert bool((offsets[..., :3].norm(dim=-1) > 0.01).all())
    durations = params["durations"].clone()
    rule.move("durations", durations, offsets[0])
    shrunk = torch.tensor([True, False, False, True, False])
    torch.testing.assert_close((params["durations"] - durations).exp()[:, 0], torch.where(shrunk, SHRINK, 1.0))


def test_options_unsupported_by_moving_points_are_refused() -> None:
    usual = {
        "optimizer_state": "full",
        "depth_loss": 0.0,
        "normal_map_loss": 0.0,
        "sky_loss": 0.0,
        "far_plane": None,
        "radius_clip": 0.0,
        "sh_degree": 3,
    }
    check_primitive(SimpleNamespace(primitive="4dgs", densifier="default", **usual), "tile")  # type: ignore[arg-type]
    wanted: Any = SimpleNamespace(primitive="4dgs", densifier="mcmc", **usual)
    with pytest.raises(InputError, match=r"--pipeline.model.densifier mcmc is not for 4D Gaussians \(.*4dgs\): MCMC's"):
        check_primitive(wanted, "tile")
    for degree in (-1, 4):
        wanted.densifier, wanted.sh_degree = "default", degree
        with pytest.raises(InputError, match=f"--pipeline.model.sh-degree {degree}: give 0 to 3"):
            check_primitive(wanted, "tile")


def cameras(times: list[float] | None) -> Cameras:
    count = 3 if times is None else len(times)
    poses = torch.eye(4)[:3].repeat(count, 1, 1)
    moments = None if times is None else torch.tensor(times)[:, None]
    return Cameras(poses, fx=1.0, fy=1.0, cx=2.0, cy=2.0, width=4, height=4, times=moments)


def test_invalid_times_are_reported() -> None:
    assert times_note("4dgs", cameras([0.0, 0.5, 1.0])) == "" == times_note("3dgs", cameras(None))
    assert "stands still: its views have no times" in times_note("4dgs", cameras(None))
    assert "stands still: its views all have the same time" in times_note("4dgs", cameras([0.5, 0.5]))
    assert "--pipeline.model.primitive 4dgs" in times_note("3dgs", cameras([0.0, 1.0]))
    with pytest.raises(InputError, match=r"times go from 0 to 30; .*4D Gaussians .*Scale the times"):
        times_note("4dgs", cameras([0.0, 30.0]))


def test_frame_times_are_reported() -> None:
    assert frames_note("4dgs", [cameras([0.2])]) == "" == frames_note("3dgs", [cameras([4.0])])
    assert "have no times: all show the moment 0" in frames_note("4dgs", [cameras(None)[:1]])
    assert "1 of 2 frames have times outside of 0 to 1 (0.5 to 1.5)" in frames_note(
        "4dgs", [cameras([0.5]), cameras([1.5])]
    )


def test_the_registry_makes_them() -> None:
    kind = PRIMITIVES["4dgs"]
    assert kind.timed and kind.schema is MovingGaussians.schema and not PRIMITIVES["3dgs"].timed
    with cuda_ext.use_reference():  # as where there is no compiler
        points, views = make_moving_points(20, torch.float32), make_views(2, torch.float32)
        assert len(rows_of(MovingGaussians(), points, views)) > 0
