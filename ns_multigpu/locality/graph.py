"""Bipartite graph of groups and views (section 4.2.1): which view shows how many points of which group."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy  # its parts are loaded when they are first asked for
from numpy.typing import NDArray

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

    @property
    def views(self) -> int:
        return self.seen.shape[0]

    @property
    def groups(self) -> int:
        return self.seen.shape[1]

    def view_work(self) -> Ints:
        """Return [V] int64, the number of points that each view shows: roughly the cost of drawing it."""
        return np.asarray(self.seen.sum(axis=1)).ravel().astype(np.int64)

    def group_work(self) -> Ints:
        """Return [C] int64, a group's points over the views that show them: roughly its projection and exchange."""
        return np.asarray(self.seen.sum(axis=0)).ravel().astype(np.int64)

    def part(self, groups: Ints, views: Ints | None = None) -> "SeenGraph":
        """Return the graph of some groups and of some views; None keeps all views."""
        rows = self.seen if views is None else self.seen[views]
        return SeenGraph(rows[:, groups].tocsr(), self.points[groups])

    def by_rank(self, ranks: Ints, count: int) -> NDArray[np.float64]:
        """Return [V, count] float64, the points that each view needs from each rank: matrix A of section 4.2.2.

        Group c is on rank `ranks[c]`.
        """
        chosen = scipy.sparse.csr_matrix((np.ones(self.groups), (np.arange(self.groups), ranks)), (self.groups, count))
        return np.asarray((self.seen @ chosen).todense(), dtype=np.float64)
