"""Sequence of training views, the same on every rank."""

import random
from collections.abc import Callable

_KEPT = 4
"""Epochs that are kept: steps are prefetched, and may be retried."""


class ViewSequence:
    """Views in an order that holds each exactly once an epoch, for any number of ranks.

    Position p of the sequence is the p-th image seen by the job as a whole. What stands there depends on the seed and
    the number of views alone, so that a run on any number of ranks sees the same images in the same order: the order
    in which nerfstudio's full-image datamanager draws them for the same seed (one generator of Python's `random`, which
    reshuffles all views for every epoch), so that runs of ours and of `splatfacto` can be compared image by image.
    Where steps have several views, an epoch may be arranged by what these are (see `arrange`).

    Args:
        count: number of views.
        seed: the run's seed of views.
        draw: draws the next epoch's order instead. It is called once an epoch, in order, and must return the same on
            every rank; what lies before the epoch in front of the last that was drawn is forgotten.

    Attributes:
        arrange: gives the order of an epoch that was shuffled, which begins at a position of the sequence, another one:
            order, position -> order. To be set before the first view is asked for, the same on every rank.
    """

    def __init__(self, count: int, seed: int, draw: Callable[[], list[int]] | None = None) -> None:
        if count < 1:
            raise ValueError("a capture without views cannot be trained on")
        self._count = count
        self._seed = seed
        self._draw = draw
        self._random = random.Random(seed)
        self._shuffled = 0
        self._epochs: dict[int, list[int]] = {}
        self._ends: list[int] = []
        self.arrange: Callable[[list[int], int], list[int]] | None = None

    def at(self, position: int) -> int:
        """Return the view at `position`, counted from 0."""
        if self._draw is None:
            epoch, place = divmod(position, self._count)
            if epoch not in self._epochs:
                self._shuffle_to(epoch)
            return self._epochs[epoch][place]
        while not self._ends or self._ends[-1] <= position:
            order = self._draw()
            self._epochs[len(self._ends)] = order
            self._ends.append((self._ends[-1] if self._ends else 0) + len(order))
            self._epochs.pop(len(self._ends) - 3, None)
        epoch = len(self._ends) - 1
        while epoch > 0 and self._ends[epoch - 1] > position:
            epoch -= 1
        return self._epochs[epoch][position - (self._ends[epoch - 1] if epoch else 0)]

    def _shuffle_to(self, epoch: int) -> None:
        """Draw all epochs up to this one and keep the last few; restart from the first to go back."""
        if epoch < self._shuffled:
            self._random, self._shuffled = random.Random(self._seed), 0
            self._epochs = {}
        while self._shuffled <= epoch:
            order = list(range(self._count))
            self._random.shuffle(order)
            if self.arrange is not None:
                order = self.arrange(order, self._shuffled * self._count)
            self._epochs[self._shuffled] = order
            self._epochs.pop(self._shuffled - _KEPT, None)
            self._shuffled += 1

    def batch(self, step: int, size: int) -> list[int]:
        """Return the `size` views of a step."""
        return [self.at(step * size + i) for i in range(size)]
