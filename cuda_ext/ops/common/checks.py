"""Argument checks that the public wrappers share: they name the argument and what it should have been."""

from collections.abc import Sequence

import torch
from torch import Tensor


def check_floats(like: Tensor, **tensors: tuple[Tensor, Sequence[int]]) -> None:
    """Check shape, dtype and device of float tensors against `like`; -1 in a shape accepts any size.

    Raises:
        TypeError: `like` is neither float32 nor float64, or a dtype or device differs from it.
        ValueError: a shape is wrong.
    """
    if like.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"The operators work in float32 or float64, not {like.dtype}: convert with `.float()`.")
    check_tensors(like.dtype, like.device, **tensors)


def check_tensors(dtype: torch.dtype, device: torch.device, /, **tensors: tuple[Tensor, Sequence[int]]) -> None:
    """Check shape, dtype and device of tensors; -1 in a shape accepts any size.

    Raises:
        TypeError: a dtype or device is wrong.
        ValueError: a shape is wrong.
    """
    for name, (tensor, shape) in tensors.items():
        fits = tensor.dim() == len(shape)
        if not fits or any(want not in (-1, got) for want, got in zip(shape, tensor.shape, strict=True)):
            raise ValueError(f"{name} must have the shape {list(shape)} (-1: any size), not {list(tensor.shape)}.")
        if tensor.dtype != dtype or tensor.device != device:
            raise TypeError(
                f"{name} is {tensor.dtype} on {tensor.device}; it must be {dtype} on {device} like the rest."
            )


LENS_ROWS = 7
"""Rows of a view's intrinsics with a lens: see `cuda_ext.ops.project.lens`."""


def intrinsics_shape(Ks: Tensor, views: int) -> tuple[int, int, int]:
    """Return the shape that these intrinsics must have: [V, 3, 3], or [V, 7, 3] if they have lenses."""
    return (views, LENS_ROWS if Ks.dim() == 3 and Ks.shape[1] == LENS_ROWS else 3, 3)


def check_cameras(
    like: Tensor, viewmats: Tensor, Ks: Tensor, sizes: Sequence[int], near: float, far: float
) -> list[int]:
    """Check cameras and the depths between which they see; return the views' sizes, 2 V ints.

    Raises:
        TypeError, ValueError: see `check_floats`, `check_ints` and `check_depth_range`.
    """
    views = len(viewmats)
    check_floats(like, viewmats=(viewmats, (-1, 4, 4)), Ks=(Ks, intrinsics_shape(Ks, views)))
    check_depth_range(near, far)
    return check_ints("sizes", sizes, 2, views, "view")


def check_rows(like: Tensor, view_ids: Tensor, point_ids: Tensor) -> None:
    """Check that `view_ids` and `point_ids` are int32 [M] on the device of `like`.

    Raises:
        TypeError: a dtype or device is wrong.
        ValueError: a shape is wrong.
    """
    if view_ids.dim() != 1 or view_ids.shape != point_ids.shape:
        raise ValueError(
            f"view_ids and point_ids must both be [M], not {list(view_ids.shape)} and {list(point_ids.shape)}."
        )
    for name, ids in (("view_ids", view_ids), ("point_ids", point_ids)):
        if ids.dtype != torch.int32 or ids.device != like.device:
            raise TypeError(f"{name} is {ids.dtype} on {ids.device}; it must be torch.int32 on {like.device}.")


def check_ints(name: str, values: Sequence[int], per_item: int, items: int, item: str) -> list[int]:
    """Return `values` as a list of `per_item` ints for each of `items` views or patches.

    Raises:
        ValueError: another count.
    """
    if len(values) != per_item * items:
        raise ValueError(f"{name} must hold {per_item} ints a {item}, {per_item * items} in all, not {len(values)}.")
    return [int(value) for value in values]


def check_depth_range(near: float, far: float) -> None:
    """Raise ValueError unless 0 < near < far: at depth 0 the projection has no value."""
    if not 0 < near < far:
        raise ValueError(f"near and far must satisfy 0 < near < far, not near={near}, far={far}.")
