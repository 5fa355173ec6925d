"""Checks of a run that trains on photographs with their lens distortion (`--pipeline.datamanager.undistort False`)."""

from nerfstudio.cameras.cameras import CameraType
from nerfstudio.data.datasets.base_dataset import InputDataset

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture.checks import raise_together
from ns_multigpu.plugin.model.cameras import intrinsics_of

_OPTION = "--pipeline.datamanager.undistort False"
_REMEDY = "Leave the option out: photographs are undistorted then. Panoramas cannot be."


def check_lenses(datasets: list[InputDataset], world: World) -> None:
    """Check that kernels exist for the lenses of all cameras. Every rank calls it.

    Raises:
        InputError: on every rank, naming the images.
    """
    lines: list[str] = []
    for dataset in datasets:
        for index, name in enumerate(dataset.image_filenames):
            camera = dataset.cameras[index : index + 1]
            if int(camera.camera_type.item()) == CameraType.FISHEYE624.value:
                lines.append(f"{name}: no kernel draws through a lens of the model FISHEYE624")
                continue
            try:
                intrinsics_of(camera)
            except ValueError as error:
                lines.append(f"{name}: {error}")
    raise_together(lines, world, f"{_OPTION} is not for these lenses ({{count}} images). {_REMEDY}")
