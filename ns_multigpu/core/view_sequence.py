"""The one sequence from which every rank takes its views."""

from collections.abc import Callable

from ns_multigpu.core.random import keyed_permutation


class ViewSequence:
    """Views in an order that holds each exactly once an epoch, for any number of ranks.

    Position p of the sequence is the p-th image seen by the job as a whole. What stands there depends on the seed and
    the number of views alone, so that a run on any number of ranks sees the same images in the same order.

    Args:
        count: number of views.
        seed: the run's seed.
        draw: draws the next epoch's order instead of a keyed permutation. It is called once an epoch, in order, and
            must return the same on every rank.
    """

    def __init__(self, count: int, seed: int, draw: Callable[[], list[int]] | None = None) -> None:
        if count < 1:
            raise ValueError("a capture without views cannot be trained on")
        self._count = count
        self._seed = seed
        self._draw = draw
        self._epochs: dict[int, list[int]] = {}
        self._ends: list[int] = []

    def at(self, position: int) -> int:
        """The view at `position`, counted from 0."""
        if self._draw is None:
            epoch, place = divmod(position, self._count)
            if epoch not in self._epochs:
                self._epochs = {e: order for e, order in self._epochs.items() if e >= epoch - 1}
                self._epochs[epoch] = keyed_permutation(self._count, self._seed, "views", epoch)
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

    def batch(self, step: int, size: int) -> list[int]:
        """The `size` views of a step."""
        return [self.at(step * size + i) for i in range(size)]
