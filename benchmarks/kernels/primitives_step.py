"""Time a training step of each primitive on one GPU: captured in a CUDA graph, and through autograd.

    python -m benchmarks.kernels.primitives_step [--points 1000000] [--steps 20] [--profile]

Points are random in a box before the camera, and so is the image. The captured step has the stages of the autograd
step: projection, lists, compositing, loss, backward pass, Adam. 2D Gaussians have their normal loss in both, convexes
the shape that training starts from. Nothing is densified. --profile lists the times of a captured step's kernels.
"""

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from cuda_ext.ops.optim.adam import AdamStep, FusedAdam, fused_step
from cuda_ext.ops.raster.convexes import CORNERS
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.transports import OwnRows
from ns_multigpu.core.step.loss import photometric_loss
from ns_multigpu.core.step.step import Step
from ns_multigpu.core.step.step_settings import StepSettings, padded
from ns_multigpu.core.types import Patch, Points, View
from ns_multigpu.plugin.blocks.graphs import GraphPool, StepGraphs
from ns_multigpu.plugin.blocks.timing import StepTimer
from ns_multigpu.primitives.convexes.init import DELTA, SIZE, STEEPNESS, fibonacci_sphere
from ns_multigpu.primitives.registry import PRIMITIVES, RenderOptions
from ns_multigpu.primitives.surfels.losses import normal_loss
from strategies import STRATEGIES

LAMBDA, WEIGHT, DEGREE = 0.2, 0.05, 3


def make(kind: str, count: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return random parameters of `count` points."""
    g = torch.Generator(device).manual_seed(1)
    params: dict[str, torch.Tensor] = {}
    for one in PRIMITIVES[kind].schema:
        params[one.name] = torch.randn(count, *one.sized(DEGREE), generator=g, device=device) * 0.1
    box = torch.rand(count, 3, generator=g, device=device)
    params["means"] = (box - 0.5) * torch.tensor([8.0, 4.5, 4.0], device=device) + torch.tensor([0.0, 0.0, 6.0]).to(
        device
    )
    size = 0.4 * (count / 144) ** (-1 / 3)  # about as far as points are apart
    if "corners" in params:  # as training starts, a little out of shape
        sphere = fibonacci_sphere(CORNERS).flatten().to(device)
        params["corners"] = size * (SIZE * sphere + params["corners"])
        params["deltas"] += math.log(DELTA / size)
        params["sigmas"] += math.log(STEEPNESS / (DELTA * size))
    else:
        params["scales"] += math.log(size)
        params["quats"] += torch.randn(count, 4, generator=g, device=device)
    if "motions" in params:
        params["motions"][:, 0] += 1
        params["times"] += 0.5
    return params


class Both:
    """A kind's step, in both ways."""

    def __init__(self, kind: str, count: int, size: tuple[int, int], device: torch.device) -> None:
        width, height = size
        K = torch.tensor([[width * 0.8, 0, width / 2], [0, width * 0.8, height / 2], [0, 0, 1]], device=device)
        self.view = View(torch.eye(4, device=device), K, width, height, time=0.5)
        params = make(kind, count, device)
        self.params = {name: torch.nn.Parameter(value) for name, value in params.items()}
        self.adams = [FusedAdam([value], lr=1e-5, eps=1e-15) for value in self.params.values()]
        self.adam = AdamStep(self.adams)
        self.image = torch.randint(0, 256, (height, width, 3), device=device, dtype=torch.uint8)
        self.kind, self.device = kind, device
        self.flat = kind == "2dgs"

    def ordinary(self) -> Callable[[], None]:
        channels = ("normals",) if self.flat else ()
        primitive = PRIMITIVES[self.kind].make(RenderOptions(DEGREE, depth=self.flat, channels=channels))
        points, view = Points(dict(self.params)), self.view

        def step() -> None:
            splats = primitive.splat(points, primitive.cull(points, [view], [0]), [view])
            pixels = primitive.render(splats, [Patch.whole(0, view)], [view])[0]
            loss = photometric_loss(pixels.color.clamp(0, 1), self.image, pixels.patch, view, LAMBDA)
            (loss + WEIGHT * normal_loss(pixels, view) if self.flat else loss).backward()
            fused_step(self.adams, set_grads_to_zero=True)

        return step

    def captured(self) -> tuple[Callable[[], None], Any]:
        kernels = (
            PRIMITIVES[self.kind]
            .make(RenderOptions(DEGREE))
            .kernels(**({"losses": {"normals": WEIGHT}} if self.flat else {}))
        )
        params = {name: value.detach() for name, value in self.params.items()}
        return captured_step(kernels, params, self.adam, self.view, self.image, {})


def captured_step(
    kernels: Any, params: dict[str, torch.Tensor], adam: AdamStep, view: View, image: torch.Tensor,
    statistics: dict[str, torch.Tensor],
) -> tuple[Callable[[], None], Any]:  # fmt: skip
    """Return a function that runs a step of one view on one GPU, and the `Step`. From the second call it replays a
    graph.

    Args:
        kernels: of the kind. params: raw; they change. adam: of `params`, in their order. image: [H, W, 3] uint8.
        statistics: of densification, by name; empty for none.
    """
    device, count = image.device, len(params["means"])
    world = World.single(str(device))
    strategy = STRATEGIES["single"](world)
    plan = strategy.plan([view])
    moments = dict(zip(params, zip(adam.exp_avgs, adam.exp_avg_sqs, strict=True), strict=True))
    capacity = (count, 16 * count)
    while True:
        settings = StepSettings(view.width, view.height, 1, LAMBDA, capacity[0], 0, capacity[1])
        transport = OwnRows(world, kernels, capacity[0], 0, settings.words(strategy.assignment))
        step = Step(kernels, params, moments, statistics, settings, strategy, transport)
        step.viewmats[0], step.Ks[0], step.times[0] = view.viewmat, view.K, view.time
        step.scalars.copy_(torch.tensor(adam.count()))
        step.take(plan, [image])
        status = step.status()
        if not status.full and capacity != (count, 16 * count):
            break
        capacity = (padded(status.rows), padded(status.intersections))  # as a run learns it
    graphs = StepGraphs(StepTimer(device), lambda: None, GraphPool(device))
    return lambda: graphs.take(plan, lambda: step.parts(plan, [image])), step


def milliseconds(step: Callable[[], Any], steps: int) -> float:
    """Return the mean milliseconds of `steps` steps, after five for warm-up."""
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / steps


def where_time_goes(step: Callable[[], Any], steps: int, most: int = 14) -> str:
    """Return the kernels with the largest GPU time: ms per step, calls per step, and their names."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    kernels = sorted(profile.key_averages(), key=lambda one: -one.self_device_time_total)[:most]
    return "\n".join(
        f"    {one.self_device_time_total / 1e3 / steps:7.3f} ms  {one.count / steps:5.1f} x  {one.key[:110]}"
        for one in kernels
    )


def main() -> None:
    """Print a line for each primitive."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="and which kernels take the time")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("primitives_step times CUDA graphs, and torch sees no GPU here. Run it on a machine with one.")
    device, size = torch.device("cuda"), (1920, 1080)
    print(f"{torch.cuda.get_device_name()}, {options.points} points, {size[0]}x{size[1]}")
    for kind in PRIMITIVES:
        both = Both(kind, options.points, size, device)
        ordinary = milliseconds(both.ordinary(), options.steps)
        work, step = both.captured()
        captured = milliseconds(work, options.steps)
        status = step.status()
        assert not status.full and float(step.report[-1]) == 0, "all steps were taken, and nothing is NaN"
        print(
            f"{kind}: captured {captured:.2f} ms, through autograd {ordinary:.2f} ms: {ordinary / captured:.2f} times; "
            f"{status.rows} rows, {status.intersections} intersections, "
            f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most"
        )
        if options.profile:
            print(where_time_goes(work, options.steps))
        del both, work, step
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
