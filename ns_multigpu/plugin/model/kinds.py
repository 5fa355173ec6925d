"""What is to be said of the times of views and frames, by the kind of point: some have times, and some have none."""

from collections.abc import Sequence

from nerfstudio.cameras.cameras import Cameras

from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.primitives.registry import KINDS, titled


def times_note(primitive: str, cameras: Cameras) -> str:
    """What is to be said about the times of a capture's training views before points of this kind learn from them; ""
    for nothing.

    Raises:
        InputError: points with times are to learn from times outside of 0 to 1.
    """
    kind, times = KINDS[primitive], cameras.times
    several = times is not None and bool((times != times.flatten()[0]).any())
    if not kind.timed:
        return (
            "The views have different times, and these points have none: what moves will be blurred. "
            "--pipeline.model.primitive 4dgs learns it."
            if several
            else ""
        )
    if times is not None and not bool(((times >= 0) & (times <= 1)).all()):
        raise InputError(
            f"The views' times go from {float(times.min()):g} to {float(times.max()):g}; {titled(primitive)} learn "
            "those from 0 to 1. Scale the times in the capture's file: 0 for the first view, 1 for the last."
        )
    if several:
        return ""
    return (
        f"This capture stands still: its views {'have no times' if times is None else 'all have the same time'}. "
        f"{titled(primitive)} will learn that one moment, and take more memory and time than "
        "--pipeline.model.primitive 3dgs would."
    )


def frames_note(primitive: str, cameras: Sequence[Cameras]) -> str:
    """What is to be said about the times of frames that are to be drawn of points of this kind; "" for nothing."""
    if not KINDS[primitive].timed or not cameras:
        return ""
    times = [float(camera.times.reshape(-1)[0]) for camera in cameras if camera.times is not None]
    if not times:
        return "The frames have no times: all show the moment 0. A path from the viewer has times (Default Time)."
    beyond = sum(not 0 <= time <= 1 for time in times)
    return (
        f"{beyond} of {len(cameras)} frames have times outside of 0 to 1 ({min(times):g} to {max(times):g}), of which "
        "nothing was learned: points fade there."
        if beyond
        else ""
    )
