"""Notes on the times of views and frames, by primitive: some primitives have times."""

from collections.abc import Sequence

from nerfstudio.cameras.cameras import Cameras

from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.primitives.registry import PRIMITIVES, titled


def times_note(primitive: str, cameras: Cameras) -> str:
    """Return a note on the times of a capture's training views for this primitive; "" for none.

    Raises:
        InputError: the primitive has times, and a view's is outside of 0 to 1.
    """
    kind, times = PRIMITIVES[primitive], cameras.times
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
    """Return a note on the times of frames to be rendered with this primitive; "" for none."""
    if not PRIMITIVES[primitive].timed or not cameras:
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
