"""How many processes look at a model: one, or one with helpers, by what the model needs or gains.

Points that fit one device are copied to each helper: then a picture is cut into bands and views are dealt out, and
nothing travels but pixels. Those that do not are spread over the devices, and splats travel, as in `tile`. What other
models need and gain, their pipelines say (`begin`'s `plan`).
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
"""In the environment, how many processes look at a model, rank 0 included; GPUs are not shared, so at most as many as
are visible. Without it, as many as the model needs or gains from. 1 starts no helpers."""
RENDER_MEMORY = "NS_MULTIGPU_RENDER_MEMORY_GB"
"""In the environment, how much of a device's memory a model may take, GB; by default `FILLED` of what is free."""
FILLED = 0.7
"""Of a device's free memory a model may take: pictures need the rest."""
GAINS_FROM = 2_000_000
"""Points from which on a second GPU makes pictures quicker by more than it costs to start it."""


@dataclass(frozen=True)
class Size:
    """How many processes, and whether each has all points."""

    ranks: int
    whole: bool


def size_for(
    points: int, point_bytes: int, kind: Literal["cpu", "cuda"], devices: int, memory: float | None, asked: int | None
) -> Size:
    """The processes for a model.

    Args:
        points: of the model. point_bytes: what one takes.
        kind: of the devices. devices: how many there are. memory: of one, that the model may take; None for no limit.
        asked: by the user; None if nothing was said.

    Raises:
        InputError: the model fits the devices in no way.
    """
    needed = points * point_bytes
    least = 1 if memory is None else max(1, math.ceil(needed / memory))
    if asked is not None:
        ranks = min(asked, devices) if kind == "cuda" else asked
    elif least > 1:
        ranks = devices if kind == "cuda" else 1
    else:
        ranks = devices if kind == "cuda" and points >= GAINS_FROM else 1
    ranks = max(1, ranks)
    if least > ranks:
        one = ("GPU", "GPUs") if kind == "cuda" else ("process", "processes")
        raise InputError(
            f"{points:,} Gaussians take {needed / 1e9:.3g} GB, and {ranks} {one[ranks > 1]} of which "
            f"each may hold {(memory or 0) / 1e9:.3g} GB cannot hold them: {least} are needed. Take more: "
            f"--num-devices, or {RENDER_RANKS} with nerfstudio's commands; CUDA_VISIBLE_DEVICES may hide some. "
            f"{RENDER_MEMORY} says how much of a device's memory may be taken."
        )
    return Size(ranks, least == 1)


def free_memory() -> float:
    """Bytes that a model may take of each GPU: of the fullest."""
    return FILLED * min(torch.cuda.mem_get_info(device)[0] for device in range(torch.cuda.device_count()))


def asked_for(name: str, kind: Callable[[str], Any], least: float) -> Any:
    """The number that an environment variable is set to; None if it is not.

    Raises:
        InputError: it is no such number.
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
    """What there is to look at a model with.

    Attributes:
        kind: of the devices. count: how many of them there are; 0 for CPUs, which processes share.
        memory: bytes of each that a model may take; None for no limit.
        asked: how many processes the user wants; None if nothing was said.
    """

    kind: Literal["cpu", "cuda"]
    count: int
    memory: float | None
    asked: int | None

    @staticmethod
    def here() -> "Devices":
        """Those of this machine, as the environment lets them be used.

        Raises:
            InputError: an environment variable is set to nonsense.
        """
        asked, memory = asked_for(RENDER_RANKS, int, 1), asked_for(RENDER_MEMORY, float, 0)
        if not torch.cuda.is_available():
            return Devices("cpu", 0, None if memory is None else memory * 1e9, asked)
        return Devices("cuda", gpu_places(), free_memory() if memory is None else memory * 1e9, asked)

    def named(self, count: int) -> str:
        """So many of them, in words."""
        one, more = ("GPU", "GPUs") if self.kind == "cuda" else ("process", "processes")
        return f"{count} {one if count == 1 else more}"


@dataclass(frozen=True)
class Plan:
    """How a model is looked at.

    Attributes:
        ranks: processes, this one included.
        line: what is where, said to the user; from "4 GPUs" on.
        changes: of the pipeline's configuration, for all processes.
    """

    ranks: int
    line: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])


def plan_for_points(state: Mapping[str, Any], checkpoint: Path, devices: Devices) -> Plan | None:
    """How points are looked at; see `begin`."""
    del checkpoint
    shapes = {k: s for k, s in shapes_in(state).items() if k.startswith(POINTS)}
    if not shapes:
        return None
    points = next(iter(shapes.values()))[0]
    point_bytes = 4 * sum(math.prod(shape[1:]) for shape in shapes.values())
    size = size_for(points, point_bytes, devices.kind, devices.count, devices.memory, devices.asked)
    how = "each holds all of them" if size.whole else "each holds a part"
    line = f"{points:,} Gaussians on {devices.named(size.ranks)}: {how}."
    return Plan(size.ranks, line, {"strategy": "batch" if size.whole else "tile"})


class Team:
    """Rank 0's side: what it tells its helpers. They run `launch.helpers.help_rank_0`.

    Args:
        helpers: the processes.
    """

    def __init__(self, helpers: Helpers) -> None:
        self.helpers, self.world = helpers, helpers.world

    def tell(self, what: str, *args: Any, **kwargs: Any) -> None:
        """Has all helpers do something that this process then does with them: see `launch.helpers.obey`."""
        broadcast_object((what, args, kwargs), 0, self.world)


def begin(
    config: Any,
    test_mode: str,
    plan: Callable[[Mapping[str, Any], Path, Devices], Plan | None] = plan_for_points,
) -> tuple[Any, Team | None]:
    """Starts helpers, where one of nerfstudio's commands is about to load a run and that takes or gains from them.

    Args:
        config: of a pipeline, its `checkpoints` set. test_mode: the pipeline's.
        plan: how a model is looked at, by the pipeline's state in its .ckpt, the .ckpt, and what there is to look with;
            None where it cannot be told.

    Returns:
        the configuration to go on with, and the team; None for this process alone.

    Raises:
        InputError: the model fits the devices in no way, or an environment variable is set to nonsense.
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
    set_world(team.world)  # while the pipeline is made; what nerfstudio makes later is this process's alone
    return config, team
