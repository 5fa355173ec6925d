"""Simulate the gain of locality: traffic and balance of Gaian's placement and assignment, on the CPU.

    python -m benchmarks.scaling.locality_sim --kind aerial --ranks 8 16 32 64 128 --cache /tmp/seen --json FILE
    python -m benchmarks.scaling.locality_sim --kind street --seen near
    python -m benchmarks.scaling.locality_sim --large 122500        # METIS on the graph of 500 M points
    python -m benchmarks.scaling.locality_sim --place 100M --views 60000 --threads 2   # all of a placement
    python -m benchmarks.scaling.locality_sim --plan-time           # 64 views x 16 patches on 32 ranks

The city and its visible points: `benchmarks.scenes.seen_city`. Nothing is drawn or exchanged: points that a patch needs
from other ranks are counted. The baseline has randomly placed points and complete images on any rank, as in gsplat.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.baselines.placements import Way, assigner, partitioned, random_assignment
from benchmarks.lib.report import write_report
from benchmarks.scaling.locality_times import large_graph_seconds, placing_seconds, plan_times
from benchmarks.scenes.seen_city import VISIBILITY_RULES, SeenCity, seen_city
from ns_multigpu.locality.assign import Volume
from ns_multigpu.locality.graph import SeenGraph
from ns_multigpu.locality.partition import PlacedGroups
from ns_multigpu.planning.quantities import parse_count

GPUS = 4
"""Of a machine."""
GROUP = 64
"""Simulated points of a group."""
ABLATED = 16
"""Ranks of the ablation table."""
GAIAN = {
    "aerial": "82.8 (Rubble), 89.3 (Sci-Art), 89.9 (BigCity Aerial)",
    "street": "89.2 (Ithaca365), 54.5 (Campus), 57.7 (BigCity Street)",
}
"""Less between machines, per cent: Table 2, 3DGS."""


@dataclass(frozen=True)
class Setting:
    """Enabled features of a simulation.

    Attributes:
        across, within: ways to place groups. locality: patches are assigned by where points are, else at random.
        hierarchical: machines first. factor: patches along each side of a picture.
        balance: parts and loads are levelled.
        even: a batch has equally many views of each machine's; else it is random.
    """

    across: Way = "metis"
    within: Way = "round_robin"
    locality: bool = True
    hierarchical: bool = True
    factor: int = 4
    balance: bool = True
    even: bool = False


BASELINE = Setting("random", "random", False, True, 1, False)


def batch_of(ranks: int) -> int:
    """Return the views of a step: Table 1's 16 on 16 GPUs and 64 on 32; beyond, two a GPU as in its weak scaling."""
    return 16 if ranks <= 16 else max(64, 2 * ranks)


def place(city: SeenCity, way: str, machines: int, setting: Setting) -> tuple[PlacedGroups, float]:
    """Place groups on ranks; return them and the seconds that it took."""
    graph = SeenGraph(city.seen[way, 1].astype(np.int64), city.points.astype(np.int64))
    start = time.perf_counter()
    found = partitioned(
        graph,
        machines,
        GPUS,
        setting.across,
        setting.within,
        hierarchical=setting.hierarchical,
        balance=setting.balance,
    )
    return found, time.perf_counter() - start


def simulate(
    city: SeenCity, way: str, placed: PlacedGroups, setting: Setting, batch: int, steps: int
) -> dict[str, float]:
    """Return means over steps: points between machines and in all, busiest rank over mean, plan time in ms."""
    factor, ranks = setting.factor, placed.count
    seen = city.seen[way, factor].astype(np.int64)
    needed = SeenGraph(seen, city.points.astype(np.int64)).by_rank(placed.ranks, ranks)
    needed = needed.reshape(city.views, factor * factor, ranks)
    plans = assigner(placed.machines, placed.per_machine, hierarchical=setting.hierarchical, search=setting.balance)
    generator = np.random.default_rng(5)
    batches = _batches(placed, setting.even, batch, steps, generator)
    found: list[list[float]] = []
    for views in batches:
        rows = needed[views].reshape(-1, ranks)
        start = time.perf_counter()
        chosen = plans.assign(rows) if setting.locality else random_assignment(len(rows), ranks, generator)
        took = 1e3 * (time.perf_counter() - start)
        volume = Volume.of(rows, chosen, placed.per_machine)
        shares = [float(load.max() / max(load.mean(), 1)) for load in (volume.sent, volume.received, volume.drawn)]
        found.append([volume.between, volume.total, *shares, took])
    means = np.mean(found, axis=0)
    names = ("between", "total", "send", "receive", "draw")
    return {**dict(zip(names, means.tolist(), strict=False)), "plan_ms": float(np.median([f[-1] for f in found]))}


def _batches(
    placed: PlacedGroups, even: bool, batch: int, steps: int, generator: np.random.Generator
) -> list[np.ndarray]:
    """Return the views of each step, of epochs in random order, or equally many of each machine's."""
    owners = placed.view_machines
    if not even:
        epochs = -(-steps * batch // len(owners))
        order = np.concatenate([generator.permutation(len(owners)) for _ in range(epochs)])
        return [order[step * batch : (step + 1) * batch] for step in range(steps)]
    each = batch // placed.machines
    own = [np.flatnonzero(owners == machine) for machine in range(placed.machines)]
    return [np.concatenate([generator.choice(views, each, len(views) < each) for views in own]) for _ in range(steps)]


def by_view(city: SeenCity, way: str, placed: PlacedGroups) -> tuple[float, float]:
    """Return the largest share of a view's points over the mean, among a machine's ranks: mean and 95th percentile.

    Counted are views of which the machine has a tenth or more.
    """
    graph = SeenGraph(city.seen[way, 1].astype(np.int64), city.points.astype(np.int64))
    shown = graph.by_rank(placed.ranks, placed.count).reshape(city.views, placed.machines, placed.per_machine)
    totals = shown.sum(2)
    picked = shown[(totals >= 0.1 * totals.sum(1, keepdims=True)) & (totals > 0)]
    shares = picked.max(1) / picked.mean(1)
    return float(shares.mean()), float(np.quantile(shares, 0.95))


def scaling(
    city: SeenCity, way: str, ranks: Sequence[int], steps: int, views: int | None = None
) -> list[dict[str, Any]]:
    """Return a row for each number of ranks."""
    rows = []
    for count in ranks:
        machines, batch = count // GPUS, views or batch_of(count)
        plain, _ = place(city, way, machines, BASELINE)
        base = simulate(city, way, plain, BASELINE, batch, steps)
        setting = Setting()
        placed, seconds = place(city, way, machines, setting)
        ours = simulate(city, way, placed, setting, batch, steps)
        memory = np.bincount(placed.ranks, weights=city.points, minlength=count)
        row = {"ranks": count, "machines": machines, "batch": batch, "baseline": base, **ours}
        row |= {
            "partition_s": seconds,
            "memory": float(memory.max() / memory.mean()),
            "less_total": less(ours, base, "total"),
        }
        row |= {"less_between": less(ours, base, "between") if machines > 1 else None}
        rows.append(row)
    return rows


def less(ours: dict[str, float], base: dict[str, float], what: str) -> float:
    """Return by how many per cent a value is below the baseline's."""
    return 100 * (1 - ours[what] / max(base[what], 1e-9))


def ablations(city: SeenCity, way: str, count: int, steps: int, views: int | None = None) -> list[dict[str, Any]]:
    """Return a row for each part left out, and for each way to place within a machine."""
    full, machines, batch = Setting(), count // GPUS, views or batch_of(count)
    settings = {
        "ours": full,
        "batches even over machines": replace(full, even=True),
        "random placement": replace(full, across="random", within="random"),
        "random assignment": replace(full, locality=False),
        "no hierarchy": replace(full, hierarchical=False),
        "no patches": replace(full, factor=1),
        "no balance": replace(full, balance=False),
        "ranges of the Z-order, no METIS": replace(full, across="ranges"),
        "within a machine: METIS": replace(full, within="metis"),
        "within a machine: random": replace(full, within="random"),
        "whole images, all random": BASELINE,
    }
    rows, base = [], simulate(city, way, place(city, way, machines, BASELINE)[0], BASELINE, batch, steps)
    for name, setting in settings.items():
        placed, seconds = place(city, way, machines, setting)
        ours = simulate(city, way, placed, setting, batch, steps)
        mean, tail = by_view(city, way, placed)
        row = {"name": name, **ours, "partition_s": seconds, "view_mean": mean, "view_95": tail}
        rows.append(row | {"less_between": less(ours, base, "between"), "less_total": less(ours, base, "total")})
    return rows


_LOADS = ("less_between", "less_total", "send", "receive", "draw")


def table(title: str, first: Sequence[str], rows: Sequence[dict[str, Any]]) -> Table:
    """Return the rows as they are printed."""
    names = {
        "less_between": "between machines, % less", "less_total": "in all, % less", "send": "busiest sender",
        "receive": "busiest receiver", "draw": "busiest drawer", "partition_s": "placing, s", "plan_ms": "a plan, ms",
        "memory": "most points", "view_mean": "busiest GPU of a view", "view_95": "at 95 %",
    }  # fmt: skip
    columns = [
        *first,
        *_LOADS,
        *(k for k in ("memory", "view_mean", "view_95", "partition_s", "plan_ms") if k in rows[0]),
    ]
    made = Table(*(names.get(column, column) for column in columns), title=title)
    for row in rows:
        values = (row[column] for column in columns)
        made.add_row(*("-" if v is None else f"{v:.2f}" if isinstance(v, float) else str(v) for v in values))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("aerial", "street"), default="aerial")
    parser.add_argument("--blocks", type=int, default=24, help="along a side of the city")
    parser.add_argument("--views", type=int, default=1200)
    parser.add_argument("--points", type=parse_count, default=1_000_000, help="simulated; groups are what counts")
    parser.add_argument("--altitude", type=float, help="of the cameras, metres")
    parser.add_argument(
        "--seen", choices=VISIBILITY_RULES, default="frustum", help="what counts as seen; see scenes.seen_city"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument(
        "--batch", type=int, help="views of a step; by default 16 up to 16 ranks, then 64 or two a rank"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--large", type=int, help="instead: place a graph of so many groups and --views views")
    parser.add_argument("--place", type=parse_count, help="instead: place so many points by --views views")
    parser.add_argument("--plan-time", action="store_true", help="instead: 64 views x 16 patches on 32 ranks")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if any(count % GPUS for count in options.ranks):
        parser.error(f"ranks come in machines of {GPUS}: give multiples of it")
    console, report = Console(width=180), dict[str, Any](benchmark="locality_sim")
    if options.large:
        report["large"] = large_graph_seconds(options.large, options.views)
        console.print(report["large"])
    elif options.place:
        report["placing"] = placing_seconds(options.place, options.views)
        console.print(report["placing"])
    else:
        city = seen_city(
            options.kind, options.blocks, options.views, options.points, GROUP, options.altitude, options.cache
        )
        way = options.seen
        share = float(city.seen[way, 1].sum() / city.views / city.points.sum())
        console.print(
            f"{options.kind}, {way}: {len(city.points):,} groups, a view shows {100 * share:.2f} % of the points"
        )
        report["share"] = share
        if options.plan_time:
            report["plan"] = plan_times(city, way)
            console.print(report["plan"])
        else:
            report["scaling"] = scaling(city, way, options.ranks, options.steps, options.batch)
            console.print(
                table(f"{options.kind}; Gaian's: {GAIAN[options.kind]}", ("ranks", "batch"), report["scaling"])
            )
            report["ablations"] = ablations(city, way, ABLATED, options.steps, options.batch)
            console.print(table(f"what each part does, {ABLATED} ranks", ("name",), report["ablations"]))
    write_report(options.json, **report)


if __name__ == "__main__":
    main()
