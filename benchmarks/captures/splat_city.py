"""Make a capture of a city in COLMAP's layout whose photographs show 3D Gaussians: milliseconds a view on a GPU.

    python -m benchmarks.captures.splat_city --output DIR --blocks 4 --views 5000 --width 1920 --height 1080

The Gaussians lie on the surfaces of `ns-multigpu city`'s city, where rays through the training views meet them, and
have the colours that those rays have. So photographs show a scene with true poses, seed points, and tracks that end
where a point is hidden; `--compare N` says how near N of them are to the city's own, which are ray-traced. With
`--stops` training photographs differ in exposure, with `--noise` all have noise.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from scipy.spatial import KDTree
from torch import Tensor

from benchmarks.captures.varied_exposure import exposures
from ns_multigpu.api import render
from ns_multigpu.city import City, CityCapture, SeedPoints
from ns_multigpu.city.colmap_writer import Observed, prepare_folder, write_model
from ns_multigpu.city.sky import sky_colour

SPREAD = 0.7
"""Standard deviation of a Gaussian, of the mean distance to its three nearest."""
OPACITY = 0.95
HIDDEN = 0.02
"""A point is hidden where the picture is nearer than the point by this part of its depth."""


@dataclass(frozen=True)
class Model:
    """Gaussians on a device: means [N, 3], standard deviations [N], colours [N, 3] in [0, 1]; the sky's colour [3]."""

    means: Tensor
    scales: Tensor
    colors: Tensor
    sky: Tensor

    @classmethod
    def of(cls, capture: CityCapture, count: int, device: torch.device) -> "Model":
        """Return so many Gaussians on the surfaces that the training views see."""
        found = capture.seed_points(count, noise=0.0, device=device)
        places = found.xyz.numpy()
        tree = KDTree(places, compact_nodes=False, balanced_tree=False)
        distances, _ = tree.query(places, k=4, workers=-1)
        spread = torch.from_numpy(distances[:, 1:].mean(1)).float().clamp(min=1e-3) * SPREAD
        horizon = sky_colour(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.05, 0.05]]), clouds=False).mean(1)
        return cls(found.xyz.to(device), spread.to(device), found.rgb.to(device) / 255, horizon.to(device))

    @torch.no_grad()
    def look(self, viewmat: Tensor, K: Tensor, width: int, height: int) -> tuple[Tensor, Tensor]:
        """Return a view's colours [h, w, 3] in [0, 1] and expected depths [h, w]."""
        count, like = len(self.means), self.means
        quats = like.new_tensor([1.0, 0, 0, 0]).expand(count, 4).contiguous()
        images, _, _ = render(
            like, quats, self.scales[:, None].expand(count, 3).contiguous(), like.new_full((count,), OPACITY),
            self.colors, viewmat[None], K[None], width, height, render_mode="RGB+ED", near_plane=0.1,
            backgrounds=self.sky[None],
        )  # fmt: skip
        return images[0, ..., :3].clamp(0, 1), images[0, ..., 3]


def observations(points: Tensor, viewmat: Tensor, K: Tensor, depth: Tensor, most: int) -> Observed:
    """Return which points [N, 3] a view with such depths [h, w] observes, at most so many, evenly, and where."""
    height, width = depth.shape
    seen = points @ viewmat[:3, :3].T + viewmat[:3, 3]
    z = seen[:, 2]
    places = (seen[:, :2] / z.clamp(min=1e-6)[:, None]) * K.diagonal()[:2] + K[:2, 2]
    inside = (z > 0) & (places >= 0).all(1) & (places[:, 0] < width) & (places[:, 1] < height)
    ids = inside.nonzero()[:, 0]
    x, y = places[ids].long().unbind(1)
    ids = ids[depth[y, x] > (1 - HIDDEN) * z[ids]]
    ids = ids[torch.linspace(0, len(ids) - 1, min(most, len(ids)), device=ids.device).round().long()]
    return ids.cpu().numpy(), places[ids].double().cpu().numpy()


def photographs(
    capture: CityCapture, model: Model, seeds: SeedPoints, most: int, stops: np.ndarray, noise: float
) -> Iterator[tuple[np.ndarray, Observed]]:
    """Yield of each view the photograph [h, w, 3], uint8, and what it observes of the seed points."""
    device, viewmats = model.means.device, capture.viewmats().to(model.means.device)
    points, generator = seeds.xyz.to(device), torch.Generator(device).manual_seed(capture.seed)
    K = torch.tensor([[capture.fx, 0, capture.cx], [0, capture.fy, capture.cy], [0, 0, 1]], device=device)
    for viewmat, stop in zip(viewmats, stops.tolist(), strict=True):
        color, depth = model.look(viewmat, K, capture.width, capture.height)
        color = color * 2 ** (stop / 2.2)  # a power of light is one of what a display's gamma has made of it
        if noise > 0:
            color = color + noise * torch.randn(color.shape, generator=generator, device=device)
        image = (color.clamp(0, 1) * 255 + 0.5).to(torch.uint8).cpu().numpy()
        yield image, observations(points, viewmat, K, depth, most)


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    """Return the PSNR of two pictures of bytes."""
    return float(-10 * np.log10(np.square(one / 255.0 - other / 255.0).mean()))


def main(argv: Sequence[str] | None = None) -> int:
    """Write the capture and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a new or empty folder")
    parser.add_argument("--kind", choices=("aerial", "street"), default="aerial")
    for name, value in (("blocks", 2), ("views", 200), ("width", 960), ("height", 540), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--gaussians", type=int, default=1_000_000)
    parser.add_argument("--seed-points", type=int, default=100_000)
    parser.add_argument("--most-observed", type=int, default=2000, help="points that a view observes at most")
    parser.add_argument("--stops", type=float, default=0.0, help="see benchmarks.captures.varied_exposure")
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation, of 1")
    parser.add_argument("--compare", type=int, default=0, help="views that are ray-traced, too")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(argv)
    if not 0 < given.seed_points <= given.gaussians:
        parser.error(f"--seed-points {given.seed_points}: give 1 to --gaussians {given.gaussians}.")
    if given.gaussians < 4 or min(given.stops, given.noise) < 0:
        parser.error("give 4 --gaussians at least, and --stops and --noise from 0 on.")
    if given.output.is_dir() and any(given.output.iterdir()):
        parser.error(f"--output {given.output} is not empty: give a new folder.")
    try:
        prepare_folder(given.output, overwrite=False)
        capture = CityCapture(
            City(given.blocks, given.seed), given.kind, given.views, given.width, given.height, seed=given.seed,
            cache_bytes=0,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        parser.error(str(error))
    (given.output / "images").mkdir()
    started = time.perf_counter()
    model = Model.of(capture, given.gaussians, torch.device(given.device))
    pick = torch.randperm(given.gaussians, generator=torch.Generator().manual_seed(given.seed))[: given.seed_points]
    seeds = SeedPoints(model.means[pick].cpu(), (model.colors[pick] * 255 + 0.5).to(torch.uint8).cpu())
    begun = time.perf_counter()
    stops = exposures(given.views, given.stops, given.seed) if given.stops > 0 else np.zeros(given.views)
    observed, compared = list[Observed](), dict[int, np.ndarray]()
    chosen = set(np.linspace(0, given.views - 1, given.compare).astype(int).tolist())
    with ThreadPoolExecutor() as pool:
        writes = []
        looks = photographs(capture, model, seeds, given.most_observed, stops, given.noise)
        for view, (image, seen) in enumerate(looks):
            observed.append(seen)
            file = given.output / f"images/{capture.name(view)}.jpg"
            writes.append(pool.submit(Image.fromarray(image).save, file, quality=95))
            if view in chosen:
                compared[view] = image
        for write in writes:
            write.result()
    ms = 1e3 * (time.perf_counter() - begun) / given.views
    write_model(given.output / "sparse" / "0", capture, ".jpg", seeds, observed)
    report = {
        "views": given.views, "size": [given.width, given.height], "gaussians": given.gaussians,
        "seconds_for_the_model": round(begun - started, 1), "ms_a_view": round(ms, 2),
        "points_a_view": round(sum(len(ids) for ids, _ in observed) / given.views),
        "psnr_to_ray_traced": [
            round(psnr(image, capture.image(view, given.device).numpy()), 2) for view, image in compared.items()
        ],
    }  # fmt: skip
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
