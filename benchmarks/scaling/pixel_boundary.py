"""Difference between `pixel` and one GPU without cells, for each treatment of splats that overlap other cells.

    python -m benchmarks.scaling.pixel_boundary --config RUN/config.yml --cells 2 4 8 --json FILE

A trained model is drawn in its capture's held-out views: blended by depth, as on one GPU, and cell by cell. Results are
mean PSNRs over views: of one picture against the other, and of each against the photograph. And the bytes that GPUs
would send of a view: boundary rows, and pixels. Rows are 48 bytes, and 36 of gradients. The code of training counts the
sent rows. It runs in one process, so nothing is sent.

`filter` is Splaxel's (appendix 8.1), by tiles instead of pixels: of two neighbouring cells, a splat that extends
from one into the other is skipped where both are visible, if its depth lies where both have some. It exists only here,
for this measurement.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nerfstudio.utils.eval_utils import eval_setup
from rich.console import Console
from torch import Tensor

import cuda_ext
from benchmarks.lib.report import empty_table, write_report
from ns_multigpu.cells.boundary import CellsInViews
from ns_multigpu.cells.options import PixelOptions
from ns_multigpu.cells.placing import ByCells
from ns_multigpu.cells.seen import tiles_seen
from ns_multigpu.cells.sharing import CellPixels
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.boundary_rows import BoundaryRows
from ns_multigpu.core.exchange.exchanged_rows import ExchangedRows
from ns_multigpu.core.exchange.fragments import routes_of
from ns_multigpu.core.step.step_settings import with_halos
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.types import TILE, Patch, Pixels, Points, Splats, View
from ns_multigpu.plugin.model.cameras import view_from_camera
from ns_multigpu.primitives.gaussians.functions import Gaussians
from strategies import STRATEGIES
from strategies.pixel import pixel

ROW_BYTES = 48 + 36
"""Of a row there and back (`row_words`, `gradient_words`)."""


@dataclass(frozen=True)
class Filtered(Gaussians):
    """Gaussians that are skipped where they overlap other cells.

    Attributes:
        crosses: [N, cells] other cells that each point overlaps.
        overlaps: [view][cell][other] tiles' rectangle x0, y0, x1, y1 in pixels and depths in which both have something.
    """

    crosses: Any = None
    overlaps: Any = None

    def render(
        self, splats: Splats, patches: Sequence[Patch], views: Sequence[View], *, stops: bool = False,
        windows: Tensor | None = None,
    ) -> list[Pixels]:  # fmt: skip
        rows, cells = splats.rows, self.crosses.shape[1]
        found: list[Pixels] = []
        for patch in patches:
            x0, y0, x1, y1 = patch.rendered(views[patch.view])
            flat = [patch.view, x0, y0, x1, y1]
            geometry = (rows["means2d"], rows["conics"], rows["opacities"])
            offsets, ids = cuda_ext.intersect(*geometry, rows["radii"], rows["depths"], splats.hits.view_ids, flat)
            counts = offsets.diff().long()
            tile = torch.repeat_interleave(torch.arange(len(counts)), counts)
            columns = -(-(x1 - x0) // TILE)
            x, y = x0 + tile % columns * TILE, y0 + tile // columns * TILE
            out = torch.zeros(len(ids), dtype=torch.bool)
            view, cell = divmod(patch.view, cells)
            row = ids.long()
            for other, (left, top, right, bottom, near, far) in self.overlaps[view][cell].items():
                inside = (x >= left) & (x < right) & (y >= top) & (y < bottom)
                depth = rows["depths"][row]
                point = splats.hits.point_ids[row].long()
                out |= inside & (depth >= near) & (depth <= far) & self.crosses[point, other]
            kept = torch.zeros(len(counts), dtype=torch.int64).index_add_(0, tile, (~out).long())
            cut = torch.cat([kept.new_zeros(1), kept.cumsum(0)]).int()
            color, alpha, _ = cuda_ext.rasterize(*geometry, rows["features"], cut, ids[~out].contiguous(), flat,
                                                 mark_stops=True)  # fmt: skip
            height, width = y1 - y0, x1 - x0
            covered = alpha.view(height, width, 1)
            found.append(Pixels(patch, color.view(height, width, -1), covered.abs(), None, covered < 0))
        return found


def filtered(kind: Gaussians, space: ByCells, points: Points, views: Sequence[View]) -> Filtered:
    """Return the filter of cells, points and views."""
    assert space.tree is not None and space.boxes is not None
    means, extents, bounds = points.params["means"], kind.extents(points), space.tree.boxes().float()
    touched = [((means + extents >= low) & (means - extents <= high)).all(1) for low, high in bounds]
    crosses = torch.stack(touched, 1)
    crosses[torch.arange(len(means)), space.tree.of(means)] = False
    overlaps: list[list[dict[int, Any]]] = []
    for view in views:
        seen = tiles_seen(space.boxes, view)
        depths = [depths_of(box, view) for box in space.boxes]
        of_view: list[dict[int, Any]] = []
        for a in range(space.cells):
            common: dict[int, Any] = {}
            for b in range(space.cells):
                touching = bool(((bounds[a, 0] <= bounds[b, 1]) & (bounds[b, 0] <= bounds[a, 1])).all())
                one, other = seen[a], seen[b]
                if a == b or not touching or one is None or other is None:
                    continue
                box = max(one[0], other[0]), max(one[1], other[1]), min(one[2], other[2]), min(one[3], other[3])
                common[b] = (*box, max(depths[a][0], depths[b][0]), min(depths[a][1], depths[b][1]))
            of_view.append(common)
        overlaps.append(of_view)
    named = {name: getattr(kind, name) for name in kind.__dataclass_fields__}
    return Filtered(**{**named, "depth": False}, crosses=crosses, overlaps=overlaps)


def depths_of(box: Any, view: View) -> tuple[float, float]:
    """Return the smallest and the largest depth of a box's corners."""
    corners = np.array([[box[k >> axis & 1, axis] for axis in range(3)] for k in range(8)])
    matrix = view.viewmat.double().numpy()
    depth = corners @ matrix[2, :3] + matrix[2, 3]
    return float(depth.min()), float(depth.max())


def drawn(spread: Strategy, kind: Gaussians, points: Points, view: View) -> Tensor:
    """Render a view on black, [h, w, 3]."""
    image = torch.zeros(view.height, view.width, 3)
    for one in spread.render(kind, points, [view], spread.plan([view])).pixels:
        x0, y0, x1, y1 = one.patch.inner(view)
        patch = one.patch
        image[patch.y0 : patch.y1, patch.x0 : patch.x1] = one.color[y0:y1, x0:x1]
    return image.clamp(0, 1)


def decibels(a: Tensor, b: Tensor) -> float:
    """Return the PSNR, at most 100."""
    return float(-10 * (a - b).square().mean().clamp_min(1e-10).log10())


def rows_that_cross(spread: Strategy, kind: Gaussians, points: Points, views: Sequence[View], gpus: int) -> Any:
    """Return for so many GPUs and each view: rows, those sent, and bytes of these and of pixels, over all GPUs."""
    space = spread.placement
    assert isinstance(space, ByCells) and space.tree is not None
    counts = []
    sizes = ByCells(replace(World.single(), size=gpus), PixelOptions(cells=space.cells, crossing="ghosts"))
    sizes.tree, sizes.boxes = space.tree, space.boxes
    ranks = torch.tensor([sizes.rank_of(cell) for cell in range(space.cells)])
    for view in views:
        plan = with_halos(CellPixels(sizes).assign([view], gpus), [view])
        own = kind.splat(points, kind.cull(points, [view], [0]), [view])
        owner = ranks[space.tree.of(points.params["means"])][own.hits.point_ids.long()]
        drawn = [(rank, patch) for rank, patches in enumerate(plan.drawn) for patch in patches]
        lines, _ = BoundaryRows(CellsInViews(sizes)).route(own, [view], drawn, gpus)
        sent = int(((lines >= 0) & (torch.arange(gpus)[:, None] != owner)).sum())
        _, everywhere = ExchangedRows().route(own, [view], drawn, gpus)
        tile = len(own) * (gpus - 1) / gpus  # bands: about one of them needs a row
        routes = [routes_of(plan, [view], rank) for rank in range(gpus)]
        pixels = 16 * sum(sum(r.receive) + sum(r.receive_back) for r in routes)
        counts.append([len(own), sent, sent * ROW_BYTES, pixels, tile * ROW_BYTES, int(everywhere.sum())])
    return np.mean(counts, 0).tolist()


@torch.no_grad()
def measure(config: Path, counts: Sequence[int], most: int) -> list[dict[str, Any]]:
    pipeline: Any = eval_setup(config, test_mode="test")[1]
    model = pipeline.model
    points = Points({name: value.detach() for name, value in model.gauss_params.items()})
    kind = replace(model.primitive(depth=False), depth=False)
    dataset = pipeline.datamanager.eval_dataset
    chosen = range(0, len(dataset), max(1, len(dataset) // most))
    cameras = [dataset.cameras[k : k + 1] for k in chosen]
    views = [view_from_camera(camera, camera.camera_to_worlds[0], k) for k, camera in zip(chosen, cameras, strict=True)]
    photographs = [dataset.get_image_float32(k)[..., :3] for k in chosen]
    single = STRATEGIES["single"](World.single())
    wanted = [drawn(single, kind, points, view) for view in views]
    truth = float(np.mean([decibels(a, b) for a, b in zip(wanted, photographs, strict=True)]))
    found: list[dict[str, Any]] = []
    for cells in counts:
        line: dict[str, Any] = {"cells": cells, "points": len(points), "views": len(views), "single": truth}
        for way in ("none", "filter", "ghosts"):
            spread = pixel(World.single(), PixelOptions(cells=cells, crossing="ghosts" if way == "ghosts" else "none"))
            held = spread.placement.hold(points, World.single())
            spread.observe(kind, held, 0)
            space = spread.placement
            assert isinstance(space, ByCells)
            nears, truths = [], []
            for view, image, photograph in zip(views, wanted, photographs, strict=True):
                drawing = filtered(kind, space, held, [view]) if way == "filter" else kind
                got = drawn(spread, drawing, held, view)
                nears.append(decibels(got, image))
                truths.append(decibels(got, photograph))
            line[way] = {"to single": float(np.mean(nears)), "to photograph": float(np.mean(truths))}
            if way == "ghosts":
                names = ("rows", "rows sent", "bytes of rows", "bytes of pixels", "bytes of tile", "rows by rectangle")
                line |= dict(zip(names, rows_that_cross(spread, kind, held, views, cells), strict=True))
        found.append(line)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--cells", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--views", type=int, default=8)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = measure(given.config, given.cells, given.views)
    title = f"{given.config}: {rows[0]['points']:,} points; single to photographs {rows[0]['single']:.2f} dB"
    heads = ("cells", "none", "filter", "ghosts", "to photographs", "", "", "rows sent", "MB rows", "MB pixels")
    table = empty_table(title, heads)
    for row in rows:
        variants = [row[way] for way in ("none", "filter", "ghosts")]
        near, true = ([f"{way[name]:.2f}" for way in variants] for name in ("to single", "to photograph"))
        sent = [
            f"{row['rows sent'] / max(row['rows'], 1):.1%}",
            *(f"{row[f'bytes of {n}'] / 1e6:.2f}" for n in ("rows", "pixels")),
        ]
        table.add_row(str(row["cells"]), *near, *true, *sent)
    Console(width=150).print(table)
    write_report(given.json, config=given.config.name, rows=rows)


if __name__ == "__main__":
    main()
