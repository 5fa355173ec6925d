"""Configuration of a training run: nerfstudio's, plus the start of its worker processes.

`ns-train` calls, in this order and in the process that the user (or torchrun) started: `set_timestamp`,
`print_to_terminal`, `save_config`; then, if `machine.num_devices` is 1, `setup(local_rank=0, world_size=1)`, whose
result it sets up and trains. With more devices it would start the processes itself, on CUDA only and with a seed for
each. So `save_config` writes the file with the user's values and then sets `machine.num_devices` to 1, and `setup`
restores the number. The processes are torchrun's, or a `WorkerLauncher` starts them.
"""

import copy
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, cast

import yaml
from nerfstudio.engine.trainer import TrainerConfig
from nerfstudio.utils.rich_utils import CONSOLE
from rich.text import Text

from ns_multigpu.core.dist.world import gpu_places
from ns_multigpu.plugin.capture.checks import listed
from ns_multigpu.plugin.capture.coordinate_offset import saved_offset
from ns_multigpu.plugin.capture.first_look import find_reconstruction, first_look
from ns_multigpu.plugin.capture.reading import FAULTS
from ns_multigpu.plugin.checkpoint.verify import checkpoints_in, step_of
from ns_multigpu.plugin.faults.errors import InputError, show_uncaught
from ns_multigpu.plugin.faults.host_memory import available_memory
from ns_multigpu.plugin.faults.signals import stop_before_training
from ns_multigpu.plugin.launch import checks, quick_imports
from ns_multigpu.plugin.launch.agreement import manifest_of
from ns_multigpu.plugin.launch.commands import named_config, resume_command, with_options
from ns_multigpu.plugin.launch.launcher import WorkerLauncher, use_own_share_of_cores
from ns_multigpu.plugin.launch.option_help import given, without_effect
from ns_multigpu.plugin.launch.processes import cores
from ns_multigpu.plugin.launch.ranks import Ranks, Start, agree, check_layout
from ns_multigpu.plugin.launch.removed_options import account_for, take_out
from ns_multigpu.plugin.launch.run_folder import (
    abandoned_unless_begun,
    config_being_loaded,
    note_name,
    recall,
    remove_unused,
    restarts,
)
from ns_multigpu.plugin.launch.run_parts import run_parts
from ns_multigpu.plugin.run.objective import Objective
from ns_multigpu.plugin.run.trainer import DistributedTrainer

Run = TypeVar("Run", bound="RunConfig")

_ASKED = "_asked_of_nerfstudio"
"""Name of the attribute that holds (num_devices, num_machines) between `save_config` and `setup`; never saved."""
_FOLDER = "_run_folder"
"""Name of the attribute that holds a moved run's folder, which differs from the one that the options give;
never saved."""
_MADE = "_made_run_folder"
"""Name of the attribute that is True if this process has made the run's folder; never saved."""


@dataclass
class RunConfig(TrainerConfig):
    """Options of a run with any number of workers, whatever it trains."""

    cpu_device: ClassVar[str] = "CPU worker"
    """Name of what computes instead of a GPU, for messages."""

    _target: type = field(default_factory=lambda: DistributedTrainer)
    """target class to instantiate"""
    eval_at_start: bool = False
    """Evaluate all held-out views before the first step as well."""
    max_num_images: int | None = None
    """Training ends once all ranks together have seen this many images, or after max_num_iterations steps. Where steps
    are of rays, an image is as many rays as a training photograph has pixels, on average."""
    steps_per_checksum: int = 500
    """Check every so many steps that all GPUs hold the same values of shared parameters; 0 for never."""
    save_in_background: bool = True
    """Write checkpoints while training goes on. Training waits only until the state is copied, on the GPU or to the
    host's memory. If that needs more than a quarter of the host's available memory, it waits for the disk."""
    save_on_interrupt: bool = True
    """Save a checkpoint when Ctrl-C or SIGTERM ends the run; a second Ctrl-C ends it at once."""
    max_restarts: int = 3
    """Number of times that ns-train restarts its workers from the last checkpoint after one has died. Under torchrun
    its own --max-restarts counts."""
    stall_seconds: float = 120.0
    """Seconds without progress after which the late rank is reported (ten times that in evaluations, saves and the
    first step); 0 for never."""
    stall_abort_seconds: float = 300.0
    """Seconds without progress after which the run ends; 0 leaves it to the collectives' own limit of ten minutes."""
    steps_per_numeric_check: int = 50
    """Steps between checks for NaN and infinity in losses, gradients and parameters; 0 for none."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Reaction to NaN or infinity in gradients: stop the run, or skip such steps."""
    fused_steps: Literal["auto", "always", "never"] = "auto"
    """Run steps in our own fused operators and CUDA graphs instead of autograd. "auto" does on GPUs if the options
    allow it, and prints the choice or the obstacle; "always" refuses to start if they do not."""
    keep_checkpoints: int = 2
    """Number of newest checkpoints to keep; 0 for all (as with save_only_latest_checkpoint False)."""
    save_fallback_dir: Path | None = None
    """Folder, on another disk, for the final model if it cannot be saved in the run's own folder."""
    save_retry_seconds: float = 60.0
    """Seconds during which saving the final model is retried, every few seconds: time to free disk space."""
    start_over: bool = False
    """Begin at step 0 in a run folder that holds checkpoints, which the new ones replace. Otherwise that is refused."""
    allow_unseen_points: bool = False
    """Train although (nearly) no view sees a seed point, or other poses would see many more."""
    verbose: bool = False
    """Print all options at the start. config.yml in the run's folder always has them."""

    def __post_init__(self) -> None:
        """Check the file that `--load-config` names, before nerfstudio reads it.

        Raises:
            InputError: it is not the config.yml of a run of ours.
        """
        if self.load_config is not None:
            show_uncaught()
            read_config(self.load_config)

    def steps_for(self, batch: float) -> int:
        """Return the number of steps to train for when each sees `batch` images."""
        if self.max_num_images is None:
            return self.max_num_iterations
        return min(self.max_num_iterations, math.ceil(self.max_num_images / batch))

    def for_steps(self: Run, steps: int) -> Run:
        """Return a copy of this configuration, to train for `steps` steps."""
        same = copy.copy(self)
        vars(same).update(vars(self))  # attributes that are not pickled, too
        same.max_num_iterations = steps
        return same

    def checkpoints_to_keep(self) -> int:
        """Return the number of checkpoints that a save keeps; 0 for all."""
        return self.keep_checkpoints if self.save_only_latest_checkpoint else 0

    def most_checkpoints(self) -> int:
        """Return the largest number of checkpoints in the run's folder at a time, with the one being written."""
        saves = self.max_num_iterations // self.steps_per_save + 1
        return min(saves, self.checkpoints_to_keep() + 1) if self.checkpoints_to_keep() else saves

    def set_timestamp(self) -> None:
        """Check what was asked for and name the run folder, the same on all ranks.

        Raises:
            InputError: an option or the capture is invalid.
        """
        show_uncaught()
        quick_imports.end_quickly()
        run_parts().done("command line")
        stop_before_training()
        ranks, machine = Ranks.from_env(), self.machine
        if (named := named_config()) is not None:
            self._follow(named)
            machine = self.machine
        cuda_devices = gpu_places() if machine.device_type == "cuda" else 0
        checks.check_devices(machine.device_type, machine.num_devices, ranks, cuda_devices)
        self.complete(self.processes * machine.num_machines if ranks is None else ranks.size)
        checks.check_lengths(self.max_num_images, self.max_num_iterations)
        checks.check_retries(self.save_retry_seconds)
        self.check_method()
        for line in without_effect(self, sys.argv) if speaks() else ():
            CONSOLE.print(Text(line, "yellow"), soft_wrap=True)
        here = self.processes if ranks is None else ranks.local_size
        if machine.device_type == "cpu" and (note := checks.crowd(here, cores(), available_memory())) and speaks():
            CONSOLE.print(Text(note, "yellow"), soft_wrap=True)
        checks.check_machines(
            machine.num_machines, machine.machine_rank, machine.num_devices, machine.dist_url, ranks, sys.argv[1:]
        )
        if ranks is None:
            check_layout([Start.of_this_process().place] * self.processes)
            self._begin([])
        else:
            machine.num_devices, machine.num_machines = ranks.local_size, ranks.machines
            # The experiment's name too: it may come from the capture's folder, whose name may differ between machines.
            agreed = json.loads(agree(ranks, self._begin, manifest=manifest_of(self)))
            self.experiment_name, self.timestamp, reconstruction, offset = agreed
            datamanager = cast(Any, self.pipeline).datamanager
            datamanager.offset = offset and tuple(offset)
            if reconstruction is not None:
                datamanager.dataparser = dataclasses.replace(datamanager.dataparser, colmap_path=Path(reconstruction))
        run_parts().done("first look at the capture")
        with abandoned_unless_begun(self):
            self.prepare()
        run_parts().done("operators")

    @property
    def processes(self) -> int:
        """Number of processes on this machine, unless a launcher has started them."""
        return self.machine.num_devices

    @property
    def device_type(self) -> str:
        """Type of the device on which a rank computes."""
        return self.machine.device_type

    def complete(self, ranks: int) -> None:
        """Set options that follow from others, for a run of so many ranks."""

    def check_precision(self) -> None:
        """Raise an InputError unless the method can train in the precision that was asked for."""

    def check_method(self) -> None:
        """Raise an InputError unless the method's own options go together."""

    def needs_tracks(self) -> bool:
        """Return whether training uses the views that see each seed point."""
        return False

    def objective(self) -> type[Objective]:
        """Return the class of what the run trains."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Prepare what all workers use."""
        checks.prepare_operators(self.machine.device_type)

    def _follow(self, named: Path) -> None:
        """Apply the rest of the command line, which nerfstudio ignores next to `--load-config`. Keep the folder of the
        file `named`, even if it was moved, unless the command line names another."""
        if (line := account_for(self)) and speaks():
            CONSOLE.print(Text(line, "yellow"), soft_wrap=True)
        places = ("output_dir", "experiment_name", "timestamp", "relative_model_dir")
        before = [getattr(self, name) for name in places]
        vars(self).update(vars(with_options(self)))
        if before == [getattr(self, name) for name in places] and (named.parent / self.relative_model_dir).is_dir():
            vars(self)[_FOLDER] = named.parent

    def _keep_frame(self) -> None:
        """Subtract the offset of the run that this one resumes from."""
        datamanager = cast(Any, self.pipeline).datamanager
        models = self.load_dir or (self.load_checkpoint and self.load_checkpoint.parent)
        if models is not None and datamanager.offset is None:
            datamanager.offset = saved_offset(models.parent)

    def _begin(self, starts: Sequence[Start]) -> str:
        """Check the capture, and name and make the run's folder; on one rank of the job.

        Args:
            starts: the starts of all ranks; none without a launcher.

        Returns:
            as JSON, the names in the folder's path, the experiment's and the time's; the folder of COLMAP's
            reconstruction in the capture, null for other captures; and the datamanager's offset.
        """
        noted = recall(self.output_dir, starts) if starts else None
        self._keep_frame()
        datamanager = cast(Any, self.pipeline).datamanager
        if "colmap_path" not in given(sys.argv) and (note := find_reconstruction(datamanager)):
            CONSOLE.print(Text(f"Note: {note}.", "yellow"), soft_wrap=True)
        if restarts() == 0:
            self._look_at_capture()
        if noted is not None and self.timestamp == "{timestamp}":
            self.timestamp = noted
        self._name_run_folder(starts)
        reconstruction = getattr(datamanager.dataparser, "colmap_path", None)
        reconstruction = reconstruction and str(reconstruction)
        return json.dumps([self.experiment_name, self.timestamp, reconstruction, datamanager.offset])

    def _look_at_capture(self) -> None:
        """Check the capture and print notes about it.

        Raises:
            InputError: something is wrong with it; lists all problems, one per line.
        """
        pipeline = cast(Any, self.pipeline)
        data, model = pipeline.datamanager, pipeline.model
        found = first_look(data, model, tracks=self.needs_tracks(), allow_unseen_points=self.allow_unseen_points)
        for note in found.notes:
            CONSOLE.print(Text(f"Note: {note}.", "yellow"), soft_wrap=True)
        if found.problems:
            raise listed(FAULTS, found.problems)

    def _name_run_folder(self, starts: Sequence[Start]) -> None:
        super().set_timestamp()
        self._refuse_to_replace()
        folder = self.get_base_dir()
        vars(self)[_MADE] = not folder.exists()
        if self.save_fallback_dir is not None:
            checks.check_folder(self.save_fallback_dir, fallback=True)
        checks.check_folder(folder)  # last: it makes it
        if starts:
            note_name(self.output_dir, self.timestamp, starts)

    def _refuse_to_replace(self) -> None:
        """Check that the run would not replace another run's checkpoints, nor go on in its folder with another capture.

        A capture that is no longer at its earlier path was moved.

        Raises:
            InputError: the folder holds checkpoints that the run does not resume from and would replace; or it resumes
                from them with another capture.
        """
        folder, models = self.get_base_dir(), self.get_checkpoint_dir()
        kept = checkpoints_in(models)
        begun_here = any(
            path is not None and path.resolve() == models.resolve()
            for path in (self.load_dir, self.load_checkpoint and self.load_checkpoint.parent)
        )
        if not kept or restarts() > 0 or self.start_over:
            return
        if begun_here:
            file, now = folder / "config.yml", self._capture()
            before = read_config(file)._capture() if file.is_file() else None
            if before and now and before.exists() and _folder_of(before) != _folder_of(now):
                raise InputError(
                    f"The run folder {folder} is of the capture {before}, and the results of {now} would be mixed with "
                    "its own. Add --timestamp NAME to go on in a new folder next to it, or give --data its capture."
                )
            return
        name = str(self.method_name)
        raise InputError(
            f"The run folder {folder} holds checkpoints up to step {step_of(kept[-1])}, and this run would replace "
            f"them with its own. To go on with that run:\n\n  {resume_command(name, folder, models)}\n\n"
            "To begin another run next to it, add --timestamp NAME; to begin again in its place, --start-over True."
        )

    def abandon(self) -> None:
        """Remove the folder of a run that has not begun, if this process has made it."""
        if vars(self).pop(_MADE, False) and not checkpoints_in(self.get_checkpoint_dir()):
            remove_unused(self.get_base_dir(), self.output_dir)

    def get_base_dir(self) -> Path:
        """Return the run's folder."""
        return vars(self).get(_FOLDER) or super().get_base_dir()

    def get_checkpoint_dir(self) -> Path:
        """Return the run's folder of checkpoints: next to the config.yml given to one of nerfstudio's commands.

        It is also set as the pipeline's `checkpoints`: those commands call this before they set up the pipeline. Later
        they pass the contents of a .ckpt to the pipeline without its path.

        Raises:
            InputError: such a command calls it, and there are no checkpoints, neither there nor in the original run
                folder.
        """
        named = config_being_loaded()
        if named is not None:
            show_uncaught()
            models = self._models_next_to(named)
            vars(self)[_FOLDER] = models.parent
        folder = super().get_checkpoint_dir()
        self.pipeline.checkpoints = folder  # pyright: ignore[reportAttributeAccessIssue]
        return folder

    def _models_next_to(self, named: Path) -> Path:
        next_to, began = named.parent / self.relative_model_dir, super().get_base_dir() / self.relative_model_dir
        if checkpoints_in(next_to):
            return next_to
        if checkpoints_in(began):
            note = f"Note: there are no checkpoints next to {named}; those where the run began are taken, in {began}."
            CONSOLE.print(Text(note, "yellow"), soft_wrap=True)
            return began
        raise InputError(
            f"--load-config {named}: there are no checkpoints next to it, in {next_to}, nor where the run began, in "
            f"{began}. To move or copy a run, move or copy its whole folder."
        )

    def print_to_terminal(self) -> None:
        """Print a summary of the run, or all options, on one rank of the job."""
        if not speaks():
            return
        if self.verbose:
            super().print_to_terminal()
        else:
            CONSOLE.print(Text(self.short_summary()), soft_wrap=True)

    def short_summary(self) -> str:
        """Return the method, devices, length and folder of the run, in two lines."""
        machine, data = self.machine, self._capture()
        ranks = machine.num_devices * machine.num_machines
        devices = f"{ranks} {self.cpu_device if machine.device_type == 'cpu' else 'GPU'}{'' if ranks == 1 else 's'}"
        of = f" of {data}" if data else ""
        return (
            f"{self.method_name} on {devices}{self.length_in_words(ranks)}{of}\n"
            f"Run folder {self.get_base_dir()} (config.yml there has all options; --verbose True prints them)"
        )

    def _capture(self) -> Path | None:
        """Return the capture's path; None for a city, which has none."""
        datamanager = cast(Any, self.pipeline).datamanager
        data = datamanager.data or datamanager.dataparser.data
        return data if data and data != Path() else None

    def length_in_words(self, ranks: int) -> str:
        """Return the length of a run on `ranks` ranks in words, from ": 30,000 images" on."""
        raise NotImplementedError

    def save_config(self) -> None:
        """Write config.yml, on one rank of the job, and prevent nerfstudio from starting processes of its own."""
        if speaks():
            folder = self.get_base_dir()
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.yml").write_text(yaml.dump(dataclasses.replace(self)), "utf8")  # the fields alone
        vars(self)[_ASKED] = (self.machine.num_devices, self.machine.num_machines)
        self.machine.num_devices = self.machine.num_machines = 1

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that other processes of the run receive."""
        return {name: value for name, value in vars(self).items() if name not in (_ASKED, _MADE)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load attributes from a file or another process, without removed options."""
        vars(self).update(state)
        take_out(self)

    def setup(self, **kwargs: Any) -> Any:
        """Return the trainer of this process, or the launcher of the processes that train."""
        workers = 1
        if _ASKED in vars(self):
            self.machine.num_devices, self.machine.num_machines = vars(self).pop(_ASKED)
            workers = self.processes
        ranks = Ranks.from_env()
        if ranks is None and workers > 1:
            return WorkerLauncher(self, workers, self.abandon)
        if ranks is not None:
            kwargs.update(local_rank=ranks.local_rank, world_size=ranks.size)
            CONSOLE.quiet = ranks.rank != 0
        use_own_share_of_cores(ranks)
        with abandoned_unless_begun(self):
            return super().setup(**kwargs)

    # nerfstudio starts a viewer on each machine's first rank; there is one viewer a job, on rank 0.

    def is_viewer_enabled(self) -> bool:
        """True if this rank runs the viewer."""
        return speaks() and super().is_viewer_enabled()

    def is_viewer_legacy_enabled(self) -> bool:
        """True if this rank runs the legacy viewer."""
        return speaks() and super().is_viewer_legacy_enabled()


def speaks() -> bool:
    """Return whether this process writes files and prints for its job."""
    ranks = Ranks.from_env()
    return ranks is None or ranks.rank == 0


def read_config(path: Path) -> RunConfig:
    """Return the configuration of a run.

    Raises:
        InputError: there is none, or it is another program's.
    """
    try:
        config = yaml.load(path.read_text("utf8"), Loader=yaml.Loader)  # as nerfstudio's commands do
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"--load-config {path}: {reason}. Give the config.yml in a run's folder.") from error
    except yaml.YAMLError as error:
        raise InputError(f"--load-config {path}: it is damaged, or no config.yml of a run ({error}).") from error
    if not isinstance(config, RunConfig):
        method = getattr(config, "method_name", None)
        whose = f"it is of the method {method}" if method else "it is not the config.yml of a run"
        raise InputError(
            f"--load-config {path}: {whose}. Give the config.yml of a run of "
            "splatfacto-batch, -tile, -locality, -pixel, -aggregate or nerfacto-xl. Of other methods: ns-eval and "
            "ns-render."
        )
    return config


def _folder_of(capture: Path) -> Path:
    """Return the resolved path of a capture; a folder and the transforms.json in it are one capture."""
    path = capture.resolve()
    return path.parent if path.name == "transforms.json" else path
