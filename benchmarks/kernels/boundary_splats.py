"""Time boundary splats on one GPU: steps of `pixel` with 4 cells compared with `single`, and the operators of boundary
splats, by our kernels and composed of torch's operators.

    python -m benchmarks.kernels.boundary_splats [--points 500000 2000000 8000000] [--views N] [--json FILE]

The scene is the procedural city from the air at 1920 x 1080. Steps are launched one kernel after the other, as steps of
`pixel` are in training; those of `single` also replay a CUDA graph, as in training. One GPU draws all 4 cells, each
from the lists of all splats in its rectangle. With `ghosts` it sorts the work of 4 GPUs. The operators get all rows of
the model, and route them to 4 GPUs; each of 4 GPUs has a quarter.

Splaxel's filter is not available for training (docs/methods/pixel.md), so it has no step to time.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.lib.environment import describe
from benchmarks.lib.stopwatch import Stopwatch, captured, free
from benchmarks.scenes.city_model import CityScene, make_model
from cuda_ext import clip_lists, use_reference
from cuda_ext.ops.exchange.row_exchange import route_lines
from cuda_ext.ops.optim.adam import adam_scalars
from ns_multigpu.cells.boundary import CellsInViews
from ns_multigpu.cells.options import PixelOptions
from ns_multigpu.cells.placing import ByCells
from ns_multigpu.cells.sharing import CellPixels
from ns_multigpu.core.assign.plan import Plan, rectangles
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.transports import OwnRows
from ns_multigpu.core.kernels import Cameras
from ns_multigpu.core.step.step import Step
from ns_multigpu.core.step.step_settings import StepSettings, padded, with_halos
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.types import Points, View
from ns_multigpu.primitives.gaussians.functions import Gaussians
from strategies.pixel import pixel
from strategies.single import single

CELLS, WIDTH, HEIGHT, DEGREE = 4, 1920, 1080, 3
_KIND = Gaussians(sh_degree=DEGREE)
_NAMES = ("grad2d", "count", "radii")


class _Launches(TorchDispatchMode):
    """Counts operators that do something on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or "empty" in func.__name__ or "detach" in func.__name__)
        return func(*args, **(kwargs or {}))


def launches(work: Callable[[], Any]) -> int:
    """Operators of torch, and of ours, that `work` calls; views and empty tensors are not counted."""
    with _Launches() as counted:
        work()
    return counted.count


def step_of(spread: Strategy, points: Points, views: Sequence[View], capacities: tuple[int, int]) -> Callable[[], Step]:
    """Takes a step each time that it is called. `capacities` is for rows and intersections."""
    world = spread.world
    spread.placement.look(lambda: list(views))
    params = {name: value.clone() for name, value in spread.placement.hold(points, world).params.items()}
    moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in params.items()}
    sums = {name: torch.zeros(len(points), device=world.device) for name in _NAMES}
    spread.observe(_KIND, Points(params), 0)
    settings = StepSettings(WIDTH, HEIGHT, len(views), 0.2, rows=capacities[0], segment=1, intersections=capacities[1])
    kernels = _KIND.kernels()
    assert kernels is not None
    rows = OwnRows(world, kernels, settings.rows, settings.segment, settings.words(spread.assignment))
    step = Step(kernels, params, moments, sums, settings, spread, rows)
    step.viewmats.copy_(torch.stack([view.viewmat for view in views]))
    step.Ks.copy_(torch.stack([view.K for view in views]))
    numbers = [adam_scalars(1e-6, (0.9, 0.999), 1e-15, 1)] * len(kernels.parameters)
    step.scalars.copy_(torch.tensor(numbers))
    plan = with_halos(spread.plan_alike(list(views)), views)
    g = torch.Generator(world.device).manual_seed(1)
    targets = [
        torch.randint(0, 256, (y1 - y0, x1 - x0, 3), generator=g, device=world.device, dtype=torch.uint8)
        for patch in plan.owned[0]
        for x0, y0, x1, y1 in [patch.rendered(views[patch.view])]
    ]

    def take() -> Step:
        step.take(plan, targets)
        return step

    return take


def time_step(spread: Strategy, points: Points, views: Sequence[View], iterations: int, *, graph: bool = False) -> Any:
    """Milliseconds, and intersections."""
    device, rows = spread.world.device, padded(len(points) * len(views))
    capacities = rows, padded(2 * len(points) * len(views) + 200_000)
    take = step_of(spread, points, views, capacities)
    status = take().status()
    if status.full:
        take = step_of(spread, points, views, (rows, padded(status.intersections)))
        status = take().status()
    if status.full or status.done != 1:
        raise RuntimeError(f"the step was not taken: {status}")
    watch = Stopwatch(device, iterations)
    ms = watch.median(captured(take, device) if graph else take)
    return ms, status.intersections


def space_of(points: Points, world: World) -> ByCells:
    """As `CELLS` GPUs would cut the model, seen from the first."""
    alone = pixel(world, PixelOptions(cells=CELLS))
    alone.placement.hold(points, world)
    alone.observe(_KIND, points, 0)
    made = alone.placement
    assert isinstance(made, ByCells)
    space = ByCells(replace(world, size=CELLS), PixelOptions(cells=CELLS))
    space.tree, space.boxes = made.tree, made.boxes
    return space


def operators(points: Points, views: Sequence[View], world: World, iterations: int) -> list[dict[str, Any]]:
    """Of each operator milliseconds and launches, by kernels and by torch."""
    space = space_of(points, world)
    cells_in_views, device = CellsInViews(space), world.device
    plan: Plan = with_halos(CellPixels(space).assign(views, CELLS), views)
    kernels = _KIND.kernels()
    assert kernels is not None
    params = dict(points.params)
    moments = {name: (torch.zeros(0, device=device), torch.zeros(0, device=device)) for name in params}
    model = kernels.model(params, moments, {}, None)
    matrices = torch.stack([v.viewmat for v in views]), torch.stack([v.K for v in views])
    cameras = Cameras(*matrices, (WIDTH, HEIGHT) * len(views), torch.zeros(len(views), device=device))
    rows = kernels.project(model, cameras, padded(len(points) * len(views)))
    real = int(rows.count)
    del params, moments, model
    rows = type(rows)(*(t[:real].contiguous() if t.dim() and len(t) > real else t for t in rows))
    place = torch.empty(CELLS, real, dtype=torch.int32, device=device)
    counts = torch.zeros(CELLS, dtype=torch.int64, device=device)
    drawn = rectangles(plan, views, range(CELLS))
    cells = [patch.cell for patches in plan.drawn for patch in patches]
    arrived = kernels.receive_local(rows, torch.zeros(real, dtype=torch.int32, device=device),
                           torch.arange(real, dtype=torch.int32, device=device))  # fmt: skip
    mine = [n for p in plan.drawn[0] for n in (p.view, *p.rendered(views[p.view]))]
    offsets, ids, met = kernels.intersect(arrived, mine, padded(8 * real))
    windows, reached = cells_in_views.windows(plan, views, 0).float(), cells_in_views.reached_by(rows, views)
    where = rows.view_ids, rows.count, rows.means2d, rows.radii
    works: dict[str, Callable[[], Any]] = {
        "windows of all tiles": lambda: cells_in_views.windows(plan, views, 0),
        "reach": lambda: cells_in_views.reached_by(rows, views),
        "routes": lambda: route_lines(*where, drawn, 0, real, place, counts, reached, cells),
        "lists cut to windows": lambda: clip_lists(offsets, ids, arrived.depths, windows),
    }
    found: list[dict[str, Any]] = []
    watch = Stopwatch(device, iterations)
    for name, work in works.items():
        ours, theirs = work(), by_torch(work)
        if not all(torch.equal(a, b) for a, b in zip(_tensors(ours), _tensors(theirs), strict=True)):
            raise RuntimeError(f"{name}: kernels and torch differ")
        found.append({
            "what": name, "rows": real, "intersections": int(met), "tiles": len(windows),
            "kernels_ms": watch.median(work), "kernels_calls": launches(work),
            "torch_ms": watch.median(partial(by_torch, work)), "torch_calls": launches(partial(by_torch, work)),
        })  # fmt: skip
    return found


def by_torch(work: Callable[[], Any]) -> Any:
    """The same of torch's operators."""
    with use_reference():
        return work()


def _tensors(result: Any) -> list[Tensor]:
    if result is None:
        return []
    return [result] if isinstance(result, Tensor) else list(result)


def measure(points: int, views: int, device: torch.device, iterations: int, console: Console) -> dict[str, Any]:
    """All figures of one size of model."""
    world = World.single(device)
    city = CityScene(points, WIDTH, HEIGHT, views=max(views, 2))
    seen = [replace(view, viewmat=view.viewmat.to(device), K=view.K.to(device)) for view in city.cameras()[:views]]
    model = make_model(city, world)
    model = Points({name: value.detach() for name, value in model.params.items()})
    table = Table(title=f"{points / 1e6:g} M Gaussians, {views} view(s) of {WIDTH}x{HEIGHT}", title_justify="left")
    for column in ("step", "ms", "intersections"):
        table.add_column(column)
    steps: dict[str, Any] = {}
    variants: dict[str, tuple[Callable[[], Strategy], bool]] = {
        "single, a graph": (lambda: single(world), True),
        "single, launched": (lambda: single(world), False),
        "pixel, clipped splats": (lambda: pixel(world, PixelOptions(cells=CELLS, crossing="none")), False),
        "pixel, boundary splats": (lambda: pixel(world, PixelOptions(cells=CELLS, crossing="ghosts")), False),
    }
    for name, (make, graph) in variants.items():
        ms, intersections = time_step(make(), model, seen, iterations, graph=graph)
        steps[name] = {"ms": ms, "intersections": intersections}
        table.add_row(name, f"{ms:.2f}", f"{intersections:,}")
        free(device)
    console.print(table)
    parts = operators(model, seen, world, iterations)
    table = Table("operator", "kernels, ms", "calls", "torch, ms", "calls")
    for one in parts:
        table.add_row(
            one["what"], f"{one['kernels_ms']:.3f}", str(one["kernels_calls"]), f"{one['torch_ms']:.3f}",
            str(one["torch_calls"]),
        )  # fmt: skip
    console.print(table)
    free(device)
    return {"points": points, "views": views, "steps": steps, "operators": parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, nargs="+", default=[500_000, 2_000_000, 8_000_000])
    parser.add_argument("--views", type=int, default=1, help="of a step")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    device, console = torch.device(options.device), Console(width=110)
    found = []
    with torch.no_grad():
        for points in options.points:
            found.append(measure(points, options.views, device, options.iterations, console))
            if options.json is not None:  # after each: a later size may not fit
                report = {"environment": describe(), "measured": found}
                options.json.write_text(json.dumps(report, indent=1) + "\n", "utf8")


if __name__ == "__main__":
    sys.exit(main())
