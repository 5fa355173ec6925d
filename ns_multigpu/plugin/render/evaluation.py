"""Held-out views, rendered for the ranks that hold their images, and how good they are."""

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
    """A held-out view of this rank's.

    Attributes:
        index: its number among the held-out views.
        camera, image: what the datamanager has of it.
        outputs: what the model made of it.
        seconds: how long that took.
    """

    index: int
    camera: Cameras
    image: dict[str, Any]
    outputs: dict[str, Tensor]
    seconds: float


@dataclass(frozen=True)
class HeldOut:
    """How well held-out views are rendered: means over `views` of the `total` that there are; PSNR in dB.

    Attributes:
        corrected: PSNR once each view's colours are as near to the photograph's as a map of colours brings them; None
            where nobody asked for it (`color_corrected_metrics`) and the model has no maps of exposure.
    """

    views: int
    total: int
    psnr: float
    ssim: float
    corrected: float | None = None

    def described(self) -> str:
        """For the user."""
        some = f"{self.views} of {self.total}" if self.views < self.total else f"{self.total}"
        corrected = "" if self.corrected is None else f"; {self.corrected:.2f} dB with corrected colours"
        return f"{self.psnr:.2f} dB (SSIM {self.ssim:.3f}{corrected}) on {some} held-out views"


def rendered_views(
    model: Any, datamanager: Any, renders: RenderService, world: World, some: Sequence[int] | None = None
) -> Iterator[RenderedView]:
    """The held-out views whose images this rank holds, ascending. Every rank iterates to the end.

    Each rank renders its own; where the model is spread over ranks, all render every view together, in the order of the
    views, as many at a time as there are ranks, so that these can look at their images side by side afterwards.

    Args:
        model, datamanager, renders: a pipeline's. world: the ranks.
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
    """PSNR and SSIM of some held-out views, as ns-eval computes them. Every rank calls it and gets the same.

    Args:
        model, datamanager, renders: a pipeline's, not in training. world: the ranks.
        most: how many views to look at, at most.

    Returns:
        None where no views are held out.
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
    # In the order of the views, so that the mean has the same bits on every world size.
    columns = list(zip(*(gathered[index] for index in sorted(gathered)), strict=True))
    return HeldOut(len(gathered), total, *(sum(column) / len(column) for column in columns))


def _corrected_psnr(model: Any, truth: Tensor, rgb: Tensor) -> float:
    """NaN where nerfstudio finds no correction, as of an image of one colour."""
    try:
        try:
            corrected = color_correct(rgb, truth)
        except torch.OutOfMemoryError:  # it takes more memory than a step; on the host, more time
            corrected = color_correct(rgb.cpu(), truth.cpu()).to(rgb)
    except AssertionError:
        return float("nan")
    return float(model.psnr(truth.permute(2, 0, 1)[None], corrected.permute(2, 0, 1)[None]))


def spread(views: int, most: int) -> list[int]:
    """At most `most` of so many views, evenly spread, ascending."""
    count = min(views, most)
    return [i * views // count for i in range(count)]
