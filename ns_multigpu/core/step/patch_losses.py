"""The loss of a rank's patches in a step that reads nothing back, and its gradient by their pixels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cuda_ext.ops.loss.band_loss import band_loss_into
from cuda_ext.ops.raster.compositing import composite
from ns_multigpu.core.exchange.pixel_operators import OwnedPixels
from ns_multigpu.core.step.exposures import StepExposures
from ns_multigpu.core.step.step_settings import StepSettings
from ns_multigpu.core.types import Patch, View


class PatchLosses:
    """The losses of one rank's steps.

    Args:
        settings: the step's.
        backgrounds: [B, 3], by view. report: [B + 1], to whose first B numbers, by view, losses are added.
        exposures: of the views, if their colours are mapped before they are compared.
    """

    def __init__(
        self, settings: StepSettings, backgrounds: Tensor, report: Tensor, exposures: StepExposures | None = None
    ) -> None:
        self._settings, self._backgrounds, self._report = settings, backgrounds, report
        self._exposures = exposures
        self._weights: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by size of a view: graphs hold addresses

    def add(
        self, drawn: OwnedPixels, own: Sequence[Patch], views: Sequence[View], targets: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Add the losses of patches; return their renderings, one a patch, without halo [h, w, 3], and the gradients
        by colour [P, 3] and alpha [P], which are zero in halos.

        Args:
            drawn: the patches. own: which they are. views: the batch.
            targets: of each patch the photograph under its rendered rectangle [h, w, channels], uint8 or float.
        """
        s = self._settings
        rgbs: list[Tensor] = []
        v_color, v_alpha = torch.empty_like(drawn.color), torch.empty_like(drawn.alpha)
        start = 0
        for patch, layers in zip(own, targets, strict=True):
            v_l1, v_ssim = self._weights_of(views[patch.view])
            left, top, right, bottom = patch.rendered(views[patch.view])
            inner = patch.inner(views[patch.view])
            piece = slice(start, start + (bottom - top) * (right - left))
            start = piece.stop
            target, mask = self.photograph(layers, patch.view)
            rgb = drawn.color.new_empty(target.shape)
            offset = s.ssim_lambda if (patch.x0, patch.y0) == (0, 0) else 0.0
            # Halo pixels have zero gradient: `last` = -1 makes backward skip them.
            color, alpha, background = drawn.color[piece], drawn.alpha[piece], self._backgrounds[patch.view]
            blended = color, alpha, background
            if self._exposures is not None:
                color, background = self._exposures.applied(patch.view, color, background)
            seen = color, alpha
            if mask is not None:  # of clamped colours, over nothing
                seen = composite(color, alpha, background) * mask, torch.ones_like(alpha)
            band_loss_into(
                *seen, background, target, inner,
                v_l1, v_ssim, offset=offset, scale=s.views, rgb=rgb, loss=self._report[patch.view],
                v_out=v_color[piece], v_alpha=v_alpha[piece], last=None if drawn.last is None else drawn.last[piece],
            )  # fmt: skip
            if mask is not None:
                v_rgb = v_color[piece] * mask
                found = torch.ops.ns_multigpu.composite_backward(color, alpha, background, v_rgb)
                v_color[piece], v_alpha[piece] = found
            if self._exposures is not None:
                self._exposures.backward(patch.view, *blended, v_color[piece])
            x0, y0, x1, y1 = inner
            rgbs.append(rgb[y0:y1, x0:x1])
        return rgbs, v_color, v_alpha

    def photograph(self, layers: Tensor, view: int) -> tuple[Tensor, Tensor | None]:
        """Return what a rendering of the batch's view at this position is compared with, and its mask.

        Args:
            layers: [h, w, channels] colour, then alpha and mask if the settings have them; uint8 or float.

        Returns:
            colours [h, w, 3] over the view's background, zero where masked, and mask [h w, 1] or None.
        """
        if self._settings.channels == 3:
            return layers, None
        values = layers.float() / 255 if layers.dtype == torch.uint8 else layers
        image = values[..., :3]
        if self._settings.alpha:
            image = torch.lerp(self._backgrounds[view].expand_as(image), image, values[..., 3:4])
        if not self._settings.masked:
            return image, None
        mask = values[..., -1:]
        return image * mask, mask.reshape(-1, 1)

    def _weights_of(self, view: View) -> tuple[Tensor, Tensor]:
        """Return the loss's gradients by a view's sums. They are made before a graph is captured, which cannot."""
        size = view.width, view.height
        if size not in self._weights:
            s = self._settings
            self._weights[size] = loss_weights(*size, s.views, s.ssim_lambda, self._report.device)
        return self._weights[size]


def loss_weights(
    width: int, height: int, batch: int, ssim_lambda: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The gradients [] of a batch's mean loss by the sums of a view's absolute differences and of its SSIM."""
    windows = (width - 10) * (height - 10)
    by_l1 = (1 - ssim_lambda) / (3 * batch * width * height)
    return torch.tensor(by_l1, device=device), torch.tensor(-ssim_lambda / (3 * batch * windows), device=device)


def share_of_mse(
    images: Sequence[Tensor], targets: Sequence[Tensor], patches: Sequence[Patch], views: Sequence[View]
) -> Tensor:
    """Return the patches' contribution [] to a batch's mean squared error.

    Args:
        images: renderings [h, w, 3], without halo. targets: see `PatchLosses.add`. patches: which they are.
        views: the batch, on the images' device.
    """
    error = torch.zeros((), device=views[0].K.device)
    for patch, image, target in zip(patches, images, targets, strict=True):
        view = views[patch.view]
        x0, y0, x1, y1 = patch.inner(view)
        own = target[y0:y1, x0:x1]
        squared = (image - (own.float() / 255 if own.dtype == torch.uint8 else own)).square().sum()
        error = error + squared / (3 * view.width * view.height * len(views))
    return error
