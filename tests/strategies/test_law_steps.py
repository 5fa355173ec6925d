"""The law for the steps that train on GPUs: gradients, losses, pixels and statistics of a step that reads nothing back
equal `single`'s, as it is launched (`step`), from what was recorded of it (`captured`), and as the second of two that
were recorded as one (`several`; of strategies whose steps are taken so).

Adam's first moment is the gradient if it begins at zero and beta1 is 0; so the operators' own update shows it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from nerfstudio.cameras.camera_optimizers import CameraOptimizer

from cuda_ext.ops.optim.adam import adam_scalars
from ns_multigpu.core.assign.assignment import RoundRobinViews
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.legs import LocalRows, SummedGradients, WholePixels
from ns_multigpu.core.exchange.transports import make_transport
from ns_multigpu.core.observations import Observations
from ns_multigpu.core.step.bilateral_grids import StepGrids
from ns_multigpu.core.step.exposures import StepExposures
from ns_multigpu.core.step.fused_support import unsupported_reason
from ns_multigpu.core.step.poses import StepPoses
from ns_multigpu.core.step.step import Step
from ns_multigpu.core.step.step_settings import StepSettings, with_halos
from ns_multigpu.core.step.tile_lists import SortedLists
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.types import Patch, Points, View, sizes_of
from ns_multigpu.plugin.blocks.graphs import GraphPool, StepGraphs
from ns_multigpu.plugin.blocks.timing import StepTimer
from ns_multigpu.primitives.gaussians.functions import Gaussians
from strategies import STRATEGIES
from tests.lib.ranks import on_gpus, run_ranks
from tests.lib.recorded import RecordedPool
from tests.strategies.scene import (
    make_gains,
    make_grids,
    make_image,
    make_layers,
    make_normals,
    make_observations,
    make_points,
    make_views,
    through_lenses,
)
from tests.strategies.test_law import (
    KNOW_MACHINES,
    LIKE_SINGLE,
    MACHINES,
    PRIMITIVES,
    SKY_WEIGHT,
    Outcome,
    check,
    corrected_by,
    held_at,
    on_machines,
    one_step,
    points_of,
    stitch,
)

KERNELS = [name for name, make in PRIMITIVES.items() if isinstance(kind := make(), Gaussians) and kind.sh_degree]
"""The 3D Gaussians that all cases are of."""
OTHERS = ["4D gaussians", "gaussians, plain colours"]
"""Other points, which few cases on a CPU are of."""
MODES = ("step", "captured")
POINTS, LAMBDA, BACKGROUND = 150, 0.2, 0.3
REPLICATED, CUT = 12, 11
"""Views of a step: divisible by 1 to 4 ranks if distributed round-robin; otherwise some views have to be cut."""
CAPACITIES = {"rows": 2048, "segment": 2048, "intersections": 65536}
Size = tuple[int, int] | None
"""Size of all views; None: each has another."""
LANDSCAPE, PORTRAIT = (61, 45), (45, 61)


def count_of(strategy: str) -> int:
    """Return the number of views of a step."""
    return REPLICATED if STRATEGIES[strategy](World.single()).placement.replicated else CUT


def step_of(
    world: World, strategy: str, primitive: str, size: Size, mode: str, by_sort: bool = False,
    half: bool | None = None,
) -> Outcome:  # fmt: skip
    """Return `take_one` with a strategy and a primitive of those names."""
    kind, whole = points_of(primitive, POINTS, torch.float32, world.device)
    return take_one(STRATEGIES[strategy](world), kind, count_of(strategy), size, mode, by_sort, half, whole)


def step_on(machines: int, world: World, *rest: Any) -> Outcome:
    """Return `step_of` with the ranks spread over so many machines."""
    return step_of(on_machines(world, machines), *rest)


def take_one(
    spread: Strategy, kind: Any, count: int, size: Size, mode: str, by_sort: bool = False, half: bool | None = None,
    whole: Points | None = None, observes: bool = False, directs: bool = False, exposes: bool = False,
    layered: bool = False, sky: bool = False, corrects: CameraOptimizer | None = None, grids: bool = False,
    lenses: bool = False, **more: Any,
) -> Outcome:  # fmt: skip
    """Return the results of `one_step` for a fused step. With `half` given rows use collectives. The points are 3D
    Gaussians, unless given; `observes`, `directs`, `exposes`, `layered`, `sky`, `corrects`, `grids`, `lenses`:
    see `take_step`; `more` are options of the kernels."""
    world = spread.world
    device = world.device
    views = make_views(count, torch.float32, device, size)
    views = through_lenses(views) if lenses else views
    spread.placement.look(lambda: views)
    held, places = held_at(spread, whole or make_points(POINTS, torch.float32, device))
    params = {name: value.detach().clone() for name, value in held.params.items()}
    begun = {name: value.clone() for name, value in params.items()}
    moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in params.items()}
    statistics = {name: torch.zeros(len(held), device=device) for name in ("grad2d", "count", "radii")}
    spread.observe(kind, held, 0)
    observed = {"observations": make_observations(count, torch.float32, device)} if observes else {}
    observed |= {"normals": make_normals(count, torch.float32, device)} if directs else {}
    of_views: dict[str, Any] = {}
    for name, wanted, make, kept in (
        ("exposures", exposes, make_gains, StepExposures), ("grids", grids, make_grids, StepGrids)
    ):  # fmt: skip
        if wanted:
            values = make(count, torch.float32, device)
            begun[name], params[name] = values.clone(), values
            moments[name] = torch.zeros_like(values), torch.zeros_like(values)
            of_views[name] = kept(values, *moments[name], count)
    step_poses, seen = None, views
    if corrects is not None:
        views = [replace(view, index=max(view.index - 1, 0)) for view in views]
        corrections = corrects.pose_adjustment.detach().clone().to(device)
        begun["corrections"], params["corrections"] = corrections.clone(), corrections
        moments["corrections"] = torch.zeros_like(corrections), torch.zeros_like(corrections)
        seen = [replace(v, viewmat=corrected_by(corrects, v).detach()) for v in views]  # plans of cells follow it
        weights = corrects.config.trans_l2_penalty, corrects.config.rot_l2_penalty
        summed = None if spread.gradients.summed else world
        step_poses = StepPoses(
            corrections, *moments["corrections"], count, cast(Any, corrects.config.mode), weights, summed
        )  # fmt: skip
    step = made(
        spread, kind, views, params, moments, statistics, by_sort, half, observed, masks=layered + sky,
        poses=step_poses,
        **of_views, **more
    )  # fmt: skip
    fill(step, views)
    if step_poses is not None:
        step_poses.indices.copy_(torch.tensor([view.index for view in views]))
    for kept in of_views.values():
        kept.indices.copy_(torch.tensor([view.index for view in views]))
    plan = with_halos(spread.plan_alike(seen), views)
    targets = []
    for patch in plan.owned[world.rank]:
        left, top, right, bottom = patch.rendered(views[patch.view])
        photograph = make_layers(views[patch.view], sky) if layered else make_image(views[patch.view])
        targets.append(photograph[top:bottom, left:right].to(device).contiguous())
    steps = 2 if mode == "several" else 1
    if mode == "step":
        step.take(plan, targets, sizes_of(views))
    else:
        parts = partial(step.parts, plan, targets, sizes_of(views))
        replay(step, parts, plan, [*moments.values()], statistics, params, begun, steps)
    status, kept = step.status(), int(step._forward.counts[step._transport.local_index])
    assert status.done == steps
    if step._transport.is_exchanged:
        sent = steps * (sum(status.segments) - kept)
        assert status.sent == sent, "of this rank's rows, those sent to others"
    gradients = {name: first.cpu() for name, (first, _) in moments.items()}
    counted = torch.zeros(3, POINTS)
    counted[:, places.cpu()] = torch.stack(list(statistics.values())).cpu()
    images = [(replace(p, halo=0), rgb.cpu()) for p, rgb in zip(plan.owned[world.rank], step.rgb, strict=True)]
    loss = step.report[:-1].sum().cpu() / len(views)
    found = {"loss": loss, "images": images, "gradients": gradients, "statistics": counted, "places": places.cpu()}
    return {**found, "learnt": step.measured_work.cpu()}


def made(
    spread: Strategy, kind: Any, views: list[View], params: Any, moments: Any, statistics: Any, by_sort: bool,
    half: bool | None = None, observed: Mapping[str, Observations] | None = None,
    exposures: StepExposures | None = None, masks: int = 0, capacities: Any = None,
    poses: StepPoses | None = None, grids: StepGrids | None = None,
    **more: Any,
) -> Step:  # fmt: skip
    """Return the step of a strategy and a primitive, with what carries its rows."""
    world, of_views = spread.world, exposures or grids
    settings = StepSettings(
        max(view.width for view in views),
        max(view.height for view in views),
        len(views),
        LAMBDA,
        **{**CAPACITIES, **(capacities or {})},
        view_numbers=0 if of_views is None else of_views.now[0].numel(),
        poses=poses is not None,
        alpha=masks > 0,
        masks=masks,
        sky_weight=SKY_WEIGHT if masks == 2 else 0.0,
        intrinsics_rows=len(views[0].K),
    )
    kernels = replace(kind, depth=False).kernels(**more)
    assert kernels is not None
    words = settings.words(spread.assignment)
    spread.rows.half, spread.rows.slots = bool(half), by_sort
    peer = world.device.type == "cuda" and world.size > 1 and half is None
    size = settings.views, settings.width, settings.height, world.size
    spread.pixels.fast_links = spread.pixels.fast_links or peer
    spread.pixels.prepare(spread.assignment.most_exchanged(*size) if peer else 0, world)
    transport = make_transport(
        spread.rows, spread.gradients, world, kernels, settings.rows, settings.segment, words, peer=peer,
    )  # fmt: skip
    lists = SortedLists(settings, world, transport.lines, peer=False) if by_sort else None
    counted = statistics if world.is_main or not spread.gradients.summed else {}
    return Step(
        kernels, params, moments, counted, settings, spread, transport, lists=lists, observed=observed,
        exposures=exposures, grids=grids, poses=poses,
    )  # fmt: skip


def replay(
    step: Step, parts: Callable[[], Any], plan: Any, moments: Any, statistics: Any, params: Any, begun: Any,
    steps: int = 1,
) -> None:  # fmt: skip
    """The step as the third one of its graphs: after one as it came and one that was captured. Only what replays write
    counts: each step wipes off what the one before it has left, as one of its operators, and so does this before the
    third. That may be several `steps`, of which the last counts."""
    device = step.report.device
    pool = GraphPool(device) if device.type == "cuda" else RecordedPool()
    graphs = StepGraphs(StepTimer(device), lambda: None, pool)
    added = [*statistics.values(), *(one for pair in moments for one in pair)]

    def redistributed() -> Any:
        for tensor in added:
            tensor.zero_()
        return (yield from parts())

    for turn in range(3):
        for name, value in begun.items():
            params[name].copy_(value)
        if turn == 2:
            for tensor in added:
                tensor.fill_(torch.nan)
            step.report.fill_(torch.nan)
            for image in step.rgb:
                image.fill_(torch.nan)
            step.status()
        step.rgb = graphs.take(plan, redistributed, steps if turn == 2 else 1)


def fill(step: Step, views: list[View]) -> None:
    step.viewmats.copy_(torch.stack([view.viewmat for view in views]))
    step.Ks.copy_(torch.stack([view.K for view in views]))
    step.backgrounds.fill_(BACKGROUND)
    step.times.copy_(torch.tensor([view.time for view in views]))
    step.scalars.copy_(torch.tensor(adam_scalars(0.0, (0.0, 0.999), 1e-15, 1)).expand_as(step.scalars))


def check_step(outcomes: list[Outcome], strategy: str, primitive: str, size: Size) -> None:
    """Return whether the ranks together did what one rank does through autograd."""
    expected = one_step(World.single(), "single", primitive, count_of(strategy), POINTS, torch.float32, size)
    replicated = STRATEGIES[strategy](World.single()).placement.replicated
    check_outcomes(outcomes, expected, count_of(strategy), size, replicated=replicated)


def check_outcomes(
    outcomes: list[Outcome], expected: Outcome, views: int, size: Size, *, replicated: bool,
    sized: bool = True,
) -> None:  # fmt: skip
    """Return whether ranks together did what is expected. Points that are not `sized` have no radii for
    densification."""
    assert sum(float(image.std()) > 0.02 for image in stitch(expected["images"]).values()) >= views - 2
    whole = torch.stack([outcome["statistics"] for outcome in outcomes]).sum(0)
    loss = torch.stack([outcome["loss"] for outcome in outcomes]).sum(0).reshape(1)
    together = outcomes[0]["gradients"]
    if not replicated:
        order = torch.cat([outcome["places"] for outcome in outcomes]).argsort()
        together = {name: torch.cat([outcome["gradients"][name] for outcome in outcomes])[order] for name in together}
    else:
        for outcome in outcomes:
            assert all(torch.equal(outcome["gradients"][name], together[name]) for name in together), "replicas differ"
    seen = {**expected, "loss": loss, "gradients": together, "statistics": whole[:2], "depths": expected["depths"]}
    fragments = [piece for outcome in outcomes for piece in outcome["images"]]
    check([{**seen, "images": fragments}], expected, torch.float32)
    most = float(whole[2].max())
    assert most > 2 / max(size or LANDSCAPE) if sized else most == 0, "radii are fractions of the longer side"


RANKS = [("single", 1), *((name, ranks) for name in LIKE_SINGLE for ranks in (1, 2, 3))]


@pytest.mark.parametrize(
    ("strategy", "ranks", "primitive", "size", "device"),
    [
        *((*row, name, size, "cpu") for row in RANKS for name, size in zip(KERNELS, [None, PORTRAIT], strict=True)),
        *(on_gpus(*row, name, None) for row in [*RANKS, *((name, 4) for name in LIKE_SINGLE)]
          for name in [*KERNELS, *OTHERS]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", MODES)
def test_a_step_equals_single(
    strategy: str, mode: str, ranks: int, primitive: str, size: Size, device: str
) -> None:  # fmt: skip
    reason = unsupported_reason(STRATEGIES[strategy](World.single()), count_of(strategy))
    if reason is not None:
        pytest.skip(f"{strategy}: {reason}")
    check_step(run_ranks(step_of, ranks, strategy, primitive, size, mode, device=device), strategy, primitive, size)


@pytest.mark.parametrize(
    ("strategy", "ranks", "primitive", "device"),
    [
        ("single", 1, KERNELS[0], "cpu"), ("batch", 2, KERNELS[0], "cpu"),
        *(on_gpus(*row, name) for row in (("single", 1), ("batch", 1), ("batch", 2), ("batch", 3))
          for name in [*KERNELS, *OTHERS]),
    ],
)  # fmt: skip
def test_a_step_behind_another_equals_single(strategy: str, ranks: int, primitive: str, device: str) -> None:
    outcomes = run_ranks(step_of, ranks, strategy, primitive, PORTRAIT, "several", device=device)
    check_step(outcomes, strategy, primitive, PORTRAIT)


@pytest.mark.parametrize("primitive", OTHERS)
@pytest.mark.parametrize(
    ("strategy", "ranks", "mode"),
    [("batch", 2, "captured"), ("tile", 3, "step"), ("locality", 2, "captured")],
)
def test_a_step_of_other_points_equals_single(strategy: str, ranks: int, mode: str, primitive: str) -> None:
    check_step(run_ranks(step_of, ranks, strategy, primitive, PORTRAIT, mode), strategy, primitive, PORTRAIT)


@pytest.mark.parametrize(("ranks", "machines"), MACHINES)
@pytest.mark.parametrize(("inside", "device"), [("collective", "cpu"), on_gpus("peer"), on_gpus("collective")])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", KNOW_MACHINES)
def test_a_step_over_machines_equals_single(
    strategy: str, mode: str, inside: str, device: str, ranks: int, machines: int
) -> None:
    """Inside a machine through peer memory, or all by collectives; between machines, which are pretended, by these."""
    half = None if inside == "peer" else False
    step = partial(step_on, machines)
    outcomes = run_ranks(step, ranks, strategy, KERNELS[0], PORTRAIT, mode, False, half, device=device)
    check_step(outcomes, strategy, KERNELS[0], PORTRAIT)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_lists_from_a_sort_over_all_ranks(ranks: int) -> None:
    outcomes = run_ranks(step_of, ranks, "tile", KERNELS[1], None, "step", True)
    check_step(outcomes, "tile", KERNELS[1], None)


class RoundRobin(RoundRobinViews):
    """View 0 to rank 0, view 1 to rank 1, ..."""

    def assign(self, views: Sequence[View], ranks: int, holders: Sequence[int] | None = None) -> Plan:
        return Plan.of([Patch.whole(v, views[v]) for v in range(rank, len(views), ranks)] for rank in range(ranks))


class OtherRows(LocalRows):
    """Row leg without a known transport."""


class OtherPixels(WholePixels):
    """The same of pixels."""


class OtherGradients(SummedGradients):
    """The same of gradients."""


def test_unsupported_strategy_is_refused_before_the_first_step() -> None:
    world = replace(World.single(), size=2)
    batch = STRATEGIES["batch"](world)
    assert (
        unsupported_reason(batch, 4) is None and unsupported_reason(replace(batch, assignment=RoundRobin()), 2) is None
    )
    for other, words in (
        (replace(batch, assignment=RoundRobin()), r"rank 0 would splat its points for the views \[0, 2\]"),
        (replace(batch, rows=OtherRows()), "OtherRows has no operators that exchange rows"),
        (replace(batch, pixels=OtherPixels()), "OtherPixels has no operators that exchange pixels"),
        (replace(batch, gradients=OtherGradients(world)), "OtherGradients has no operators that exchange gradients"),
    ):
        assert re.search(words, unsupported_reason(other, 4) or "")
    assert "at least one" in (unsupported_reason(batch, 1) or ""), "the other rank has none"


def test_contradicting_parts_are_refused() -> None:
    world = replace(World.single(), size=2)
    batch, tile = STRATEGIES["batch"](world), STRATEGIES["tile"](world)
    for one, other in ((batch, {"rows": tile.rows}), (batch, {"gradients": tile.gradients})):
        with pytest.raises(ValueError, match="every rank holds every point, rows stay and gradients are summed"):
            replace(one, **other)
    with pytest.raises(ValueError, match="each has one owner"):
        replace(tile, gradients=batch.gradients)
    cut = replace(batch, assignment=tile.assignment)
    with pytest.raises(ValueError, match=r"view 0 of the batch is cut.*place points with `Sharded`"):
        cut.plan(make_views(1, torch.float32))
