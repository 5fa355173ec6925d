"""MCMC: exact picks, the cap, and noise that follows images."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ns_multigpu.core.random import keyed_generator
from ns_multigpu.primitives.densify.mcmc import McmcDensifier, pick


def test_picks() -> None:
    weights = torch.tensor([0.0, 0.1, 0.0, 0.3, 0.6, 0.0])
    rows = pick(weights, 100_000, keyed_generator(0))
    share = torch.bincount(rows, minlength=6) / 100_000
    torch.testing.assert_close(share, weights, rtol=0, atol=0.006)
    assert share[weights == 0].sum() == 0
    assert torch.equal(rows, pick(weights, 100_000, keyed_generator(0)))
    assert len(pick(torch.zeros(3), 5, keyed_generator(0))) == len(pick(weights, 0, keyed_generator(0))) == 0
    assert len(pick(torch.zeros(0), 5, keyed_generator(0))) == 0


def model(count: int, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, torch.optim.Optimizer]]:
    """Random Gaussians with Adams that have taken a step."""
    g = torch.Generator().manual_seed(seed)
    shapes = {"means": (3,), "scales": (3,), "quats": (4,), "opacities": (1,), "features_rest": (0, 3)}
    params: dict[str, Tensor] = {
        name: torch.nn.Parameter(torch.randn(count, *shape, generator=g)) for name, shape in shapes.items()
    }
    optimizers: dict[str, torch.optim.Optimizer] = {name: torch.optim.Adam([p]) for name, p in params.items()}
    for name, value in params.items():
        value.grad = torch.ones_like(value)
        optimizers[name].step()
    return params, optimizers


def test_dead_gaussians_move_onto_living_ones() -> None:
    params, optimizers = model(200)
    densifier = McmcDensifier(cap_max=200, noise_lr=0.0, refine_start_iter=0, refine_every=10, min_opacity=0.3)
    before = {name: value.detach().clone() for name, value in params.items()}
    dead = before["opacities"].sigmoid().flatten() <= 0.3
    assert 20 < int(dead.sum()) < 180
    densifier.step_post_backward(params, optimizers, step=10, images=1, rate=1.0)
    assert len(params["means"]) == 200
    sources = torch.cdist(params["quats"].detach(), before["quats"]).argmin(1)
    assert torch.equal(sources[~dead], torch.where(~dead)[0])
    assert not bool(dead[sources[dead]].any())
    moved_from = torch.unique(sources[dead])
    for name in ("quats", "scales", "opacities"):
        assert torch.equal(params[name][dead], params[name][sources[dead]])
    assert bool((params["opacities"][moved_from] < before["opacities"][moved_from]).all())
    assert bool((params["opacities"].sigmoid() >= 0.3 - 1e-6).all())
    moments = optimizers["means"].state[params["means"]]["exp_avg"]
    assert float(moments[moved_from].abs().sum()) == 0
    kept = ~dead
    kept[moved_from] = False
    assert bool((moments[kept] != 0).all())


def test_gradients_may_guide_relocation() -> None:
    """Points are relocated and added at living ones with large gradients; then sums are reset."""
    params, optimizers = model(200)
    densifier = McmcDensifier(
        cap_max=210, noise_lr=0.0, refine_start_iter=0, refine_every=10, refine_stop_iter=50, min_opacity=0.3,
        picks="gradient",
    )  # fmt: skip
    before = {name: value.detach().clone() for name, value in params.items()}
    dead = before["opacities"].sigmoid().flatten() <= 0.3
    steep = torch.zeros(200, dtype=torch.bool)
    steep[::5] = True
    state: dict[str, Any] = {}
    sums = densifier.statistics(params, state)
    sums["grad2d"][steep], sums["count"][:] = 0.02, 2.0
    assert densifier.counts(49) and not densifier.counts(50) and not McmcDensifier().counts(0)
    densifier.step_post_backward(params, optimizers, step=10, images=1, rate=1.0, state=state)
    assert len(params["means"]) == 210
    sources = torch.cdist(params["quats"].detach(), before["quats"]).argmin(1)
    moved = torch.cat([sources[:200][dead], sources[200:]])
    assert bool((steep & ~dead)[moved].all())
    assert all(len(value) == 210 and not value.any() for value in state.values()) and set(state) == {"grad2d", "count"}


def test_a_gradient_is_the_mean_over_the_views_that_drew_it() -> None:
    sums = {"grad2d": torch.tensor([0.0064, 0.0064, 0.0, 9.0]), "count": torch.tensor([1.0, 4.0, 0.0, 3.0])}
    steep = McmcDensifier(picks="gradient")._steepness({"means": torch.zeros(4, 3)}, sums)
    torch.testing.assert_close(steep, torch.tensor([0.5, 0.125, 0.0, 1.0]))


def test_both_are_multiplied() -> None:
    opacities, steep = torch.tensor([0.9, 0.5, 0.001]), torch.tensor([0.1, 1.0, 1.0])
    weights = {picks: McmcDensifier(picks=picks)._weights(opacities, steep) for picks in ("gradient", "both")}
    torch.testing.assert_close(weights["both"], torch.tensor([0.09, 0.5, 0.0]))
    torch.testing.assert_close(weights["gradient"], torch.tensor([0.1, 1.0, 0.0]))
    torch.testing.assert_close(McmcDensifier()._weights(opacities, None), torch.tensor([0.9, 0.5, 0.0]))


def test_random_draws_of_a_step_are_counted() -> None:
    params, optimizers = model(4)
    densifier = McmcDensifier(picks="gradient", refine_start_iter=10**9, noise_lr=0.0)
    state: dict[str, Any] = {}
    rows = {"ids": torch.tensor([1, 3, 3]), "gradients": torch.tensor([0.5, 0.25, 1.0]), "visible": torch.ones(3)}
    densifier.after_step(params, optimizers, state, 0, 2, 1e-3, lambda: rows)
    assert state["grad2d"].tolist() == [0, 0.5, 0, 1.25] and state["count"].tolist() == [0, 1, 0, 2]
    plain: dict[str, Any] = {}
    McmcDensifier(noise_lr=0.0).after_step(params, optimizers, plain, 0, 2, 1e-3, lambda: pytest.fail("not asked for"))
    assert plain == {}


def test_growth_up_to_the_cap_of_the_whole_model() -> None:
    params, optimizers = model(100)
    densifier = McmcDensifier(cap_max=112, noise_lr=0.0, refine_start_iter=0, refine_every=10, min_opacity=0.0)
    counts = []
    for step in range(0, 80, 8):  # refinement at 10, 20, ..., 70: not a multiple of the batch
        densifier.step_post_backward(params, optimizers, step=step, images=8, rate=1.0)
        counts.append(len(params["means"]))
    assert counts[:4] == [100, 105, 110, 112] and counts[-1] == 112
    for name, value in params.items():
        assert optimizers[name].param_groups[0]["params"] == [value]
        assert optimizers[name].state[value]["exp_avg"].shape == value.shape


@pytest.mark.parametrize("morton", [False, True])
def test_added_gaussians_lie_next_to_their_sources(morton: bool) -> None:
    """Each with its source around the place where that was."""
    params, optimizers = model(100)
    before = {name: value.detach().clone() for name, value in params.items()}
    densifier = McmcDensifier(refine_start_iter=0, refine_every=10, min_opacity=0.0, noise_lr=0.0, morton=morton)
    densifier.step_post_backward(params, optimizers, step=10, images=1, rate=1.0)
    after = {name: value.detach() for name, value in params.items()}
    sources = torch.cdist(after["quats"], before["quats"]).argmin(1)
    grown = [int(source) for source in range(100) if int((sources == source).sum()) > 1]
    assert len(after["means"]) == 105 and grown
    for source in grown:
        parts = after["means"][sources == source]
        torch.testing.assert_close(parts.mean(0), before["means"][source], rtol=1e-5, atol=1e-5)
        assert float((parts - before["means"][source]).norm(dim=1).max()) > 0.1 * float(
            before["scales"][source].max().exp()
        )


@pytest.mark.parametrize("morton", [False, True])
def test_a_refinement_that_adds_none_changes_tensors_in_place(morton: bool) -> None:
    """Of a model in an order, but for every third."""
    params, optimizers = model(100)
    densifier = McmcDensifier(
        cap_max=105, noise_lr=0.0, refine_start_iter=0, refine_every=10, min_opacity=0.3, morton=morton, order_every=3,
        picks="both",
    )  # fmt: skip
    state: dict[str, Any] = {}
    assert not densifier.replaces(params, 9, 1), "nothing is due"
    for image, replaces in ((10, True), (20, False), (30, morton), (40, False)):
        sums = densifier.statistics(params, state)
        for value in sums.values():
            value.fill_(3.0)
        moments = [optimizers[name].state[value]["exp_avg"] for name, value in params.items()]
        before = [*params.values(), *moments, *sums.values()]
        opacities = params["opacities"].detach().clone()
        params["opacities"].data[:5] = -9.0
        assert densifier.replaces(params, image, 1) == replaces
        densifier.step_post_backward(params, optimizers, step=image, images=1, rate=1.0, state=state)
        moments = [optimizers[name].state[value]["exp_avg"] for name, value in params.items()]
        after = [*params.values(), *moments, *state.values()]
        same = [one is other for one, other in zip(before, after, strict=True)]
        assert all(same) if not replaces else not any(same[: len(params)])
        assert not any(bool(value.any()) for value in state.values()) and not torch.equal(
            params["opacities"], opacities
        )
    assert densifier.replaces(params, 15, 16) == morton, "the one after image 30 is among them, if not the first"


def due_model(cap: int) -> tuple[McmcDensifier, tuple[Any, ...]]:
    """Return a model of 100 Gaussians with statistics, its optimizers and its state, and who is to refine it."""
    params, optimizers = model(100)
    densifier = McmcDensifier(
        cap_max=cap, noise_lr=0.0, refine_start_iter=0, refine_every=10, min_opacity=0.3, picks="both"
    )
    state: dict[str, Any] = {}
    for value in densifier.statistics(params, state).values():
        value.copy_(torch.linspace(0.0, 2.0, 100))
    return densifier, (params, optimizers, state)


@pytest.mark.parametrize("taken", [True, False])
def test_refinement_may_start_before_its_step_is_validated(taken: bool) -> None:
    """Only one that moves points alone; what it does is what it does later, or nothing."""
    outcomes: list[list[Tensor]] = []
    for ahead in (False, True):
        densifier, (params, optimizers, state) = due_model(100)
        given = (params, optimizers, state, 10, 1)
        if ahead:
            assert not densifier.refine_ahead(params, optimizers, state, 9, 1, torch.tensor(taken)), "nothing is due"
            assert densifier.refine_ahead(*given, torch.tensor(taken))
        elif taken:
            densifier.refine_when_due(*given)
        moments = [optimizers[name].state[value]["exp_avg"] for name, value in params.items()]
        outcomes.append([x.detach() for x in (*params.values(), *moments, *state.values())])
    assert all(torch.equal(x, y) for x, y in zip(*outcomes, strict=True))
    assert bool(outcomes[0][-1].any()) != taken, "statistics are spent where it was taken"
    growing = McmcDensifier(cap_max=105, refine_start_iter=0, refine_every=10)
    assert not growing.refine_ahead(*model(100), {}, 10, 1, torch.tensor(True))
    ordering = McmcDensifier(cap_max=100, refine_start_iter=0, refine_every=10, morton=True, order_every=1)
    assert not ordering.refine_ahead(*model(100), {}, 10, 1, torch.tensor(True))


@pytest.mark.parametrize("tries", [0, 1, 2])
@pytest.mark.parametrize("images", [1, 25])
def test_a_model_that_grows_relocates_ahead_as_well(tries: int, images: int) -> None:
    """In a step that was taken in the end; the first tries were not. What follows it is done when that is known."""
    outcomes: list[list[Tensor]] = []
    for ahead in (False, True):
        densifier, (params, optimizers, state) = due_model(400)
        given, before = (params, optimizers, state, 10, images), params["means"].detach().clone()
        if ahead:
            for _ in range(tries):
                assert not densifier.refine_ahead(*given, torch.tensor(False))
                assert torch.equal(params["means"], before)
            assert not densifier.refine_ahead(*given, torch.tensor(True))
            assert not torch.equal(params["means"], before) and len(params["means"]) == 100
        densifier.refine_when_due(*given)
        assert densifier._begun is None, "finished work is released"
        outcomes.append([x.detach().clone() for x in (*params.values(), *state.values())])
        densifier.refine_when_due(params, optimizers, state, 50, 1)  # what was done ahead is done with
        outcomes[-1] += [x.detach() for x in params.values()]
    assert all(torch.equal(x, y) for x, y in zip(*outcomes, strict=True)) and len(outcomes[0][0]) > 104


def test_work_begun_in_a_cancelled_block_is_repeated() -> None:
    outcomes: list[Tensor] = []
    for cancelled in (False, True):
        params, optimizers = model(100)
        densifier = McmcDensifier(noise_lr=0.0, refine_start_iter=0, refine_every=10, min_opacity=0.3)
        if cancelled:
            densifier.refine_ahead(params, optimizers, {}, 10, 1, torch.tensor(False))
            densifier.refine_ahead(params, optimizers, {}, 9, 1, torch.tensor(True))  # a shorter block
        densifier.refine_when_due(params, optimizers, {}, 10, 1)
        outcomes.append(params["means"].detach())
    assert torch.equal(*outcomes)


def test_one_large_step_refines_as_often_as_its_images() -> None:
    params, optimizers = model(100)
    densifier = McmcDensifier(noise_lr=0.0, refine_start_iter=0, refine_every=10, min_opacity=0.0)
    densifier.step_post_backward(params, optimizers, step=10, images=30, rate=1.0)
    assert len(params["means"]) == int(1.05 * int(1.05 * 105))


def test_no_refinement_outside_its_time() -> None:
    params, optimizers = model(100)
    densifier = McmcDensifier(noise_lr=0.0, refine_start_iter=20, refine_stop_iter=40, refine_every=10)
    for step, expected in ((0, 100), (10, 100), (20, 100), (30, 105), (40, 105)):
        densifier.step_post_backward(params, optimizers, step=step, images=1, rate=1.0)
        assert len(params["means"]) == expected


def test_model_without_living_gaussians_is_unchanged() -> None:
    params, optimizers = model(10)
    params["opacities"].data.fill_(-100.0)
    densifier = McmcDensifier(refine_start_iter=0, refine_every=10)
    densifier.step_post_backward(params, optimizers, step=10, images=1, rate=1.0)
    assert len(params["means"]) == 10


def test_noise_has_the_shape_of_the_gaussian_and_spares_the_opaque() -> None:
    count = 40_000
    quat = torch.nn.functional.normalize(torch.tensor([0.9, 0.1, -0.3, 0.2]), dim=0)
    w, x, y, z = quat.tolist()
    rotation = torch.tensor(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )
    params = {
        "means": torch.zeros(count, 3),
        "scales": torch.tensor([0.3, 0.1, 0.5]).log().repeat(count, 1),
        "quats": 3 * quat.repeat(count, 1),
        "opacities": torch.logit(torch.full((count, 1), 0.005)),
    }
    params["opacities"][0] = 10.0
    McmcDensifier(noise_lr=1.0, seed=1).move(params, 0, 1, 7.0)
    covariance = rotation @ torch.diag(torch.tensor([0.3, 0.1, 0.5]) ** 2) @ rotation.T
    expected = (7.0 * 0.5) ** 2 * covariance @ covariance  # the gate is 1/2 where the opacity is t
    measured = params["means"][1:].T @ params["means"][1:] / (count - 1)
    torch.testing.assert_close(measured, expected, rtol=0.05, atol=0.03 * float(expected.abs().max()))
    assert float(params["means"][0].abs().max()) < 1e-6


@pytest.mark.parametrize("batch", [2, 7, 16])
def test_noise_of_a_batch_is_that_of_its_images(batch: int) -> None:
    def spread(images: int, steps: int) -> float:
        params, optimizers = model(3000)
        params["opacities"].data.fill_(-6.0)
        params["scales"].data.fill_(-2.0)
        params["means"].data.zero_()
        densifier = McmcDensifier(noise_lr=100.0, refine_start_iter=10**9, seed=4)
        for step in range(steps):
            densifier.step_post_backward(params, optimizers, step=step * images, images=images, rate=1e-3)
        return float(params["means"].detach().std())

    assert spread(batch, 1) == pytest.approx(spread(1, batch), rel=0.04)


def test_noise_is_keyed_by_image() -> None:
    def moved(seed: int, step: int) -> Tensor:
        params, optimizers = model(10)
        params["opacities"].data.fill_(-6.0)
        McmcDensifier(seed=seed).step_post_backward(params, optimizers, step=step, images=2, rate=1e-3)
        return params["means"].detach()

    torch.manual_seed(1)
    first = moved(0, 4)
    torch.manual_seed(2)
    assert torch.equal(first, moved(0, 4))
    assert not torch.equal(first, moved(0, 6)) and not torch.equal(first, moved(1, 4))
