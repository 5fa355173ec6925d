"""Checks before training starts: each raises an `errors.InputError` that names the fault and its remedy.

They look at nothing but their arguments and, where they say so, the disk. The last one builds the native operators.
"""

import difflib
import math
import shlex
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import urlparse

import cuda_ext
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.ranks import Ranks

_NOT_UNDER_TORCHRUN = ("--machine.num-machines", "--machine.machine-rank", "--machine.dist-url")


def check_devices(device_type: str, num_devices: int, ranks: Ranks | None, cuda_devices: int) -> None:
    """Check that this machine has the devices for the requested workers.

    Args:
        device_type: --machine.device-type.
        num_devices: --machine.num-devices; under a launcher 1 counts as not given.
        ranks: this process's place if a launcher such as torchrun started it, else None.
        cuda_devices: how many CUDA devices torch sees here.

    Raises:
        InputError: it has not.
    """
    if num_devices < 1:
        raise InputError(
            f"--machine.num-devices {num_devices}: at least one worker is needed. Give 1 or more, one for each device."
        )
    if device_type not in ("cpu", "cuda"):
        raise InputError(
            f"--machine.device-type {device_type} is not supported. Choose --machine.device-type cuda or "
            "--machine.device-type cpu."
        )
    if ranks is not None and num_devices not in (1, ranks.local_size):
        raise InputError(
            f"--machine.num-devices {num_devices} disagrees with the launcher, which has started {ranks.local_size} "
            f"on this machine (LOCAL_WORLD_SIZE={ranks.local_size}). Leave --machine.num-devices out, or start with "
            f"torchrun --nproc-per-node {num_devices}."
        )
    workers = num_devices if ranks is None else ranks.local_size
    if device_type == "cuda" and workers > cuda_devices:
        flag = f"--machine.num-devices {workers}" if ranks is None else f"torchrun --nproc-per-node {workers}"
        if cuda_devices == 0:
            raise InputError(
                f"{flag} with --machine.device-type cuda needs {workers} CUDA device{_s(workers)}, and torch sees none "
                "on this machine. Add --machine.device-type cpu to train on the processor, or see to it that "
                "`nvidia-smi` lists the GPUs, that CUDA_VISIBLE_DEVICES does not hide them and that torch is a CUDA "
                "build."
            )
        fewer = "--machine.num-devices" if ranks is None else "--nproc-per-node"
        raise InputError(
            f"{flag} asks for {workers} CUDA devices, and torch sees {cuda_devices} on this machine. Use "
            f"{fewer} {cuda_devices}, or --machine.device-type cpu (or make more visible with CUDA_VISIBLE_DEVICES)."
        )


_WORKER_BYTES = 600e6
"""Memory that a worker takes before it has read an image: torch and nerfstudio."""


def crowd(workers: int, cores: int, memory: int | None) -> str:
    """Return a warning if CPU workers compete for cores or memory, else "".

    Args:
        workers: how many there are to be. cores: that they share.
        memory: bytes that the machine has to spare; None where that is not known.

    Raises:
        InputError: the machine has no memory for them.
    """
    needed = workers * _WORKER_BYTES
    if memory is not None and workers > 1 and needed > memory:
        raise InputError(
            f"--machine.num-devices {workers}: the workers alone would take {needed / 1e9:.1f} GB of memory, and "
            f"{memory / 1e9:.1f} GB are free. Use fewer: --machine.num-devices "
            f"{max(1, min(cores, int(memory // _WORKER_BYTES)))}."
        )
    if workers <= cores:
        return ""
    return (
        f"Note: {workers} workers share {cores} processor cores, and will be slower than {cores} would be "
        f"(--machine.num-devices {cores})."
    )


def check_machines(
    num_machines: int, machine_rank: int, num_devices: int, dist_url: str, ranks: Ranks | None, argv: Sequence[str]
) -> None:
    """Check that the requested number of machines takes part: torchrun starts several machines.

    Args:
        num_machines, machine_rank, num_devices, dist_url: the fields of nerfstudio's MachineConfig.
        ranks: this process's place if a launcher started it, else None.
        argv: the arguments of `ns-train`, for the command that the error shows.

    Raises:
        InputError: they do not; it shows the command that starts what was asked for.
    """
    if num_machines < 1:
        raise InputError(f"--machine.num-machines {num_machines}: at least one machine is needed.")
    if ranks is not None:
        if num_machines not in (1, ranks.machines):
            raise InputError(
                f"--machine.num-machines {num_machines} disagrees with the launcher, which spans {ranks.machines}. "
                f"Leave --machine.num-machines out, or start with torchrun --nnodes {num_machines}."
            )
    elif num_machines > 1:
        command = torchrun_command(argv, num_devices, num_machines, machine_rank, dist_url)
        raise InputError(
            f"--machine.num-machines {num_machines}: several machines are started by torchrun. Run this on each of "
            f"them, with --node-rank 0 to {num_machines - 1}, MASTER being the name or address of machine 0:\n\n"
            f"{command}"
        )


def torchrun_command(argv: Sequence[str], num_devices: int, num_machines: int, machine_rank: int, dist_url: str) -> str:
    """Return the torchrun command line equivalent to `ns-train ARGV` on one of several machines."""
    address = urlparse(dist_url)
    kept: list[str] = []
    skip = False
    for word in argv:
        if skip:
            skip = False
            continue
        flag, _, value = word.partition("=")
        if flag.replace("_", "-") in _NOT_UNDER_TORCHRUN:
            skip = not value
            continue
        kept.append(word)
    launcher = f"torchrun --nnodes {num_machines} --node-rank {machine_rank} --nproc-per-node {num_devices}"
    place = f"--master-addr {address.hostname or 'MASTER'} --master-port {address.port or 29500}"
    return f"{launcher} {place} -m nerfstudio.scripts.train {shlex.join(kept)}".rstrip()


def check_folder(folder: Path, fallback: bool = False) -> None:
    """Make the run folder, or that of `--save-fallback-dir`, and write to it once, so that a failure shows before the
    first checkpoint.

    Raises:
        InputError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0")
    except OSError as error:
        what, remedy = "The run folder", "Choose another place with --output-dir DIR"
        if fallback:
            what, remedy = "--save-fallback-dir", "Name a folder on another disk"
        raise InputError(f"{what} {folder} cannot be written: {error.strerror or error}. {remedy}.") from error


def check_lengths(images: int | None, steps: int) -> None:
    """Check that a run has a positive length.

    Raises:
        InputError: it has not.
    """
    for flag, length in (("--max-num-images", images), ("--max-num-iterations", steps)):
        if length is not None and length < 1:
            raise InputError(
                f"{flag} {length}: there would be nothing to train. Give how many there are to be in all, 30000 for "
                "instance; a run that is resumed counts what it has seen before."
            )


def check_retries(seconds: float) -> None:
    """Check the time for which saving is retried.

    Raises:
        InputError: it is negative.
    """
    if not seconds >= 0:
        raise InputError(f"--save-retry-seconds {seconds}: give a number of seconds, or 0 to try once.")


def check_strategy(name: str, known: Collection[str]) -> None:
    """Check that the strategy `name` is one of those `known`.

    Raises:
        InputError: one cannot, or there is none of that name; it lists those there are, the closest first.
    """
    if name in known:
        return
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    raise InputError(f"There is no strategy {name!r}. {hint}The strategies are: {', '.join(sorted(known))}.")


def check_views(views: int, ranks: int) -> None:
    """Check that there is a training view for every rank.

    Raises:
        InputError: there are fewer `views` than `ranks`.
    """
    if views < ranks:
        raise InputError(
            f"The capture has {views} training view{_s(views)} for {ranks} workers: each needs one of its own. Use "
            f"--machine.num-devices {max(views, 1)} or fewer, or add views."
        )


def check_views_per_rank(views: int) -> None:
    """Check that each rank renders at least one view per step.

    Raises:
        InputError: it renders none.
    """
    if views < 1:
        raise InputError(f"--pipeline.views-per-rank {views}: at least one view a rank is needed.")


def check_views_per_step(views: int | None, ranks: int, *, cuts_views: bool) -> None:
    """Check that a step's views can be spread over the ranks.

    Args:
        views: --pipeline.views-per-step, if given.
        ranks: how many there are.
        cuts_views: whether the strategy can have a view drawn by several ranks.

    Raises:
        InputError: they cannot be spread evenly.
    """
    if views is None:
        return
    if views < 1:
        raise InputError(f"--pipeline.views-per-step {views}: at least one view a step is needed.")
    if not cuts_views and views % ranks:
        raise InputError(
            f"--pipeline.views-per-step {views}: this strategy distributes whole views, and {ranks} workers need a "
            f"multiple of {ranks}. Give {-(-views // ranks) * ranks}, or use splatfacto-tile, which cuts views."
        )


def check_no_accumulation(steps: Mapping[str, int]) -> None:
    """Check that each step updates all parameters: gradients are exchanged once per step.

    Raises:
        InputError: gradients of some parameters are to be gathered over several steps.
    """
    groups = sorted(name for name, count in steps.items() if count != 1)
    if groups:
        raise InputError(
            f"--gradient-accumulation-steps is not supported (asked for {', '.join(groups)}). "
            "Use --pipeline.views-per-rank N: it gives each rank N views a step."
        )


def check_cap(points: int, densifier: str, cap: int | None) -> None:
    """Check that the model starts below its densifier's cap, if there is one.

    Raises:
        InputError: it starts with more points.
    """
    if densifier == "mcmc" and cap is not None and points > cap:
        raise InputError(
            f"The model starts with {points} Gaussians, more than --pipeline.model.max-gaussians {cap}. Raise the cap, "
            "or start with fewer (--pipeline.model.random-init True --pipeline.model.num-random N)."
        )


def check_first_points(opacity: float, scale: float) -> None:
    """Check that the initial Gaussians can be drawn.

    Raises:
        InputError: they have no opacity, or no size.
    """
    if not 0 < opacity < 1:
        raise InputError(f"--pipeline.model.initial-opacity {opacity}: give a number above 0 and below 1.")
    if not 0 < scale < math.inf:
        raise InputError(f"--pipeline.model.initial-scale {scale}: give a number above 0.")


def check_random_points(count: int, extent: float) -> None:
    """Check that there are initial points if the capture has none, or its points are not used.

    Raises:
        InputError: there are none, or all lie at one place.
    """
    if count < 1:
        raise InputError(f"--pipeline.model.num-random {count}: give how many Gaussians to start from, 1 or more.")
    if not 0 < extent < math.inf:
        raise InputError(f"--pipeline.model.random-scale {extent}: give the side of the cube that they fill, above 0.")


def check_precision(mixed: bool, scaler: bool) -> None:
    """Check that training uses single precision, as Splatfacto does.

    Raises:
        InputError: mixed precision or a gradient scaler is asked for.
    """
    if mixed or scaler:
        flag = "--mixed-precision" if mixed else "--use-grad-scaler"
        raise InputError(
            f"{flag} True is not supported: half-precision poses and positions would be off by whole pixels, and "
            "scaled gradients would upset densification. Leave it out; Splatfacto trains in single precision."
        )


def check_rates_at_end(part: float, fall_from: float) -> None:
    """Check the final factor of learning rates and the fraction of the run after which they decay.

    Raises:
        InputError: a value is out of range.
    """
    if not 0 < part <= 1:
        raise InputError(
            f"--rates-at-end {part}: learning rates fall to this part of what they would be. Give a number above 0 "
            "(0.1, for instance), or 1 for no fall."
        )
    if not 0 <= fall_from < 1:
        raise InputError(
            f"--rates-fall-from {fall_from}: learning rates fall behind this part of the run. Give a number from 0, "
            "the start, to less than 1, the end."
        )


def check_operators(device_type: str, problem: str | None) -> None:
    """Check that the native operators for training on `device_type` are available.

    Args:
        device_type: "cuda" or "cpu".
        problem: what `cuda_ext.compiler_problem(device_type)` says.

    Raises:
        InputError: they are missing. Without them training would take days, so it must be requested.
    """
    if problem is not None:
        raise InputError(f"The native operators that training on {device_type.upper()} needs cannot be used. {problem}")


def prepare_operators(device_type: Literal["cpu", "cuda", "mps"]) -> None:
    """Build the native operators, once and in sight, before several workers ask for them at the same time.

    Raises:
        InputError: they cannot be built.
    """
    check_operators(device_type, cuda_ext.compiler_problem(device_type))
    if cuda_ext.backend(device_type) == "native":
        try:
            cuda_ext.build_native(device_type)
        except cuda_ext.NativeBuildError as error:
            raise InputError(str(error)) from error


def check_image_memory(gigabytes: float | None) -> None:
    """Check that the memory for images is a valid number of GB.

    Raises:
        InputError: it is not above 0.
    """
    if gigabytes is not None and not gigabytes > 0:
        raise InputError(
            f"--pipeline.datamanager.image-memory-gb {gigabytes:g}: give the GB of memory that a rank may fill with "
            "images, such as 8, or leave the option out for half of what is free."
        )


def _s(count: int) -> str:
    return "" if count == 1 else "s"
