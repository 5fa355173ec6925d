"""A step in stages: bit for bit what it is without, in all modes; one stage really is drawn while the next travels."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ns_multigpu.core import row_routes
from ns_multigpu.core.plan import Plan
from ns_multigpu.core.stages import in_order, part_of, stages_of, summed
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.transports import make_transport
from ns_multigpu.core.types import Patch, Pixels, View
from ns_multigpu.core.world import World
from ns_multigpu.locality.patches import LocalPatches
from ns_multigpu.primitives.gaussians.functions import Gaussians
from ns_multigpu.primitives.gaussians.kernels import GaussianKernels
from strategies import STRATEGIES
from tests.ranks import run_ranks, skip_without_gpus
from tests.strategies.test_law import PRIMITIVES, Outcome, on_machines, take_step
from tests.strategies.test_law_steps import LANDSCAPE, MODES, POINTS, take_one

KIND = "gaussians, antialiased, absgrad"
VIEWS = 5


def spread_of(strategy: str, machines: int, world: World) -> Strategy:
    return STRATEGIES[strategy](on_machines(world, machines) if machines > 1 else world)


def taken(spread: Strategy, mode: str, stages: int, views: int = VIEWS, size: tuple[int, int] = LANDSCAPE) -> Outcome:
    spread.rows.stages = stages
    if mode == "autograd":
        return take_step(spread, KIND, views, POINTS, torch.float32, size)
    kind = PRIMITIVES[KIND]()
    assert isinstance(kind, Gaussians)
    return take_one(spread, kind, views, size, mode, False, False if spread.world.device.type == "cuda" else None)


def with_and_without(machines: int, world: World, strategy: str, modes: tuple[str, ...], *rest: Any) -> Any:
    """Of each mode a step with 1 stage and with 3. Each has a strategy of its own, for these learn."""
    return {
        mode: [taken(spread_of(strategy, machines, world), mode, stages, *rest) for stages in (1, 3)] for mode in modes
    }


def check_same(one: Any, other: Any, at: tuple[Any, ...] = ()) -> None:
    """To the last bit."""
    assert type(one) is type(other), at
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), at
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), at
        for key, value in one.items():
            check_same(value, other[key], (*at, key))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), at
        for k, (a, b) in enumerate(zip(one, other, strict=True)):
            check_same(a, b, (*at, k))
    else:
        assert one == other, at


def check_all(outcomes: list[Any]) -> None:
    for rank, by_mode in enumerate(outcomes):
        for mode, (without, with_) in by_mode.items():
            assert any(float(g.abs().sum()) > 0 for g in with_["gradients"].values()), (rank, mode)
            check_same(without, with_, (rank, mode))


@pytest.mark.parametrize(("ranks", "machines"), [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (4, 4)])
def test_stages_change_no_bit(ranks: int, machines: int) -> None:
    """The steps without are held against `single` in test_law and test_law_steps."""
    check_all(run_ranks(partial(with_and_without, machines), ranks, "locality", ("autograd", *MODES)))


def test_stages_of_bands_change_no_bit() -> None:
    """`tile` learns from where intersections are: their counts are put together from all stages."""
    check_all(run_ranks(partial(with_and_without, 1), 3, "tile", ("step",)))


class Turned(LocalPatches):
    """Ranks have their patches in another order than that of the views."""

    def _made(self, views: Sequence[View], chosen: Any, ranks: int) -> Plan:
        return Plan.of(patches[::-1] for patches in super()._made(views, chosen, ranks).drawn)


def in_any_order(kind: type[LocalPatches], world: World, mode: str, stages: int, views: int = VIEWS) -> Outcome:
    spread = spread_of("locality", 1, world)
    object.__setattr__(spread.assignment, "__class__", kind)
    return taken(spread, mode, stages, views)


class Apart(LocalPatches):
    """View k is drawn by rank k."""

    def _made(self, views: Sequence[View], chosen: Any, ranks: int) -> Plan:
        plan = super()._made(views, chosen, ranks)
        return Plan.of([patch for patch in plan.patches() if patch.view == rank] for rank in range(ranks))


def test_a_rank_that_draws_nothing_of_a_stage_takes_part() -> None:
    """Also of the last one, with whose gradients the way back begins: the others would wait for it."""
    without, with_ = (run_ranks(partial(in_any_order, Apart), 3, "autograd", n, 3, seconds=60) for n in (1, 3))
    check_same(without, with_)
    assert [{patch.view for patch, _ in of["images"]} for of in with_] == [{0}, {1}, {2}]


@pytest.mark.parametrize("mode", ["autograd", "step"])
def test_patches_keep_their_order(mode: str) -> None:
    without, with_ = (run_ranks(partial(in_any_order, Turned), 2, mode, stages) for stages in (1, 3))
    check_same(without, with_)
    views = [patch.view for patch, _ in with_[0]["images"]]
    assert views == sorted(views, reverse=True) and len(set(views)) > 2


@pytest.mark.gpu
@pytest.mark.parametrize(("ranks", "machines"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("mode", MODES)
def test_stages_change_nothing_on_gpus(mode: str, ranks: int, machines: int) -> None:
    """To rounding: gradients are added up by atomics there."""
    skip_without_gpus(ranks)
    outcomes = run_ranks(partial(with_and_without, machines), ranks, "locality", (mode,), device="cuda")
    for by_mode in outcomes:
        without, with_ = by_mode[mode]
        torch.testing.assert_close(with_["loss"], without["loss"])
        for (patch, image), (same, other) in zip(with_["images"], without["images"], strict=True):
            assert patch == same
            torch.testing.assert_close(image, other)
        for name, gradient in with_["gradients"].items():
            most = float(without["gradients"][name].abs().max())
            torch.testing.assert_close(gradient, without["gradients"][name], rtol=1e-3, atol=1e-4 * most)


def order_of_a_fused_step(machines: int, world: World, stages: int) -> list[str]:
    """What is begun, waited for and drawn, in this order."""
    said: list[str] = []

    def logged(name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (said.append(name), usual(*args, **kwargs))[1]

    class Watched:
        def __init__(self, work: Any) -> None:
            self._work = work

        def wait(self) -> None:
            said.append("wait")
            self._work.wait()

    usual = dist.all_to_all_single

    def exchange(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        if not async_op:
            return usual(*args, **kwargs)
        said.append("begin")
        return Watched(usual(*args, async_op=True, **kwargs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", exchange)
        patch.setattr(GaussianKernels, "draw", logged("draw", GaussianKernels.draw))
        patch.setattr(GaussianKernels, "draw_back", logged("back", GaussianKernels.draw_back))
        taken(spread_of("locality", machines, world), "step", stages)
    return said


def test_a_stage_is_drawn_while_the_next_one_travels() -> None:
    """And gradients of one while the next is drawn. Between machines rows and their number are one exchange."""
    for said in run_ranks(partial(order_of_a_fused_step, 2), 4, 2):
        assert said == [
            "begin", "wait", "begin", "draw", "back", "begin", "wait", "draw", "back", "begin", "wait", "wait"
        ]  # fmt: skip
    for said in run_ranks(partial(order_of_a_fused_step, 1), 2, 1):
        assert said == ["draw", "back"]


def order_through_autograd(world: World) -> list[str]:
    said: list[str] = []
    begin, render = row_routes.begin_rows, Gaussians.render

    def begun(*args: Any) -> Any:
        said.append("begin")
        rows, wait = begin(*args)
        return rows, lambda: (said.append("wait"), wait())[1]

    def rendered(self: Gaussians, splats: Any, *args: Any) -> Any:
        said.append("draw")
        splats.rows["conics"].register_hook(lambda _: said.append("back"))
        return render(self, splats, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_routes, "begin_rows", begun)
        patch.setattr(Gaussians, "render", rendered)
        taken(spread_of("locality", 1, world), "autograd", 2)
    return said


def test_a_stage_is_drawn_while_the_next_one_travels_through_autograd() -> None:
    """Splats are two exchanges: those numbers that have a gradient, and those that have none."""
    there = ["begin", "begin", "wait", "wait"]
    for said in run_ranks(order_through_autograd, 2):
        assert said == [
            *there, "begin", "begin", "draw", "wait", "wait", "draw", "back", "begin", "back", "begin", "wait", "wait"
        ]  # fmt: skip


def test_views_are_dealt_to_stages_in_their_order() -> None:
    assert stages_of(5, 2) == (range(2), range(2, 5)) and stages_of(2, 7) == (range(1), range(1, 2))
    assert stages_of(3, 1) == (range(3),) and stages_of(0, 4) == (range(0),)
    with pytest.raises(ValueError, match="1 stage at least, not 0"):
        stages_of(4, 0)
    patches = [Patch(view, x, 0, x + 16, 16) for view in range(3) for x in (0, 16)]
    plan = Plan.of([patches[::2], patches[1::2]])
    part = part_of(plan, range(1, 3))
    assert part.drawn == ((patches[2], patches[4]), (patches[3], patches[5])) == part.owned
    drawn = [Pixels(patch, torch.zeros(0), torch.zeros(0)) for patch in patches]
    assert [one.patch for one in in_order(drawn[::-1], patches)] == patches
    assert summed(((1, 2, 30, 40), (5, 6, 70, 80)), 2) == ((31, 42), (75, 86))


def test_what_does_not_go_by_collectives_has_no_stages() -> None:
    world = World(0, 2, 0, 2, torch.device("cpu"))
    kernels: Any = None
    for strategy, options in (("batch", {}), ("tile", {"slots": True}), ("tile", {"peer": True})):
        legs = STRATEGIES[strategy](world)
        with pytest.raises(ValueError, match="2 stages: rows that travel by collectives"):
            make_transport(legs.rows, legs.gradients, world, kernels, 8, 8, 4, atomics=False, stages=2,
                           **{"peer": False, **options})  # fmt: skip
