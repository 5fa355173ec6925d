"""Where a refinement's new points come from: as they are listed, and in another order."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Regrouping:
    """Where T new points come from, in any order.

    Attributes:
        source: [T] int64, the old point that each new one is a copy of.
        fresh: [F] int64, the new points that are not what they were: their moments start from zero.
        children: [births C] int64, the new points among `fresh` that came out of a split: first halves, then second.
        offsets: [births C, 3 or more] how far each child lies from its parent, in space and what else `SplitRule` draw.
    """

    source: Tensor
    fresh: Tensor
    children: Tensor
    offsets: Tensor

    def clear(self, moments: list[Tensor]) -> None:
        """Sets the fresh points' rows of each of `moments`, [T, ...], to zero."""
        for moment in moments:
            moment.index_fill_(0, self.fresh, 0)


@dataclass(frozen=True)
class Listing:
    """Where T new points come from, listed as kept ones, copies, first halves of splits and second halves.

    Attributes:
        source: [T] int64, the old point that each new one is a copy of.
        n_kept: how many are what they were: the first. The others are fresh.
        offsets: [births C, 3 or more] how far each child, one of the last, lies from its parent: see `Regrouping`.
    """

    source: Tensor
    n_kept: int
    offsets: Tensor

    @property
    def children(self) -> slice:
        """The halves of splits."""
        return slice(len(self.source) - len(self.offsets), None)

    def clear(self, moments: list[Tensor]) -> None:
        """Sets the fresh points' rows of each of `moments`, [T, ...], to zero."""
        if moments and self.n_kept < len(self.source):
            torch._foreach_zero_([moment[self.n_kept :] for moment in moments])  # pyright: ignore

    def positions(self, means: Tensor, order: Tensor | None = None) -> Tensor:
        """The new points' means, [T, 3], from the old ones'; the k-th that of `order[k]`, [T] int64, if given."""
        new = means.detach().index_select(0, self.source)
        new[self.children] += self.offsets[:, :3]
        return new if order is None else new[order]

    def beside(self) -> Tensor:
        """The order [T] int64 in which each new point stands where its old one stood, and of one all as listed."""
        return torch.sort(self.source, stable=True).indices

    def ordered(self, order: Tensor) -> Regrouping:
        """The same new points in another order: the k-th becomes the one that was at `order[k]`, [T] int64."""
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        source = self.source.index_select(0, order)
        return Regrouping(source, place[self.n_kept :], place[self.children], self.offsets)
