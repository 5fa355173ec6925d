"""Densification: gsplat's rules on a clock of images, and the same points for any assignment of views."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from gsplat.strategy import DefaultStrategy
from torch import Tensor

import cuda_ext
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.random import seed_from
from ns_multigpu.primitives.densify import gathering
from ns_multigpu.primitives.densify.densifier import ReplicatedDensifier, densification_info, due, dues
from ns_multigpu.primitives.densify.mcmc import McmcDensifier
from ns_multigpu.primitives.gaussians.functions import Gaussians, screen_radii
from tests.lib.ranks import run_ranks
from tests.strategies.scene import make_points, make_views

COUNT = 120
RULES: dict[str, Any] = {
    "prune_opa": 0.1, "grow_grad2d": 0.5, "grow_scale3d": 0.3, "grow_scale2d": 0.4, "prune_scale3d": 2.0,
    "prune_scale2d": 0.8, "refine_scale2d_stop_iter": 30, "refine_start_iter": 5, "refine_stop_iter": 60,
    "reset_every": 24, "refine_every": 8, "pause_refine_after_reset": 10, "absgrad": True,
}  # fmt: skip


def test_dues() -> None:
    for period in (1, 3, 10):
        for first in range(25):
            for count in (1, 2, 9, 30):
                expected = [i for i in range(first, first + count) if i % period == 0]
                assert list(dues(period, first, count)) == expected
                assert due(period, first, count) == (expected[-1] if expected else None)


def model() -> tuple[torch.nn.ParameterDict, dict[str, torch.optim.Optimizer]]:
    """Random points under Adams that have taken a step."""
    g = torch.Generator().manual_seed(0)
    shapes = {"means": (3,), "scales": (3,), "quats": (4,), "opacities": (1,)}
    params = torch.nn.ParameterDict(
        {n: torch.nn.Parameter(0.8 * torch.randn(COUNT, *s, generator=g)) for n, s in shapes.items()}
    )
    params["scales"].data -= 1.0
    optimizers: dict[str, torch.optim.Optimizer] = {n: torch.optim.Adam([p], lr=0.1) for n, p in params.items()}
    for name, value in params.items():
        value.grad = torch.randn(value.shape, generator=g)
        optimizers[name].step()
    return params, optimizers


def rows_of(image: int, count: int) -> dict[str, Tensor]:
    """Return an image's visible points: most of them, with random gradients and radii."""
    g = torch.Generator().manual_seed(100 + image)
    return {
        "ids": torch.randperm(count, generator=g)[: 3 * count // 4].sort().values,
        "gradients": torch.rand(3 * count // 4, generator=g),
        "visible": (torch.rand(3 * count // 4, generator=g) > 0.2).float(),
        "radii": torch.rand(3 * count // 4, generator=g),
    }


def train(world: World, batch: int, images: int) -> dict[str, Tensor]:
    """Densify over `images` images, `batch` a step, distributed round-robin to the ranks."""
    params, optimizers = model()
    densifier = ReplicatedDensifier(**RULES, world=world, seed=7)
    state = densifier.initialize_state()
    for step in range(0, images, batch):
        mine = [rows_of(i, len(params["means"])) for i in range(step, step + batch) if i % world.size == world.rank]
        empty = {name: value[:0] for name, value in rows_of(0, len(params["means"])).items()}
        info = {name: torch.cat([rows[name] for rows in (empty, *mine)]) for name in empty}
        densifier.step_post_backward(params, optimizers, state, step, {"n_cameras": batch, **info})
    return {name: value.detach() for name, value in params.items()}


def test_same_points_on_any_number_of_ranks() -> None:
    expected = train(World.single(), 6, 60)
    assert len(expected["means"]) != COUNT
    for outcome in run_ranks(train, 3, 6, 60):
        for name, value in expected.items():
            torch.testing.assert_close(outcome[name], value)


@pytest.mark.parametrize("again", [False, True])
def test_refinement_may_be_decided_ahead(again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The points are the same. A retried block restores its counts and is decided again."""
    outcomes: list[dict[str, Tensor]] = []
    for ahead in (False, True):
        params, optimizers = model()
        densifier = ReplicatedDensifier(**RULES, seed=7)
        state = densifier.initialize_state()
        given = (params, optimizers, state, 16, 1)
        densifier.count(params, state, rows_of(0, COUNT))
        if ahead and again:
            assert not densifier.refine_ahead(*given, torch.tensor(False))
        densifier.count(params, state, rows_of(1, COUNT))
        if ahead:
            before = {name: state[name].clone() for name in ("grad2d", "count", "radii")}
            assert not densifier.refine_ahead(*given, torch.tensor(True)), "how many there are has to be known"
            assert all(torch.equal(state[name], value) for name, value in before.items())
            monkeypatch.setattr(densifier, "_decided", lambda *_: pytest.fail("decided twice"))
        densifier.refine_when_due(*given)
        outcomes.append({name: value.detach() for name, value in params.items()})
    assert len(outcomes[0]["means"]) != COUNT
    assert all(torch.equal(outcomes[1][name], value) for name, value in outcomes[0].items())
    densifier = ReplicatedDensifier(**RULES)
    densifier.refine_ahead({}, {}, {}, 17, 1, torch.tensor(True))
    assert densifier._ahead is None, "nothing is due"


def test_a_small_model_is_gathered_at_once_and_a_large_one_tensor_by_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large one there are never two."""
    take, launches = cuda_ext.take_rows, list[int]()

    def counted(tensors: Any, index: Tensor) -> list[Tensor]:
        if len(index) != COUNT and len(index) > COUNT // 2:
            launches.append(len(tensors))
        return take(tensors, index)

    monkeypatch.setattr(cuda_ext, "take_rows", counted)
    outcomes: list[dict[str, Tensor]] = []
    for together in (COUNT, COUNT - 1):
        monkeypatch.setattr(gathering, "_TOGETHER", together)
        params, optimizers = model()
        densifier = ReplicatedDensifier(**RULES, seed=7)
        state = densifier.initialize_state()
        densifier.count(params, state, rows_of(0, COUNT))
        densifier.refine_when_due(params, optimizers, state, 16, 1)
        moments = {n: optimizers[n].state[p]["exp_avg_sq"] for n, p in params.items()}
        outcomes.append(
            {**{n: p.detach() for n, p in params.items()}, **{f"{n} moment": m for n, m in moments.items()}}
        )
    assert launches == [3 * 4, *[1] * 12], "four parameters with two moments each"
    assert all(torch.equal(outcomes[1][name], value) for name, value in outcomes[0].items())


def _asked_ahead(world: World) -> bool:
    """Return whether what a rank has counted is still what it has counted."""
    params, optimizers = model()
    same: list[bool] = []
    for densifier in (
        ReplicatedDensifier(**RULES, world=world),
        McmcDensifier(cap_max=COUNT, refine_start_iter=0, refine_every=8, picks="both", world=world),
    ):
        state: dict[str, Any] = densifier.initialize_state()
        sums = densifier.statistics(params, state)
        for value in sums.values():
            value.fill_(1.0 + world.rank)
        densifier.refine_ahead(params, optimizers, state, 16, 1, torch.tensor(False))
        same += [bool((value == 1.0 + world.rank).all()) for value in sums.values()]
    return len(same) == 5 and all(same)


def test_retried_block_restores_its_statistics() -> None:
    assert run_ranks(_asked_ahead, 2) == [True, True]


def test_one_image_a_step_is_gsplat() -> None:
    expected, optimizers = model()
    peer = DefaultStrategy(**RULES)
    state = peer.initialize_state()
    for image in range(60):
        rows = rows_of(image, len(expected["means"]))
        # gsplat takes a [views, points] table of screen-space gradients and scales them by half the image's size.
        gradients = torch.zeros(1, len(expected["means"]), 2)
        gradients[0, rows["ids"], 0] = rows["gradients"]
        radii = torch.zeros(1, len(expected["means"]))
        radii[0, rows["ids"]] = torch.where(rows["visible"] > 0, rows["radii"], torch.zeros(()))
        means2d = torch.zeros_like(gradients)
        means2d.absgrad = gradients  # type: ignore[attr-defined]
        info = {"width": 2.0, "height": 2.0, "n_cameras": 1, "radii": 2 * radii, "gaussian_ids": None}
        torch.manual_seed(seed_from(7, "densify", image))
        peer.step_post_backward(expected, optimizers, state, image, {**info, "means2d": means2d})
    found = train(World.single(), 1, 60)
    assert len(found["means"]) == len(expected["means"]) != COUNT
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value.detach())


def test_radii_are_parts_of_the_longer_side_as_gsplats() -> None:
    """Of a view that is wide and one that is tall."""
    sizes = [(60, 40), (40, 60)]
    views = [replace(v, width=w, height=h) for v, (w, h) in zip(make_views(2, torch.float32), sizes, strict=True)]
    views[1] = replace(views[1], viewmat=views[0].viewmat)
    points, kind = make_points(COUNT, torch.float32), Gaussians(sh_degree=0)
    params = {name: torch.nn.Parameter(value) for name, value in points.params.items()}
    for view in views:
        splats = kind.splat(points, kind.cull(points, [view], range(1)), [view])
        ids, pixels = splats.hits.point_ids.long(), screen_radii(splats)
        peer = DefaultStrategy(refine_scale2d_stop_iter=30)
        state = peer.initialize_state()
        means2d = torch.zeros(1, COUNT, 2)
        means2d.grad = torch.zeros_like(means2d)
        table = torch.zeros(1, COUNT)
        table[0, ids] = pixels.detach()
        info = {"width": view.width, "height": view.height, "n_cameras": 1, "radii": table, "means2d": means2d}
        peer._update_state(dict(params), state, {**info, "gaussian_ids": None})
        found = torch.zeros(COUNT)
        found[ids] = densification_info(splats, [view])["radii"].detach()
        assert float(found.max()) > 0
        torch.testing.assert_close(found, state["radii"])


class Spy(ReplicatedDensifier):
    """Writes down the images at which it would have refined."""

    def _refine(self, params: Any, optimizers: Any, state: dict[str, Any], image: int) -> None:
        self.__dict__.setdefault("refined", []).append(image)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 7, 8])
def test_the_clock_counts_images(batch: int) -> None:
    params, optimizers = model()
    spy = Spy(**RULES)
    state, resets = spy.initialize_state(), []
    for step in range(0, 70, batch):
        params["opacities"].data.fill_(5.0)
        empty = {name: value[:0] for name, value in rows_of(0, COUNT).items()}
        spy.step_post_backward(params, optimizers, state, step, {"n_cameras": batch, **empty})
        if float(params["opacities"].detach().max()) < 5.0:
            resets.append(range(step, step + batch))
    assert spy.__dict__["refined"] == [16, 40]
    assert [[i for i in images if i % 24 == 0] for images in resets] == [[0], [24], [48]]


@pytest.mark.parametrize("batch", [1, 5, 7, 16, 40])
def test_no_refinement_at_or_after_the_stop_step(batch: int) -> None:
    """Opacities that are reset in the last step of a run stay so: 6 dB were lost to that, with 16 views a step."""
    params, optimizers = model()
    rules = {**RULES, "refine_stop_iter": 48, "refine_every": 12, "pause_refine_after_reset": 0}
    spy = Spy(**rules)
    state, last_reset, due_last = spy.initialize_state(), -1, -1
    for step in range(0, 80, batch):
        params["opacities"].data.fill_(5.0)
        empty = {name: value[:0] for name, value in rows_of(0, COUNT).items()}
        if spy.due_after(step, batch):
            due_last = step
        spy.step_post_backward(params, optimizers, state, step, {"n_cameras": batch, **empty})
        if float(params["opacities"].detach().max()) < 5.0:
            last_reset = step
    assert max(spy.__dict__["refined"]) < 48
    assert last_reset <= 24 < last_reset + batch and due_last <= 36 < due_last + batch


def test_draws_do_not_touch_the_default_generator() -> None:
    torch.manual_seed(0)
    train(World.single(), 4, 20)
    after = torch.rand(1)
    torch.manual_seed(0)
    model()
    assert torch.equal(after, torch.rand(1))
