"""Time rasterization, forward and backward, against gsplat 1.4.0 on one GPU, and check that both draw the same.

    python -m benchmarks.kernels.rasterizer [--scenes garden-11 ...] [--garden PATH] [--quick] [--json FILE]

Four variants: gsplat's `rasterization` (packed False, as nerfstudio calls it); ours through the public operators and
autograd; ours through the fused path, eagerly and as a CUDA graph. The loss is a mean squared error against noise. The
fused path ends with the gradients of rows (splats of this view), which training passes to Adam's step in one
kernel. "and update" includes that kernel, so it does more than the others, which end with the gradients of parameters.
A second table has the stages of the fused path, replayed from CUDA graphs, with the hardware's floor of each
(`benchmarks.kernels.floors`) and with other scopes of the backward pass. Peak memory is that of a variant without the
scene's parameters and image; moments of Adam do not count.

On a CPU gsplat cannot run: the fused path is then checked against the public operators.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.kernels.floors import Counts, floors
from benchmarks.kernels.fused_path import Capacities, FusedPath, FusedUpdate, needed
from benchmarks.kernels.renderers import Render, gsplat_counts, gsplat_render, joined, operators_render
from benchmarks.kernels.sections import Line, Sections, parser, ratio, run_scenes, show
from benchmarks.lib.agreement import Drawn, compare
from benchmarks.lib.report import empty_table
from benchmarks.lib.stopwatch import Stopwatch, captured, peak_bytes
from benchmarks.scenes.garden import Scene
from cuda_ext.ops.optim.fused import PARAMETERS


@dataclass
class Results:
    """Of one scene."""

    scene: Scene
    lines: list[Line] = field(default_factory=list)
    drawn: dict[str, Drawn] = field(default_factory=dict)


def time_autograd(name: str, results: Results, watch: Stopwatch, parameters: list[Tensor], render: Render) -> None:
    """Time a variant that uses autograd, and keep its image and gradients."""
    device = results.scene.device
    leaves = [p.detach().requires_grad_() for p in parameters]
    target = results.scene.floats().view(-1, 3)

    def forward() -> Tensor:
        with torch.no_grad():
            return render(leaves)[0]

    def both() -> Tensor:
        for leaf in leaves:
            leaf.grad = None
        image, _ = render(leaves)
        (image - target).square().mean().backward()
        return image.detach()

    forward_ms, both_ms = watch.median(forward), watch.median(both)
    forward_peak = peak_bytes(device, forward)
    for leaf in leaves:
        leaf.grad = None
    both_peak = peak_bytes(device, both)
    results.lines += [
        Line(f"{name}: forward", forward_ms, peak_bytes=forward_peak),
        Line(f"{name}: forward and backward", both_ms, peak_bytes=both_peak),
    ]
    image = both()
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    if len(gradients) == 5:  # harmonics in one tensor
        gradients[4:] = [gradients[4][:, 0], gradients[4][:, 1:]]
    scales, opacities = leaves[2].detach(), leaves[3].detach()
    gradients[2] = gradients[2] * scales  # by the logarithm
    gradients[3] = gradients[3] * opacities * (1 - opacities)  # by the logit
    results.drawn[name] = Drawn(image, dict(zip(PARAMETERS, gradients, strict=True)))


def time_fused(results: Results, watch: Stopwatch, capacities: Capacities, floor: dict[str, float]) -> None:
    """Time the fused path as a whole, and keep its image and gradients."""
    scene = results.scene
    device = scene.device
    path, update = FusedPath(scene, capacities), FusedUpdate(scene)

    def updated() -> None:
        rows, _, _ = path.both()
        update(rows, path.records)

    both = floor["forward and backward"]
    measurements = (
        ("forward", path.forward, floor["forward"]),
        ("forward and backward", path.both, both),
        ("forward, backward and update", updated, both + floor["update"]),
    )
    for what, work, least in measurements:
        peak = None
        if work == path.both:  # records of gradients and their places included
            peak = peak_bytes(device, lambda: FusedPath(scene, capacities, target=path.target).both())
        bound = least if device.type == "cuda" else None
        results.lines.append(Line(f"fused: {what}", watch.median(work), bound, peak))
        if device.type == "cuda":
            results.lines.append(Line(f"fused, graph: {what}", watch.median(captured(work, device)), bound))
    rows, lists, pixels = path.both()
    path.check_capacity(rows, lists)
    gradients = FusedUpdate(scene, remember=False)
    gradients(rows, path.records)
    results.drawn["fused"] = Drawn(pixels.out, dict(zip(PARAMETERS, gradients.exp_avgs, strict=True)))


def time_stages(results: Results, watch: Stopwatch, capacities: Capacities, floor: dict[str, float]) -> None:
    """Time the parts of the fused path, and variants of its backward pass."""
    scene = results.scene
    cuda = scene.device.type == "cuda"
    path = FusedPath(scene, capacities)
    rows, lists, pixels = path.forward()
    v_out = path.image_gradient(pixels)
    update = FusedUpdate(scene)

    def add(what: str, work: Callable[[], Any], piece: str) -> None:
        results.lines.append(Line(f"  {what}", watch.kernels(work), floor[piece] if cuda else None))

    add("splat_forward", path.splat, "splat_forward")
    add("intersect_capacity", lambda: path.lists(rows), "intersect")
    add("rasterize", lambda: path.pixels(rows, lists), "rasterize")
    everything = (rows, lists, pixels, v_out)
    add("backward: local, unpacked", lambda: path.local_backward(*everything), "backward")
    for scope, system in (("gpu", False), ("system", True)):
        other = FusedPath(scene, capacities, system_scope=system)
        add(f"backward: into, {scope} scope", lambda o=other: o.backward(*everything), "backward")
    other = FusedPath(scene, capacities, absgrad=True)
    add("backward: into, absgrad", lambda: other.backward(*everything), "backward")
    path.backward(*everything)
    add("splat_update (with Adam)", lambda: update(rows, path.records), "update")


def measure(scene: Scene, sections: Sections, watch: Stopwatch) -> dict[str, Any]:
    """Measure one scene."""
    results, name = Results(scene), scene.name
    report: dict[str, Any] = {"name": name, "points": scene.points, "width": scene.width, "height": scene.height}
    cuda = scene.device.type == "cuda"
    if cuda:
        with sections.section(f"{name}: gsplat"):
            report["gsplat_counts"] = gsplat_counts(scene)
            *geometry, dc, rest = scene.activated()
            time_autograd("gsplat", results, watch, [*geometry, joined(dc, rest)], gsplat_render(scene))
            del geometry, dc, rest
    with sections.section(f"{name}: operators"):
        time_autograd("operators", results, watch, scene.activated(), operators_render(scene))
    capacities: Capacities | None = None
    counts: Counts | None = None
    with sections.section(f"{name}: counts"):
        capacities = needed(scene)
        counts = FusedPath(scene, capacities).counts()
        report |= {"counts": asdict(counts), "floors_ms": floors(counts), "capacities": capacities._asdict()}
    if capacities is not None and counts is not None:
        with sections.section(f"{name}: fused"):
            time_fused(results, watch, capacities, floors(counts))
        with sections.section(f"{name}: pieces"):
            time_stages(results, watch, capacities, floors(counts))
    show(sections.console, scene.describe(), results.lines)
    for title, numbers in (("ours", report.get("counts", {})), ("gsplat", report.get("gsplat_counts", {}))):
        if numbers:
            sections.console.print(f"{title}: " + ", ".join(f"{key} {value:,}" for key, value in numbers.items()))
    with sections.section(f"{name}: comparison"):
        report["against"] = compare(sections.console, results.drawn, "gsplat" if cuda else "operators")
    return report | {"lines": results.lines}


def summarize(console: Console, reports: list[dict[str, Any]]) -> None:
    """Print each variant's speed-up over gsplat."""
    variants = ("operators", "fused", "fused, graph")
    heads = [f"{way}: {what}" for what in ("forward", "forward and backward") for way in variants]
    more = ("fused, graph: forward, backward and update", "peak, of gsplat's")
    table = empty_table("times faster than gsplat 1.4.0", ("scene", *heads, *more))
    for report in reports:
        lines = {line.what: line for line in report["lines"]}
        ms = {what: line.ms for what, line in lines.items()}
        cells = [ratio(ms.get(f"gsplat: {head.split(': ')[1]}"), ms.get(head)) for head in heads]
        cells.append(
            ratio(ms.get("gsplat: forward and backward"), ms.get("fused, graph: forward, backward and update"))
        )
        peaks = [line.peak_bytes for w in ("fused", "gsplat") if (line := lines.get(f"{w}: forward and backward"))]
        cells.append(ratio(*peaks) if len(peaks) == 2 else "")
        table.add_row(report["name"], *cells)
    console.print(table)


if __name__ == "__main__":
    sys.exit(run_scenes("rasterizer", parser(__doc__), measure, summarize))
