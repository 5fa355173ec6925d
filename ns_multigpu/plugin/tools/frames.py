"""Conversion of a model's outputs to frames: images side by side, as in ns-render, in host memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from nerfstudio.utils import colormaps
from torch import Tensor

from ns_multigpu.plugin.faults.errors import InputError


@dataclass(frozen=True)
class Look:
    """Display options of outputs.

    Attributes:
        names: of the outputs, side by side: rgb, rgba, depth, accumulation, and rank if several devices share a
            picture.
        near, far: depths at the ends of the colour scale; by default each frame's least and largest.
        colors: colour map of outputs with one channel.
    """

    names: tuple[str, ...] = ("rgb",)
    near: float | None = None
    far: float | None = None
    colors: colormaps.ColormapOptions = field(default_factory=colormaps.ColormapOptions)


class HostFrame:
    """Frame in an asynchronous copy to the host; `array` waits for it.

    Args:
        frame: [h, w, channels] uint8 on any device.

    Attributes:
        bytes: size in bytes.
    """

    def __init__(self, frame: Tensor) -> None:
        self.bytes = frame.numel()
        self._done: torch.cuda.Event | None = None
        if frame.is_cuda:
            self._frame = torch.empty(frame.shape, dtype=frame.dtype, pin_memory=True)
            self._frame.copy_(frame, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()
        else:
            self._frame = frame.contiguous()

    def array(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the frame [h, w, channels] uint8, after the copy."""
        if self._done is not None:
            self._done.synchronize()
        return self._frame.numpy()


def shown(outputs: Mapping[str, Any], look: Look) -> Tensor:
    """Return a frame [h, w, 3 or 4] uint8, on the outputs' device.

    Raises:
        InputError: an output does not exist.
    """
    return torch.cat([picture(outputs, name, look) for name in look.names], dim=1)


def picture(outputs: Mapping[str, Any], name: str, look: Look) -> Tensor:
    """Return one output as a picture [h, w, 3 or 4] uint8.

    Raises:
        InputError: the output does not exist.
    """
    if name == "rgba":
        image = torch.cat([outputs["rgb"], outputs["accumulation"]], -1)
    elif name not in outputs:
        raise InputError(f"--rendered-output-names {name}: there is no such output; there are {_said(outputs)}.")
    elif "depth" in name:
        image = colormaps.apply_depth_colormap(
            outputs[name], outputs["accumulation"], look.near, look.far, colormap_options=look.colors
        )
    else:
        image = colormaps.apply_colormap(outputs[name].contiguous(), look.colors)
    return (image.clamp(0.0, 1.0) * 255.0 + 0.5).to(torch.uint8)


def check_names(names: Sequence[str], there: Sequence[str]) -> None:
    """Check that outputs of these names exist.

    Args:
        there: names of the available outputs.

    Raises:
        InputError: a name is missing, or none is given.
    """
    for name in names:
        if name not in there:
            hint = " (rank is there where Gaussians are spread over several devices)" if name == "rank" else ""
            raise InputError(
                f"--rendered-output-names {name}: there is no such output; there are {', '.join(there)}{hint}."
            )
    if not names:
        raise InputError(f"--rendered-output-names: name at least one of {', '.join(there)}.")


def _said(outputs: Mapping[str, Any]) -> str:
    return ", ".join([*outputs, "rgba"])


def with_even_sides(frame: Tensor) -> Tensor:
    """Return a frame [h, w, c], with its last row or column repeated if the side is odd."""
    height, width, _ = frame.shape
    if height % 2:
        frame = torch.cat([frame, frame[-1:]])
    return torch.cat([frame, frame[:, -1:]], 1) if width % 2 else frame
