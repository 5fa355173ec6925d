"""Measure the fixed cost of a refinement over ranks: host milliseconds, and number of collectives.

    python -m benchmarks.scaling.refinement --ranks 2 --points 5000 --json refinement.json

A small model is refined many times, with Adam's moments. So operators, launches and collectives dominate the time.
`grows` adds a twentieth to MCMC's Gaussians. `splits` is splatfacto's refinement, which splits, copies and prunes.
`ordered` refinements sort all points, `unordered` ones do not.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.lib.report import write_report
from ns_multigpu.core.assign.placement import Sharded
from ns_multigpu.core.assign.shard_index import ShardIndex
from ns_multigpu.core.dist.collectives import barrier
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.launch.processes import RankProcesses
from ns_multigpu.primitives.densify.sharded_densifier import ShardedDensifier
from ns_multigpu.primitives.densify.sharded_mcmc import ShardedMcmc
from ns_multigpu.primitives.gaussians.schema import SCHEMA

SHAPES = {one.name: one.sized(3) for one in SCHEMA}
MEETINGS = ("all_gather_into_tensor", "all_to_all_single", "all_gather", "all_reduce", "all_gather_object")
EVERY = 100
TIMEOUT = timedelta(seconds=120)


def model(points: int, rank: int, device: torch.device) -> tuple[Any, dict[str, torch.optim.Optimizer]]:
    """Return a rank's points and their Adam optimizers after one step."""
    g = torch.Generator().manual_seed(rank)
    params = torch.nn.ParameterDict(
        {n: torch.nn.Parameter(torch.randn(points, *s, generator=g).to(device)) for n, s in SHAPES.items()}
    )
    params["scales"].data -= 3.0
    optimizers: dict[str, torch.optim.Optimizer] = {n: torch.optim.Adam([p], lr=1e-3) for n, p in params.items()}
    for name, optimizer in optimizers.items():
        params[name].grad = torch.ones_like(params[name])
        optimizer.step()
        params[name].grad = None
    return params, optimizers


def refine(kind: str, points: int, world: World, times: int) -> dict[str, list[tuple[float, int]]]:
    """Return milliseconds and number of collectives of each refinement, by whether it orders points."""
    params, optimizers = model(points, world.rank, world.device)
    held: Any = {"shard_index": ShardIndex(Sharded()), "world": world}
    grows = kind == "grows"
    densifier: Any = (
        ShardedMcmc(cap_max=1 << 30, refine_start_iter=0, refine_every=EVERY, **held)
        if grows
        else ShardedDensifier(refine_start_iter=0, refine_every=EVERY, reset_every=1 << 20, morton=True, **held)
    )
    state: dict[str, Any] = {} if grows else densifier.initialize_state(scene_scale=1.0)
    met: list[str] = []
    for name in MEETINGS:
        call: Callable[..., Any] = getattr(dist, name)
        setattr(dist, name, lambda *a, call=call, name=name, **k: (met.append(name), call(*a, **k))[1])
    found: dict[str, list[tuple[float, int]]] = {"ordered": [], "unordered": []}
    for k in range(1, times + 1):
        if not grows:
            sums = densifier.statistics(params, state)
            sums["grad2d"].copy_(torch.linspace(0, 2.2 * densifier.grow_grad2d, len(sums["grad2d"]))).mul_(0.5)
            sums["grad2d"][::40] *= 2.0
            sums["count"].fill_(1.0)
        barrier(world)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        met.clear()
        began = time.perf_counter()
        densifier.refine_when_due(params, optimizers, state, k * EVERY, 1)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        took = 1e3 * (time.perf_counter() - began)
        found["unordered" if k % densifier.order_every else "ordered"].append((took, len(met)))
    return found


def run_rank(points: int, times: int, device: str, folder: str) -> None:
    """Measure on one rank; rank 0 writes the figures."""
    world = World.from_env(device, TIMEOUT)
    figures = [
        {
            "kind": kind, "way": way, "refinements": len(took), "ms": round(statistics.median(ms for ms, _ in took), 2),
            "meetings": statistics.median(met for _, met in took),
        }
        for kind in ("grows", "splits")
        for way, took in refine(kind, points, world, times).items()
        if took
    ]  # fmt: skip
    if world.is_main:
        (Path(folder) / "figures.json").write_text(json.dumps(figures))
    barrier(world)
    world.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--points", type=int, default=5000, help="of each rank, in the beginning")
    parser.add_argument("--times", type=int, default=30, help="refinements")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for name in ("ranks", "points", "times"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: give 1 or more")
    if options.device == "cuda" and options.ranks > torch.cuda.device_count():
        parser.error(f"--ranks {options.ranks}: there are {torch.cuda.device_count()} GPUs, and each rank takes one")
    with TemporaryDirectory() as folder:
        args = (options.points, options.times, options.device, folder)
        RankProcesses(run_rank, args, options.ranks, fork=False).wait()
        figures = json.loads((Path(folder) / "figures.json").read_text())
    table = Table("refinement", "way", "refinements", "ms, median", "meetings")
    for row in figures:
        table.add_row(row["kind"], row["way"], str(row["refinements"]), f"{row['ms']:.2f}", f"{row['meetings']:.0f}")
    Console().print(table)
    write_report(options.json, rows=figures)


if __name__ == "__main__":
    main()
