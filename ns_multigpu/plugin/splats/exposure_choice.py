"""Choice of `--pipeline.model.exposure` at the start of a run, and its message."""

import torch
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor

from ns_multigpu.core.dist.collectives import broadcast_object
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture.checks import raise_together
from ns_multigpu.plugin.capture.datamanager import DistributedDataManager
from ns_multigpu.plugin.capture.differing_exposures import Exposures, differ, measured
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.run_parts import run_parts
from ns_multigpu.plugin.model import exposures
from ns_multigpu.plugin.model.cameras import view_from_camera
from ns_multigpu.plugin.model.splat_model import SplatModel

LOOKED_AT = 128
"""Maximum number of compared photographs, evenly spread over the capture."""


def choose_exposure(model: SplatModel, datamanager: DistributedDataManager, world: World) -> None:
    """Decide, before training, whether the model has gains, and print the choice. Every rank calls it.

    Raises:
        InputError: the option conflicts with another one.
    """
    config = model.config
    if config.exposure == "gain" and config.use_bilateral_grid:
        raise InputError(
            "--pipeline.model.exposure gain and --pipeline.model.use-bilateral-grid True both correct the exposure of "
            "views. Leave out one of them."
        )
    if config.exposure == "auto" and not config.use_bilateral_grid:
        found = exposures_of(datamanager, model.seed_points, world)
        if found is not None and differ(found):
            exposures.add(model)
        CONSOLE.print(described(found), soft_wrap=True)
    else:
        text, option = "no correction", "exposure off"
        if config.use_bilateral_grid:
            text, option = "a bilateral grid per photograph", "use-bilateral-grid True"
        elif config.exposure == "gain":
            text, option = "a correction per photograph", "exposure gain"
        CONSOLE.print(f"Exposure: {text} (--pipeline.model.{option}).", soft_wrap=True)
    run_parts().done("exposure of the photographs")


def exposures_of(
    datamanager: DistributedDataManager, seed_points: tuple[Tensor, Tensor] | None, world: World
) -> Exposures | None:
    """Return the training photographs' exposures, the same on every rank. Every rank calls it; rank 0
    reads.

    Args:
        datamanager: a `DistributedDataManager`, its capture checked.
        seed_points: [N, 3] positions in the model's world and [N, 3] colours up to 255.

    Returns:
        None if too few seed points, or photographs that show them, can be compared.

    Raises:
        InputError: on every rank, if a photograph cannot be read.
    """
    found: Exposures | None = None
    problems: list[str] = []
    if world.is_main and seed_points is not None:
        cameras = datamanager.train_dataset.cameras
        chosen = [round(i) for i in torch.linspace(0, len(cameras) - 1, min(LOOKED_AT, len(cameras))).tolist()]
        singles = [cameras[index : index + 1].to("cpu") for index in chosen]
        views = [view_from_camera(one, one.camera_to_worlds.reshape(-1, 3, 4)[0], 0) for one in singles]
        try:
            found = measured(seed_points[0], views, lambda k: datamanager.train_reader.read(chosen[k])["image"])
        except ValueError as error:  # names the file
            problems = [str(error)]
    raise_together(problems, world, "A photograph cannot be read:")
    return broadcast_object(found, 0, world)


def described(found: Exposures | None) -> str:
    """Return the message about the choice; None stands for an exposure that could not be measured."""
    if found is None:
        return (
            "Exposure: too few seed points to compare the photographs with, so no correction "
            "(--pipeline.model.exposure gain has one)."
        )
    measured = f"Exposure: the photographs differ by {found.spread:.2f} stops"
    if differ(found):
        return f"{measured}, so each has a correction, which is trained (--pipeline.model.exposure off has none)."
    return f"{measured}, so they need no correction."
