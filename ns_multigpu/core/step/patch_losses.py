"""Loss of a rank's patches in a step that reads nothing back, and its gradient with respect to their pixels."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from cuda_ext.ops.loss.band_loss import Band, band_loss_into
from cuda_ext.ops.raster.compositing import composite
from ns_multigpu.core.exchange.pixel_operators import OwnedPixels
from ns_multigpu.core.step.bilateral_grids import StepGrids
from ns_multigpu.core.step.depth_loss import depth_loss
from ns_multigpu.core.step.exposures import StepExposures
from ns_multigpu.core.step.loss import sky_loss
from ns_multigpu.core.step.normal_map_loss import normal_map_loss
from ns_multigpu.core.step.step_settings import StepSettings
from ns_multigpu.core.types import SSIM_HALO, Patch, Pixels, View

_Blended = tuple[Tensor, Tensor, Tensor]
"""Of a patch, with halo: colours [P, 3], alpha [P] and background [3]."""


class _Seen(NamedTuple):
    """Pixels of a patch as its photograph is compared with them.

    Attributes:
        color, alpha, background: [P, 3], [P], [3]. target: [h, w, 3].
        backward: turns the gradients by color and alpha into those by what was blended; None: they are.
    """

    color: Tensor
    alpha: Tensor
    background: Tensor
    target: Tensor
    backward: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None


class PatchLosses:
    """The losses of one rank's steps.

    Args:
        settings: the step's.
        backgrounds: [B, 3], by view. report: [B + 1], to whose first B numbers, by view, losses are added.
        exposures, grids: of the views, if their colours are mapped before they are compared.
    """

    def __init__(
        self, settings: StepSettings, backgrounds: Tensor, report: Tensor, exposures: StepExposures | None = None,
        grids: StepGrids | None = None,
    ) -> None:  # fmt: skip
        self._settings, self._backgrounds, self._report = settings, backgrounds, report
        self._exposures, self._grids = exposures, grids
        terms = (settings.depth_weight, depth_loss), (settings.normal_weight, normal_map_loss)
        self._of_depth = [term for term in terms if term[0] > 0]
        self._weights: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by size of a view: graphs hold addresses
        self._weights_of(settings.width, settings.height)

    def add(
        self, drawn: OwnedPixels, own: Sequence[Patch], views: Sequence[View], targets: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Add the losses of patches; return their renderings, one a patch, without halo [h, w, 3], and the gradients
        by colour [P, 3] and alpha [P], which are zero in halos; with losses of depth by colour and depth [P, 4].

        Args:
            drawn: the patches. own: which they are. views: the batch.
            targets: of each patch the photograph under its rendered rectangle [h, w, channels], uint8 or float.
        """
        colors, start = drawn.color[:, :3].contiguous(), 0
        look = self._blended if self._grids is None else self._mapped
        seen, bands, slices = list[_Seen](), list[Band](), list[slice]()
        for patch, layers in zip(own, targets, strict=True):
            view = views[patch.view]
            left, top, right, bottom = patch.rendered(view)
            slices.append(slice(start, start + (bottom - top) * (right - left)))
            start = slices[-1].stop
            blended = colors[slices[-1]], drawn.alpha[slices[-1]], self._backgrounds[patch.view]
            seen.append(look(patch, view, blended, layers))
            target = seen[-1].target
            weights, rgb = self._weights_of(view.width, view.height), colors.new_empty(target.shape)
            report, offset = self._report[patch.view], self._offset(patch)
            bands.append(Band(target, patch.inner(view), seen[-1].background, *weights, rgb, report, offset))
        shown, covered = colors, drawn.alpha
        if mapped := any(one.backward for one in seen):
            shown, covered = _joined((one.color, one.alpha) for one in seen)
        v_color, v_alpha = torch.empty_like(colors), torch.empty_like(drawn.alpha)
        band_loss_into(
            shown, covered, bands, scale=self._settings.views, v_out=v_color, v_alpha=v_alpha, last=drawn.last,
            clamp=self._grids is None,
        )  # fmt: skip
        if mapped:
            given = [(v_color[piece], v_alpha[piece]) for piece in slices]
            v_color, v_alpha = _joined(
                by if one.backward is None else one.backward(*by) for one, by in zip(seen, given, strict=True)
            )
        rgbs = []
        for band, patch in zip(bands, own, strict=True):
            x0, y0, x1, y1 = patch.inner(views[patch.view])
            rgbs.append(band.rgb[y0:y1, x0:x1])
        if self._of_depth:
            v_depth, v_covered = self._add_depths(drawn, own, views)
            v_color, v_alpha = torch.cat([v_color, v_depth[:, None]], dim=1), v_alpha + v_covered
        if self._settings.sky_weight > 0:
            for patch, piece, layers in zip(own, slices, targets, strict=True):
                self._add_sky(patch, views, drawn.alpha[piece], layers, v_alpha[piece])
        return rgbs, v_color, v_alpha

    def _blended(self, patch: Patch, view: View, blended: _Blended, layers: Tensor) -> _Seen:
        """Return what a patch's photograph is compared with. layers: see `photograph`."""
        target, mask = self.photograph(layers, patch.view)
        (color, alpha, background), gains = blended, self._exposures
        if gains is not None:
            color, background = gains.applied(patch.view, color, background)
        if gains is None and mask is None:
            return _Seen(color, alpha, background, target, None)

        def backward(v_color: Tensor, v_alpha: Tensor) -> tuple[Tensor, Tensor]:
            if mask is not None:
                v_color, v_alpha = torch.ops.ns_multigpu.composite_backward(color, alpha, background, v_color * mask)
            if gains is not None:
                gains.backward(patch.view, *blended, v_color)
            return v_color, v_alpha

        if mask is None:
            return _Seen(color, alpha, background, target, backward)
        # Of clamped colours, over nothing.
        shown = composite(color, alpha, background) * mask
        return _Seen(shown, torch.ones_like(alpha), background, target, backward)

    def _mapped(self, patch: Patch, view: View, blended: _Blended, layers: Tensor) -> _Seen:
        """Do what `_blended` does, with bilateral grids: these map clamped colours to colours that are not clamped."""
        assert self._grids is not None
        target, mask = self.photograph(layers, patch.view)
        shown = composite(*blended).view(target.shape)
        mapped, unmap = self._grids.applied(patch.view, shown, patch.rendered(view), (view.width, view.height))
        mapped = mapped.view(-1, 3) if mask is None else mapped.view(-1, 3) * mask

        def backward(v_color: Tensor, v_alpha: Tensor) -> tuple[Tensor, Tensor]:
            del v_alpha
            v_mapped = v_color if mask is None else v_color * mask
            v_shown = unmap(v_mapped.view(target.shape)).reshape(-1, 3)
            return torch.ops.ns_multigpu.composite_backward(*blended, v_shown)

        return _Seen(mapped, torch.ones_like(blended[1]), torch.zeros_like(blended[2]), target, backward)

    def _offset(self, patch: Patch) -> float:
        """Return what a view's loss begins with, once a view."""
        return self._settings.ssim_lambda if (patch.x0, patch.y0) == (0, 0) else 0.0

    def _add_depths(self, drawn: OwnedPixels, own: Sequence[Patch], views: Sequence[View]) -> tuple[Tensor, Tensor]:
        """Add the losses of the patches' depths; return the gradients by blended depth [P] and by alpha [P].

        A pixel's gradient is the whole view's, as `band_loss_into`'s: neighbours of the patch need send none.
        """
        by_depth, by_alpha = torch.zeros_like(drawn.alpha), torch.zeros_like(drawn.alpha)
        start = 0
        for patch in own:
            view = views[patch.view]
            left, top, right, bottom = patch.rendered(view)
            piece, shape = slice(start, start + (right - left) * (bottom - top)), (bottom - top, right - left, 1)
            start = piece.stop
            with torch.enable_grad():
                blended = drawn.color[piece, 3].detach().view(shape).requires_grad_()
                covered = drawn.alpha[piece].detach().view(shape).requires_grad_()
                pixels = Pixels(patch, blended, covered, blended / covered.clamp(min=1e-10))
                near = sum(weight * loss(pixels, view, beyond=1) for weight, loss in self._of_depth)
                found = torch.autograd.grad(cast(Tensor, near) / len(views), [blended, covered])
            self._report[patch.view].add_(sum(weight * loss(pixels, view) for weight, loss in self._of_depth))
            x0, y0, x1, y1 = patch.inner(view)
            for whole, gradient in zip((by_depth, by_alpha), found, strict=True):
                whole[piece].view(shape)[y0:y1, x0:x1] = gradient[y0:y1, x0:x1]
        return by_depth, by_alpha

    def _add_sky(
        self, patch: Patch, views: Sequence[View], alpha: Tensor, layers: Tensor, v_alpha: Tensor
    ) -> None:  # fmt: skip
        """Add a patch's loss of the sky, and its gradient by alpha [P], in place."""
        sky = layers[..., -1:].float() / (255 if layers.dtype == torch.uint8 else 1)
        with torch.enable_grad():
            covered = alpha.detach().requires_grad_()
            share = self._settings.sky_weight * sky_loss(covered.view(sky.shape), sky, patch, views[patch.view])
            (found,) = torch.autograd.grad(share / len(views), covered)
        self._report[patch.view].add_(share.detach())
        v_alpha.add_(found)

    def photograph(self, layers: Tensor, view: int) -> tuple[Tensor, Tensor | None]:
        """Return what a rendering of the batch's view at this position is compared with, and its mask.

        Args:
            layers: [h, w, channels] colour, then alpha, mask and sky if the settings have them; uint8 or float.

        Returns:
            colours [h, w, 3] over the view's background, zero where masked, and mask [h w, 1] or None.
        """
        if self._settings.channels == 3:
            return layers, None
        values = layers.float() / 255 if layers.dtype == torch.uint8 else layers
        image = values[..., :3]
        if self._settings.alpha:
            image = torch.lerp(self._backgrounds[view].expand_as(image), image, values[..., 3:4])
        if not self._settings.masks:
            return image, None
        mask = values[..., 3 + self._settings.alpha, None]
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


def _joined(of_patches: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Join colours [P, 3] and alphas [P] of patches in their order."""
    return [part[0] if len(part) == 1 else torch.cat(part) for part in zip(*of_patches, strict=True)]


def loss_weights(
    width: int, height: int, batch: int, ssim_lambda: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the gradients [] of a batch's mean loss by a view's two sums: of absolute differences and of SSIM.

    Views without a window of SSIM get no SSIM weight: see `photometric_loss`.
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
