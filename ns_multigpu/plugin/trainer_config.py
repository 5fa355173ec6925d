"""The configuration of a training run: nerfstudio's, plus how its workers come to life.

`ns-train` calls, in this order and in the process that the user (or torchrun) started: `set_timestamp`,
`print_to_terminal`, `save_config`; then, if `machine.num_devices` is 1, `setup(local_rank=0, world_size=1)`, whose
result it sets up and trains. With more devices it would start the processes itself, on CUDA only and with a seed for
each. So `save_config` writes the file as it was asked for and then tells nerfstudio of one device, and `setup` finds
the others: they are torchrun's, or a `WorkerLauncher` starts them.
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nerfstudio.engine.trainer import TrainerConfig
from nerfstudio.utils.rich_utils import CONSOLE

import cuda_ext
from ns_multigpu.core.world import gpu_places
from ns_multigpu.plugin import checks
from ns_multigpu.plugin.agreement import manifest_of
from ns_multigpu.plugin.batch_scaling import RateCourse, ScalingChoice, scaling_rule
from ns_multigpu.plugin.errors import InputError, show_uncaught
from ns_multigpu.plugin.launch import WorkerLauncher, use_own_share_of_cores
from ns_multigpu.plugin.ranks import Ranks, agree
from ns_multigpu.plugin.run_folder import note_name, noted_name, restarts

_ASKED = "_asked_of_nerfstudio"
"""Name of the attribute that holds (num_devices, num_machines) between `save_config` and `setup`; never saved."""


def _distributed_trainer() -> type:
    from ns_multigpu.plugin.trainer import DistributedTrainer  # it needs this module

    return DistributedTrainer


@dataclass
class DistributedTrainerConfig(TrainerConfig):
    """Configuration of a training run with any number of workers."""

    _target: type = field(default_factory=_distributed_trainer)
    """target class to instantiate"""
    eval_at_start: bool = False
    """Evaluate all held-out views before the first step as well."""
    max_num_images: int | None = 30000
    """Training ends once this many images have been seen by all ranks together, or after max_num_iterations steps."""
    batch_scaling: ScalingChoice = "auto"
    """How learning rates (and with them Adam's betas and eps) follow the number of views in a step; auto is
    sqrt-to-none for runs that see each view 100 times or more, and sqrt for others."""
    rates_at_end: float = 1.0
    """What learning rates, besides their own schedules, are multiplied by at the end of training; 1 for no fall."""
    rates_fall_from: float = 0.5
    """Behind which part of the run they fall to rates_at_end, exponentially with the images seen; 0 is the start."""
    steps_per_checksum: int = 500
    """Steps between proofs that all replicas are identical; 0 for none."""
    save_in_background: bool = True
    """Write checkpoints while training goes on, which waits only until the state has been copied to the host's memory;
    where a quarter of what is available there is not enough for that, it waits for the disk."""
    save_on_interrupt: bool = True
    """Save a checkpoint when Ctrl-C or SIGTERM ends the run; a second Ctrl-C ends it at once."""
    max_restarts: int = 3
    """How often ns-train starts its workers anew, from the last checkpoint, after one has died; under torchrun its own
    --max-restarts counts."""
    stall_seconds: float = 120.0
    """After how long a standstill to say which rank is late (ten times that in evaluations, saves and the first step);
    0 for never."""
    stall_abort_seconds: float = 300.0
    """After how long a standstill to end the run; 0 to leave it to the collectives' own limit of ten minutes."""
    steps_per_numeric_check: int = 50
    """Steps between two looks for NaN and infinity in losses, gradients and parameters; 0 for none."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do about NaN or infinity in gradients: stop the run, or leave such steps out."""
    fused_steps: Literal["auto", "always", "never"] = "auto"
    """Whether to take steps in our own fused operators and CUDA graphs instead of autograd: "auto" does on GPUs where
    the options allow it and says so, or what does not allow it; "always" refuses to start where they do not."""
    keep_checkpoints: int = 2
    """How many checkpoints to keep, the newest; 0 for all (as with save_only_latest_checkpoint False)."""

    def steps_for(self, batch: int) -> int:
        """Steps to train for when each sees `batch` images."""
        if self.max_num_images is None:
            return self.max_num_iterations
        return min(self.max_num_iterations, -(-self.max_num_images // batch))

    def rate_course(self, batch: int, views: int) -> RateCourse:
        """What learning rates follow when each step sees `batch` images of a capture of so many training views."""
        images = max(self.steps_for(batch), 1) * batch
        rule = scaling_rule(self.batch_scaling, images, views)
        return RateCourse(rule, batch, images, self.rates_at_end, self.rates_fall_from)

    def checkpoints_to_keep(self) -> int:
        """How many checkpoints a save leaves; 0 for all."""
        return self.keep_checkpoints if self.save_only_latest_checkpoint else 0

    def set_timestamp(self) -> None:
        """Names the run folder, the same on all ranks, once what was asked for is known to be possible.

        Raises:
            InputError: it is not possible.
        """
        show_uncaught()
        ranks = Ranks.from_env()
        checks.check_rates_at_end(self.rates_at_end, self.rates_fall_from)
        machine = self.machine
        cuda_devices = gpu_places() if machine.device_type == "cuda" else 0
        checks.check_devices(machine.device_type, machine.num_devices, ranks, cuda_devices)
        checks.check_machines(
            machine.num_machines, machine.machine_rank, machine.num_devices, machine.dist_url, ranks, sys.argv[1:]
        )
        if ranks is None:
            self._name_run_folder()
        else:
            machine.num_devices, machine.num_machines = ranks.local_size, ranks.machines
            self.timestamp = agree(ranks, self._name_run_folder, manifest=manifest_of(self))
        prepare_operators(machine.device_type)

    def _name_run_folder(self) -> str:
        if restarts() > 0 and self.timestamp == "{timestamp}":
            self.timestamp = noted_name(self.output_dir) or self.timestamp
        super().set_timestamp()
        checks.check_run_folder(self.get_base_dir())
        if "TORCHELASTIC_RUN_ID" in os.environ:
            note_name(self.output_dir, self.timestamp)
        return self.timestamp

    def get_checkpoint_dir(self) -> Path:
        """The run's folder of checkpoints. The pipeline is told of it, because nerfstudio's commands, which ask for it
        before they set the pipeline up, give the pipeline a .ckpt's contents and not its place."""
        folder = super().get_checkpoint_dir()
        self.pipeline.checkpoints = folder  # pyright: ignore[reportAttributeAccessIssue]
        return folder

    def print_to_terminal(self) -> None:
        """Prints the configuration, on one rank of the job."""
        if _speaks():
            super().print_to_terminal()

    def save_config(self) -> None:
        """Writes config.yml, on one rank of the job, and keeps nerfstudio from starting processes of its own."""
        if _speaks():
            super().save_config()
        self.__dict__[_ASKED] = (self.machine.num_devices, self.machine.num_machines)
        self.machine.num_devices = self.machine.num_machines = 1

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled and written to config.yml: the fields."""
        return {name: value for name, value in self.__dict__.items() if name != _ASKED}

    def setup(self, **kwargs: Any) -> Any:
        """The trainer of this process, or what starts the processes that the trainers will be in."""
        workers = 1
        if _ASKED in self.__dict__:
            workers, machines = self.__dict__.pop(_ASKED)
            self.machine.num_devices, self.machine.num_machines = workers, machines
        ranks = Ranks.from_env()
        if ranks is None and workers > 1:
            return WorkerLauncher(self, workers)
        if ranks is not None:
            kwargs.update(local_rank=ranks.local_rank, world_size=ranks.size)
            CONSOLE.quiet = ranks.rank != 0
        use_own_share_of_cores(ranks)
        return super().setup(**kwargs)

    # nerfstudio starts a viewer on each machine's first rank; there is one viewer a job, on rank 0.

    def is_viewer_enabled(self) -> bool:
        """Whether this rank runs the viewer."""
        return _speaks() and super().is_viewer_enabled()

    def is_viewer_legacy_enabled(self) -> bool:
        """Whether this rank runs the legacy viewer."""
        return _speaks() and super().is_viewer_legacy_enabled()


def _speaks() -> bool:
    """Whether this process is the one of its job that writes files and talks to the user."""
    ranks = Ranks.from_env()
    return ranks is None or ranks.rank == 0


def prepare_operators(device_type: Literal["cpu", "cuda", "mps"]) -> None:
    """Builds the native operators here, once and in sight, before several workers ask for them at the same time."""
    checks.check_operators(device_type, cuda_ext.compiler_problem(device_type))
    if cuda_ext.backend(device_type) == "native":
        try:
            cuda_ext.build_native(device_type)
        except cuda_ext.NativeBuildError as error:
            raise InputError(str(error)) from error
