"""Held-out views, rendered for the ranks that hold their images."""

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from nerfstudio.cameras.cameras import Cameras
from torch import Tensor

from ns_multigpu.core.world import World
from ns_multigpu.plugin.render_service import RenderService


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


def rendered_views(model: Any, datamanager: Any, renders: RenderService, world: World) -> Iterator[RenderedView]:
    """The held-out views whose images this rank holds, ascending. Every rank iterates to the end.

    Each rank renders its own; where points are spread over ranks, all render every view together, in the order of the
    views, as many at a time as there are ranks, so that these can look at their images side by side afterwards.

    Args:
        model: a `SplatModel`. datamanager: a `DistributedDataManager`.
        renders: the model's. world: the ranks.
    """
    share, own = datamanager.eval_share, iter(datamanager.fixed_indices_eval_dataloader)
    if not renders.shared:
        for index, (camera, image) in zip(share.own, own, strict=True):
            start = perf_counter()
            outputs = model.get_outputs_for_camera(camera)
            yield RenderedView(index, camera, image, outputs, perf_counter() - start)
        return
    views = len(share.shapes)
    for first in range(0, views, world.size):
        mine: list[tuple[int, dict[str, Tensor], float]] = []
        for index in range(first, min(first + world.size, views)):
            start = perf_counter()
            outputs = renders.render(datamanager.eval_camera(index), roots=(share.holder(index),))
            if outputs is not None:
                mine.append((index, outputs, perf_counter() - start))
        for index, outputs, seconds in mine:
            camera, image = next(own)
            yield RenderedView(index, camera, image, outputs, seconds)
