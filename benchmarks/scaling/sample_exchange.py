"""Compare the exchange of a radiance field's segments with that of all its samples (NeRF-XL, sections 4.3 and 4.2).

    python -m benchmarks.scaling.sample_exchange --ranks 2 --cells 2 4 --gbit none 10 1 --json FILE

- "segments": each rank integrates its own segments. Ranks all-gather 11 numbers of each and fold them, as `nerfacto-xl`
  does.
- "samples": ranks all-gather density, colour and both ends of each sample, and each rank integrates all whole rays.

Both have the same samples: nerfacto's 48 of a ray, which its segments share. Both give the same pixels, and the same
gradients at a rank's own samples. Neither has an exchange in the backward pass. Rays begin at random places of a cloud
of points, in random directions; densities and colours are random. Networks are left out: a step here has integrals,
exchange, a loss and its backward pass down to the samples.

Links are those of `benchmarks.scaling.limited_links`. A time is the slowest rank's, the median over --steps steps; all
ranks begin a step together. "exchange" is the all-gather.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.lib.lockstep import Clock, over_ranks
from benchmarks.lib.rank_jobs import Job, run_jobs
from benchmarks.lib.report import empty_table, write_report
from benchmarks.scaling.limited_links import environment, link, link_name
from benchmarks.scaling.links.limiting import limit, variables, why_none
from ns_multigpu.core.dist.collectives import barrier
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.transport import launched
from ns_multigpu.radiance.contraction import Domain
from ns_multigpu.radiance.exchange import all_segments, gathered, segments_of_ranks
from ns_multigpu.radiance.integrals import BACKGROUND, COLOUR, DEPTH, MOMENT, Distortion, Family, Samples, State
from ns_multigpu.radiance.partition import distance, partition, spacing
from ns_multigpu.radiance.segments import Segments, clip

FAMILY = Family([COLOUR, DEPTH, MOMENT, Distortion(), BACKGROUND])
"""The integrals of `nerfacto-xl`."""
SAMPLES = 48
"""Samples of a ray, as nerfacto's field has them."""
_NEAR, _FAR, _POINTS = 0.05, 1000.0, 4096
_WARM = 5


@dataclass(frozen=True)
class Batch:
    """Rays in cells, and their samples: ordered by rank, by number of segments of their ray, then by segment.

    Attributes:
        segments: of all ranks.
        groups: of this rank's segments that have equally many samples, by number of segments of their ray: indices
            among this rank's segments, and the number of samples of each.
        rays: of the rays with equally many segments: indices [n], and their samples [n, S], front to back.
        held: number of samples of each rank.
        fields: [own samples, 4] density and colour, with gradients. ends: [own samples, 2] distances along rays.
    """

    segments: Segments
    groups: list[tuple[Tensor, int]]
    rays: list[tuple[Tensor, Tensor]]
    held: list[int]
    fields: Tensor
    ends: Tensor


def make_batch(world: World, rays: int, cells: int, dtype: torch.dtype = torch.float32) -> Batch:
    """Return a batch of rays, the same on every rank, with this rank's samples."""
    g = torch.Generator().manual_seed(1)
    cloud = torch.randn(_POINTS, 3, generator=g) * torch.tensor([1.0, 0.7, 0.2])
    boxes = partition(cloud, cells, Domain.unbounded()).boxes().to(world.device, dtype)
    origins = (2 * torch.rand(rays, 3, generator=g, dtype=dtype) - 1).to(world.device)
    directions = torch.nn.functional.normalize(torch.randn(rays, 3, generator=g, dtype=dtype), dim=1).to(world.device)
    near = torch.full_like(origins[:, 0], _NEAR)
    segments = clip(origins, directions, near, torch.full_like(near, _FAR), boxes)
    counts, bounds = segments.counts[segments.ray], segments_of_ranks(segments, world.size)
    first, total = torch.zeros_like(segments.ray), 0
    groups: list[tuple[Tensor, int]] = []
    held: list[int] = []
    for rank in range(world.size):
        begin = total
        for parts in range(1, segments.order.shape[1] + 1):
            rows = (counts[bounds[rank] : bounds[rank + 1]] == parts).nonzero()[:, 0]
            each = ceil(SAMPLES / parts)
            first[bounds[rank] + rows] = total + each * torch.arange(len(rows), device=rows.device)
            total += each * len(rows)
            groups += [(rows, each)] if rank == world.rank else []
        held.append(total - begin)
    whole: list[tuple[Tensor, Tensor]] = []
    for parts in range(1, segments.order.shape[1] + 1):
        chosen = (segments.counts == parts).nonzero()[:, 0]
        each = torch.arange(ceil(SAMPLES / parts), device=chosen.device)
        whole.append((chosen, (first[segments.order[chosen, :parts]][..., None] + each).flatten(1)))
    own = bounds[world.rank]
    ends = [_ends(segments.near[own + rows], segments.far[own + rows], each) for rows, each in groups]
    fields = torch.rand(held[world.rank], 4, generator=g.manual_seed(2 + world.rank), dtype=dtype).to(world.device)
    return Batch(segments, groups, whole, held, fields.requires_grad_(), torch.cat(ends))


def _ends(near: Tensor, far: Tensor, samples: int) -> Tensor:
    """Return the ends [n samples, 2] of samples of segments [n], spaced as nerfacto's first ones."""
    steps = torch.linspace(0, 1, samples + 1, device=near.device, dtype=near.dtype)[1:-1]
    low, high = spacing(near)[:, None], spacing(far)[:, None]
    edges = torch.cat([near[:, None], distance(low + (high - low) * steps), far[:, None]], 1)
    return torch.stack([edges[:, :-1], edges[:, 1:]], 2).flatten(0, 1)


def _samples(rows: Tensor) -> Samples:
    """Return samples of their numbers [n, S, 6]: density, colour and ends."""
    edges = torch.cat([rows[..., 4], rows[:, -1:, 5]], 1)
    return Samples(edges, rows[..., 0], spacing(edges), {"colour": rows[..., 1:4]})


Mark = Callable[[], None]
"""Marks the moments before and after the exchange."""


def by_segments(batch: Batch, world: World, mark: Mark) -> State:
    """Return the integrals of whole rays, by name, with the exchange of segments."""
    rows = torch.cat([batch.fields, batch.ends], 1)
    parts = rows.split([len(numbers) * each for numbers, each in batch.groups])
    states = [
        FAMILY.within(_samples(part.view(-1, each, 6)))
        for part, (_, each) in zip(parts, batch.groups, strict=True)
    ]  # fmt: skip
    order = torch.cat([numbers for numbers, _ in batch.groups])
    own = torch.cat(states).index_select(0, order.argsort())
    mark()
    states_of_all = all_segments(own, batch.segments, world)
    mark()
    return FAMILY.fold(states_of_all, batch.segments.order)[0]


def by_samples(batch: Batch, world: World, mark: Mark) -> State:
    """Return the integrals of whole rays, by name, with the exchange of samples."""
    rows = torch.cat([batch.fields, batch.ends], 1)
    mark()
    rows = launched(gathered(rows, batch.held, world))
    mark()
    states = [
        FAMILY.within(_samples(rows.index_select(0, index.flatten()).view(*index.shape, 6)))
        for _, index in batch.rays
    ]  # fmt: skip
    order = torch.cat([rays for rays, _ in batch.rays])
    return FAMILY.unpacked(torch.cat(states).index_select(0, order.argsort()))


EXCHANGES = {"segments": by_segments, "samples": by_samples}


def step(batch: Batch, way: str, world: World, mark: Mark = lambda: None) -> tuple[Tensor, State]:
    """Run a step; return its loss, nerfacto's of random pixels, and the integrals. The gradients are at the fields."""
    batch.fields.grad = None
    whole = EXCHANGES[way](batch, world, mark)
    pixels = whole["colour"] + whole["transmittance"] * whole["background"][:, :3]
    loss = (pixels - 0.5).square().mean() + 0.002 * whole["distortion"].mean()
    loss.backward()
    return loss, whole


def make_worker(world: World, shared: Job) -> Callable[[Job], Job]:
    """Job worker: see `lib.rank_jobs`. `shared`: rays, steps."""

    def work(job: Job) -> Job:
        if job["gbit"] is not None:
            limit(job["gbit"])
        batch = make_batch(world, shared["rays"], job["cells"])
        times: list[list[float]] = []
        sent = 0
        for number in range(_WARM + shared["steps"]):
            clock = Clock(world.device)
            barrier(world)
            before = world.traffic.sent
            clock.mark()
            step(batch, job["way"], world, clock.mark)
            clock.mark()
            sent = world.traffic.sent - before
            if number >= _WARM:
                _, exchange, _ = intervals = clock.intervals()
                times.append([exchange, sum(intervals)])
        slowest = torch.tensor(over_ranks([n for pair in times for n in pair], world)).amax(0).view(-1, 2)
        exchange_ms, step_ms = (median(column.tolist()) for column in slowest.unbind(1))
        bytes_sent = max(row[0] for row in over_ranks([sent], world))
        a_ray = len(batch.segments) / shared["rays"]
        return {"bytes": int(bytes_sent), "exchange_ms": exchange_ms, "step_ms": step_ms, "segments_a_ray": a_ray}

    return work


def table(done: list[Job]) -> Table:
    """Return a table with a row for each run."""
    shown = empty_table(None, ("cells", "link", "exchange of", "KB a step", "exchange, ms", "step, ms"), left=(1, 2))
    for one in done:
        figures = [one.get("error", one.get("skipped", "")).strip().splitlines()[-1:]]
        if "step_ms" in one:
            figures = [f"{one['bytes'] / 1e3:,.0f}", f"{one['exchange_ms']:.2f}", f"{one['step_ms']:.2f}"]
        shown.add_row(str(one["cells"]), one["link"], one["way"], *map(str, figures))
    return shown


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rays", type=int, default=4096)
    parser.add_argument("--cells", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--gbit", nargs="+", type=link, default=[None, 10.0, 1.0], help="none, free, or Gbit/s each way"
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", type=Path, help="file for the results, written after every figure")
    options = parser.parse_args(words)
    if min(options.cells) < options.ranks or options.ranks < 2:
        parser.error(f"--ranks {options.ranks}, --cells {min(options.cells)}: need 2 ranks or more, a cell for each.")
    if options.rays < 1 or options.steps < 1:
        parser.error(f"--rays {options.rays}, --steps {options.steps}: need 1 or more.")
    if options.device == "cuda" and torch.cuda.device_count() < options.ranks:
        parser.error(f"--ranks {options.ranks}: there are {torch.cuda.device_count()} GPUs: give --device cpu.")
    if any(gbit is not None for gbit in options.gbit) and (reason := why_none()):
        parser.error(reason)
    shared, done = {name: getattr(options, name) for name in ("device", "ranks", "rays", "steps")}, list[Job]()
    groups = [[gbit for gbit in options.gbit if gbit is None], [gbit for gbit in options.gbit if gbit is not None]]
    for gbits in filter(None, groups):
        jobs: list[Job] = [
            {"cells": cells, "gbit": gbit, "link": link_name(gbit), "way": way}
            for cells in options.cells for gbit in gbits for way in EXCHANGES
        ]  # fmt: skip

        def emit(number: int, result: Job, jobs: list[Job] = jobs) -> None:
            done.append({**jobs[number], **result})
            write_report(options.json, benchmark="sample_exchange", options=shared, runs=done)

        with environment(variables(cuda=options.device == "cuda") if None not in gbits else {}):
            run_jobs(make_worker, shared, jobs, options.ranks, options.device, emit, float("inf"), stall=120.0)
    Console(width=None if sys.stdout.isatty() else 120).print(table(done))
    return 1 if any("error" in one for one in done) else 0


if __name__ == "__main__":
    sys.exit(main())
