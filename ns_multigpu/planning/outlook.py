"""Expected speed of each strategy on a run's GPUs, and a recommendation if another one is much faster."""

from dataclasses import dataclass, replace

from ns_multigpu.planning.memory import most_points
from ns_multigpu.planning.pace import pace
from ns_multigpu.planning.work import Workload

WORTH_SAYING = 1.2
"""Least speedup for which another strategy is recommended."""
SOME_SIZE = 1_000_000
"""Assumed final number of Gaussians if it is unknown."""


@dataclass(frozen=True)
class Outlook:
    """Images per second by strategy, for a model of some size. "single" is one GPU for any strategy.

    Attributes:
        points: of the model.
        speeds: by strategy; those that exceed the memory are omitted.
    """

    points: int
    speeds: dict[str, float]

    def better(self, than: str) -> str | None:
        """Return the fastest strategy if it is much faster than `than`, else None."""
        best = max(self.speeds, key=lambda name: self.speeds[name], default=than)
        slow = self.speeds.get(than)
        return best if slow is not None and self.speeds[best] >= WORTH_SAYING * slow else None


def outlook(mine: str, workload: Workload, points: int, memory: float | None) -> Outlook:
    """Return the speeds of `mine`, with its batch, and of the other strategies, with their default batches.

    Args:
        mine: the run's strategy.
        workload: the run's quantities.
        points: of the model.
        memory: bytes of a GPU that a model and its steps may take; None if unknown.
    """
    speeds: dict[str, float] = {}
    for name, views in (("single", 1), ("batch", workload.gpus), ("tile", 1), ("locality", workload.gpus)):
        if name == "locality" and workload.machines == 1 and mine != name:
            continue  # it is made for several machines
        gpus, machines = (1, 1) if name == "single" else (workload.gpus, workload.machines)
        views = workload.views if name == mine else views
        one = replace(workload.with_points(max(points, 1)), gpus=gpus, machines=machines, views=views)
        if memory is not None and most_points(name, one, memory, densify=True) < points:
            continue
        speeds[name] = pace(name, one).images_per_second
    return Outlook(points, speeds)


def described(found: list[Outlook], mine: str, gpus: int) -> list[str]:
    """Return the lines that are printed at a run's start.

    Args:
        found: for models of several sizes, the largest last.
        mine: the run's strategy.
        gpus: number of GPUs.
    """
    lines = [f"Planned, images a second on {gpus} GPUs, by the rates of an H200 (ns-multigpu plan says how):"]
    for one in found:
        names = {name: "one GPU" if name == "single" else name for name in one.speeds}
        text = ", ".join(f"{names[name]} {speed:,.0f}" for name, speed in one.speeds.items())
        lines.append(f"  {one.points:,} Gaussians: {text}")
    last = found[-1]
    if (best := last.better(mine)) is not None:
        times = last.speeds[best] / last.speeds[mine]
        how = "one GPU (--machine.num-devices 1)" if best == "single" else f"splatfacto-{best}"
        lines.append(f"With {last.points:,} Gaussians {how} would be {times:.1f} times as fast as this.")
    return lines
