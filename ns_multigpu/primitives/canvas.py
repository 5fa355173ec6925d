"""Pixels of a batch's patches in one buffer, as the raster operators return them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

import cuda_ext
from ns_multigpu.core.types import Patch, Pixels, View


class Canvas:
    """Layout of the patches' pixels, patch by patch and line by line.

    Attributes:
        patches: of the batch.
        flat: 5 integers a patch (view, x0, y0, x1, y1), halo included.
    """

    def __init__(self, patches: Sequence[Patch], views: Sequence[View]) -> None:
        self.patches = patches
        self._rectangles = [patch.rendered(views[patch.view]) for patch in patches]
        pairs = zip(patches, self._rectangles, strict=True)
        self.flat = [n for patch, rectangle in pairs for n in (patch.view, *rectangle)]

    def cut(self, values: Tensor) -> list[Tensor]:
        """Return the images [h, w, C] of the patches, from values [P] or [P, C]."""
        found: list[Tensor] = []
        start = 0
        for x0, y0, x1, y1 in self._rectangles:
            end = start + (y1 - y0) * (x1 - x0)
            found.append(values[start:end].reshape(y1 - y0, x1 - x0, -1))
            start = end
        return found

    def pixels(
        self, colors: Sequence[Tensor], signed: Tensor, depths: Sequence[Tensor] | None, *, marked: bool, stops: bool,
        extra: Sequence[Mapping[str, Tensor]] | None = None,
    ) -> list[Pixels]:  # fmt: skip
        """Return the patches' pixels.

        Args:
            colors, depths: image of each patch; depths are sums by weights.
            signed: [P] alphas, if `marked` negative where drawing stopped.
            stops: return where it did. extra: further images of each patch.
        """
        stopped = signed.detach() < 0
        alphas = self.cut(torch.where(stopped, -signed, signed) if marked else signed)
        where = self.cut(stopped)
        result: list[Pixels] = []
        for k, (patch, alpha) in enumerate(zip(self.patches, alphas, strict=True)):
            depth = None if depths is None else depths[k] / alpha.clamp(min=1e-10)
            shown = {} if extra is None else extra[k]
            result.append(Pixels(patch, colors[k], alpha, depth, where[k] if stops else None, shown))
        return result


def clip_lists(lists: tuple[Tensor, Tensor], depths: Tensor, windows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return tile offsets and row ids of the rows within their tiles' windows; all for None. See `Primitive.render`."""
    if windows is None:
        return lists
    return cuda_ext.clip_lists(*lists, depths.detach(), windows.to(depths.dtype))
