"""Procedural city: any number of blocks, deterministic in the seed, at any moment, on any device."""

import threading

import numpy as np
import torch

from ns_multigpu.city import sky
from ns_multigpu.city.buildings import add_buildings
from ns_multigpu.city.grid import Frame, Layer, clear_height, make_layer
from ns_multigpu.city.ground import GroundPlan
from ns_multigpu.city.plan import make_plan
from ns_multigpu.city.shade import ShadedCity
from ns_multigpu.city.solids import Pile, Shape, Solids
from ns_multigpu.city.streets import Cars, add_furniture, add_trees, make_cars
from ns_multigpu.city.trace import Geometry

_MARGIN = 44.0
"""Largest distance of solids from the city's edge, metres."""
_CAR_TOP = 1.5


class City:
    """A city of blocks x blocks, centred on the origin; x east, y north, z up; metres.

    Args:
        blocks: blocks along each side, at least 1; a block and its road measure 70 m.
        seed: 0 or more; the same arguments give the same city.
        car_density: 1 for an ordinary day, 0 for no cars.

    Attributes:
        plan: roads, blocks and lots.
        cars: parked and moving cars.
        still: the solids that do not move, by shape.
        frame: the grid under them.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, blocks: int = 2, seed: int = 0, car_density: float = 1.0) -> None:
        if car_density < 0:
            raise ValueError(f"car_density is {car_density}: give 0 for no cars, 1 for an ordinary day")
        self.blocks, self.seed, self.car_density = blocks, seed, car_density
        self.plan = make_plan(blocks, seed)
        # One generator for each part, so that changing one leaves the others as they are.
        buildings, trees, furniture, cars = (np.random.default_rng([seed, blocks, part]) for part in range(1, 5))
        pile = Pile()
        add_buildings(self.plan, pile, buildings)
        add_trees(self.plan, pile, trees)
        add_furniture(self.plan, pile, furniture)
        self.cars: Cars = make_cars(self.plan, car_density, cars)
        self.still: tuple[Solids, ...] = tuple(pile.solids(shape) for shape in Shape)
        self.frame = Frame.around(self.plan.half + _MARGIN)
        self._lock = threading.Lock()
        self._layers: list[Layer] = []
        first = 0
        for solids in self.still:
            self._layers.append(make_layer(solids, first, self.frame))
            first += len(solids)
        self._moving_first = first
        self._surroundings = sky.Surroundings(list(self.still), self.plan.half + _MARGIN)
        top = np.maximum.reduce([layer.top.numpy() for layer in self._layers]).clip(0.0)
        self._top = top
        self._clear = torch.from_numpy(clear_height(top, self.frame, sky.SUN, _CAR_TOP))
        self._parts: dict[torch.device, tuple] = {}
        self._scenes: dict[tuple[torch.device, float], ShadedCity] = {}

    def __reduce__(self) -> tuple:
        return City, (self.blocks, self.seed, self.car_density)

    def __deepcopy__(self, memo: dict) -> "City":
        return self  # nothing of a city ever changes

    @property
    def half(self) -> float:
        """Distance from the centre to the outer edge of the outermost road, metres."""
        return self.plan.half

    @property
    def tallest(self) -> float:
        """Height of the tallest building or tree, metres."""
        return float(self._top.max())

    def solids(self, time: float = 0.0) -> tuple[Solids, ...]:
        """Return all solids at a time in [0, 1], in the order of their numbers."""
        return (*self.still, self.cars.solids(time))

    def scene(self, time: float = 0.0, device: torch.device | str = "cpu") -> ShadedCity:
        """Return the city at a time in [0, 1] (cars move), as a scene on a device."""
        device = torch.device(device)
        with self._lock:
            key = (device, float(time))
            if key not in self._scenes:
                if len(self._scenes) >= 4:
                    self._scenes.pop(next(iter(self._scenes)))
                self._scenes[key] = self._make_scene(float(time), device)
            return self._scenes[key]

    def _make_scene(self, time: float, device: torch.device) -> ShadedCity:
        if device not in self._parts:
            attributes = torch.from_numpy(np.concatenate([s.attributes for s in self.still]).T.copy())
            self._parts[device] = (
                tuple(layer.to(device) for layer in self._layers),
                attributes.to(device),
                GroundPlan.of(self.plan, device),
                self._surroundings.to(device),
                self._clear.to(device),
            )
        layers, attributes, plan, surroundings, clear = self._parts[device]
        cars = self.cars.solids(time)
        moving = make_layer(cars, self._moving_first, self.frame)
        top = np.maximum(self._top, moving.top.numpy())
        geometry = Geometry(
            self.frame, (*layers, moving.to(device)), torch.from_numpy(top).to(device), float(top.max()) + 1e-3, clear
        )
        both = torch.cat([attributes, torch.from_numpy(cars.attributes.T.copy()).to(device)], dim=1)
        return ShadedCity(geometry, both, plan, surroundings)
