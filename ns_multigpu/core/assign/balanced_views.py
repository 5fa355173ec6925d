"""Batches of views with similar work, so that ranks with one view each do not wait for the slowest.

Work differs by view: an aerial view straight down shows a third of what an oblique view shows. A step takes as long as
the longest of its views. Gains: benchmarks/results/whole-runs.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from ns_multigpu.core.image_points import image_points
from ns_multigpu.core.types import FAR, View

WINDOW = 16
"""Steps that views are exchanged between. With more, views of a step are more alike; and always the same ones."""
NEAR = 0.01
"""Nearest depth at which a point is seen, world units."""
MOST_LOOKS = 2_000_000
"""Points times views that are looked at: a tenth of a second. Of more points, some are left out, evenly."""
LEAST_POINTS = 1_000
"""Points that are looked at all the same."""


def works(points: Tensor, views: Sequence[View], far: float = FAR) -> list[float]:
    """Return the work of each view, 2 in the mean: half by the points that it sees, half by its pixels.

    Args:
        points, views, far: see `points_seen`.
    """
    seen, pixels = points_seen(points, views, far), [view.width * view.height for view in views]
    of_seen, of_pixels = (len(views) / max(sum(counts), 1) for counts in (seen, pixels))
    return [of_seen * s + of_pixels * p for s, p in zip(seen, pixels, strict=True)]


def points_seen(points: Tensor, views: Sequence[View], far: float = FAR) -> list[int]:
    """Return the number of points within each view's image.

    Args:
        points: [N, 3], world units. views: of any camera. All on the host.
        far: largest depth at which a point is seen, world units.
    """
    return [int((depths <= far).sum()) for depths in depths_seen(points, views)]


def depths_seen(points: Tensor, views: Sequence[View]) -> Iterator[Tensor]:
    """Yield the depths [K] float64 of the points within each view's image; arguments as in `points_seen`."""
    most = max(MOST_LOOKS // max(len(views), 1), LEAST_POINTS)
    rows = points[:: -(-len(points) // most) or 1].double()
    some = rows.T.contiguous()
    for view in views:
        viewmat, K = view.viewmat.double(), view.K.double()
        if len(K) > 3:
            x, y, depth = image_points(replace(view, viewmat=viewmat, K=K), rows)
        else:
            matrix = K @ viewmat[:3]  # its last row is the depth
            x, y, depth = matrix[:, :3] @ some + matrix[:, 3:]
            x, y = x / depth, y / depth
        seen = (depth >= NEAR) & (x > 0) & (x < view.width) & (y > 0) & (y < view.height)
        yield depth[seen]


def alike(order: Sequence[int], work: Sequence[float], size: int, lead: int = 0) -> list[int]:
    """Return the views of an epoch in an order in which the views of each step have similar work.

    Sorts the views of `WINDOW` steps at a time by their work and cuts them into steps. Steps keep the order in which
    the first view of each was drawn. Views that complete a step of the previous epoch, or begin one that the next epoch
    completes, keep their places. An epoch has each view once.

    Args:
        order: views of an epoch. work: of each view of the capture.
        size: views of a step. lead: of the first step, as many as are still to be found for it; 0 for all.

    Raises:
        ValueError: the size is not positive.
    """
    if size < 1:
        raise ValueError(f"a step of {size} views: at least 1 is needed")
    end = len(order) - (len(order) - lead) % size
    result = list(order[:lead])
    for begin in range(lead, end, WINDOW * size):
        drawn = order[begin : min(begin + WINDOW * size, end)]
        ranked = sorted(range(len(drawn)), key=lambda place: work[drawn[place]])
        steps = [ranked[k : k + size] for k in range(0, len(ranked), size)]
        result += [drawn[place] for step in sorted(steps, key=min) for place in step]
    return result + list(order[max(end, lead) :])
