"""Duration of placement and planning, at the sizes that the strategy must handle."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy import sparse

from benchmarks.baselines.placements import assigner
from benchmarks.scenes.seen_city import SeenCity
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import View
from ns_multigpu.locality.assign import Volume
from ns_multigpu.locality.graph import SeenGraph
from ns_multigpu.locality.options import LocalityOptions
from ns_multigpu.locality.partition import partition
from ns_multigpu.locality.placing import ByViews
from ns_multigpu.locality.rules import Access


def large_graph_seconds(groups: int, views: int, shown: float = 0.0035, machines: int = 8) -> dict[str, Any]:
    """Return the seconds of placing a flat city of square groups, seen from above by views of random rectangles.

    Args:
        groups: about how many: a square number of them is made, in the Z-order.
        views: how many. shown: the fraction of all groups that a view shows, in the mean.
        machines: of four GPUs.
    """
    side = round(groups**0.5)
    x, y = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    place = np.empty(side * side, dtype=np.int64)
    place[np.argsort((_spread(x) | _spread(y) << 1).ravel(), kind="stable")] = np.arange(side * side)
    generator, edge = np.random.default_rng(0), side * shown**0.5
    parts = []
    for centre in generator.random((views, 2)) * side:
        half = edge * generator.uniform(0.6, 1.4, 2) / 2
        low, high = np.maximum(centre - half, 0).astype(int), np.minimum(centre + half + 1, side).astype(int)
        parts.append(place.reshape(side, side)[low[0] : high[0], low[1] : high[1]].ravel())
    starts = np.cumsum([0, *(len(part) for part in parts)])
    counts = generator.integers(1, 4097, starts[-1])
    seen = sparse.csr_matrix((counts, np.concatenate(parts), starts), shape=(views, side * side))
    graph = SeenGraph(seen, np.full(side * side, 4096))
    start, work = time.perf_counter(), time.process_time()
    found = partition(graph, machines, 4)
    took = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - work}
    shares = np.bincount(found.ranks, minlength=found.count) / (side * side / found.count)
    return {"groups": side * side, "views": views, "edges": int(starts[-1]), **took, "most_points": float(shares.max())}


def placing_seconds(points: int, views: int, machines: int = 8, shown: float = 0.0035) -> dict[str, Any]:
    """Return seconds that a run's placement takes: `ByViews` of points of a flat city, seen from above.

    Args:
        points: number of points, 12 bytes each and some 100 more of those whose owners are found at once.
        views: number of views of 16 patches. shown: fraction of the points that a view shows.
        machines: of four GPUs.
    """
    side, width, height = 1000.0, 1920, 1080
    focal = height * 80 / (side * (shown * height / width) ** 0.5)  # at a height of 80
    where = torch.rand(points, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([side, side, 5.0])
    K = torch.tensor([[focal, 0, width / 2], [0, focal, height / 2], [0, 0, 1]])
    centres = torch.rand(views, 2, generator=torch.Generator().manual_seed(1)) * side
    poses = torch.diag(torch.tensor([1.0, -1, -1, 1])).repeat(views, 1, 1)
    poses[:, 0, 3], poses[:, 1, 3], poses[:, 2, 3] = -centres[:, 0], centres[:, 1], 85.0
    seen = [View(pose, K, width, height, index) for index, pose in enumerate(poses)]
    world, options = replace(World.single(), size=4 * machines, local_size=4), LocalityOptions()
    placement = ByViews(world, options, Access(options.patches**2, world.size))
    placement.look(lambda: seen)
    start, work = time.perf_counter(), time.process_time()
    shares = placement.shares(points, lambda: where, world.size)
    report = {"points": points, "views": views, "seconds": time.perf_counter() - start}
    report["cpu_seconds"], start = time.process_time() - work, time.perf_counter()
    assert placement.group_owners is not None
    placement.group_owners.of(where)
    report["owners_seconds"] = time.perf_counter() - start
    counts = [len(share) for share in shares]
    return {**report, "most_points": max(counts) * len(counts) / points}


def plan_times(city: SeenCity, way: str, batch: int = 64, machines: int = 8, repeats: int = 20) -> dict[str, Any]:
    """Return ms of assigning `batch` views x 16 patches on machines of four GPUs, whole and without the search."""
    graph = SeenGraph(city.seen[way, 1].astype(np.int64), city.points.astype(np.int64))
    placed = partition(graph, machines, 4)
    by_patch = SeenGraph(city.seen[way, 4].astype(np.int64), city.points.astype(np.int64))
    needed = by_patch.by_rank(placed.ranks, placed.count).reshape(city.views, 16, placed.count)
    generator, report = np.random.default_rng(3), {}
    for name, search in (("start", False), ("with search", True)):
        plans, took, work, between = assigner(machines, 4, search=search), list[float](), list[float](), list[float]()
        for _ in range(repeats):
            rows = needed[generator.choice(city.views, batch, replace=False)].reshape(-1, placed.count)
            start, used = time.perf_counter(), time.process_time()
            chosen = plans.assign(rows)
            took.append(1e3 * (time.perf_counter() - start))
            work.append(1e3 * (time.process_time() - used))
            between.append(Volume.of(rows, chosen, 4).between)
        report[name] = {
            "ms": float(np.median(took)), "least_ms": min(took), "most_ms": max(took),
            "cpu_ms": float(np.median(work)), "between": float(np.mean(between)),
        }  # fmt: skip
    return report


def _spread(values: np.ndarray) -> np.ndarray:
    result = np.zeros_like(values)
    for bit in range(16):
        result |= (values >> bit & 1) << (2 * bit)
    return result
