"""Time a complete training step, render, L1 + SSIM, backward and Adam, against the usual parts on one GPU.

    python -m benchmarks.train_step [--scenes garden-11 city-8 ...] [--garden PATH] [--counts] [--quick] [--json FILE]
                                    [--group-culling auto|on|off|both]

Today's step is what nerfstudio's splatfacto runs: activations, gsplat 1.4.0's `rasterization`, a background, L1 and
pytorch_msssim's SSIM, six `torch.optim.Adam` (with its defaults, and with fused=True). Ours is `Step` as in
training, eagerly and as a CUDA graph, including the upload of cameras, rates and image. "lazy" defers the steps of
points that are not drawn, and includes a 50th of the flush after 50 steps. Our public operators under autograd with
`FusedAdam` are timed for comparison. None of these counts densification's statistics, as training does until it stops
refining. With --counts each variant is timed once more, "counting", with absolute gradients and these statistics
(gsplat's `DefaultStrategy`, and ours). Learning rates are so small that the scene is unchanged, and lazy steps find few
more candidates than rows: in training there are some more. Peak memory excludes the parameters and Adam's moments, and
includes the image.

Groups of points are culled by their boxes as in training, or always, or never. With --group-culling both, each of our
variants is timed without ("no groups") and with groups, and so are the parts that use groups.

The first step of each is compared with today's: the image, the loss and Adam's first moments.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.kernels.autograd_step import RATE, AutogradStep, Kind, torch_loss
from benchmarks.kernels.floors import floors
from benchmarks.kernels.fused_path import Capacities, FusedPath, FusedUpdate, needed
from benchmarks.kernels.lazy_parts import BLOCK, LazyParts, lazy_floors
from benchmarks.kernels.our_step import OurStep
from benchmarks.kernels.sections import Line, Sections, parser, ratio, run_scenes, show
from benchmarks.lib.agreement import Drawn, compare
from benchmarks.lib.report import empty_table
from benchmarks.lib.stopwatch import Stopwatch, peak_bytes
from benchmarks.scenes.garden import Scene
from cuda_ext import AdamStep, Band, FusedAdam, adam_step, band_loss_into, box_views, composite, new_boxes, splat_boxes
from cuda_ext.ops.optim.fused import PARAMETERS

GROUPS = {"auto": {"": None}, "on": {"": True}, "off": {"": False}, "both": {", no groups": False, "": True}}
"""By --group-culling what is added to the name of a way, and whether groups are culled; None: as training would."""
COUNTING = ", counting"
"""In the name of a way that sums up absolute gradients and adds to densification's statistics."""
MOST_LOSS_DIFFERENCE = 1e-2
"""Relative."""


@dataclass
class Results:
    """Of one scene."""

    scene: Scene
    lines: list[Line] = field(default_factory=list)
    drawn: dict[str, Drawn] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)

    def beyond_model(self, fresh: Callable[[], Any]) -> int | None:
        """Return the peak memory of `fresh`, which creates its own parameters and moments, without those."""
        model = 3 * sum(p.numel() * p.element_size() for p in self.scene.raw())
        peak = peak_bytes(self.scene.device, fresh)
        return None if peak is None else peak - model


def time_autograd(name: str, kind: Kind, results: Results, watch: Stopwatch, counting: bool) -> None:
    """Time a step that uses autograd, and keep the result of its first one."""
    scene = results.scene

    def fresh() -> AutogradStep:
        made = AutogradStep(scene, kind, counting)
        made()  # makes the moments
        made()
        return made

    peak = results.beyond_model(fresh)
    step = AutogradStep(scene, kind, counting)
    image, loss = step()
    results.losses[name] = float(loss)
    results.drawn[name] = Drawn(image.detach(), dict(zip(PARAMETERS, [m.clone() for m in step.moments()], strict=True)))
    results.lines.append(Line(f"step, {name}", watch.median(step), peak_bytes=peak))


def time_ours(
    name: str, results: Results, watch: Stopwatch, capacities: Capacities, floor: float | None,
    counting: bool, groups: bool | None,
) -> None:  # fmt: skip
    """Time our step: eagerly, or as a "graph", or "lazy"."""
    scene, graph, lazy = results.scene, "graph" in name, "lazy" in name

    def fresh() -> OurStep:
        made = OurStep(scene, capacities, graph, lazy, counting, groups)
        for _ in range(3):
            made()
        made.fused.flush()
        return made

    peak = results.beyond_model(fresh)
    step = OurStep(scene, capacities, graph, lazy, counting, groups)
    step()
    step.fused.flush()
    if graph:  # what is compared shall be the graph's
        for moment in step.adam.exp_avgs:
            moment.zero_()
        step()
        step.fused.flush()
    results.losses[name] = float(step.fused.report[0])
    moments: dict[str, Tensor] = dict(zip(PARAMETERS, [m.clone() for m in step.adam.exp_avgs], strict=True))
    results.drawn[name] = Drawn(step.fused.rgb[0].reshape(-1, 3).clone(), moments)
    ms = watch.median(lambda: step.block(BLOCK)) / BLOCK if lazy else watch.median(step)
    results.lines.append(Line(f"step, {name}", ms, floor, peak))
    step.check()


def time_losses(results: Results, watch: Stopwatch, floor: float | None) -> None:
    """Time L1 + SSIM with gradient: pytorch_msssim's, ours, and the fused steps' operator that includes the
    background."""
    scene = results.scene
    inner = (0, 0, scene.width, scene.height)
    generator = torch.Generator(scene.device).manual_seed(1)
    image = torch.rand(scene.height, scene.width, 3, generator=generator, device=scene.device)
    loss = torch_loss(scene)
    v_l1, v_ssim = (torch.tensor(v, device=scene.device) for v in (1e-7, -1e-7))
    operators = torch.ops.ns_multigpu
    _, _, gradient = operators.l1_ssim(image, scene.target, inner)

    def theirs() -> None:
        loss(image.detach().requires_grad_()).backward()

    def back() -> Tensor:
        return operators.l1_ssim_backward(image, scene.target, gradient, inner, v_l1, v_ssim)

    def both() -> None:
        operators.l1_ssim(image, scene.target, inner)
        back()

    blended, covered = image.view(-1, 3), torch.full((scene.width * scene.height,), 0.9, device=scene.device)
    background = torch.full((3,), 0.1, device=scene.device)

    def apart() -> Tensor:
        rgb = composite(blended, covered, background).view_as(image)
        _, _, dssim = operators.l1_ssim(rgb, scene.target, inner)
        v_rgb = operators.l1_ssim_backward(rgb, scene.target, dssim, inner, v_l1, v_ssim)
        return operators.composite_backward(blended, covered, background, v_rgb.view(-1, 3))[0]

    band = Band(scene.target, inner, background, v_l1, v_ssim, torch.empty_like(image), torch.zeros_like(v_l1))
    v_out, v_alpha = torch.empty_like(blended), torch.empty_like(covered)

    def in_one() -> None:
        band_loss_into(blended, covered, [band], scale=1.0, v_out=v_out, v_alpha=v_alpha)

    results.lines += [
        Line("  loss: L1 and pytorch_msssim, with gradient", watch.median(theirs)),
        Line("  loss: l1_ssim", watch.kernels(lambda: operators.l1_ssim(image, scene.target, inner))),
        Line("  loss: l1_ssim_backward", watch.kernels(back)),
        Line("  loss: both of them", watch.kernels(both), floor),
        Line("  loss: composite, both of them, composite_backward", watch.kernels(apart)),
        Line("  loss: band_loss, the same in one", watch.kernels(in_one)),
    ]


def time_updates(results: Results, watch: Stopwatch, capacities: Capacities, floor: dict[str, float]) -> None:
    """Time Adam on explicit gradients, torch's and ours, and our update from gradients of rows."""
    scene = results.scene
    params = [torch.nn.Parameter(p.clone()) for p in scene.raw()]
    for p in params:
        p.grad = torch.full_like(p, 1e-6)
    configurations: tuple[tuple[str, dict[str, Any]], ...] = (("default", {}), ("fused=True", {"fused": True}))
    for name, options in configurations:
        optimizers = [torch.optim.Adam([p], lr=RATE, eps=1e-15, **options) for p in params]
        results.lines.append(
            Line(f"  Adam: six torch.optim.Adam, {name}", watch.median(lambda o=optimizers: [x.step() for x in o]))
        )
        del optimizers
    adam = AdamStep([FusedAdam([p], lr=RATE, eps=1e-15) for p in params])
    grads = [p.grad for p in params if p.grad is not None]
    scalars = torch.tensor(adam.count(), device=scene.device)
    step = partial(adam_step, params, grads, adam.exp_avgs, adam.exp_avg_sqs, scalars)
    results.lines.append(Line("  Adam: adam_step", watch.kernels(step), floor.get("adam")))
    del adam, params, grads, step
    path, update = FusedPath(scene, capacities), FusedUpdate(scene)
    rows, lists, _ = path.both()
    path.check_capacity(rows, lists)
    results.lines.append(
        Line(
            "  splat_update: from rows, with Adam",
            watch.kernels(lambda: update(rows, path.records)),
            floor.get("update"),
        )
    )


def time_lazy_parts(results: Results, watch: Stopwatch, capacities: Capacities, floor: dict[str, float]) -> None:
    """Time the parts that differ with deferred Adam steps."""
    path = FusedPath(results.scene, capacities)
    rows, lists, _ = path.both()
    path.check_capacity(rows, lists)
    parts = LazyParts(path)
    works: tuple[tuple[str, str, Callable[[], Any]], ...] = (
        ("splat_forward", "forward", parts.forward),
        ("splat_update", "update", lambda: parts.update(rows, path.records)),
        ("splat_flush", "flush", parts.flush),
    )
    results.lines.append(Line("  splat_forward", watch.kernels(path.splat), floor.get("splat_forward")))
    for what, key, work in works:
        results.lines.append(Line(f"  lazy: {what}", watch.kernels(work), floor.get(f"lazy {key}")))


def time_groups(results: Results, watch: Stopwatch, capacities: Capacities) -> dict[str, int]:
    """Time the parts that cull groups by boxes. Return the numbers of groups and of visible ones."""
    scene = results.scene
    path = FusedPath(scene, capacities)
    rows, lists, _ = path.both()
    path.check_capacity(rows, lists)
    parts, update = LazyParts(path), FusedUpdate(scene)
    boxes = new_boxes(scene.means)
    splat_boxes(scene.means, scene.log_scales, boxes)
    cameras = (scene.viewmats, scene.Ks, scene.size)
    works: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("splat_boxes", lambda: splat_boxes(scene.means, scene.log_scales, boxes)),
        ("box_views", lambda: box_views(boxes, *cameras)),
        ("splat_forward, groups", lambda: path.splat(boxes)),
        ("splat_update, groups", lambda: update(rows, path.records, boxes)),
        ("lazy: splat_forward, groups", lambda: parts.forward(boxes)),
        ("lazy: splat_update, groups", lambda: parts.update(rows, path.records, boxes)),
    )
    for what, work in works:
        results.lines.append(Line(f"  {what}", watch.kernels(work)))
    same = zip(path.splat(boxes), rows, strict=True)
    if not all(torch.equal(a, b) for a, b in same):
        raise RuntimeError("rows differ where groups are culled")
    return {"groups": len(boxes), "shown": int(box_views(boxes, *cameras).sum())}


def check_losses(losses: dict[str, float], reference: str) -> None:
    """Raise RuntimeError if a first step's loss is not the reference's."""
    wanted = losses[reference]
    wrong = {k: v for k, v in losses.items() if not abs(v - wanted) <= MOST_LOSS_DIFFERENCE * abs(wanted)}
    if wrong:
        raise RuntimeError(f"the loss of {reference} is {wanted}, but others' are {wrong}")


def measure(
    scene: Scene, sections: Sections, watch: Stopwatch, counts_too: bool, culling: str = "auto"
) -> dict[str, Any]:
    """Measure one scene; `culling` is one of `GROUPS`."""
    results, name = Results(scene), scene.name
    report: dict[str, Any] = {"name": name, "points": scene.points, "width": scene.width, "height": scene.height}
    cuda = scene.device.type == "cuda"
    configurations = (
        (("today", Kind("gsplat", "default")), ("today, fused Adam", Kind("gsplat", "fused"))) if cuda else ()
    )
    for way, kind in (*configurations, ("operators", Kind("operators", "ours"))):
        for counting in (False, True)[: 1 + counts_too]:
            named = way + COUNTING * counting
            with sections.section(f"{name}: {named}"):
                time_autograd(named, kind, results, watch, counting)
    capacities: Capacities | None = None
    floor: dict[str, float] = {}
    with sections.section(f"{name}: counts"):
        capacities = needed(scene)
        counts = FusedPath(scene, capacities).counts()
        report |= {"counts": asdict(counts), "floors_ms": floors(counts), "capacities": capacities._asdict()}
        floor = floors(counts) if cuda else {}
        if cuda:
            floor |= {f"lazy {name}": ms for name, ms in lazy_floors(counts, floor).items()}
    if capacities is not None:
        variants = ("ours", "ours, graph", "ours, graph, lazy") if cuda else ("ours", "ours, lazy")
        for way, (more, groups), counting in product(
            variants, GROUPS[culling].items(), (False, True)[: 1 + counts_too]
        ):
            named = way + more + COUNTING * counting
            with sections.section(f"{name}: {named}"):
                least = floor.get("lazy step" if "lazy" in way else "step")
                time_ours(named, results, watch, capacities, least, counting, groups)
        with sections.section(f"{name}: updates"):
            time_updates(results, watch, capacities, floor)
        with sections.section(f"{name}: parts of a lazy step"):
            time_lazy_parts(results, watch, capacities, floor)
        if culling == "both":
            with sections.section(f"{name}: groups"):
                report["groups"] = time_groups(results, watch, capacities)
                sections.console.print(f"{name}: {report['groups']}")
    with sections.section(f"{name}: losses"):
        time_losses(results, watch, floor.get("loss"))
    show(sections.console, scene.describe(), results.lines)
    with sections.section(f"{name}: comparison"):
        reference = "today" if cuda else "operators"
        report |= {"against": compare(sections.console, results.drawn, reference), "losses": results.losses}
        check_losses(results.losses, reference)
    return report | {"lines": results.lines}


def summarize(console: Console, reports: list[dict[str, Any]]) -> None:
    """Print our step's speed-up over the present ones."""
    variants = ("today", "today, fused Adam", "operators", "ours", "ours, graph", "ours, graph, lazy")
    table = empty_table("whole step, ms", ("scene", *variants, "times faster", "peak, of today's"))
    for report, more in [(report, more) for report in reports for more in ("", COUNTING)]:
        steps = [line for line in report["lines"] if line.what.startswith("step, ")]
        of_these = [line for line in steps if line.what.endswith(COUNTING) == bool(more)]
        if not of_these:
            continue
        lines = {line.what.removeprefix("step, ").removesuffix(COUNTING): line for line in of_these}
        cells = [f"{lines[way].ms:.3f}" if way in lines else "" for way in variants]
        ours = lines.get("ours, graph, lazy") or lines.get("ours, graph")
        if "today" in lines and ours is not None:
            today = lines["today"]
            cells += [ratio(today.ms, ours.ms), ratio(ours.peak_bytes, today.peak_bytes)]
        table.add_row(report["name"] + more, *cells)
    console.print(table)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--counts", action="store_true", help="time each way with statistics and absolute gradients, too")
    made.add_argument("--group-culling", choices=list(GROUPS), default="auto", help="see above (default: %(default)s)")
    return run_scenes("train_step", made, measure, summarize, ("counts", "group_culling"))


if __name__ == "__main__":
    sys.exit(main())
