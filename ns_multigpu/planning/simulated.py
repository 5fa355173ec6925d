"""Simulated savings and balance of `locality`, as input of a plan.

All figures are from `benchmarks/results/locality-sim.md`, table "Traffic and balance"
(tests/planning/test_planning_machines.py compares them). The simulation ran on a CPU, with a procedural city of 1 M
points, 4 GPUs per machine and 16 patches per view. The baseline has points and patches on random ranks. Nothing was
measured on GPUs or over a network.
"""

from bisect import bisect_left
from dataclasses import astuple, dataclass
from math import log, log2

SOURCE = "benchmarks/results/locality-sim.md"
GPUS = 4
"""GPUs per machine in the simulation."""


@dataclass(frozen=True)
class Simulated:
    """One line of the table.

    Attributes:
        between: fraction of the traffic between machines that is saved.
        in_all: fraction of all traffic between GPUs that is saved.
        sends, receives, draws, holds: the busiest rank over the mean: splats sent, received and rendered; points held.
        views: of a step.
    """

    between: float
    in_all: float
    sends: float
    receives: float
    draws: float
    holds: float
    views: float


@dataclass(frozen=True)
class SimulatedScene:
    """Lines of one scene.

    Attributes:
        title: as in the table.
        visible: fraction of the points that a view shows.
        lines: by number of machines, ascending, for the fewest simulated views.
    """

    title: str
    visible: float
    lines: dict[int, Simulated]


def _scene(
    title: str, visible: float, *lines: tuple[int, float, float, float, float, float, float, int]
) -> SimulatedScene:
    return SimulatedScene(
        title, visible,
        {
            machines: Simulated(between / 100, in_all / 100, sends, receives, draws, holds, views)
            for machines, between, in_all, sends, receives, draws, holds, views in lines
        },
    )  # fmt: skip


SCENES = {
    "aerial": _scene(
        "aerial, frustum", 0.0093,
        (2, 88.3, 2.8, 1.23, 1.12, 1.13, 1.04, 16), (4, 85.8, 7.6, 1.56, 1.26, 1.29, 1.05, 16),
        (8, 87.9, 10.8, 1.66, 1.28, 1.30, 1.05, 64), (16, 86.6, 11.8, 1.78, 1.31, 1.33, 1.05, 128),
        (32, 84.0, 11.7, 1.75, 1.31, 1.33, 1.05, 256),
    ),
    "street": _scene(
        "street, frustum", 0.209,
        (2, 75.1, 6.3, 1.15, 1.18, 1.17, 1.01, 16), (4, 70.4, 9.8, 1.36, 1.46, 1.44, 1.04, 16),
        (8, 46.9, 6.5, 1.29, 1.37, 1.38, 1.05, 64), (16, 18.7, 0.4, 1.21, 1.36, 1.38, 1.05, 128),
        (32, 13.4, -0.8, 1.19, 1.58, 1.62, 1.05, 256),
    ),
    "street-far-plane": _scene(
        "street, far plane", 0.0037,
        (2, 97.5, 10.6, 1.28, 1.24, 1.23, 1.01, 16), (4, 95.7, 15.1, 1.66, 1.56, 1.54, 1.03, 16),
        (8, 96.3, 18.6, 1.76, 1.62, 1.60, 1.05, 64), (16, 95.2, 19.4, 1.82, 1.68, 1.65, 1.05, 128),
        (32, 94.2, 19.9, 1.87, 1.73, 1.70, 1.05, 256),
    ),
    "street-visible": _scene(
        "street, visible", 0.0294,
        (2, 76.6, 5.3, 1.27, 1.44, 1.38, 1.03, 16), (4, 71.4, 8.8, 1.63, 2.66, 2.55, 1.01, 16),
        (8, 67.7, 10.2, 1.55, 1.70, 1.66, 1.05, 64), (16, 59.0, 9.0, 1.68, 1.86, 1.84, 1.05, 128),
        (32, 45.4, 6.2, 1.63, 2.11, 2.08, 1.05, 256),
    ),
}  # fmt: skip
"""Scenes by option value."""


def nearest_scene(visible: float) -> str:
    """Return the scene whose visible fraction is nearest to `visible`, by ratio."""
    return min(SCENES, key=lambda name: abs(log(SCENES[name].visible / visible)))


def simulated(scene: str, machines: int) -> Simulated:
    """Return the figures for a number of machines.

    Between two simulated numbers they are interpolated linearly over the logarithm. Beyond the largest they are the
    largest's. One machine saves nothing and is assumed balanced.

    Raises:
        ValueError: the scene does not exist.
    """
    if scene not in SCENES:
        raise ValueError(f"scene is {scene!r}: choose from auto, {', '.join(SCENES)}")
    if machines == 1:
        return Simulated(0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    lines = SCENES[scene].lines
    known = list(lines)
    above = bisect_left(known, machines)
    if above == len(known):
        return lines[known[-1]]
    if known[above] == machines:
        return lines[machines]
    low, high = known[above - 1], known[above]
    part = log2(machines / low) / log2(high / low)
    return Simulated(*(a + part * (b - a) for a, b in zip(astuple(lines[low]), astuple(lines[high]), strict=True)))
