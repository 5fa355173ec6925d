"""The bipartite graph of groups and views (section 4.2.1): who sees what, and how much of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import scipy  # its parts are loaded when they are first asked for
import torch
from numpy.typing import NDArray
from torch import Tensor

from cuda_ext.ops.project.culling import cull
from ns_multigpu.locality.groups import Groups, cull_groups

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SeenGraph:
    """Groups, views, and an edge where a view shows points of a group.

    Attributes:
        seen: [V, C] csr of int64, points of group c that view v shows; what is zero is not stored.
        points: [C] int64, points of each group.
    """

    seen: Any  # scipy's matrices have no types
    points: Ints

    @staticmethod
    def of(view_ids: Tensor, group_ids: Tensor, counts: Tensor, views: int, points: Tensor) -> "SeenGraph":
        """From the edges' views, groups and points [E], the number of views, and the groups' points [C].

        Raises:
            ValueError: there are no views, or none shows a point.
        """
        if views < 1:
            raise ValueError("there are no views: points are placed by who sees them")
        rows, columns, amounts = (t.cpu().numpy().astype(np.int64) for t in (view_ids, group_ids, counts))
        seen = scipy.sparse.csr_matrix((amounts, (rows, columns)), shape=(views, len(points)))
        seen.eliminate_zeros()
        if seen.nnz == 0:
            raise ValueError(f"none of the {views} views shows a point: the poses do not fit the points")
        return SeenGraph(seen, points.cpu().numpy().astype(np.int64))

    @property
    def views(self) -> int:
        return self.seen.shape[0]

    @property
    def groups(self) -> int:
        return self.seen.shape[1]

    def view_work(self) -> Ints:
        """[V] int64, points that each view shows: what drawing it costs, roughly."""
        return np.asarray(self.seen.sum(axis=1)).ravel().astype(np.int64)

    def group_work(self) -> Ints:
        """[C] int64, points that a group shows in all views: what projecting and sending them costs, roughly."""
        return np.asarray(self.seen.sum(axis=0)).ravel().astype(np.int64)

    def part(self, groups: Ints, views: Ints | None = None) -> "SeenGraph":
        """The graph of some groups and, unless all stay, some views."""
        rows = self.seen if views is None else self.seen[views]
        return SeenGraph(rows[:, groups].tocsr(), self.points[groups])

    def thinned(self, views: int, seed: int = 0) -> "SeenGraph":
        """The graph of so many of the views at most, drawn at random: for graphs that take too long to partition."""
        if self.views <= views:
            return self
        drawn = np.random.default_rng(seed).choice(self.views, views, replace=False)
        return SeenGraph(self.seen[np.sort(drawn)], self.points)

    def by_rank(self, ranks: Ints, count: int) -> NDArray[np.float64]:
        """[V, count] float64, points that each view needs from each rank, where group c lies on ranks[c]: the matrix A
        of section 4.2.2."""
        chosen = scipy.sparse.csr_matrix((np.ones(self.groups), (np.arange(self.groups), ranks)), (self.groups, count))
        return np.asarray((self.seen @ chosen).todense(), dtype=np.float64)


def count_seen(
    groups: Groups,
    means: Tensor,
    scales: Tensor,
    opacities: Tensor,
    viewmats: Tensor,
    Ks: Tensor,
    sizes: Sequence[int],
    rects: Sequence[int],
    exact: bool = True,
    **culling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Points of each group that may show in each view's rectangle: first whole groups, then the points of those kept.

    Give a view once for each of its patches, with the patch's rectangle, to count by patches.

    Args:
        groups: of the points, with boxes that hold. means, scales, opacities, viewmats, Ks, sizes, rects: as
            `cuda_ext.ops.project.culling.cull` has them.
        exact: look at the points; else a group that may show counts whole, which needs the boxes alone.
        culling: eps2d, near, far of `cull`.

    Returns:
        view_ids [E], group_ids [E] and counts [E], int64, by view, then group; counts are positive.
    """
    view_ids, group_ids = cull_groups(groups, viewmats, Ks, sizes, rects, **culling)
    if not exact:
        return view_ids, group_ids, groups.points[group_ids]
    bounds = torch.searchsorted(view_ids, torch.arange(len(viewmats) + 1, device=view_ids.device)).tolist()
    spare = len(groups) * groups.size - len(means)
    order = torch.cat([groups.order, groups.order[-1:].expand(spare)])
    blocks = [t.detach()[order].view(len(groups), groups.size, -1) for t in (means, scales, opacities)]
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for view, (first, end) in enumerate(pairwise(bounds)):
        if first == end:
            continue
        kept = group_ids[first:end]
        near_means, near_scales, near_opacities = (block[kept].flatten(0, 1) for block in blocks)
        hits = cull(
            near_means, near_scales, near_opacities.squeeze(1), viewmats[view : view + 1], Ks[view : view + 1],
            sizes[2 * view : 2 * view + 2], rects[4 * view : 4 * view + 4], **culling,
        )[1].long()  # fmt: skip
        place, within = hits // groups.size, hits % groups.size
        real = kept[place] * groups.size + within < len(means)  # the last group is filled up with its last point
        shown = torch.bincount(place[real], minlength=len(kept))
        seen = shown.nonzero().squeeze(1)
        found.append((torch.full_like(seen, view), kept[seen], shown[seen]))
    if not found:
        none = view_ids[:0]
        return none, none, none
    return torch.cat([f[0] for f in found]), torch.cat([f[1] for f in found]), torch.cat([f[2] for f in found])
