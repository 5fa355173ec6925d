# torch annotates only part of itself:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""What stages of a step hide of a slow link: times of the same step with and without, turn about in the same processes.

    sudo python -m benchmarks.scaling.stages --megabits 100 1000 --workers 1 2 [--json FILE]

The machines are network namespaces of this host with a link of a given rate between them (see benchmarks.lib.machines):
that takes Linux and root. They share its cores. A step is that of `locality` on the processor: Gaussians on a plain,
and views that look down at it from one end to the other. Each turn takes one step with each number of stages, after a
barrier. What is shown are medians over turns, so that what else the host does meets all alike. A step's time ends when
its last rank has ended. All gradients are compared, to the bit.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.lib.environment import describe
from benchmarks.lib.machines import TwoMachines, why_none
from cuda_ext.ops.adam import adam_scalars
from ns_multigpu.core.collectives import all_gather_floats, barrier
from ns_multigpu.core.loss import photometric_loss
from ns_multigpu.core.plan import Plan
from ns_multigpu.core.relays import Relays
from ns_multigpu.core.stages import stages_of
from ns_multigpu.core.step import Step
from ns_multigpu.core.step_settings import StepSettings, padded, with_halos
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.transports import make_transport
from ns_multigpu.core.types import Points, View
from ns_multigpu.core.world import World
from ns_multigpu.plugin.blocks.first_room import rows_needed
from ns_multigpu.primitives.gaussians.functions import Gaussians
from ns_multigpu.primitives.gaussians.schema import ORDER
from strategies.locality import locality

LAMBDA, LENGTH, WIDE = 0.2, 12.0, 4.0


def plain(count: int) -> Points:
    """Gaussians on a plain of 12 by 4."""
    g = torch.Generator().manual_seed(1)
    params = {
        "means": torch.rand(count, 3, generator=g) * torch.tensor([LENGTH, WIDE, 0.3]),
        "scales": torch.log(0.3 * (LENGTH * WIDE / count) ** 0.5 * (0.5 + torch.rand(count, 3, generator=g))),
        "quats": torch.randn(count, 4, generator=g),
        "opacities": torch.randn(count, 1, generator=g),
        "features_dc": torch.randn(count, 3, generator=g) * 0.5,
        "features_rest": torch.randn(count, 15, 3, generator=g) * 0.1,
    }
    return Points(params)


def above(count: int, width: int, height: int) -> list[View]:
    """Views that look straight down, from one end of the plain to the other, each at a third of it."""
    views: list[View] = []
    for k in range(count):
        matrix = torch.diag(torch.tensor([1.0, -1.0, -1.0, 1.0]))
        matrix[:3, 3] = -matrix[:3, :3] @ torch.tensor([LENGTH * (k + 0.5) / count, WIDE / 2, 3.0])
        K = torch.tensor([[0.75 * width, 0, width / 2], [0, 0.75 * width, height / 2], [0, 0, 1.0]])
        views.append(View(matrix, K, width, height, index=k))
    return views


def image_of(view: View) -> Tensor:
    g = torch.Generator().manual_seed(view.index)
    return torch.randint(0, 256, (view.height, view.width, 3), generator=g, dtype=torch.uint8)


def by_autograd(spread: Strategy, kind: Gaussians, held: Points, views: list[View], plan: Plan, stages: int) -> Any:
    """A step with so many stages, that returns the gradients."""
    world, rows = spread.world, spread.rows
    params = {name: value.clone().requires_grad_() for name, value in held.params.items()}

    def step() -> dict[str, Tensor]:
        rows.stages = stages
        for value in params.values():
            value.grad = None
        rendering = spread.render(kind, Points(params), views, plan)
        loss = sum((r.sum() * 0.0 for r in rendering.splats.rows.values() if r.requires_grad), start=torch.zeros(()))
        for pixels in rendering.pixels:
            view = views[pixels.patch.view]
            rgb = (pixels.color + (1 - pixels.alpha) * 0.3).clamp(0, 1)
            left, top, right, bottom = pixels.patch.rendered(view)
            target = image_of(view)[top:bottom, left:right]
            loss = loss + photometric_loss(rgb, target, pixels.patch, view, LAMBDA) / len(views)
        spread.gradients.begin_backward([*params.values()])
        loss.backward()
        spread.gradients.end_backward()
        return {name: value.grad for name, value in params.items() if value.grad is not None}

    assert world.size > 1
    return step


def fused(spread: Strategy, kind: Gaussians, held: Points, views: list[View], plan: Plan, stages: int) -> Any:
    """The same without autograd, with the room that a run would have: Adam's first moment is the gradient."""
    world, kernels = spread.world, kind.kernels()
    assert kernels is not None
    params = {name: value.clone() for name, value in held.params.items()}
    moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in params.items()}
    count = len(stages_of(len(views), stages))
    relays = Relays.of(world) if spread.rows.relays else None
    rows = padded(len(held) * len(views) // 2)
    needed = rows_needed(kernels, kernels.model(params, moments, {}, None), spread, [views], rows, relays, count)
    pairs = tuple(tuple(map(padded, row)) for row in needed)
    settings = StepSettings(
        views[0].width, views[0].height, len(views), LAMBDA, rows, pairs, padded(20 * len(held) * len(views))
    )
    transport = make_transport(
        spread.rows, spread.gradients, world, kernels, rows, pairs, settings.words(spread.assignment), peer=False,
        atomics=False, stages=count,
    )  # fmt: skip
    step = Step(kernels, params, moments, {}, settings, spread, transport)
    step.viewmats.copy_(torch.stack([view.viewmat for view in views]))
    step.Ks.copy_(torch.stack([view.K for view in views]))
    step.scalars.copy_(torch.tensor([adam_scalars(0.0, (0.0, 0.999), 1e-15, 1) for _ in ORDER]))
    whole = with_halos(plan, views[0].width, views[0].height)
    targets: list[Tensor] = []
    for patch in whole.owned[world.rank]:
        left, top, right, bottom = patch.rendered(views[patch.view])
        targets.append(image_of(views[patch.view])[top:bottom, left:right].contiguous())

    def take() -> dict[str, Tensor]:
        step.take(whole, targets)
        if step.status().full:
            raise RuntimeError("a step had not enough room")
        return {name: first for name, (first, _) in moments.items()}

    return take


def work(options: argparse.Namespace) -> None:
    """A rank's part; rank 0 writes what was found."""
    torch.set_num_threads(1)
    world = World.from_env("cpu")
    spread, kind = locality(world), Gaussians()
    views = above(options.views, options.width, options.height)
    spread.placement.look(lambda: views)
    held = spread.placement.hold(plain(options.points), world)
    held = Points({name: value.detach() for name, value in held.params.items()})
    spread.observe(kind, held, 0)
    plan = spread.plan(views)
    by_autograd(spread, kind, held, views, plan, 1)()  # it learns what patches need
    plan = spread.plan(views)
    found: dict[str, Any] = {}
    for mode, make in (("autograd", by_autograd), ("step", fused)):
        steps = {count: make(spread, kind, held, views, plan, count) for count in options.stages}
        found[mode] = turns(steps, options.turns, world)
    if world.is_main:
        Path(options.work).write_text(json.dumps(found))
    barrier(world)


def turns(steps: dict[int, Callable[[], dict[str, Tensor]]], count: int, world: World) -> dict[str, Any]:
    """Milliseconds of each turn by stages, bytes between machines, and whether all gradients were the same."""
    first = next(iter(steps.values()))()
    first = {name: value.clone() for name, value in first.items()}
    times: dict[int, list[float]] = {stages: [] for stages in steps}
    sent: dict[int, int] = {}
    same = True
    for turn in range(count + 1):
        for stages, step in steps.items():
            barrier(world)
            world.traffic.between_since("step")
            begun = time.perf_counter()
            gradients = step()
            took = max(row[0] for row in all_gather_floats([time.perf_counter() - begun], world))
            sent[stages] = world.traffic.between_since("step")
            same = same and all(torch.equal(value, first[name]) for name, value in gradients.items())
            if turn:  # the first warms up
                times[stages].append(1e3 * took)
    every = all_gather_floats([float(same), *(float(n) for n in sent.values())], world)
    between = [sum(column) for column in zip(*every, strict=True)][1:]
    return {
        "ms": {str(stages): values for stages, values in times.items()},
        "between": dict(zip(map(str, sent), between, strict=True)),
        "same": all(row[0] == 1.0 for row in every),
    }


def measure(options: argparse.Namespace, megabits: float, workers: int, folder: Path) -> dict[str, Any]:
    """Starts both machines' workers; returns what rank 0 has found."""
    file = folder / f"{megabits:g}-{workers}.json"
    logs = [folder / f"{megabits:g}-{workers}-{machine}.log" for machine in range(2)]
    variables = {"GLOO_SOCKET_IFNAME": TwoMachines.interface, "OMP_NUM_THREADS": "1"}
    numbers = ("points", "views", "width", "height", "turns")
    with TwoMachines(megabits) as machines:
        runs: list[Any] = []
        for machine, log in enumerate(logs):
            words = [
                *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nnodes", "2"),
                *("--node-rank", str(machine), "--nproc-per-node", str(workers)),
                *("--master-addr", TwoMachines.names[0], "--master-port", "29500"),
                *("-m", "benchmarks.scaling.stages", "--work", str(file)),
                *(word for name in numbers for word in (f"--{name}", str(getattr(options, name)))),
                *("--stages", *map(str, options.stages)),
            ]
            runs.append(machines.start(machine, words, variables, log.open("w")))
        codes = [run.wait(1500) for run in runs]
    if any(codes):
        raise RuntimeError("\n".join(log.read_text()[-3000:] for log in logs))
    return {"megabits": megabits, "workers": workers, **json.loads(file.read_text())}


def table(runs: Sequence[dict[str, Any]]) -> Table:
    shown = Table(
        "link", "workers", "mode", "stages", "between machines", "median", "quartiles", "beside 1", "same bits"
    )
    for run in runs:
        for mode in ("autograd", "step"):
            one = run[mode]
            base = statistics.median(next(iter(one["ms"].values())))
            for stages, values in one["ms"].items():
                low, middle, high = statistics.quantiles(values, n=4)
                shown.add_row(
                    f"{run['megabits']:g} Mbit/s", f"2 x {run['workers']}", mode, stages,
                    f"{one['between'][stages] / 1e6:.2f} MB", f"{middle:.0f} ms", f"{low:.0f} to {high:.0f}",
                    f"{100 * (middle / base - 1):+.0f} %", "yes" if one["same"] else "NO",
                )  # fmt: skip
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--megabits", type=float, nargs="+", default=[100.0, 1000.0], help="rates of the link, each way"
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1], help="on each machine")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4], help="the first is what others are beside")
    parser.add_argument("--points", type=int, default=40000)
    parser.add_argument("--views", type=int, default=8, help="of a step")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--height", type=int, default=128)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options)
        return 0
    if reason := why_none():
        parser.error(reason)
    runs: list[dict[str, Any]] = []
    console = Console(width=None if sys.stdout.isatty() else 140)
    with TemporaryDirectory(prefix="stages-") as folder:
        for workers in options.workers:
            for megabits in options.megabits:
                runs.append(measure(options, megabits, workers, Path(folder)))
                console.print(table(runs[-1:]))
    if options.json:
        load = os.getloadavg()
        options.json.write_text(
            json.dumps({**describe(), "load": load, "runs": runs}, indent=2) + "\n", encoding="utf8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
