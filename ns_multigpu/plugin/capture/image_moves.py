"""Schedule of image rectangles that ranks exchange. All ranks compute the same one from shared data alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ns_multigpu.core.assign.image_part import Rectangle, area, is_empty
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.types import Patch, View
from ns_multigpu.plugin.capture.image_store import ImageShape


@dataclass(frozen=True)
class ImageMove:
    """Rectangle of an image that one rank sends to another.

    Attributes:
        source, to: sending and receiving rank; equal if the rank that needs it holds it.
        position: of the view in the batch.
        rectangle: in pixels of the image.
    """

    source: int
    to: int
    position: int
    rectangle: Rectangle


def moves_of(
    indices: Sequence[int],
    plan: Plan,
    views: Sequence[View],
    shapes: Sequence[ImageShape],
    holder: Callable[[int], int],
) -> list[ImageMove]:
    """Return the rectangles that each rank needs for the pixels it owns, ordered by rank, then by position.

    Args:
        indices: the batch's views by their number in the capture.
        plan: the owner of each pixel.
        views: the batch's.
        shapes: of all images of the capture.
        holder: the rank that holds a view's image.
    """
    moves: list[ImageMove] = []
    for reader, patches in enumerate(plan.owned):
        own: dict[int, list[Patch]] = {}
        for patch in patches:
            own.setdefault(patch.view, []).append(patch)
        for position in sorted(own):
            index = indices[position]
            needed = rectangles_of(own[position], views[position], shapes[index])
            moves += [ImageMove(holder(index), reader, position, rectangle) for rectangle in needed]
    return moves


def rectangles_of(patches: Sequence[Patch], view: View, shape: ImageShape) -> list[Rectangle]:
    """Return the rectangles of an image that cover some patches of its view, halos included, in the patches' order.

    The result is the complete image if the rectangles together have as many bytes. It is also the complete image if the
    view's resolution differs from the image's: resampling needs all of it.
    """
    drawn = [patch.rendered(view) for patch in patches]
    needed = list(dict.fromkeys(rectangle for rectangle in drawn if not is_empty(rectangle)))
    whole = (0, 0, shape.width, shape.height)
    another = (view.width, view.height) != (shape.width, shape.height)
    if needed and (another or sum(map(area, needed)) >= area(whole)):
        return [whole]
    return needed
