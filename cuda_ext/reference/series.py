"""The reference of `series`. Shapes: `cuda_ext.ops.project.series`."""

from torch import Tensor

from cuda_ext.reference.projection import _take


def series(base: Tensor, terms: Tensor, weights: Tensor, view_ids: Tensor, point_ids: Tensor, views: int) -> Tensor:
    """See `cuda_ext.series`."""
    point = point_ids.long()
    sums = _take(base, point)
    for c in range(weights.shape[1]):
        sums = sums + weights[:, c, None] * _take(terms[:, c], point)
    return sums * (point >= 0)[:, None]
