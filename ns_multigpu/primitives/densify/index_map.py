"""Index maps of a refinement's new points to old ones: in creation order, and reordered."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Regrouping:
    """Index map of T new points, in any order.

    Attributes:
        source: [T] int64, the old point that each new one copies.
        fresh: [F] int64, changed new points, whose moments start from zero.
        children: [births C] int64, the new points among `fresh` from splits: first halves, then second.
        offsets: [births C, 3 or more] offset of each child from its parent, in space and other `SplitRule` draws.
    """

    source: Tensor
    fresh: Tensor
    children: Tensor
    offsets: Tensor

    def clear(self, moments: list[Tensor]) -> None:
        """Set the fresh points' rows of each of `moments`, [T, ...], to zero."""
        for moment in moments:
            moment.index_fill_(0, self.fresh, 0)


@dataclass(frozen=True)
class IndexMap:
    """Index map of T new points, in creation order: kept ones, copies, first and second halves of splits.

    Attributes:
        source: [T] int64, the old point that each new one copies.
        n_kept: number of unchanged points, which come first. The others are fresh.
        offsets: [births C, 3 or more] offset of each child, at the end, from its parent: see `Regrouping`.
    """

    source: Tensor
    n_kept: int
    offsets: Tensor

    @property
    def children(self) -> slice:
        """The children of splits."""
        return slice(len(self.source) - len(self.offsets), None)

    def clear(self, moments: list[Tensor]) -> None:
        """Set the fresh points' rows of each of `moments`, [T, ...], to zero."""
        if moments and self.n_kept < len(self.source):
            torch._foreach_zero_([moment[self.n_kept :] for moment in moments])  # pyright: ignore

    def positions(self, means: Tensor, order: Tensor | None = None) -> Tensor:
        """Return the new points' means [T, 3] from the old ones', in the order [T] int64 if given."""
        new = means.detach().index_select(0, self.source)
        new[self.children] += self.offsets[:, :3]
        return new if order is None else new[order]

    def source_order(self) -> Tensor:
        """Return the order [T] int64 of new points by old point, stable among those of one old point."""
        return torch.sort(self.source, stable=True).indices

    def ordered(self, order: Tensor) -> Regrouping:
        """Return the same new points in another order [T] int64."""
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        source = self.source.index_select(0, order)
        return Regrouping(source, place[self.n_kept :], place[self.children], self.offsets)
