"""Fused steps of the aggregate device: pixels, losses, parameters and statistics of `single`, for any members."""

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_ext import LazyAdam
from cuda_ext.ops.optim.adam import adam_scalars
from ns_multigpu import aggregate
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.members import Members
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.transports import OwnRows
from ns_multigpu.core.step.member_steps import MemberSteps
from ns_multigpu.core.step.step import Step
from ns_multigpu.core.step.step_settings import StepSettings, with_halos
from ns_multigpu.core.types import View, sizes_of
from ns_multigpu.plugin.blocks.fused_options import _on_gpu
from ns_multigpu.plugin.blocks.graphs import GraphPool, StepGraphs
from ns_multigpu.plugin.blocks.timing import StepTimer
from ns_multigpu.primitives.gaussians.functions import Gaussians
from strategies.single import single
from strategies.tile import tile
from tests.lib.recorded import RecordedPool
from tests.strategies.scene import make_image, make_points, make_views

GPUS = bool(os.environ.get("NS_MULTIGPU_TEST_GPUS"))
POINTS, VIEWS, STEPS, RATE = 151, 3, 5, 0.01
FAR, CLIP = 3.3, 5.0
"""World units and pixels: each leaves out a part of what views see."""
LOOSER = 10 if GPUS else 1  # exponentials of GPUs round otherwise
Use = Callable[..., None]


class Model:
    """Points, their moments and statistics on a device, and the fused steps of its members.

    Args:
        device: where they are. members: of the steps. lazy: defer the steps of points that are not drawn.
        more: with regularised scales, a far plane and a radius clip. settings: of steps other than the usual ones.
    """

    def __init__(
        self, device: str, members: Members, *, lazy: bool = False, more: bool = False, **settings: Any
    ) -> None:
        make = single if device == "cpu" else tile
        self.members, self.strategies = members, [make(world) for world in members.worlds]
        points = make_points(POINTS, torch.float32)
        self.params = {name: value.detach().clone().to(device) for name, value in points.params.items()}
        self.moments = {name: (torch.zeros_like(v), torch.zeros_like(v)) for name, v in self.params.items()}
        self.statistics = {name: torch.zeros(POINTS, device=device) for name in ("grad2d", "count", "radii")}
        views = make_views(VIEWS + 2, torch.float32)[:VIEWS]
        wanted: dict[str, Any] = {"rows": 1024, "segment": 1024, "intersections": 32768, **settings}
        of_views = max(view.width for view in views), max(view.height for view in views)
        of_steps = StepSettings(*of_views, VIEWS, 0.2, **wanted)
        weight = {"needles": torch.tensor([0.002], device=device), "max_ratio": 1.2} if more else {}
        limits = {"far": FAR, "radius_clip": CLIP} if more else {}
        kernels = Gaussians(sh_degree=3, **limits).kernels(**weight)
        assert kernels is not None
        tensors = kernels, self.params, self.moments, self.statistics, of_steps
        if device == "cpu":
            transport = OwnRows(members.worlds[0], kernels, of_steps.rows, 0, of_steps.words())
            own = LazyAdam.make(POINTS, device) if lazy else None
            self.steps = MemberSteps([Step(*tensors, self.strategies[0], transport, own)], members)
        else:
            rows = aggregate.member_rows(self.params["means"])
            options = [{"lazy": LazyAdam.make(len(own), own.device) if lazy else None} for own in rows]
            self.steps = aggregate.fused_steps(members, self.strategies, *tensors, options)
        self.graphs: list[StepGraphs] = []
        self.targets: dict[Plan, list[list[Tensor]]] = {}

    def capture(self) -> None:
        """Take steps by graphs from now on, recorded ones on a CPU."""
        for world in self.members.worlds:
            pool = GraphPool(world.device) if world.device.type == "cuda" else RecordedPool()
            self.graphs.append(StepGraphs(StepTimer(world.device), lambda: None, pool))

    def take(self, number: int, views: list[View]) -> tuple[Tensor, list[Tensor]]:
        """Take a step of these views; return the report, and their images."""
        step, strategy = self.steps, self.strategies[0]
        step.viewmats.copy_(torch.stack([view.viewmat for view in views]))
        step.Ks.copy_(torch.stack([view.K for view in views]))
        step.backgrounds.fill_(0.3)
        step.scalars.copy_(torch.tensor(adam_scalars(RATE, (0.9, 0.999), 1e-3, number)).expand_as(step.scalars))
        plan = with_halos(strategy.plan_alike(views), views)
        if plan not in self.targets:  # at fixed addresses, which graphs hold
            self.targets[plan] = [self._photographs(plan, rank, views) for rank in range(len(plan.owned))]
        targets = self.targets[plan]
        sizes = sizes_of(views)
        if self.graphs:
            step.take(plan, targets, sizes, lambda rank, parts: self.graphs[rank].parts(plan, parts))
        else:
            step.take(plan, targets, sizes)
        images = [torch.zeros(view.height, view.width, 3) for view in views]
        for patches, own in zip(plan.owned, step.rgb, strict=True):
            for patch, rgb in zip(patches, own, strict=True):
                images[patch.view][patch.y0 : patch.y1, patch.x0 : patch.x1] = rgb.cpu()
        return step.report.cpu(), images

    def _photographs(self, plan: Plan, rank: int, views: list[View]) -> list[Tensor]:
        """Return a rank's parts of the photographs of these views, on its device."""
        found: list[Tensor] = []
        for patch in plan.owned[rank]:
            x0, y0, x1, y1 = patch.rendered(views[patch.view])
            part = make_image(views[patch.view])[y0:y1, x0:x1].contiguous()
            found.append(part.to(self.members.worlds[rank].device))
        return found

    def state(self) -> dict[str, Tensor]:
        """Return parameters, moments and statistics, on the CPU."""
        named = {f"{name}.{k}": one for name, both in self.moments.items() for k, one in enumerate(both)}
        return {name: value.cpu() for name, value in {**self.params, **named, **self.statistics}.items()}


def batches() -> list[list[View]]:
    """Return the views of a few steps, in two orders: each has plans of its own."""
    views = make_views(VIEWS + 2, torch.float32)[:VIEWS]
    return [views, views[::-1], *[views] * (STEPS - 2)]


def check(found: Model, expected: Model) -> None:
    """Take steps of two models; each has the images, losses and points of the other."""
    for number, views in enumerate(batches(), start=1):
        (report, images), (wanted, pictures) = found.take(number, views), expected.take(number, views)
        torch.testing.assert_close(report[:-1], wanted[:-1], atol=1e-6, rtol=1e-5 * LOOSER)
        assert bool(report[-1].isfinite())
        for image, picture in zip(images, pictures, strict=True):
            torch.testing.assert_close(image, picture, atol=2e-5 * LOOSER, rtol=1e-4 * LOOSER)
        assert float(pictures[0].std()) > 0.02
    for steps in (found.steps, expected.steps):
        steps.flush()
        assert steps.status().done == STEPS
    begun, state = make_points(POINTS, torch.float32).params["means"].detach(), expected.state()
    assert float((state["means"] - begun).abs().max()) > RATE, "points have moved"
    for name, value in found.state().items():
        if GPUS and name == "radii":
            continue  # whole pixels
        named = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(value, state[name], atol=2e-5 * LOOSER, rtol=2e-3 * LOOSER, msg=named)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("mode", ["step", "captured"])
@pytest.mark.parametrize("members", [1, 2, 3])
def test_steps_equal_single(use: Use, members: int, mode: str, lazy: bool) -> None:
    use(members, small_bytes=64)
    found = Model("multigpu", Members(aggregate.devices()), lazy=lazy)
    if mode == "captured":
        found.capture()
    check(found, Model("cpu", Members([torch.device("cpu")]), lazy=lazy))
    if aggregate.devices()[0].type == "cpu":  # a GPU holds 2 MiB at least
        assert min(aggregate.shards(found.params["means"])) > 0, "each member holds points"


@pytest.mark.parametrize("mode", ["step", "captured"])
@pytest.mark.parametrize("members", [1, 3])
def test_regularised_scales_and_limits_equal_single(use: Use, members: int, mode: str) -> None:
    use(members, small_bytes=64)
    found = Model("multigpu", Members(aggregate.devices()), more=True)
    if mode == "captured":
        found.capture()
    expected, without = (Model("cpu", Members([torch.device("cpu")]), more=given) for given in (True, False))
    check(found, expected)
    check(without, Model("cpu", Members([torch.device("cpu")])))
    assert float((expected.state()["scales"] - without.state()["scales"]).abs().max()) > RATE, "they matter"


@pytest.mark.parametrize("limits", [{"rows": 360}, {"intersections": 50}, {"segment": 20}])
def test_a_step_beyond_a_capacity_of_one_member_changes_nothing(use: Use, limits: dict[str, int]) -> None:
    """The first member has 384 rows, the second 69."""
    use(2, small_bytes=64)
    found = Model("multigpu", Members(aggregate.devices()), **limits)
    before = found.state()
    found.take(1, batches()[0])
    status = found.steps.status()
    assert status.full and status.done == 0
    assert all(torch.equal(value, before[name]) for name, value in found.state().items())
    needed = {"rows": status.rows, "intersections": status.intersections, "segment": max(status.segments)}
    assert all(needed[name] > limit for name, limit in limits.items())


@pytest.mark.parametrize("mode", ["step", "captured"])
def test_a_gradient_that_is_not_finite_skips_the_step_of_all(use: Use, mode: str) -> None:
    use(3, small_bytes=64)
    found = Model("multigpu", Members(aggregate.devices()), skips=True)
    if mode == "captured":
        found.capture()
    transport = found.steps.steps[2]._transport  # gradients of the last member's points
    poison, returned = torch.zeros(1, device=transport.world.device), transport.return_gradients

    def poisoned(*given: Any) -> Any:
        back = yield from returned(*given)
        back.records[:1].add_(poison)
        return back

    transport.return_gradients = poisoned  # type: ignore[method-assign]
    for number, views in enumerate([batches()[0]] * 3, start=1):
        assert bool(found.take(number, views)[0][-1].isfinite())
    poison.fill_(torch.nan)
    before = found.state()
    report, _ = found.take(4, batches()[0])
    assert bool(report[-1].isnan()) and found.steps.status().done == 3
    for name, value in found.state().items():
        torch.testing.assert_close(value, before[name], atol=0, rtol=0, equal_nan=True)


@pytest.mark.skipif(GPUS, reason="only tensors are made")
def test_rows_of_members(use: Use) -> None:
    use(3, small_bytes=64)
    for count, expected in ((151, [64, 64, 23]), (193, [128, 65, 0]), (0, [0, 0, 0])):
        tensor = torch.arange(2 * count, device="multigpu").view(count, 2)
        rows = aggregate.member_rows(tensor)
        assert [len(own) for own in rows] == expected and all(own.device.type == "cpu" for own in rows)
        for own in rows:
            own.add_(1)
        assert tensor.cpu().flatten().tolist() == list(range(1, 2 * count + 1))
    with pytest.raises(ValueError, match="need a tensor of multigpu, not of cpu"):
        aggregate.member_rows(torch.zeros(3))


def test_where_steps_are_fused_by_themselves(use: Use) -> None:
    """On GPUs; on host members they are only if they always are."""
    use(2)
    assert _on_gpu(World.single("multigpu:0")) == GPUS


@pytest.mark.skipif(GPUS, reason="on host members")
def test_members_ask_for_equal_buffers(use: Use) -> None:
    use(2)
    members = Members(aggregate.devices())
    first = [members.buffers(0, 8), members.buffers(0, 16)]
    assert all(one is other for one, other in zip(first[0], members.buffers(1, 8), strict=True))
    with pytest.raises(ValueError, match="rank 1 asks for 8 bytes of peer memory, another rank for 16"):
        members.buffers(1, 8)
