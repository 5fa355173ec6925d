"""The loss of a rank's patches in a step that reads nothing back, and its gradient by their pixels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cuda_ext.ops.loss.band_loss import band_loss_into
from cuda_ext.ops.raster.compositing import composite
from ns_multigpu.core.exchange.pixel_operators import OwnedPixels
from ns_multigpu.core.step.depth_loss import depth_loss
from ns_multigpu.core.step.exposures import StepExposures
from ns_multigpu.core.step.step_settings import StepSettings
from ns_multigpu.core.types import SSIM_HALO, Patch, Pixels, View


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
        self._weights_of(settings.width, settings.height)

    def add(
        self, drawn: OwnedPixels, own: Sequence[Patch], views: Sequence[View], targets: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Add the losses of patches; return their renderings, one a patch, without halo [h, w, 3], and the gradients
        by colour [P, 3] and alpha [P], which are zero in halos; with a loss of depth by colour and depth [P, 4].

        Args:
            drawn: the patches. own: which they are. views: the batch.
            targets: of each patch the photograph under its rendered rectangle [h, w, channels], uint8 or float.
        """
        s = self._settings
        rgbs: list[Tensor] = []
        colors = drawn.color[:, :3].contiguous()
        v_color, v_alpha = torch.empty_like(colors), torch.empty_like(drawn.alpha)
        start = 0
        for patch, layers in zip(own, targets, strict=True):
            v_l1, v_ssim = self._weights_of(views[patch.view].width, views[patch.view].height)
            left, top, right, bottom = patch.rendered(views[patch.view])
            inner = patch.inner(views[patch.view])
            piece = slice(start, start + (bottom - top) * (right - left))
            start = piece.stop
            target, mask = self.photograph(layers, patch.view)
            rgb = colors.new_empty(target.shape)
            offset = s.ssim_lambda if (patch.x0, patch.y0) == (0, 0) else 0.0
            # Halo pixels have zero gradient: `last` = -1 makes backward skip them.
            color, alpha, background = colors[piece], drawn.alpha[piece], self._backgrounds[patch.view]
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
        if s.depth_weight > 0:
            v_depth, v_covered = self._add_depths(drawn, own, views)
            v_color, v_alpha = torch.cat([v_color, v_depth[:, None]], dim=1), v_alpha + v_covered
        return rgbs, v_color, v_alpha

    def _add_depths(self, drawn: OwnedPixels, own: Sequence[Patch], views: Sequence[View]) -> tuple[Tensor, Tensor]:
        """Add the losses of the patches' depths; return the gradients by blended depth [P] and by alpha [P].

        A pixel's gradient is the whole view's, as `band_loss`'s: neighbours of the patch need send none.
        """
        by_depth, by_alpha = torch.zeros_like(drawn.alpha), torch.zeros_like(drawn.alpha)
        weight, start = self._settings.depth_weight, 0
        for patch in own:
            view = views[patch.view]
            left, top, right, bottom = patch.rendered(view)
            piece, shape = slice(start, start + (right - left) * (bottom - top)), (bottom - top, right - left, 1)
            start = piece.stop
            with torch.enable_grad():
                blended = drawn.color[piece, 3].detach().view(shape).requires_grad_()
                covered = drawn.alpha[piece].detach().view(shape).requires_grad_()
                pixels = Pixels(patch, blended, covered, blended / covered.clamp(min=1e-10))
                near = weight * depth_loss(pixels, view, beyond=1) / len(views)
                found = torch.autograd.grad(near, [blended, covered])
            self._report[patch.view].add_(weight * depth_loss(pixels, view))
            x0, y0, x1, y1 = patch.inner(view)
            for whole, gradient in zip((by_depth, by_alpha), found, strict=True):
                whole[piece].view(shape)[y0:y1, x0:x1] = gradient[y0:y1, x0:x1]
        return by_depth, by_alpha

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

    def _weights_of(self, width: int, height: int) -> tuple[Tensor, Tensor]:
        """Return the loss's gradients by the sums of a view of this size.

        They are copied from the host, which a capture must not do. So a size other than the settings' needs a step
        that is launched before one is captured.
        """
        if (width, height) not in self._weights:
            s = self._settings
            found = loss_weights(width, height, s.views, s.ssim_lambda, self._report.device)
            self._weights[width, height] = found
        return self._weights[width, height]


def loss_weights(
    width: int, height: int, batch: int, ssim_lambda: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The gradients [] of a batch's mean loss by the sums of a view's absolute differences and of its SSIM.

    Views without a window of SSIM have no weight of it: see `photometric_loss`.
    """
    windows = (width - 2 * SSIM_HALO) * (height - 2 * SSIM_HALO)
    by_l1 = (1 - ssim_lambda) / (3 * batch * width * height)
    by_ssim = -ssim_lambda / (3 * batch * windows) if ssim_lambda != 0 else 0.0
    return torch.tensor(by_l1, device=device), torch.tensor(by_ssim, device=device)


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
