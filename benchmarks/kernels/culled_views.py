"""Times projection of several views at once, with groups culled by their boxes and without (Gaian, appendix D.1).

    python -m benchmarks.kernels.culled_views [--scenes city-8 city-16] [--views 1 4 16 64] [--json FILE]

A step of one view reads each point once either way; a step of many views tests each point for each. The rows of both
ways are compared: they must be the same.
"""

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.lib.report import write_report
from benchmarks.lib.stopwatch import Stopwatch
from benchmarks.scenes.city_model import CityScene, make_model
from benchmarks.scenes.city_view import CITIES
from cuda_ext import SplatRows, box_views, new_boxes, splat_boxes, splat_forward
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.schema import flat
from ns_multigpu.primitives.gaussians.schema import ORDER

_CAPACITY_SHARE = 0.5
"""Row capacity, in points x views; both variants drop further rows."""
_MOST_ROWS = 1 << 26


def measure(name: str, views: int, device: torch.device, iterations: int) -> dict[str, float | int | str]:
    """Return the milliseconds of one projection, without boxes and with."""
    city = CityScene(*CITIES[name], views=views)
    points = make_model(city, World.single(device)).params
    params = [flat(key, points[key]).to(device) for key in ORDER]
    cameras = city.cameras()[:views]
    viewmats = torch.stack([camera.viewmat for camera in cameras]).to(device)
    Ks = torch.stack([camera.K for camera in cameras]).to(device)
    sizes = [n for camera in cameras for n in (camera.width, camera.height)]
    boxes = new_boxes(params[0])
    splat_boxes(params[0], params[2], boxes)
    capacity = min(int(_CAPACITY_SHARE * len(params[0]) * views), _MOST_ROWS)

    def project(groups: torch.Tensor | None) -> SplatRows:
        return splat_forward(*params, viewmats=viewmats, Ks=Ks, sizes=sizes, degree=3, capacity=capacity, boxes=groups)

    plain, grouped = project(None), project(boxes)
    real = min(int(plain.count), capacity)
    same = int(plain.count) == int(grouped.count) and all(
        torch.equal(a[:real], b[:real]) for a, b in zip(plain, grouped, strict=True) if a.dim() and len(a) == capacity
    )
    if not same:
        raise RuntimeError(f"{name}, {views} views: the rows differ with groups and without")
    watch = Stopwatch(device, iterations)
    shown = int(box_views(boxes, viewmats, Ks, sizes).sum()) if views <= 64 else -1
    times = {way: watch.kernels(lambda b=b: project(b)) for way, b in (("plain", None), ("groups", boxes))}
    return {"scene": name, "views": views, "rows": real, "groups shown": shown, **times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", nargs="+", choices=list(CITIES), default=["city-8", "city-16"])
    parser.add_argument("--views", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = [measure(name, views, device, options.iterations) for name in options.scenes for views in options.views]
    table = Table("scene", "views", "rows", "groups shown", "plain, ms", "groups, ms", "saved, %")
    for row in rows:
        plain, groups = float(row["plain"]), float(row["groups"])
        saved = 100 * (1 - groups / plain)
        counts = (str(row[key]) for key in ("scene", "views", "rows", "groups shown"))
        table.add_row(*counts, f"{plain:.3f}", f"{groups:.3f}", f"{saved:.1f}")
    Console(width=120).print(table)
    write_report(options.json, rows=rows)


if __name__ == "__main__":
    sys.exit(main())
