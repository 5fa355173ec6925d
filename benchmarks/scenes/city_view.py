"""The procedural city from the air, as one of the scenes that rasterizers are timed on: little of it is seen.

Points are in training's order (`primitives.morton`), so that neighbours in memory are neighbours in space; those of the
garden are so only as far as its boxes go.
"""

import torch

from benchmarks.scenes.city_model import CityScene, make_model
from benchmarks.scenes.garden import Scene
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.schema import flat
from ns_multigpu.primitives.gaussians.schema import ORDER

CITIES = {
    # name: points, width, height
    "city-2": (2_000_000, 1920, 1080),
    "city-8": (8_000_000, 1920, 1080),
    "city-16": (16_000_000, 1920, 1080),
    "city-tiny": (4000, 96, 64),
}
"""The camera path's first view sees about two million points, of the smaller ones a quarter."""


def city_view(name: str, device: torch.device) -> Scene:
    """Return the scene of that name in `CITIES`."""
    city, world = CityScene(*CITIES[name], views=1), World.single(device)
    params = make_model(city, world).params
    view = city.cameras()[0]
    image = city.images(world)[0]
    cameras = (view.viewmat[None].to(device), view.K[None].to(device))
    return Scene(name, *(flat(k, params[k]) for k in ORDER), *cameras, image)
