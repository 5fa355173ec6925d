"""Trains the largest model: some steps of `splatfacto-tile` on a city of hundreds of millions of Gaussians.

    python -m benchmarks.scaling.largest --points 400M --image 4K --json FILE

Every GPU makes its own shard (`scenes.city_model`): no tensor is ever as large as the whole model. Parameters, both
moments of Adam and densification's statistics are float32; the learning rates are splatfacto's. With --compact the
moments are bfloat16, as with --pipeline.model.optimizer-state compact: 484 bytes a point instead of 720. Printed are
the time of a step and the memory of each GPU; the loss of each view the first and the last time that it was seen shows
that it trains. On a CPU: --device cpu --gpus 2 --points 2000 --image 96x64 --steps 4 --views 2.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.lib.lockstep import Clock, memory, over_ranks
from benchmarks.lib.rank_jobs import Job, run_jobs
from benchmarks.lib.report import write_report
from benchmarks.lib.stopwatch import free
from benchmarks.scaling.city_runs import RATES, CityViews
from benchmarks.scaling.tile import MOST_VIEWS, image_size
from benchmarks.scaling.tile_run import Mode, TileRun
from benchmarks.scenes.city_model import CityScene, make_model
from cuda_ext.dispatch.load import build_native
from cuda_ext.ops.optim.compact_adam import COMPACT
from ns_multigpu.core.dist.collectives import barrier
from ns_multigpu.core.dist.peer_memory import choose_transport
from ns_multigpu.core.dist.world import World
from ns_multigpu.planning.quantities import parse_count

_BLOCK = 50
"""Steps that share a flush."""


def _bytes(moment: torch.dtype) -> int:
    """Return the bytes of a point: parameters, two moments each, statistics."""
    return 59 * (4 + 2 * moment.itemsize) + 3 * 4


def make_worker(world: World, shared: Job) -> Callable[[Job], Job]:
    """Training worker; see `lib.rank_jobs`."""
    return lambda job: _train(world, job)


def _train(world: World, job: Job) -> Job:
    scene = CityScene(**job["scene"])
    began = time.perf_counter()
    model = make_model(scene, world)
    model.moment_dtype = COMPACT if job["compact"] else torch.float32
    city_views = CityViews(scene, scene.cameras(), scene.images(world))
    made, making = time.perf_counter() - began, memory(world)
    free(world.device)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
    chosen = choose_transport(world, "auto")
    mode = Mode("peer" if chosen.peer else "collective")
    run = TileRun(model, city_views, world, 1, mode, counting=True)
    run.warm_up()  # measures the capacities that steps need
    run.still_moments()
    for counted in run.statistics.values():
        counted.zero_()
    run.step.status()  # resets the counts
    warmed_up = time.perf_counter() - began
    run.number = done = 0
    times: list[float] = []
    losses: list[tuple[int, float]] = []
    redone, flush = 0, 0.0
    while done < job["steps"]:
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        barrier(world)
        reports: list[Tensor] = []
        clock = Clock(world.device)
        clock.mark()
        for k in range(done, min(job["steps"], done + _BLOCK)):
            run.advance(k % len(run.batches), RATES)
            reports.append(run.step.report[0].clone())
            clock.mark()
        run.flush()
        clock.mark()
        slowest = [max(column) for column in zip(*over_ranks(clock.intervals(), world), strict=True)]
        status = run.step.status()
        flush = slowest.pop()
        times += slowest[: status.done]
        shares = over_ranks([float(loss) for loss in reports[: status.done]], world)
        losses += [(k % len(run.batches), sum(one)) for k, one in enumerate(zip(*shares, strict=True), start=done)]
        done += status.done
        run.number = done
        if status.full:
            redone += 1
            if redone > 8:
                raise RuntimeError(f"capacities are still exceeded: {status}, capacities {run.capacities}")
            run.grow_capacity(run.demand_of(status))
    finite = all(bool(torch.isfinite(p.sum())) for p in model.params.values())
    if min(row[0] for row in over_ranks([float(finite)], world)) < 1:
        raise RuntimeError("a parameter is not finite")
    by_view = {view: [loss for seen, loss in losses if seen == view] for view in range(len(run.batches))}
    ms = statistics.median(times)
    return {
        "points": sum(model.counts), "points_by_rank": list(model.counts), "steps": done, "ms": ms, "step_ms": times,
        "flush_ms": flush, "ms_with_flush": ms + flush / _BLOCK, "mode": mode.name,
        "optimizer_state": "compact" if job["compact"] else "full",
        "losses_by_view": by_view, "made_seconds": made, "settled_seconds": warmed_up, "model_seconds": model.seconds,
        "state_gib_by_rank": [_bytes(model.moment_dtype) * n / 2**30 for n in model.counts], "memory": memory(world),
        "memory_making": making,
        "capacities": list(run.capacities), "needed": list(run.needed), "taken_again": redone,
        "transport": chosen.reason,
    }  # fmt: skip


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count() if cuda else 2, help="default: all")
    parser.add_argument("--points", type=parse_count, default=400_000_000)
    parser.add_argument("--image", type=image_size, default=(3840, 2160), help="1080p, 4K, 8K or WIDTHxHEIGHT")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--views", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=0, help="along a side of the city (default: as the points grow)")
    parser.add_argument("--compact", action="store_true", help="Adam's moments as bfloat16, rounded stochastically")
    parser.add_argument("--stall", type=float, default=500.0, help="seconds after which the run counts as hung")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    if not 1 <= options.views <= MOST_VIEWS or options.steps < 1:
        parser.error(f"--views must lie between 1 and {MOST_VIEWS}, --steps be 1 or more")
    return options


def main(words: list[str] | None = None) -> int:
    options = arguments(words)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if options.device == "cuda":
        build_native("cuda")  # here, not on every rank at once
    scene = CityScene(options.points, options.image[0], options.image[1], options.views, options.blocks)
    job: Job = {"scene": asdict(scene), "steps": options.steps, "compact": options.compact}
    found: list[Job] = []
    run_jobs(
        make_worker, {}, [job], options.gpus, options.device, lambda _, result: found.append(result), float("inf"),
        options.stall,
    )  # fmt: skip
    result = found[0]
    write_report(options.json, benchmark="largest", result=result)
    if "error" in result:
        console.print(f"FAILED: {result['error'][-2000:]}", markup=False, highlight=False)
        return 1
    state = f"{result['optimizer_state']} optimizer state"
    console.print(f"{scene.name}, {options.gpus} ranks, {result['mode']}, {state}: {result['transport']}")
    console.print(
        f"{result['steps']} steps: {result['ms']:.2f} ms each (median), flush {result['flush_ms']:.1f} ms; model and "
        f"images made in {result['made_seconds']:.1f} s {result['model_seconds']}, first steps after "
        f"{result['settled_seconds']:.1f} s"
    )
    for rank, points in enumerate(result["points_by_rank"]):
        used = result["memory"][rank] if result["memory"] else {}
        state = result["state_gib_by_rank"][rank]
        console.print(f"rank {rank}: {points:,} points, {state:.2f} GiB of parameters and state; GiB: {used}")
    for view, losses in result["losses_by_view"].items():
        console.print(f"view {view}: loss {losses[0]:.5f} -> {losses[-1]:.5f}" if losses else f"view {view}: not seen")
    return 0


if __name__ == "__main__":
    sys.exit(main())
