"""Pixels that `pixel` sends of a trained model, for each rule that leaves out parts of cells.

    python -m benchmarks.scaling.pixel_visible --config RUN/config.yml --cells 4 8 --width 1920 --json FILE

Views to train on are drawn cell by cell, scaled to `--width`. As many views as cells are a step of as many GPUs. Two
rules say which tiles of a cell are visible at a threshold: `light`, by the transmittance in front of the cell, which is
Splaxel's (section 4.3), and `contributes`, by that times alpha. Three shapes hold them: one rectangle, a box in each
band of the view with a tile around it (as training has it), and the tiles alone. Results are bytes into the busiest
GPU and into all, as parts of those without a rule. A view is taken as unchanged between two visits. It runs in one
process, so nothing is sent.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nerfstudio.utils.eval_utils import eval_setup
from numpy.typing import NDArray
from rich.console import Console

from benchmarks.lib.report import empty_table, write_report
from cuda_ext.ops.exchange.fragments import composite_fragments
from ns_multigpu.cells.occlusion import tiles_around
from ns_multigpu.cells.options import PixelOptions
from ns_multigpu.cells.placing import ByCells
from ns_multigpu.cells.sharing import CellPixels
from ns_multigpu.core.assign.image_part import Rectangle
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange import composite
from ns_multigpu.core.exchange.fragments import BANDS, band_height, routes_of
from ns_multigpu.core.step.step_settings import with_halos
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.types import TILE, Points, View
from ns_multigpu.planning.work import PIXEL_BYTES
from ns_multigpu.plugin.model.cameras import view_from_camera
from strategies.pixel import pixel

THRESHOLDS = (1e-1, 1e-2, 1e-3, 1e-4)
RULES = ("light", "contributes")
Tiles = NDArray[Any]


def one_rectangle(seen: Tiles, wide: Rectangle) -> list[Rectangle]:
    """Return the rectangle around tiles [h, w] bool."""
    rows, columns = (np.flatnonzero(seen.any(axis)) for axis in (1, 0))
    return _clipped([(columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)], wide) if len(rows) else []


def single_tiles(seen: Tiles, wide: Rectangle) -> list[Rectangle]:
    """Return tiles [h, w] bool as rectangles of a row each."""
    found = []
    for y, row in enumerate(np.diff(np.pad(seen, ((0, 0), (1, 1))).astype(np.int8))):
        found += [(a, y, b, y + 1) for a, b in zip(np.flatnonzero(row == 1), np.flatnonzero(row == -1), strict=True)]
    return _clipped(found, wide)


def bands(seen: Tiles, wide: Rectangle) -> list[Rectangle]:
    """Return what training draws after it has seen these tiles [h, w] bool."""
    step, live = band_height(len(seen) * TILE) // TILE, np.zeros((BANDS, 4), dtype=np.int64)
    for band, first in enumerate(range(0, len(seen), step)):
        rows, columns = (np.flatnonzero(seen[first : first + step].any(axis)) for axis in (1, 0))
        if len(rows):
            live[band] = columns[0], first + rows[0], columns[-1] + 1, first + rows[-1] + 1
    return tiles_around(live * TILE, wide)


def _clipped(tiles: Sequence[Sequence[Any]], wide: Rectangle) -> list[Rectangle]:
    return [
        (int(a) * TILE, int(b) * TILE, min(int(c) * TILE, wide[2]), min(int(d) * TILE, wide[3])) for a, b, c, d in tiles
    ]


SHAPES: dict[str, Callable[[Tiles, Rectangle], list[Rectangle]]] = {
    "rectangle": one_rectangle, "bands": bands, "tiles": single_tiles
}  # fmt: skip


def most_of(spread: Strategy, kind: Any, held: Points, view: View) -> dict[int, dict[str, Tiles]]:
    """Return the most light and the most contribution of each cell in each tile of a view, [h, w]; -1 out of sight."""
    seen: dict[str, torch.Tensor] = {}

    def spy(received: torch.Tensor, layers: Sequence[int], sizes: Sequence[int]) -> Any:
        out = composite_fragments(received, layers, sizes)
        seen.update(light=out[2], contributes=out[2] * received[:, -1].abs())
        return out

    plan = with_halos(spread.plan([view]), [view])
    composite.composite_fragments = spy  # pyright: ignore[reportPrivateImportUsage]
    spread.render(kind, held, [view], plan)
    composite.composite_fragments = composite_fragments  # pyright: ignore[reportPrivateImportUsage]
    watched = routes_of(plan, [view], 0).watched
    rows, columns = -(-view.height // TILE), -(-view.width // TILE)
    found: dict[int, dict[str, Tiles]] = {}
    for k in range(0, len(watched), 6):
        slot, first, x0, y0, width, height = watched[k : k + 6]
        of_cell = found.setdefault(
            slot // BANDS, {rule: np.full((rows * TILE, columns * TILE), -1.0) for rule in RULES}
        )
        for rule in RULES:
            pixels = seen[rule][first : first + width * height].view(height, width).numpy()
            of_cell[rule][y0 : y0 + height, x0 : x0 + width] = pixels
    return {
        cell: {rule: image.reshape(rows, TILE, columns, TILE).max((1, 3)) for rule, image in of_cell.items()}
        for cell, of_cell in found.items()
    }


class Chosen(CellPixels):
    """Assignment that draws given rectangles of cells. `known` has them by view and cell."""

    known: dict[int, dict[int, list[Rectangle]]]

    def visible(self, view: View, in_sight: Sequence[Rectangle | None]) -> list[list[Rectangle]]:
        return [self.known[view.index].get(cell, []) for cell in range(len(in_sight))]


@torch.no_grad()
def measure(config: Path, counts: Sequence[int], width: int, most: int) -> list[dict[str, Any]]:
    """Return a row for each number of cells: bytes without a rule, MB, and for each rule and shape as parts of those.

    Args:
        config: a run's config.yml. counts: numbers of cells. width: pixels of the views. most: views that are drawn.
    """
    pipeline: Any = eval_setup(config, test_mode="test")[1]
    model = pipeline.model
    points = Points({name: value.detach() for name, value in model.gauss_params.items()})
    kind = replace(model.primitive(depth=False), depth=False)
    cameras = pipeline.datamanager.train_dataset.cameras
    views: list[View] = []
    for k, chosen in enumerate(np.random.default_rng(3).permutation(len(cameras))[:most].tolist()):
        camera = cameras[chosen : chosen + 1]
        view = view_from_camera(camera, camera.camera_to_worlds[0], k)
        K = view.K.clone()
        K[:2] *= width / view.width
        views.append(replace(view, K=K, width=width, height=round(view.height * width / view.width)))
    rows: list[dict[str, Any]] = []
    for cells in counts:
        spread = pixel(World.single(), PixelOptions(cells=cells))
        held = spread.placement.hold(points, World.single())
        spread.observe(kind, held, 0)
        sizes = ByCells(replace(World.single(), size=cells), PixelOptions(cells=cells))
        own: Any = spread.placement
        sizes.tree, sizes.boxes = own.tree, own.boxes
        lights = [most_of(spread, kind, held, view) for view in views]
        whole, pixels = bytes_of(CellPixels(sizes), views, cells)
        row: dict[str, Any] = {"cells": cells, "points": len(points), "busiest MB": whole / 1e6, "all MB": pixels / 1e6}
        for rule, least, (shape, fit) in product(RULES, THRESHOLDS, SHAPES.items()):
            chosen_ = Chosen(sizes)
            wide = 0, 0, views[0].width, views[0].height
            chosen_.known = {
                v: {cell: fit(one[rule] >= least, wide) for cell, one in of_view.items()}
                for v, of_view in enumerate(lights)
            }
            busiest, everyone = bytes_of(chosen_, views, cells)
            patches = np.mean([sum(map(len, of_view.values())) for of_view in chosen_.known.values()])
            row[f"{rule}, {shape}, {least:g}"] = busiest / whole, everyone / pixels, float(patches)
        rows.append(row)
    return rows


def bytes_of(assignment: CellPixels, views: Sequence[View], gpus: int) -> tuple[float, float]:
    """Return the bytes into the busiest GPU and into all, means over steps."""
    sent = []
    for k in range(0, len(views) - gpus + 1, gpus):
        batch = views[k : k + gpus]
        plan = with_halos(assignment.assign(batch, gpus), batch)
        routes = [routes_of(plan, batch, rank) for rank in range(gpus)]
        sent.append([PIXEL_BYTES * (sum(r.receive) + sum(r.receive_back)) for r in routes])
    return float(np.mean(np.max(sent, 1))), float(np.mean(np.sum(sent, 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="a run's config.yml")
    parser.add_argument("--cells", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--width", type=int, default=1920, help="of views, pixels")
    parser.add_argument("--views", type=int, default=8, help="that are drawn")
    parser.add_argument("--json", type=Path, help="file for the results")
    given = parser.parse_args()
    if not given.config.is_file():
        parser.error(f"--config {given.config}: there is no such file. Give a run's config.yml.")
    if min(*given.cells, given.width, given.views) < 1:
        parser.error("--cells, --width and --views: give 1 or more.")
    rows = measure(given.config, given.cells, given.width, given.views)
    heads = ["rule", "threshold", *(f"{row['cells']} cells, {shape}" for row in rows for shape in SHAPES)]
    sizes = ", ".join(f"{row['cells']} cells {row['busiest MB']:.0f} MB" for row in rows)
    table = empty_table(f"{given.config}: busiest GPU, part of {sizes} (patches a view)", heads, left=(0,))
    for rule, least in product(RULES, THRESHOLDS):
        found = [row[f"{rule}, {shape}, {least:g}"] for row in rows for shape in SHAPES]
        table.add_row(rule, f"{least:g}", *(f"{busiest:.2f} ({patches:.0f})" for busiest, _, patches in found))
    Console(width=180).print(table)
    write_report(given.json, benchmark="pixel_visible", config=given.config.name, rows=rows)


if __name__ == "__main__":
    main()
