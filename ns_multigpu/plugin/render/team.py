"""Number of processes that render a model for nerfstudio's commands: one, or one with helpers.

Points that fit one device are copied to each helper. Pictures are then cut into bands and views are distributed
round-robin; only pixels are exchanged. Otherwise points are sharded and splats are exchanged, as in `tile`. Pipelines
of other models supply their own rule (the `plan` of `begin`).
"""

import copy
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from nerfstudio.utils.rich_utils import CONSOLE

from ns_multigpu.core.dist.collectives import broadcast_object
from ns_multigpu.core.dist.world import gpu_places
from ns_multigpu.plugin.checkpoint.sharded_state import POINTS, shapes_in
from ns_multigpu.plugin.checkpoint.verify import checkpoints_in, read_checkpoint_file, step_of
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.helpers import Helpers
from ns_multigpu.plugin.launch.process_world import set_world
from ns_multigpu.plugin.launch.ranks import Ranks
from ns_multigpu.plugin.launch.run_folder import config_being_loaded

RENDER_RANKS = "NS_MULTIGPU_RENDER_RANKS"
"""Environment variable: number of rendering processes, rank 0 included. GPUs are not shared, so at most as many as are
visible. Without it, the number follows from the model's size. 1 starts no helpers.
"""
RENDER_MEMORY = "NS_MULTIGPU_RENDER_MEMORY_GB"
"""Environment variable: device memory that a model may take, GB; by default `FILLED` of the free memory."""
FILLED = 0.7
"""Fraction of a device's free memory that a model may take: pictures need the rest."""
GAINS_FROM = 2_000_000
"""Number of points from which a second GPU saves more time than its start costs."""


@dataclass(frozen=True)
class Size:
    """Number of processes; `whole` if each holds all points."""

    ranks: int
    whole: bool


def free_memory() -> float:
    """Return the bytes that a model may take on each GPU, from the GPU with the least free memory."""
    return FILLED * min(torch.cuda.mem_get_info(device)[0] for device in range(torch.cuda.device_count()))


def asked_for(name: str, kind: Callable[[str], Any], least: float) -> Any:
    """Return the number in an environment variable; None if it is not set.

    Raises:
        InputError: the value is no such number.
    """
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not value >= least:
        raise InputError(f"{name}={text}: give a number from {least:g} on, or leave it out.")
    return value


@dataclass(frozen=True)
class Devices:
    """Devices for rendering.

    Attributes:
        kind: type of the devices.
        count: number of GPUs; 0 for CPUs, which processes share.
        memory: bytes of each that a model may take; None for no limit.
        asked: number of processes requested by the user; None if not given.
    """

    kind: Literal["cpu", "cuda"]
    count: int
    memory: float | None
    asked: int | None

    @staticmethod
    def here() -> "Devices":
        """Return this machine's devices, within the limits of the environment variables.

        Raises:
            InputError: an environment variable is invalid.
        """
        asked, memory = asked_for(RENDER_RANKS, int, 1), asked_for(RENDER_MEMORY, float, 0)
        if not torch.cuda.is_available():
            return Devices("cpu", 0, None if memory is None else memory * 1e9, asked)
        return Devices("cuda", gpu_places(), free_memory() if memory is None else memory * 1e9, asked)

    def limited(self, wanted: int) -> int:
        """Return the number of processes if `wanted` are: at least one, and at most one for each GPU."""
        return max(1, min(wanted, self.count) if self.kind == "cuda" else wanted)

    def named(self, count: int) -> str:
        """Return `count` devices in words."""
        one, more = ("GPU", "GPUs") if self.kind == "cuda" else ("process", "processes")
        return f"{count} {one if count == 1 else more}"


def size_for(points: int, point_bytes: int, devices: Devices) -> Size:
    """Return the number of processes for a model of so many points, of so many bytes each.

    Raises:
        InputError: the model does not fit the devices.
    """
    needed, memory = points * point_bytes, devices.memory
    least = 1 if memory is None else max(1, math.ceil(needed / memory))
    gains = devices.kind == "cuda" and (least > 1 or points >= GAINS_FROM)
    ranks = devices.limited(devices.asked or (devices.count if gains else 1))
    if least > ranks:
        raise InputError(
            f"{points:,} Gaussians take {needed / 1e9:.3g} GB, and {devices.named(ranks)} of which "
            f"each may hold {(memory or 0) / 1e9:.3g} GB cannot hold them: {least} are needed. Take more: "
            f"--num-devices, or {RENDER_RANKS} with nerfstudio's commands; CUDA_VISIBLE_DEVICES may hide some. "
            f"{RENDER_MEMORY} says how much of a device's memory may be taken."
        )
    return Size(ranks, least == 1)


@dataclass(frozen=True)
class TeamPlan:
    """Distribution of a model over processes.

    Attributes:
        ranks: number of processes, this one included.
        line: description for the user.
        changes: of the pipeline's configuration, for all processes.
    """

    ranks: int
    line: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])


def plan_for_points(state: Mapping[str, Any], checkpoint: Path, devices: Devices) -> TeamPlan | None:
    """Return the plan for a model of points; None if the state has none. See `begin`."""
    del checkpoint
    shapes = {k: s for k, s in shapes_in(state).items() if k.startswith(POINTS)}
    if not shapes:
        return None
    points = next(iter(shapes.values()))[0]
    point_bytes = 4 * sum(math.prod(shape[1:]) for shape in shapes.values())
    size = size_for(points, point_bytes, devices)
    how = "each holds all of them" if size.whole else "each holds a part"
    line = f"{points:,} Gaussians on {devices.named(size.ranks)}: {how}."
    return TeamPlan(size.ranks, line, {"strategy": "batch" if size.whole else "tile"})


class Team:
    """Rank 0's connection to its helpers, which run `launch.helpers.help_rank_0`.

    Args:
        helpers: the processes.
    """

    def __init__(self, helpers: Helpers) -> None:
        self.helpers, self.world = helpers, helpers.world

    def call(self, what: str, *args: Any, **kwargs: Any) -> None:
        """Send a call to all helpers, which run it together with this process: see `launch.helpers.obey`."""
        broadcast_object((what, args, kwargs), 0, self.world)


def begin(
    config: Any,
    test_mode: str,
    plan: Callable[[Mapping[str, Any], Path, Devices], TeamPlan | None] = plan_for_points,
) -> tuple[Any, Team | None]:
    """Start helpers if one of nerfstudio's commands is about to load a run that needs or benefits from them.

    Args:
        config: of a pipeline, its `checkpoints` set.
        test_mode: the pipeline's.
        plan: returns the plan from the pipeline's state in the .ckpt, the .ckpt and the devices; None if unknown.

    Returns:
        the configuration to use, and the team; None for this process alone.

    Raises:
        InputError: the model does not fit the devices, or an environment variable is invalid.
    """
    folder: Path | None = config.checkpoints
    if config_being_loaded() is None or folder is None or Ranks.from_env() is not None:
        return config, None
    devices, found = Devices.here(), checkpoints_in(folder)
    if not found:
        return config, None
    newest = max(found, key=step_of)
    planned = plan(read_checkpoint_file(newest)["pipeline"], newest, devices)
    if planned is None or planned.ranks == 1:
        return config, None
    CONSOLE.print(f"{planned.line} ({RENDER_RANKS}=1 keeps to one.)", soft_wrap=True)
    with CONSOLE.status(f"Starting {planned.ranks - 1} helpers"):
        team = Team(Helpers(planned.ranks - 1, devices.kind))
    config = copy.copy(config)
    for name, value in planned.changes.items():
        setattr(config, name, value)
    broadcast_object((config, test_mode), 0, team.world)
    set_world(team.world)  # only while the pipeline is created; later objects belong to this process alone
    return config, team
