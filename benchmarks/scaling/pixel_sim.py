"""Simulate the traffic and balance of `pixel`: cells of a procedural city, counted on the CPU.

    python -m benchmarks.scaling.pixel_sim --kind aerial --altitude 150 --json FILE
    python -m benchmarks.scaling.pixel_sim --kind street

Nothing is drawn or exchanged. The code of training cuts the cells and makes the plans. Bytes are those of the plans'
routes. Cells and views of a step are as many as GPUs. The bytes of `tile` are those of `ns-multigpu plan`, with the
share of points that a view of this city shows. `boundary_bytes` are those of splats that overlap other cells, with
`--pipeline.pixel.crossing ghosts`. They are counted on the sampled points. Standard deviations shrink with the square
root of the ratio of the model's size to the sample's.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from benchmarks.lib.report import empty_table, write_report
from benchmarks.scenes.seen_city import points_seen, viewmat_of
from cuda_ext.ops.project.culling import cull
from ns_multigpu.cells.balancing import loads_of, order_balanced
from ns_multigpu.cells.boundary import CellsInViews
from ns_multigpu.cells.options import PixelOptions
from ns_multigpu.cells.placing import ByCells
from ns_multigpu.cells.sharing import CellPixels
from ns_multigpu.city.capture import CityCapture, Kind
from ns_multigpu.city.city import City
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.boundary_rows import BoundaryRows
from ns_multigpu.core.exchange.fragments import routes_of
from ns_multigpu.core.step.step_settings import with_halos
from ns_multigpu.core.types import Points, View
from ns_multigpu.planning.work import PIXEL_BYTES, Workload, share
from ns_multigpu.primitives.gaussians.functions import Gaussians

Crossings = Literal["none", "ghosts"]
MODELS = (8_000_000, 50_000_000, 200_000_000)
BOUNDARY_BYTES = 48 + 36
"""Of a row there and back (`row_words`, `gradient_words`)."""
_BOUNDARY_STEPS = 3
_TRACED = 64
_EXTENT_SIGMA = 3.33
"""Radius of a splat's footprint in standard deviations."""


@dataclass(frozen=True)
class Scene:
    """A capture's views and points.

    Attributes:
        views: the training views. means: [N, 3]. extent: [N, 3] half sizes of the points' boxes.
        shown: the part of the points that a view shows, in the mean.
    """

    views: list[View]
    means: torch.Tensor
    extent: torch.Tensor
    shown: float


def scene_of(kind: Kind, blocks: int, views: int, points: int, altitude: float | None) -> Scene:
    """Return views of 1920x1080 of a city, and points where they show something."""
    width, height = 1920, 1080
    capture = CityCapture(City(blocks, 7), kind, views, width, height, 1, altitude=altitude)
    depths = torch.stack([capture.depth(v, scale=_TRACED / width) for v in track(range(views), "tracing")])
    means, scales = points_seen(capture, depths, points)
    K = torch.tensor([[capture.fx, 0.0, capture.cx], [0.0, capture.fy, capture.cy], [0.0, 0.0, 1.0]])
    cameras = [View(viewmat_of(capture, v)[0], K, width, height, v) for v in range(views)]
    shown = 0
    for view in cameras[::10]:
        size = [width, height]
        solid = torch.full((len(means),), 0.7)
        shown += len(cull(means, scales, solid, view.viewmat[None], K[None], size, [0, 0, *size])[1])
    return Scene(cameras, means, _EXTENT_SIGMA * scales, shown / len(cameras[::10]) / len(means))


def boundary_bytes_of(scene: Scene, space: ByCells, plan: Plan, batch: list[View], points: int) -> float:
    """Return the most bytes of boundary splats that one GPU receives and returns gradients of."""
    tree = space.tree
    assert tree is not None
    gaussians = Gaussians(sh_degree=None)
    params = {
        "means": scene.means, "quats": torch.tensor([1.0, 0, 0, 0]).expand(len(scene.means), 4).contiguous(),
        "scales": (scene.extent / _EXTENT_SIGMA * (len(scene.means) / points) ** 0.5).log(),
        "opacities": torch.full((len(scene.means), 1), 0.85), "features_dc": torch.zeros(len(scene.means), 3),
    }  # fmt: skip
    held = Points(params)
    own = gaussians.splat(held, gaussians.cull(held, batch, range(len(batch))), batch)
    owners = torch.tensor([space.rank_of(cell) for cell in range(space.cells)])[tree.of(scene.means)]
    owner = owners[own.hits.point_ids.long()]
    drawn = [(rank, patch) for rank, patches in enumerate(plan.drawn) for patch in patches]
    lines, _ = BoundaryRows(CellsInViews(space)).route(own, batch, drawn, len(plan.drawn))
    into = [int(((there >= 0) & (owner != rank)).sum()) for rank, there in enumerate(lines)]
    return BOUNDARY_BYTES * max(into) * points / len(scene.means)


def space_of(scene: Scene, gpus: int, boundary_mode: Crossings) -> ByCells:
    """Return a cell for each GPU, as training cuts and measures them; of rank 0."""
    world = World(0, gpus, 0, gpus, torch.device("cpu"))
    space = ByCells(world, PixelOptions(crossing=boundary_mode))
    space.shares(len(scene.means), lambda: scene.means, gpus)
    assert space.tree is not None
    # Boxes as training measures them, of all ranks at once.
    everywhere = ByCells(World.single(), PixelOptions(cells=gpus, crossing=boundary_mode))
    everywhere.tree = space.tree
    everywhere.moved(scene.means)
    everywhere.observe(Points({"means": scene.means}), lambda: scene.extent, 0, World.single())
    space.boxes = everywhere.boxes
    return space


def row_of(scene: Scene, gpus: int, steps: int, boundary_mode: Crossings = "ghosts") -> dict[str, Any]:
    """Return traffic and balance for a number of GPUs: means over steps."""
    space = space_of(scene, gpus, boundary_mode)
    assert space.boxes is not None
    loads = loads_of(space.boxes, scene.views)
    pixels = scene.views[0].width * scene.views[0].height
    drawn_by = (loads > 0).sum(1)
    order = np.random.default_rng(5).permutation(len(scene.views)).tolist()
    run = Workload(1, 1920, 1080, views=gpus, gpus=gpus, visible=max(scene.shown, 1e-6))
    row: dict[str, Any] = {
        "gpus": gpus,
        "in sight": float(loads.sum() / loads.size / pixels),
        "GPUs a view": float(drawn_by.mean()),
        "one view a step": float(drawn_by.mean() / gpus),
        "tile": {n: share("tile", run.with_points(n)).traffic_padded for n in MODELS},
    }
    assignment = CellPixels(space)
    for name, some in (("as drawn", order), ("leveled", order_balanced(order, loads, gpus))):
        batches = [some[k : k + gpus] for k in range(0, len(some) - gpus + 1, gpus)][:steps]
        level, sent, naive, gathered = [], [], [], []
        boundary_bytes: dict[int, list[float]] = {n: [] for n in MODELS}
        for batch in batches:
            load = loads[batch].sum(0)
            level.append(load.mean() / load.max())
            views = [scene.views[v] for v in batch]
            plan = with_halos(assignment.assign(views, gpus), views)
            routes = [routes_of(plan, views, rank) for rank in range(gpus)]
            sent.append(max(PIXEL_BYTES * (sum(r.receive) + sum(r.receive_back)) for r in routes))
            if boundary_mode == "ghosts" and name == "leveled" and len(sent) <= _BOUNDARY_STEPS:
                for n, found in boundary_bytes.items():
                    found.append(boundary_bytes_of(scene, space, plan, views, n))
            naive.append(PIXEL_BYTES * (gpus - 1) * pixels * len(batch))  # all pixels of all, as Splaxel begins
            # All pixels in sight, to each GPU that draws any of the view: Splaxel's selective all-to-all.
            others = (loads[batch].sum(1)[:, None] - loads[batch]) * (loads[batch] > 0)
            gathered.append(PIXEL_BYTES * others.sum(0).max())
        row[name] = {
            "level": float(np.mean(level)), "sent": float(np.mean(sent)), "naive": float(np.mean(naive)),
            "gathered": float(np.mean(gathered)),
            "ghosts": {n: float(np.mean(found)) for n, found in boundary_bytes.items() if found},
        }  # fmt: skip
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=["aerial", "street"], default="aerial")
    parser.add_argument("--crossing", choices=["none", "ghosts"], default="ghosts")
    parser.add_argument("--altitude", type=float, default=None)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--views", type=int, default=400)
    parser.add_argument("--points", type=int, default=200_000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--gpus", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    scene = scene_of(given.kind, given.blocks, given.views, given.points, given.altitude)
    rows = [row_of(scene, gpus, given.steps, given.crossing) for gpus in track(given.gpus, "planning")]
    names = ["GPUs", "GPUs a view", "in sight", "level: one view", "random", "leveled", "all-gather"]
    names += ["in sight, to all", "direct send", *(f"tile, {n // 10**6} M" for n in MODELS)]
    names += [f"boundary, {n // 10**6} M" for n in MODELS if given.crossing == "ghosts"]
    title = f"{given.kind}: a view shows {scene.shown:.2%} of the points; MB into the busiest GPU a step"
    table = empty_table(title, names, left=())
    for row in rows:
        plain, level = row["as drawn"], row["leveled"]
        numbers = [plain["naive"], level["gathered"], level["sent"], *row["tile"].values(), *level["ghosts"].values()]
        table.add_row(
            str(row["gpus"]), f"{row['GPUs a view']:.2f}", f"{row['in sight']:.1%}", f"{row['one view a step']:.2f}",
            f"{plain['level']:.2f}", f"{level['level']:.2f}", *(f"{n / 1e6:,.1f}" for n in numbers),
        )  # fmt: skip
    Console(width=180).print(table)
    write_report(given.json, benchmark="pixel_sim", shown=scene.shown, rows=rows)


if __name__ == "__main__":
    main()
