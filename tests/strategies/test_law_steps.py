"""The law for the steps that train on GPUs: gradients, losses, pixels and statistics of a fused step equal `single`'s.

Adam's first moment is the gradient if it begins at zero and beta1 is 0; so the operators' own update shows it.
"""

from dataclasses import replace

import pytest
import torch

from cuda_ext.ops.adam import adam_scalars
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.types import Patch, View
from ns_multigpu.core.world import World
from ns_multigpu.plugin.blocks.composed import training_of
from ns_multigpu.plugin.blocks.fused_training import FusedTraining
from ns_multigpu.plugin.blocks.tile_training import TileTraining
from ns_multigpu.primitives.fused_step import ORDER, FusedStep, StepSettings
from ns_multigpu.primitives.gaussians import Gaussians
from ns_multigpu.primitives.tile_lists import SortedLists
from ns_multigpu.primitives.tile_rows import CollectiveRows, OwnRows
from ns_multigpu.primitives.tile_settings import TileSettings, bands
from ns_multigpu.primitives.tile_step import TileStep
from strategies import STRATEGIES
from tests.ranks import run_ranks
from tests.strategies.scene import make_image, make_points, make_views
from tests.strategies.test_law import PRIMITIVES, Outcome, Pieces, check, one_step, stitch

KERNELS = [name for name, make in PRIMITIVES.items() if getattr(make(), "sh_degree", None)]
"""The primitives that have a fused step: plain colours take the ordinary one."""
POINTS, LAMBDA, BACKGROUND = 150, 0.2, 0.3
DEALT, CUT = 12, 11
"""Views of a step: as many for each of 1 to 4 ranks where they are dealt out; else so many that some have to be cut."""
ROOM = {"rows": 2048, "intersections": 16384}
LANDSCAPE, PORTRAIT = (61, 45), (45, 61)


Tensors = dict[str, torch.Tensor]
Moments = dict[str, tuple[torch.Tensor, torch.Tensor]]


def count_of(strategy: str) -> int:
    """How many views a step has."""
    return DEALT if STRATEGIES[strategy](World.single()).placement.replicated else CUT


def fused_step(world: World, strategy: str, primitive: str, size: tuple[int, int], by_sort: bool = False) -> Outcome:
    """What `one_step` returns, of the fused step that a strategy of that name trains with."""
    spread, kind = STRATEGIES[strategy](world), PRIMITIVES[primitive]()
    assert isinstance(kind, Gaussians) and kind.sh_degree
    views = make_views(count_of(strategy), torch.float32, size=size)
    held = spread.placement.hold(make_points(POINTS, torch.float32), world)
    params = {name: value.detach() for name, value in held.params.items()}
    moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in params.items()}
    statistics = {name: torch.zeros(len(held)) for name in ("grad2d", "count", "radii")}
    take = {FusedTraining: _whole_views, TileTraining: _bands}[training_of(spread) or FusedTraining]
    loss, images = take(spread, kind, views, params, moments, statistics, by_sort)
    gradients, counted = {name: first for name, (first, _) in moments.items()}, torch.zeros(3, POINTS)
    if spread.placement.replicated:
        counted = torch.stack(list(statistics.values()))
    else:
        lengths = [POINTS * rank // world.size for rank in range(world.size + 1)]
        counted[:, lengths[world.rank] : lengths[world.rank + 1]] = torch.stack(list(statistics.values()))
    return {"loss": loss, "images": images, "gradients": gradients, "statistics": counted}


def _whole_views(
    spread: Strategy,
    kind: Gaussians,
    views: list[View],
    params: Tensors,
    moments: Moments,
    statistics: Tensors,
    by_sort: bool,
) -> tuple[torch.Tensor, Pieces]:
    world, each = spread.world, len(views) // spread.world.size
    settings = StepSettings(
        views[0].width, views[0].height, each, kind.sh_degree or 0, kind.antialiased, kind.absgrad, LAMBDA, **ROOM
    )
    step = FusedStep(params, moments, statistics if world.is_main else {}, settings, world)
    first = world.rank * each
    _fill(step, views)
    step.targets.copy_(torch.stack([make_image(view) for view in views[first : first + each]]))
    step.render()
    step.exchange()
    step.update()
    assert step.status().done == 1
    images = [(Patch.whole(first + v, views[first + v]), step.rgb[v]) for v in range(each)]
    return step.report[:-1].sum() / len(views), images


def _bands(
    spread: Strategy,
    kind: Gaussians,
    views: list[View],
    params: Tensors,
    moments: Moments,
    statistics: Tensors,
    by_sort: bool,
) -> tuple[torch.Tensor, Pieces]:
    world = spread.world
    settings = TileSettings(
        views[0].width, views[0].height, len(views), kind.sh_degree or 0, kind.antialiased, kind.absgrad, LAMBDA,
        segment=ROOM["rows"], **ROOM,
    )  # fmt: skip
    shape = (settings.rows, settings.segment, settings.words)
    rows = OwnRows(world, *shape) if world.size == 1 else CollectiveRows(world, *shape)
    lists = SortedLists(settings, world, peer=False) if by_sort else None
    step = TileStep(params, moments, statistics, settings, world, rows, lists=lists)
    _fill(step, views)
    plan = bands(spread.plan(views), settings)
    own = plan[world.rank]
    targets = []
    for patch in own:
        _, top, _, bottom = patch.rendered(views[patch.view])
        targets.append(make_image(views[patch.view])[top:bottom].contiguous())
    step.render(plan, targets)
    step.update()
    assert step.status().done == 1
    images = [(replace(patch, halo=0), rgb) for patch, rgb in zip(own, step.rgb, strict=True)]
    return step.report[:-1].sum() / len(views), images


def _fill(step: FusedStep | TileStep, views: list[View]) -> None:
    step.viewmats.copy_(torch.stack([view.viewmat for view in views]))
    step.Ks.copy_(torch.stack([view.K for view in views]))
    step.backgrounds.fill_(BACKGROUND)
    step.scalars.copy_(torch.tensor([adam_scalars(0.0, (0.0, 0.999), 1e-15, 1) for _ in ORDER]))


def check_step(outcomes: list[Outcome], strategy: str, primitive: str, size: tuple[int, int]) -> None:
    """Whether the ranks together did what one rank does through autograd."""
    expected = one_step(World.single(), "single", primitive, count_of(strategy), POINTS, torch.float32, size)
    assert sum(float(image.std()) > 0.02 for image in stitch(expected["images"]).values()) >= count_of(strategy) - 2
    whole = torch.stack([outcome["statistics"] for outcome in outcomes]).sum(0)
    loss = torch.stack([outcome["loss"] for outcome in outcomes]).sum(0).reshape(1)
    together = outcomes[0]["gradients"]
    if not STRATEGIES[strategy](World.single()).placement.replicated:
        together = {name: torch.cat([outcome["gradients"][name] for outcome in outcomes]) for name in together}
    for outcome in outcomes:
        if len(outcomes) > 1 and together is outcomes[0]["gradients"]:
            assert all(torch.equal(outcome["gradients"][name], together[name]) for name in together), "replicas differ"
    seen = {**expected, "loss": loss, "gradients": together, "statistics": whole[:2], "depths": expected["depths"]}
    pieces = [piece for outcome in outcomes for piece in outcome["images"]]
    check([{**seen, "images": pieces}], expected, torch.float32)
    assert float(whole[2].max()) > 2 / max(size), "radii are fractions of the longer side"


@pytest.mark.parametrize("size", [LANDSCAPE, PORTRAIT], ids=["landscape", "portrait"])
@pytest.mark.parametrize("primitive", KERNELS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_fused_step_equals_single(strategy: str, ranks: int, primitive: str, size: tuple[int, int]) -> None:
    if strategy == "single" and ranks > 1:
        pytest.skip("`single` has one rank")
    if training_of(STRATEGIES[strategy](World.single())) is None:
        pytest.skip(f"no fused step is composed of what {strategy} is made of")
    check_step(run_ranks(fused_step, ranks, strategy, primitive, size), strategy, primitive, size)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_lists_from_a_sort_over_all_ranks(ranks: int) -> None:
    outcomes = run_ranks(fused_step, ranks, "tile", KERNELS[1], PORTRAIT, True)
    check_step(outcomes, "tile", KERNELS[1], PORTRAIT)
