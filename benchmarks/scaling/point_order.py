"""Balance of single views' points over ranges of an order: a plain Morton curve, and cells distributed round-robin.

    python -m benchmarks.scaling.point_order --points 800k --blocks 6 --garden garden.npz --json FILE

A view shows the points whose centres lie in its picture. For each view: the most of them that one of equally long
ranges has, over the mean; 1 is even. Runs on the CPU. The scenes are the procedural city's (`scenes.city_model`)
from the air and, if its file is named, the garden's points with its three cameras.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.lib.environment import describe
from benchmarks.scenes.city_model import CityScene, make_model
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import View
from ns_multigpu.planning.quantities import parse_count
from ns_multigpu.primitives.morton import MORTON_BITS, MortonGrid, census, interleaved_codes


def orders(means: Tensor) -> dict[str, Tensor]:
    """The permutations [N] of positions [N, 3], by name."""
    codes = interleaved_codes(means, MortonGrid.of(census(means).tolist()))
    plain = codes & ((1 << 3 * MORTON_BITS) - 1)  # without the hand, what is left is the curve
    return {name: torch.sort(keys, stable=True).indices for name, keys in (("plain", plain), ("dealt", codes))}


def shown(means: Tensor, view: View) -> Tensor:
    """[N] bool, whether positions [N, 3] lie in a view's picture."""
    places = (means @ view.viewmat[:3, :3].T + view.viewmat[:3, 3]) @ view.K.T
    x, y = places[:, 0] / places[:, 2], places[:, 1] / places[:, 2]
    return (places[:, 2] > 0.01) & (x > 0) & (x < view.width) & (y > 0) & (y < view.height)


def imbalance(order: Tensor, seen: Sequence[Tensor], ranks: int) -> list[float]:
    """By view: the most of what it shows that a rank's range has / the mean."""
    owner = torch.empty_like(order)
    owner[order] = torch.arange(len(order)) * ranks // len(order)
    counts = [torch.bincount(owner[one], minlength=ranks) for one in seen]
    return [round(float(count.max() * ranks / count.sum()), 4) for count in counts]


def measured(name: str, means: Tensor, views: Sequence[View], ranks: Sequence[int]) -> list[dict[str, Any]]:
    """A record for each order and number of ranks."""
    seen = [shown(means, view) for view in views]
    return [
        {"scene": name, "points": len(means), "order": kind, "ranks": n, "by_view": imbalance(order, seen, n)}
        for kind, order in orders(means).items()
        for n in ranks
    ]


def garden_views(data: Any) -> list[View]:
    """The cameras of garden.npz."""
    size = int(data["width"]), int(data["height"])
    pairs = zip(data["viewmats"], data["Ks"], strict=True)
    return [
        View(torch.from_numpy(V).float(), torch.from_numpy(K).float(), *size, index)
        for index, (V, K) in enumerate(pairs)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=parse_count, default=800_000, help="of the city")
    parser.add_argument("--blocks", type=int, default=6, help="along a side of the city")
    parser.add_argument("--views", type=int, default=8)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--garden", type=Path, help="garden.npz")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    scene = CityScene(options.points, 3840, 2160, options.views, options.blocks)
    means = make_model(scene, World.single()).params["means"]
    found = measured("city", means, scene.cameras(), options.ranks)
    if options.garden is not None:
        data = np.load(options.garden)
        found += measured("garden", torch.from_numpy(data["means3d"]).float(), garden_views(data), options.ranks)
    table = Table("scene", "points", "ranks", "order", "mean over views", "worst view", title="busiest rank / mean")
    for one in found:
        mean, worst = statistics.mean(one["by_view"]), max(one["by_view"])
        table.add_row(
            one["scene"], f"{one['points']:,}", str(one["ranks"]), one["order"], f"{mean:.3f}", f"{worst:.3f}"
        )
    Console().print(table)
    if options.json:
        report = {"benchmark": "point_order", **describe(), "results": found}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
