"""Which rectangles of a batch's images go from which rank to which. All ranks find the same, from shared data alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ns_multigpu.core.assign.image_part import Rectangle, area, is_empty
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.types import Patch, View
from ns_multigpu.plugin.capture.image_store import ImageShape


@dataclass(frozen=True)
class Move:
    """A rectangle of an image that goes from one rank to another.

    Attributes:
        source, to: the ranks; the same where it is needed by the rank that holds it.
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
) -> list[Move]:
    """What each rank needs for the pixels that it owns, by rank, then by position.

    Args:
        indices: the batch's views by their number in the capture.
        plan: whose pixels are whose.
        views: the batch's.
        shapes: of all images of the capture.
        holder: the rank that holds a view's image.
    """
    moves: list[Move] = []
    for reader, patches in enumerate(plan.owned):
        own: dict[int, list[Patch]] = {}
        for patch in patches:
            own.setdefault(patch.view, []).append(patch)
        for position in sorted(own):
            index = indices[position]
            needed = rectangles_of(own[position], views[position], shapes[index])
            moves += [Move(holder(index), reader, position, rectangle) for rectangle in needed]
    return moves


def rectangles_of(patches: Sequence[Patch], view: View, shape: ImageShape) -> list[Rectangle]:
    """The rectangles of an image that cover some patches of its view, halos included, in the patches' order.

    Where the rectangles together are not fewer bytes than the whole image it is the whole one. So it is where the view
    is drawn at another resolution than the image's: what a pixel becomes there follows from the whole image.
    """
    drawn = [patch.rendered(view) for patch in patches]
    needed = list(dict.fromkeys(rectangle for rectangle in drawn if not is_empty(rectangle)))
    whole = (0, 0, shape.width, shape.height)
    another = (view.width, view.height) != (shape.width, shape.height)
    if needed and (another or sum(map(area, needed)) >= area(whole)):
        return [whole]
    return needed
