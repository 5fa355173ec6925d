"""Rendering of held-out views on the ranks that hold their images, and quality metrics."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.model_components.lib_bilagrid import color_correct
from torch import Tensor

from ns_multigpu.core.dist.collectives import all_gather_objects
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.render.service import RenderService


@dataclass(frozen=True)
class RenderedView:
    """Rendered held-out view of this rank.

    Attributes:
        index: its number among the held-out views.
        camera, image: from the datamanager.
        outputs: from the model.
        seconds: rendering time.
    """

    index: int
    camera: Cameras
    image: dict[str, Any]
    outputs: dict[str, Tensor]
    seconds: float


@dataclass(frozen=True)
class HeldOut:
    """Quality of held-out views: means over `views` of `total` views; PSNR in dB.

    Attributes:
        corrected: PSNR after an optimal colour mapping of each view to its photograph. None unless requested
            (`color_corrected_metrics`) or the model has exposure gains.
    """

    views: int
    total: int
    psnr: float
    ssim: float
    corrected: float | None = None

    def described(self) -> str:
        """Return a description for the user."""
        some = f"{self.views} of {self.total}" if self.views < self.total else f"{self.total}"
        corrected = "" if self.corrected is None else f"; {self.corrected:.2f} dB with corrected colours"
        return f"{self.psnr:.2f} dB (SSIM {self.ssim:.3f}{corrected}) on {some} held-out views"


def rendered_views(
    model: Any, datamanager: Any, renders: RenderService, world: World, some: Sequence[int] | None = None
) -> Iterator[RenderedView]:
    """Yield the rendered held-out views whose images this rank holds, ascending. Every rank iterates to the end.

    Each rank renders its own views if the model is replicated. If it is sharded, all ranks render every view together,
    in view order. They render as many views as there are ranks before yielding, so that metrics are computed in
    parallel.

    Args:
        model, datamanager, renders: a pipeline's.
        world: the ranks.
        some: the views to render, ascending, the same on every rank; by default all.
    """
    views = list(range(len(datamanager.eval_dataset))) if some is None else list(some)
    if not renders.shared:
        for index in datamanager.eval_held():
            if index in set(views):
                camera, image = datamanager.eval_image(index)
                start = perf_counter()
                outputs = model.get_outputs_for_camera(camera)
                yield RenderedView(index, camera, image, outputs, perf_counter() - start)
        return
    for first in range(0, len(views), world.size):
        mine: list[tuple[int, dict[str, Tensor], float]] = []
        for index in views[first : first + world.size]:
            start = perf_counter()
            outputs = renders.render(datamanager.eval_camera(index), roots=(datamanager.eval_holder(index),))
            if outputs is not None:
                mine.append((index, outputs, perf_counter() - start))
        for index, outputs, seconds in mine:
            camera, image = datamanager.eval_image(index)
            yield RenderedView(index, camera, image, outputs, seconds)


@torch.no_grad()
def held_out_quality(model: Any, datamanager: Any, renders: RenderService, world: World, most: int) -> HeldOut | None:
    """Return PSNR and SSIM of some held-out views, as ns-eval computes them; the same on every rank. Every rank calls
    it.

    Args:
        model, datamanager, renders: a pipeline's, in eval mode.
        world: the ranks.
        most: largest number of views to render.

    Returns:
        None if no views are held out.
    """
    total = len(datamanager.eval_dataset)
    if total == 0:
        return None
    rows: dict[int, tuple[float, ...]] = {}
    for view in rendered_views(model, datamanager, renders, world, spread(total, most)):
        truth, rgb = model.compared(view.outputs, view.image)
        images = [image.permute(2, 0, 1)[None] for image in (truth, rgb)]
        rows[view.index] = float(model.psnr(*images)), float(model.ssim(*images))
        if model.corrects_colours:
            rows[view.index] += (_corrected_psnr(model, truth, rgb),)
    gathered: dict[int, tuple[float, ...]] = {}
    for part in all_gather_objects(rows, world):
        gathered.update(part)
    # In view order, so that the mean has the same bits on every world size.
    columns = list(zip(*(gathered[index] for index in sorted(gathered)), strict=True))
    return HeldOut(len(gathered), total, *(sum(column) / len(column) for column in columns))


def _corrected_psnr(model: Any, truth: Tensor, rgb: Tensor) -> float:
    """Return the PSNR after nerfstudio's colour correction; NaN if that fails, for example on an image of one
    colour.
    """
    try:
        try:
            corrected = color_correct(rgb, truth)
        except torch.OutOfMemoryError:  # it needs more memory than a step; the host is slower
            corrected = color_correct(rgb.cpu(), truth.cpu()).to(rgb)
    except AssertionError:
        return float("nan")
    return float(model.psnr(truth.permute(2, 0, 1)[None], corrected.permute(2, 0, 1)[None]))


def spread(views: int, most: int) -> list[int]:
    """Return at most `most` view numbers, evenly spaced, ascending."""
    count = min(views, most)
    return [i * views // count for i in range(count)]
