"""Time 2D Gaussians, forward and backward, against gsplat 1.4.0's `rasterization_2dgs` on one GPU, and check that both
draw the same.

    python -m benchmarks.kernels.surfels [--scenes garden-11 ...] [--garden PATH] [--quick] [--json FILE]

The scenes are those of `benchmarks.kernels.rasterizer`: 0.07, 1.64 and 7.93 M points; the first two scales count.
gsplat is called with packed False, RGB and expected depth. "all losses": the loss has normals and distortion in it as
well as the image. Ours use the public operators and autograd.

"whole step": a complete training step with a loss of normals. gsplat's is that of its own trainer
(`examples/simple_trainer_2dgs.py`: rasterization, losses by torch and pytorch_msssim, its densifier's counts, torch's
Adam). Ours is fused and captured, as in `ns-train`, with Adam and our densifier's statistics. The image of
both is random.

Images differ where a splat extends beyond 3 standard deviations: ours are cut where alpha is 1/255, gsplat's by tiles
at 3. They also differ where the disc of one standard deviation touches the camera's plane: ours draw none of these. So
the images' difference is reported, not judged. On a CPU gsplat cannot run: only ours is timed.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from benchmarks.kernels.autograd_step import RATE, torch_loss
from benchmarks.kernels.primitives_step import captured_step
from benchmarks.kernels.renderers import joined
from benchmarks.kernels.sections import Line, Sections, parser, ratio, run_scenes, show
from benchmarks.lib.counting import GsplatCounts
from benchmarks.lib.stopwatch import Stopwatch, peak_bytes
from benchmarks.scenes.garden import DEGREE, Scene
from cuda_ext.ops.optim.adam import AdamStep, FusedAdam
from ns_multigpu.core.schema import names
from ns_multigpu.core.types import Patch, Points, View
from ns_multigpu.primitives.surfels.functions import Surfels
from ns_multigpu.primitives.surfels.schema import SCHEMA

WEIGHT = 0.05
"""Of the loss of normals."""
Picture = tuple[Tensor, Tensor, Tensor]
"""Colours [H W, 3], normals [H W, 3] in camera space or the world's, distortion [H W]."""


def gsplat_way(scene: Scene, distorted: bool) -> Callable[[list[Tensor]], Picture]:
    """Return gsplat's renderer, of means, quats, log scales [N, 3], logits and harmonics."""
    from gsplat.rendering import rasterization_2dgs

    cameras: Any = (scene.viewmats, scene.Ks, scene.width, scene.height)

    def render(leaves: list[Tensor]) -> Picture:
        means, quats, scales, logits, dc, rest = leaves
        options: Any = {"sh_degree": DEGREE, "packed": False, "render_mode": "RGB+ED", "distloss": distorted}
        three = torch.nn.functional.pad(scales.exp(), (0, 1), value=1.0)
        drawn = rasterization_2dgs(means, quats, three, logits.sigmoid(), joined(dc, rest), *cameras, **options)
        image, _, normals, _, distortion, _, _ = drawn
        return image[..., :3].reshape(-1, 3), normals.reshape(-1, 3), distortion.reshape(-1)

    return render


def our_way(scene: Scene, distorted: bool) -> Callable[[list[Tensor]], Picture]:
    """Return our renderer, which draws a whole view as a training step does."""
    kind = Surfels(DEGREE, depth=True, channels=("normals", "distortion"))
    view = View(scene.viewmats[0], scene.Ks[0], scene.width, scene.height)

    def render(leaves: list[Tensor]) -> Picture:
        points = Points(dict(zip(names(SCHEMA), leaves, strict=True)))
        splats = kind.splat(points, kind.cull(points, [view], [0]), [view])
        pixels = kind.render(splats, [Patch.whole(0, view)], [view])[0]
        extra = pixels.extra
        return pixels.color.view(-1, 3), extra["normals"].view(-1, 3), extra["distortion"].view(-1)

    return render


def time_way(name: str, scene: Scene, watch: Stopwatch, way: Callable[[Scene, bool], Any]) -> tuple[list[Line], Tensor]:
    """Time forward, forward and backward of the image, and of all losses. Return the times and the image."""
    parameters = scene.raw()
    parameters[2] = parameters[2][:, :2]
    leaves = [p.detach().clone().requires_grad_() for p in parameters]
    target = scene.floats().view(-1, 3)

    def forward() -> Any:
        with torch.no_grad():
            return way(scene, False)(leaves)

    def both(distorted: bool) -> None:
        for leaf in leaves:
            leaf.grad = None
        image, normals, distortion = way(scene, distorted)(leaves)
        loss = (image - target).square().mean()
        if distorted:
            loss = loss + (1 - normals.square().sum(-1)).mean() + distortion.mean()
        loss.backward()

    lines = [Line(f"{name}: forward", watch.median(forward), peak_bytes=peak_bytes(scene.device, forward))]
    for what, distorted in (("forward and backward", False), ("all losses", True)):
        peak = peak_bytes(scene.device, lambda d=distorted: both(d))
        lines.append(Line(f"{name}: {what}", watch.median(lambda d=distorted: both(d)), peak_bytes=peak))
    return lines, forward()[0]


def gsplat_step(scene: Scene) -> Callable[[], Any]:
    """Return gsplat's whole step."""
    from gsplat.rendering import rasterization_2dgs

    params = [torch.nn.Parameter(value.clone()) for value in scene.raw()]
    means, quats, scales, logits, dc, rest = params
    optimizers = [torch.optim.Adam([p], lr=RATE, eps=1e-15) for p in params]
    counts = GsplatCounts(absgrad=False, packed=False, key="gradient_2dgs")
    cameras: Any = (scene.viewmats, scene.Ks, scene.width, scene.height)
    options: Any = {"sh_degree": DEGREE, "packed": False, "render_mode": "RGB+ED"}
    loss_of, background = torch_loss(scene), scene.background()

    def step() -> None:
        shape = (means, quats, scales.exp(), logits.sigmoid(), joined(dc, rest))
        image, alpha, normals, surface, _, _, info = rasterization_2dgs(*shape, *cameras, **options)
        counts.meet(info)
        image = image[0, ..., :3] + (1 - alpha[0]) * background
        away = 1 - (normals[0] * surface.view_as(normals[0]) * alpha[0].detach()).sum(-1)
        (loss_of(image.clamp(0.0, 1.0)) + WEIGHT * away.mean()).backward()
        counts.add(means)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def our_step(scene: Scene) -> Callable[[], None]:
    """Return our whole step, as a graph."""
    raw = scene.raw()
    raw[2] = raw[2][:, :2].contiguous()
    raw[3] = raw[3].view(-1, 1)
    params = dict(zip(names(SCHEMA), (value.clone() for value in raw), strict=True))
    adam = AdamStep([FusedAdam([Parameter(p)], lr=RATE, eps=1e-15) for p in params.values()])
    view = View(scene.viewmats[0], scene.Ks[0], scene.width, scene.height)
    statistics = {name: torch.zeros(scene.points, device=scene.device) for name in ("grad2d", "count", "radii")}
    kernels = Surfels(DEGREE).kernels(losses={"normals": WEIGHT})
    step, made = captured_step(kernels, params, adam, view, scene.target, statistics)
    made.backgrounds.copy_(scene.background())
    return step


def time_steps(scene: Scene, sections: Sections, watch: Stopwatch) -> list[Line]:
    """Time whole steps."""
    lines = list[Line]()
    for name, make in (("gsplat", gsplat_step), ("ours", our_step)):
        with sections.section(f"{scene.name}: a whole step of {name}"):
            step = make(scene)
            step()
            lines.append(Line(f"{name}: whole step", watch.median(step), peak_bytes=peak_bytes(scene.device, step)))
    return lines


def measure(scene: Scene, sections: Sections, watch: Stopwatch) -> dict[str, Any]:
    """Measure one scene."""
    lines, images = list[Line](), dict[str, Tensor]()
    variants = {"gsplat": gsplat_way, "ours": our_way} if scene.device.type == "cuda" else {"ours": our_way}
    for name, way in variants.items():
        with sections.section(f"{scene.name}: {name}"):
            found, images[name] = time_way(name, scene, watch, way)
            lines += found
    if scene.device.type == "cuda":
        lines += time_steps(scene, sections, watch)
    show(sections.console, scene.describe(), lines)
    report: dict[str, Any] = {"name": scene.name, "points": scene.points, "width": scene.width, "height": scene.height}
    if len(images) == 2:
        apart = (images["ours"] - images["gsplat"]).abs()
        report["apart"] = {"mean": float(apart.mean()), "largest": float(apart.max())}
        report["share above 1/255"] = float((apart.amax(-1) > 1 / 255).float().mean())
        ms = {line.what: line.ms for line in lines}
        report["times faster"] = {
            what: ratio(ms.get(f"gsplat: {what}"), ms.get(f"ours: {what}"))
            for what in ("forward", "forward and backward", "all losses", "whole step")
        }
        sections.console.print(f"apart: {report['apart']}; times faster: {report['times faster']}")
    return report | {"lines": lines}


if __name__ == "__main__":
    sys.exit(run_scenes("surfels", parser(__doc__), measure))
