"""Times the compiled CPU operators against the pure-torch reference: forward and backward of one training view.

    python -m benchmarks.kernels.cpu_operators [--json FILE]

The chain is a training step: cull, project, spherical harmonics of degree 3, tile intersection, rasterization of
colour and depth with absgrad, L1 + SSIM. "chain" runs it as one graph, forward and backward;
the lines above it time each operator alone. `encode_grid`, of radiance fields, is no part of it.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.lib.report import empty_table, write_report
from benchmarks.scenes.cloud import Scene, make_scene
from cuda_ext import build_native, cull, encode_grid, intersect, l1_ssim, project, rasterize, sh_colors, use_reference

POINTS, SIZE = 100_000, (640, 480)
SAMPLES, LEVELS, LOG2_SIZE = 512 * 48, 16, 17
"""Positions in a hash grid: those of 512 rays of `nerfacto-xl`. Levels, and rows of each."""
DIRECTIONS = ("forward", "backward")


@dataclass
class Timer:
    """Seconds of named pieces of work, the median of several runs."""

    repeats: int
    seconds: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])

    def time(self, operator: str, direction: str, work: Callable[[], Any]) -> Any:
        """Time `work`, record the median and return its result. Runs it once to warm up unless it runs only once."""
        runs, result = [], None
        for _ in range(self.repeats + (self.repeats > 1)):
            start = time.perf_counter()
            result = work()
            runs.append(time.perf_counter() - start)
        self.seconds.setdefault(operator, {})[direction] = statistics.median(runs[self.repeats > 1 :])
        return result

    def both(self, operator: str, inputs: list[Tensor], work: Callable[..., Any], outputs: Callable[[Any], Any]) -> Any:
        """Time `work(*inputs)` and the gradient of its differentiable `outputs` by all inputs. Return its result."""
        leaves = [x.detach().requires_grad_() for x in inputs]
        result = self.time(operator, "forward", lambda: work(*leaves))
        differentiable = outputs(result)
        weights = [torch.ones_like(x) for x in differentiable]
        self.time(operator, "backward", lambda: torch.autograd.grad(differentiable, leaves, weights, retain_graph=True))
        return result


def run_chain(scene: Scene) -> tuple[int, int]:
    """Run one training step's forward and backward pass. Return the numbers of rows and of intersections."""
    width, height = scene.size
    leaves = [x.detach().requires_grad_() for x in scene.parameters()]
    means, quats, scales, opacities, sh_dc, sh_rest = leaves
    cameras = (scene.viewmats, scene.Ks, [width, height])
    view_ids, point_ids = cull(means, scales, opacities, *cameras, [0, 0, width, height])
    splats = project(means, quats, scales, opacities, *cameras, view_ids, point_ids)
    colors = sh_colors(3, means, torch.zeros(1, 3), sh_dc, sh_rest, view_ids, point_ids)
    patches = (0, 0, 0, width, height)
    lists = intersect(
        splats.means2d, splats.conics, splats.row_opacities, splats.radii, splats.depths, view_ids, patches
    )
    probe = torch.zeros_like(splats.means2d).requires_grad_()
    features = torch.cat([colors, splats.depths[:, None]], dim=1)
    out, _, _ = rasterize(
        splats.means2d, splats.conics, splats.row_opacities, features, *lists, patches, absgrad_probe=probe
    )
    l1_sum, ssim_sum, _ = l1_ssim(out[:, :3].view(height, width, 3), scene.target, (0, 0, width, height))
    torch.autograd.grad(0.8 * l1_sum - 0.2 * ssim_sum, [*leaves, probe])
    return len(view_ids), len(lists[1])


def measure(scene: Scene, timer: Timer) -> tuple[int, int]:
    """Time each operator alone, then the chain. Return the numbers of rows and of intersections."""
    width, height = scene.size
    cameras = (scene.viewmats, scene.Ks, [width, height])
    patches = (0, 0, 0, width, height)
    view_ids, point_ids = timer.time(
        "cull",
        "forward",
        lambda: cull(scene.means, scene.scales, scene.opacities, *cameras, [0, 0, width, height]),
    )
    splats = timer.both(
        "project",
        [scene.means, scene.quats, scene.scales, scene.opacities],
        lambda means, quats, scales, opacities: project(means, quats, scales, opacities, *cameras, view_ids, point_ids),
        lambda projection: projection[:4],
    )
    colors = timer.both(
        "sh_colors",
        [scene.means, scene.sh_dc, scene.sh_rest],
        lambda means, dc, rest: sh_colors(3, means, torch.zeros(1, 3), dc, rest, view_ids, point_ids),
        lambda colors: [colors],
    )
    means2d, conics, depths, row_opacities, radii = (x.detach() for x in splats)
    tile_offsets, row_ids = timer.time(
        "intersect",
        "forward",
        lambda: intersect(means2d, conics, row_opacities, radii, depths, view_ids, patches),
    )
    features = torch.cat([colors.detach(), depths[:, None]], dim=1)
    out, _, _ = timer.both(
        "rasterize",
        [means2d, conics, row_opacities, features, torch.zeros_like(means2d)],
        lambda xy, conic, opacity, feature, probe: rasterize(
            xy, conic, opacity, feature, tile_offsets, row_ids, patches, absgrad_probe=probe
        ),
        lambda pixels: pixels[:2],
    )
    timer.both(
        "l1_ssim",
        [out.detach()[:, :3].reshape(height, width, 3)],
        lambda image: l1_ssim(image, scene.target, (0, 0, width, height)),
        lambda sums: sums[:2],
    )
    g = torch.Generator().manual_seed(2)
    scalings = torch.floor(16 * 1.38 ** torch.arange(LEVELS))
    timer.both(
        "encode_grid",
        [torch.rand(SAMPLES, 3, generator=g), torch.rand(LEVELS << LOG2_SIZE, 2, generator=g)],
        lambda positions, grid: encode_grid(positions, grid, scalings, LOG2_SIZE),
        lambda encoded: [encoded],
    )
    return timer.time("chain", "forward", lambda: run_chain(scene))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    build_native()
    scene = make_scene(POINTS, *SIZE)
    timers = {"native": Timer(repeats=9), "reference": Timer(repeats=1)}
    with use_reference():
        measure(scene, timers["reference"])
    rows, intersections = measure(scene, timers["native"])
    heads = ("native forward", "native backward", "reference forward", "reference backward", "times faster")
    title = f"{POINTS:,} Gaussians at {SIZE[0]}x{SIZE[1]}, {torch.get_num_threads()} threads: milliseconds"
    table = empty_table(title, ("operator", *heads))
    figures: dict[str, Any] = {}
    for operator in timers["native"].seconds:
        figures[operator] = line = {name: timer.seconds[operator] for name, timer in timers.items()}
        cells = [f"{1e3 * of[turn]:,.1f}" if turn in of else "" for of in line.values() for turn in DIRECTIONS]
        faster = sum(line["reference"].values()) / sum(line["native"].values())
        table.add_row(operator, *cells, f"{faster:.1f}")
    console = Console()
    console.print(table)
    console.print(f"{rows:,} rows, {intersections:,} intersections")
    write_report(
        given.json, benchmark="cpu_operators", threads=torch.get_num_threads(), points=POINTS, size=SIZE, rows=rows,
        intersections=intersections, seconds=figures,
    )  # fmt: skip


if __name__ == "__main__":
    main()
