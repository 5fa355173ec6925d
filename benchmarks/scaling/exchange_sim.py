"""What `pixel` sends where splats, pixels or whichever is less travel, on paper: counted on the CPU.

    python -m benchmarks.scaling.exchange_sim --kind aerial --altitude 150 --json FILE
    python -m benchmarks.scaling.exchange_sim --kind street

The scene, the cells and the steps are those of `pixel_sim`, without ghosts. Splats of each view and cell are projected
and counted as a step counts them, and multiplied up to models of 8 to 200 million Gaussians, which are smaller as they
are more. Plans and decisions are made by the code that trains, when each view comes for the second time. Bytes are
those that a fused step sends: of pixels the plans' routes, of splats the plans' room, and the counts that ranks tell
each other. Those of `tile` and `locality` are `ns-multigpu plan`'s; of `locality` with each GPU on a machine of its
own.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.lib.environment import describe
from benchmarks.scaling.pixel_sim import MODELS, Scene, scene_of, space_of
from cuda_ext.ops.row_spans import row_spans
from ns_multigpu.cells.exchange import GRADIENT_BYTES, PIXEL_BYTES, ROW_BYTES, WAYS, Exchange, Kind
from ns_multigpu.cells.leveling import leveled, loads_of
from ns_multigpu.cells.placing import ByCells
from ns_multigpu.cells.seen import NEAR
from ns_multigpu.cells.sharing import CellPixels
from ns_multigpu.core.pieces import routes_of
from ns_multigpu.core.plan import Plan
from ns_multigpu.core.step_settings import with_halos
from ns_multigpu.core.types import View
from ns_multigpu.planning.work import Course, share

KINDS = WAYS
_REACH, _BLUR = 3.33, 0.3
"""Standard deviations that a splat reaches; what its variance in pixels is raised by."""


def spans_of(scene: Scene, cells: torch.Tensor, count: int, view: View, model: int) -> np.ndarray:
    """[cells, 2 * rows of tiles] float64: `row_spans` of a view in a model of so many Gaussians."""
    points = scene.means.double() @ view.viewmat[:3, :3].double().T + view.viewmat[:3, 3].double()
    before = (points[:, 2] >= NEAR).nonzero()[:, 0]
    points, cells = points[before], cells[before]
    means2d = points @ view.K[:2].double().T / points[:, 2:]
    # As many more Gaussians on the same surfaces are each as much smaller.
    sigma = scene.reach[before].double() / _REACH * (len(scene.means) / model) ** 0.5
    radii = (_REACH * (sigma[:, :2] * view.K[0, 0].double() / points[:, 2:]).square().add(_BLUR).sqrt()).ceil()
    spans = row_spans(cells.int(), means2d, radii.int(), [(view.width, view.height)] * count)
    return spans.view(count, -1).numpy() * (model / len(scene.means))


def bytes_of(plan: Plan, views: Sequence[View], ranks: int, words: int) -> tuple[np.ndarray, float]:
    """[ranks] bytes into each rank in a step; and the part of layers' owners that are sent splats."""
    into = np.full(ranks, 8.0 * words * (ranks - 1))
    halos = with_halos(plan, views[0].width, views[0].height)
    for rank in range(ranks):
        routes = routes_of(halos, views, rank)
        into[rank] += PIXEL_BYTES * (sum(routes.receive) + sum(routes.receive_back))
    if plan.room:
        room = np.array(plan.room)
        into += ROW_BYTES * room.sum(0) + GRADIENT_BYTES * room.sum(1)
    homes = plan.homes
    away = sum(homes[p.cell] != rank for rank, of in enumerate(plan.drawn) for p in of) if homes else 0
    return into, float(away)


def steps_of(scene: Scene, space: ByCells, kind: Kind, batches: Sequence[Sequence[int]], spans: dict[int, np.ndarray]
             ) -> dict[str, float]:  # fmt: skip
    """Means over steps: bytes into the busiest rank and into all of them, and how many layers go as splats."""
    ranks = space.cells
    homes = [space.rank_of(cell) for cell in range(ranks)]
    exchange = None if kind == "pixels" else Exchange(kind, homes)
    assignment = CellPixels(space, exchange=exchange)
    if exchange is not None:
        exchange.keep(space.tree)
    busiest, total, away = [], [], []
    for batch in batches:
        views = [scene.views[v] for v in batch]
        if kind != "pixels":
            assignment.learn(views, np.stack([spans[v] for v in batch], 1).reshape(-1).round().astype(int).tolist())
        plan = assignment.assign(views, ranks)
        assert plan.room or kind == "pixels", "all views are known"
        words = assignment.counts(len(views), views[0].width, views[0].height)
        into, layers = bytes_of(plan, views, ranks, words)
        busiest.append(into.max())
        total.append(into.sum())
        away.append(layers)
    figures = assignment.figures()
    part = figures.get("layers_as_splats", 0.0)
    return {
        "busiest": float(np.mean(busiest)), "mean": float(np.mean(total)) / ranks, "as splats": part,
        "layers as splats a step": float(np.mean(away)),
    }  # fmt: skip


def rows_of(scene: Scene, gpus: int, steps: int) -> list[dict[str, Any]]:
    """What so many GPUs send, of models of each size."""
    space = space_of(scene, gpus, "none")
    assert space.tree is not None and space.boxes is not None
    loads = loads_of(space.boxes, scene.views)
    order = np.random.default_rng(5).permutation(len(scene.views)).tolist()
    some = leveled(order, loads, gpus)
    batches = [some[k : k + gpus] for k in range(0, len(some) - gpus + 1, gpus)][:steps]
    cells = space.tree.of(scene.means)
    course = Course(1, 1920, 1080, views=gpus, gpus=gpus, visible=max(scene.shown, 1e-6))
    rows: list[dict[str, Any]] = []
    for model in MODELS:
        spans = {v: spans_of(scene, cells, gpus, scene.views[v], model) for batch in batches for v in batch}
        row: dict[str, Any] = {"gpus": gpus, "model": model}
        planned = course.with_points(model)
        row["tile"] = share("tile", planned).traffic_padded
        row["locality"] = share("locality", replace(planned, machines=gpus)).traffic_padded
        rows.append(row | {kind: steps_of(scene, space, kind, batches, spans) for kind in KINDS})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=["aerial", "street"], default="aerial")
    parser.add_argument("--altitude", type=float, default=None)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--views", type=int, default=300)
    parser.add_argument("--points", type=int, default=200_000)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--gpus", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    scene = scene_of(given.kind, given.blocks, given.views, given.points, given.altitude)
    scene = replace(scene, means=scene.means.contiguous())
    rows = [row for gpus in track(given.gpus, "planning") for row in rows_of(scene, gpus, given.steps)]
    table = Table(title=f"{given.kind}: a view shows {scene.shown:.2%} of the points; MB into a GPU a step")
    names = [
        "tile",
        "locality",
        *KINDS,
        "mixed, layers as splats",
        *(f"mean: {kind}" for kind in KINDS),
        "mixed / better",
    ]
    for name in ["GPUs", "M Gaussians", *names]:
        table.add_column(name, justify="right")
    for row in rows:
        better = min(row[kind]["busiest"] for kind in ("pixels", "splats"))
        numbers = [row["tile"], row["locality"], *(row[kind]["busiest"] for kind in KINDS)]
        table.add_row(
            str(row["gpus"]), f"{row['model'] / 1e6:.0f}", *(f"{n / 1e6:,.1f}" for n in numbers),
            f"{row['mixed']['as splats']:.0%}", *(f"{row[kind]['mean'] / 1e6:,.1f}" for kind in KINDS),
            f"{row['mixed']['busiest'] / better:.3f}",
        )  # fmt: skip
    Console(width=180).print(table)
    if given.json is not None:
        report = {"benchmark": "exchange_sim", **describe(), "shown": scene.shown, "rows": rows}
        given.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
