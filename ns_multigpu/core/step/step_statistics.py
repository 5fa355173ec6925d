"""Step statistics that ranks gather at the end of a fused step, which reads nothing back."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from cuda_ext.ops.exchange.row_footprint import footprint_counts
from cuda_ext.ops.optim.step_control import HEAD, step_message
from ns_multigpu.core.assign.assignment import Feedback
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.exchange.pixel_operators import PixelOperators
from ns_multigpu.core.kernels import Lists, Rows
from ns_multigpu.core.step.step_settings import StepSettings
from ns_multigpu.core.step.view_parameters import ViewParameters
from ns_multigpu.core.types import TILE, Patch, View


class StepMessage:
    """Builder of a rank's step statistics: needed capacities, and the assignment's counts of the step.

    Args:
        settings: the step's. pixels: its operators.
        local_index: index of the count of local rows. words: number of words. learns: see `Feedback`.
    """

    def __init__(
        self, settings: StepSettings, pixels: PixelOperators, local_index: int, words: int, learns: Feedback
    ) -> None:
        self._settings, self._pixels = settings, pixels
        self._local_index, self._words, self._learns = local_index, words - settings.tail, learns

    def of(
        self, rows: Rows, numbers: tuple[Tensor, Tensor, Tensor], plan: Plan, lists: Lists,
        views: Sequence[View], own: Sequence[Patch], first_view: int,
        of_views: ViewParameters | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the step's statistics [words] int64.

        Args:
            rows: of this rank's points.
            numbers: of rows that go each way: how many, their capacity, and the most so far.
            lists: of the tiles that were drawn.
            own: what this rank draws. first_view: the position in the batch of the first view of the rows.
            of_views: their words are appended, if there are any.
        """
        counts, capacities, most_rows = numbers
        offsets, _, met = lists
        message = step_message(
            rows.count, counts, capacities, most_rows, met, offsets, self._bands(own, views), self._local_index,
            self._words - HEAD,
        )  # fmt: skip
        if self._learns is Feedback.NEEDS:
            everyones = [n for p in plan.patches() for n in (p.view - first_view, *p.rendered(views[p.view]))]
            found = footprint_counts(rows.view_ids, rows.count, rows.means2d, rows.radii, everyones)
            message[HEAD : HEAD + len(found)] = found  # smaller views may have fewer patches
        elif self._learns is Feedback.LIVE:
            message[HEAD:] = self._pixels.live()
        return message if of_views is None else torch.cat([message, of_views.published()])

    def _bands(self, own: Sequence[Patch], views: Sequence[View]) -> list[int]:
        """Return the positions of this rank's bands in rows of tiles, without halos, if they count: see
        `step_message`."""
        bands: list[int] = []
        lines = list(accumulate((-(-view.height // TILE) for view in views), initial=0))
        start = 0
        for patch in own if self._learns is Feedback.WORK else ():
            left, top, right, bottom = patch.rendered(views[patch.view])
            columns = -(-(right - left) // TILE)
            line = lines[patch.view] + patch.y0 // TILE
            tile = start + (patch.y0 - top) // TILE * columns
            bands += [line, tile, -(-(patch.y1 - patch.y0) // TILE), columns]
            start += -(-(bottom - top) // TILE) * columns
        return bands
