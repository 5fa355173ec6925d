"""Held-out views, rendered for the ranks that hold their images."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from nerfstudio.cameras.cameras import Cameras
from torch import Tensor

from ns_multigpu.core.world import World
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


def rendered_views(
    model: Any, datamanager: Any, renders: RenderService, world: World, some: Sequence[int] | None = None
) -> Iterator[RenderedView]:
    """The held-out views whose images this rank holds, ascending. Every rank iterates to the end.

    Each rank renders its own; where points are spread over ranks, all render every view together, in the order of the
    views, as many at a time as there are ranks, so that these can look at their images side by side afterwards.

    Args:
        model: a `SplatModel`. datamanager: a `DistributedDataManager`.
        renders: the model's. world: the ranks.
        some: the views to render, ascending, the same on every rank; by default all.
    """
    share, held = datamanager.eval_share, datamanager.fixed_indices_eval_dataloader
    views = list(range(len(share.shapes))) if some is None else list(some)
    own = [place for place, index in enumerate(share.own) if index in set(views)]
    if not renders.shared:
        for place in own:
            camera, image = held[place]
            start = perf_counter()
            outputs = model.get_outputs_for_camera(camera)
            yield RenderedView(share.own[place], camera, image, outputs, perf_counter() - start)
        return
    places = iter(own)
    for first in range(0, len(views), world.size):
        mine: list[tuple[int, dict[str, Tensor], float]] = []
        for index in views[first : first + world.size]:
            start = perf_counter()
            outputs = renders.render(datamanager.eval_camera(index), roots=(share.holder(index),))
            if outputs is not None:
                mine.append((index, outputs, perf_counter() - start))
        for index, outputs, seconds in mine:
            camera, image = held[next(places)]
            yield RenderedView(index, camera, image, outputs, seconds)


def spread(views: int, most: int) -> list[int]:
    """At most `most` of so many views, evenly spread, ascending."""
    count = min(views, most)
    return [i * views // count for i in range(count)]
