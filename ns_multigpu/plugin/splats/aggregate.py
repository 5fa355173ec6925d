"""Options of `splatfacto-aggregate`: one process, whose model is on all GPUs as one device of torch, `multigpu`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from nerfstudio.configs.base_config import MachineConfig

from cuda_ext import NativeBuildError
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.process_world import has_world
from ns_multigpu.plugin.launch.ranks import Ranks
from ns_multigpu.plugin.render import team
from ns_multigpu.plugin.splats.config import DistributedTrainerConfig
from ns_multigpu.plugin.splats.pipeline import DistributedPipelineConfig
from ns_multigpu.primitives.registry import FIRST

DEVICE = "multigpu:0"


def begin_device(device_type: str, members: int) -> str:
    """Return the device of the first `members` GPUs, or of as many pretended ones in host memory for "cpu".

    A device that `aggregate.use` has begun stays as it is.

    Raises:
        InputError: the GPUs cannot be one device, or the device cannot be compiled.
    """
    try:
        from ns_multigpu import aggregate  # registers the device: only in processes that use it

        if not aggregate.in_use() and device_type == "cpu":
            aggregate.use(host_members=members)
        elif not aggregate.in_use():
            aggregate.use(range(members))
    except (RuntimeError, ValueError, NativeBuildError) as error:
        raise InputError(str(error)) from error
    return DEVICE


@dataclass
class AggregatePipelineConfig(DistributedPipelineConfig):
    """Pipeline options of the strategy `single`, on the device `multigpu`."""

    strategy: str = "single"

    def place(self, device: str) -> str:
        """Return the device of all visible GPUs, or of one member in host memory without GPUs. A worker of several
        processes keeps its own device."""
        if has_world():
            return device
        return begin_device(torch.device(device).type, max(torch.cuda.device_count(), 1))

    def team_plan(self, state: Mapping[str, Any], checkpoint: Path, devices: team.Devices) -> team.TeamPlan | None:
        """Return no plan, for one process, unless a number of processes is asked for."""
        return None if devices.asked is None else super().team_plan(state, checkpoint, devices)


@dataclass
class AggregateTrainerConfig(DistributedTrainerConfig):
    """Options of a run in one process; `machine.num_devices` counts the GPUs of its device, 0 for all visible ones."""

    cpu_device = "pretended GPU"
    machine: MachineConfig = field(default_factory=lambda: MachineConfig(num_devices=0))

    @property
    def processes(self) -> int:
        """See `RunConfig.processes`."""
        return 1

    @property
    def device_type(self) -> str:
        """See `RunConfig.device_type`."""
        return DEVICE

    def set_timestamp(self) -> None:
        """Count the GPUs; see `RunConfig.set_timestamp`."""
        if self.machine.num_devices == 0:
            self.machine.num_devices = max(torch.cuda.device_count(), 1)
        super().set_timestamp()

    def check_method(self) -> None:
        """Raise an InputError if the run needs several processes or an option that the device has no operators for."""
        pipeline = cast(Any, self.pipeline)
        if Ranks.from_env() is not None or self.machine.num_machines > 1:
            raise InputError(
                "splatfacto-aggregate trains in one process on one machine. Start it with ns-train, without torchrun "
                "and --machine.num-machines, or use splatfacto-tile."
            )
        model = pipeline.model
        refused = {
            f"pipeline.strategy {pipeline.strategy}": pipeline.strategy != "single",
            f"pipeline.model.primitive {model.primitive}": model.primitive != FIRST,
            "pipeline.datamanager.cache-images gpu": pipeline.datamanager.cache_images == "gpu",
        }
        for option, is_refused in refused.items():
            if is_refused:
                raise InputError(
                    f"--{option}: the device of splatfacto-aggregate does not support it. Leave it out, or use "
                    "splatfacto-tile."
                )
        super().check_method()

    def prepare(self) -> None:
        """Begin the device; see `RunConfig.prepare`."""
        super().prepare()
        begin_device(self.machine.device_type, self.machine.num_devices)

    def length_in_words(self, ranks: int) -> str:
        """See `DistributedTrainerConfig.length_in_words`."""
        del ranks
        return f" of one process{super().length_in_words(1)}"
