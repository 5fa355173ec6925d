"""Rows of a truncated series: a row's value is that of its point, plus the point's terms weighted by the row."""

from typing import Any

import torch
from torch import Tensor

from cuda_ext.dispatch.library import LIBRARY, fake
from cuda_ext.dispatch.load import compiled_serves
from cuda_ext.ops.common.checks import check_floats, check_rows
from cuda_ext.reference import series as reference


def series(base: Tensor, terms: Tensor, weights: Tensor, view_ids: Tensor, point_ids: Tensor, views: int) -> Tensor:
    """Return base[p] + sum over c of weights[m, c] terms[p, c], for each row m of a point p.

    Differentiable with respect to `base`, `terms` and `weights`; the same inputs give the same bits.

    Args:
        base: [N, K]. terms: [N, C, K]. weights: [M, C].
        view_ids, point_ids: [M] int32, rows sorted by (view, point) that name each pair once; padding at the end has
            the point -1 and the last view.
        views: how many there are.

    Returns:
        [M, K]; zeros for padding.

    Raises:
        TypeError, ValueError, IndexError: as `project`.
        NativeBuildError: the operators cannot be compiled.
    """
    points, width = base.shape[0], base.shape[-1]
    check_floats(
        base,
        base=(base, (-1, -1)),
        terms=(terms, (points, -1, width)),
        weights=(weights, (point_ids.shape[0], terms.shape[1] if terms.dim() > 1 else -1)),
    )
    check_rows(base, view_ids, point_ids)
    op = torch.ops.ns_multigpu.series if compiled_serves(base) else reference.series
    return op(base, terms, weights, view_ids, point_ids, views)  # type: ignore[no-any-return]


@fake("series")
def _fake(base: Tensor, terms: Tensor, weights: Tensor, *_: Any) -> Tensor:
    return base.new_empty((weights.shape[0], base.shape[1]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.views = inputs[5]


def _grad(ctx: Any, v_rows: Tensor) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.ns_multigpu.series_backward(*ctx.saved_tensors, ctx.views, v_rows.contiguous())
    return (*gradients, None, None, None)


torch.library.register_autograd("ns_multigpu::series", _grad, setup_context=_setup, lib=LIBRARY)
