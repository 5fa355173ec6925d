"""Image metrics that cost a start nothing: torchmetrics loads whatever else is installed, which takes seconds.

PSNR is a line of arithmetic. LPIPS is built when first needed, and left out where its weights cannot be had.
"""

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torchvision
from nerfstudio.utils.rich_utils import CONSOLE
from torch import Tensor


def psnr(target: Tensor, predicted: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio [] in dB of images in [0, 1], any shape: -10 log10 of the mean
    squared error."""
    return -10 * (target - predicted).square().mean().log10()


def means(rows: Sequence[Mapping[str, Any]], *, deviations: bool) -> dict[str, float]:
    """Return means over images, of each metric over the images that have it.

    Args:
        rows: the metrics of each image by name; numbers, or tensors of one.
        deviations: standard deviations too, as `<metric>_std`.
    """
    result: dict[str, float] = {}
    for name in rows[0] if rows else ():
        column = torch.tensor([float(row[name]) for row in rows if name in row])
        result[name] = float(column.mean())
        if deviations:
            result[f"{name}_std"] = float(column.std())
    return result


class OptionalLpips:
    """Learned perceptual similarity (Zhang et al. 2018) over AlexNet, from torchmetrics.

    Not a module: its weights belong neither in checkpoints nor in the model's parameters.

    Attributes:
        missing: whether its weights could not be had; then every value is NaN.
    """

    def __init__(self) -> None:
        self.missing = False
        self._network: Any = None

    def __call__(self, target: Tensor, predicted: Tensor) -> Tensor:
        """Return LPIPS of two [1, 3, H, W] images in [0, 1]; NaN if it is not available."""
        if self._network is None and not self.missing:
            self._build()
        if self._network is None:
            return torch.tensor(float("nan"))
        return self._network.to(target.device)(target, predicted.clamp(0.0, 1.0))

    def _build(self) -> None:
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # torch announces a download before it succeeds
                torchvision.models.AlexNet_Weights.DEFAULT.get_state_dict(
                    progress=False
                )  # first: without them nothing is loaded
                from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity

                self._network = LearnedPerceptualImagePatchSimilarity(normalize=True)
        except (OSError, RuntimeError, ModuleNotFoundError) as error:
            self.missing = True
            CONSOLE.print(
                f"[yellow]LPIPS is left out: AlexNet's weights could not be downloaded ({error}). To have it, put them "
                "into torch's hub cache ($TORCH_HOME/hub/checkpoints).",
                soft_wrap=True,
            )
