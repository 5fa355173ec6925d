"""Time 3D convexes, forward and backward, on one GPU: our CUDA kernels, the pure-torch reference, and 3D Gaussians.

Times of convexes and Gaussians are compared per pair of a primitive and a tile.

    python -m benchmarks.kernels.convexes [--scenes garden-11 ...] [--garden PATH] [--quick] [--json FILE]

The scenes are those of `benchmarks.kernels.rasterizer`. Each Gaussian becomes a convex with the same position, size,
rotation, opacity and colours: an octahedron with its corners at `EXTENT` standard deviations along the axes. Its edges
are as sharp as those at the start of training. Both use the public operators and autograd.
`benchmarks.kernels.primitives_step` times fused steps.
The reference needs memory for all pixels times all convexes of a tile. So it is timed on one small rectangle of the
view, and our kernels on the same rectangle for comparison.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import cuda_ext
from benchmarks.kernels.sections import Line, Sections, parser, ratio, run_scenes, show
from benchmarks.lib.stopwatch import Stopwatch, peak_bytes
from benchmarks.scenes.garden import DEGREE, Scene
from cuda_ext.ops.raster.convexes import ConvexProjection
from cuda_ext.ops.raster.primitives import box_lists
from ns_multigpu.core.primitive import Primitive
from ns_multigpu.core.types import TILE, Patch, Points, Splats, View
from ns_multigpu.primitives.convexes.functions import Convexes
from ns_multigpu.primitives.convexes.init import STEEPNESS
from ns_multigpu.primitives.deterministic import rotations
from ns_multigpu.primitives.gaussians.functions import Gaussians

EXTENT = 1.5
"""Standard deviations: a convex covers about as many pixels as its Gaussian."""
SMALL = (64, 64)
"""Pixels of the rectangle on which the reference is timed."""


@dataclass(frozen=True)
class Way:
    """A primitive and its points, leaves of autograd."""

    name: str
    kind: Primitive
    points: Points


def convexes_of(leaves: list[Tensor]) -> Points:
    """Return octahedra in place of Gaussians: from means, quats, log scales [N, 3], logits and harmonics."""
    means, quats, scales, logits, dc, rest = (leaf.detach() for leaf in leaves)
    axes = EXTENT * (rotations(quats) * scales.exp()[:, None]).transpose(1, 2)  # [N, axis, 3]
    corners = torch.stack([axes, -axes], dim=1).flatten(1)
    size = scales.mean(-1, keepdim=True) + math.log(EXTENT)
    deltas = math.log(100.0) - size
    sigmas = math.log(STEEPNESS) - 2 * size - deltas
    params = {
        "means": means, "corners": corners, "deltas": deltas, "sigmas": sigmas,
        "opacities": logits.view(-1, 1), "features_dc": dc, "features_rest": rest,
    }  # fmt: skip
    return Points({name: value.contiguous().requires_grad_() for name, value in params.items()})


def gaussians_of(leaves: list[Tensor]) -> Points:
    """Return the Gaussians themselves."""
    names = ("means", "quats", "scales", "opacities", "features_dc", "features_rest")
    return Points({name: value.detach().requires_grad_() for name, value in zip(names, leaves, strict=True)})


def draw(way: Way, view: View, patch: Patch) -> tuple[Splats, Tensor]:
    """Return the rows of a view and the colours of a patch, drawn as in a training step."""
    splats = way.kind.splat(way.points, way.kind.cull(way.points, [view], [0]), [view])
    return splats, way.kind.render(splats, [patch], [view])[0].color


def pairs_of(way: Way, view: View, patch: Patch) -> int:
    """Return the number of entries in the patch's tile lists."""
    with torch.no_grad():
        splats, _ = draw(way, view, patch)
        rows, flat = splats.rows, [0, patch.x0, patch.y0, patch.x1, patch.y1]
        if isinstance(way.kind, Convexes):
            names = ("means2d", "lines", "sharpness", "depths", "opacities", "radii")
            return int(box_lists(ConvexProjection(*(rows[n] for n in names)), splats.hits.view_ids, flat)[0][-1])
        floats = (rows["means2d"], rows["conics"], rows["opacities"], rows["radii"], rows["depths"])
        return int(cuda_ext.intersect(*floats, splats.hits.view_ids, flat, TILE)[0][-1])


def time_way(label: str, way: Way, view: View, patch: Patch, target: Tensor, watch: Stopwatch) -> list[Line]:
    """Time forward, and forward and backward, of a patch."""

    def forward() -> Any:
        with torch.no_grad():
            return draw(way, view, patch)

    def both() -> None:
        for leaf in way.points.params.values():
            leaf.grad = None
        (draw(way, view, patch)[1] - target).square().mean().backward()

    timed: list[tuple[str, Callable[[], Any]]] = [("forward", forward), ("forward and backward", both)]
    device = target.device
    return [Line(f"{label}: {what}", watch.median(run), peak_bytes=peak_bytes(device, run)) for what, run in timed]


def small_patch(scene: Scene) -> Patch:
    """Return a rectangle in the middle of the view."""
    x0, y0 = (scene.width - SMALL[0]) // 2, (scene.height - SMALL[1]) // 2
    return Patch(0, x0, y0, x0 + SMALL[0], y0 + SMALL[1])


def measure(scene: Scene, sections: Sections, watch: Stopwatch) -> dict[str, Any]:
    """Measure one scene."""
    view = View(scene.viewmats[0], scene.Ks[0], scene.width, scene.height)
    whole, small = Patch.whole(0, view), small_patch(scene)
    target = scene.floats().view(scene.height, scene.width, 3)
    part = target[small.y0 : small.y1, small.x0 : small.x1]
    raw = scene.raw()
    ours = Way("convexes", Convexes(DEGREE), convexes_of(raw))
    gaussians = Way("3D Gaussians", Gaussians(DEGREE), gaussians_of(raw))
    lines, pairs = list[Line](), dict[str, int]()
    for way in (ours, gaussians):
        with sections.section(f"{scene.name}: {way.name}"):
            lines += time_way(way.name, way, view, whole, target, watch)
            pairs[way.name] = pairs_of(way, view, whole)
    with sections.section(f"{scene.name}: a small patch, and the reference"):
        lines += time_way("convexes, small patch", ours, view, small, part, watch)
        _, found = draw(ours, view, small)
        with cuda_ext.use_reference():
            lines += time_way("reference, small patch", ours, view, small, part, watch)
            _, expected = draw(ours, view, small)
    show(sections.console, scene.describe(), lines)
    ms = {line.what: line.ms for line in lines}
    report: dict[str, Any] = {"name": scene.name, "points": scene.points, "width": scene.width, "height": scene.height}
    report["pairs"] = pairs
    report["apart from the reference"] = float((found - expected).detach().abs().max())
    for what in ("forward", "forward and backward"):
        times = {name: ms.get(f"{name}: {what}") for name in pairs}
        report[f"ns a pair, {what}"] = {name: 1e6 * (took or 0.0) / max(pairs[name], 1) for name, took in times.items()}
        slow, fast = (ms.get(f"{name}, small patch: {what}") for name in ("reference", "convexes"))
        report[f"times faster than the reference, {what}"] = ratio(slow, fast)
    sections.console.print({name: value for name, value in report.items() if name != "name"})
    return report | {"lines": lines}


if __name__ == "__main__":
    sys.exit(run_scenes("convexes", parser(__doc__), measure))
