"""Pixels of views that are drawn cell by cell: cut into pieces, composited front to back, and their gradients.

What a cell's splats make of a pixel is a colour, premultiplied, and an alpha. Layers composite as splats do (Splaxel,
equation 5): C = sum of C_m T_1 .. T_(m-1), with T = 1 - alpha. The way back (equations 6 and 7) takes what is let
through before a layer, and the colour behind it; nothing is divided by. Nothing is read back to the host.

An alpha below 0 says that its layer was not drawn to its end there: it is the negative of what is covered, and layers
behind are not seen, as splats are not behind the one at which drawing stops (`rasterize` with `mark_stops`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuda_ext.dispatch.library import LIBRARY, NAMESPACE, fake
from cuda_ext.dispatch.load import compiled_serves
from cuda_ext.ops.common.checks import check_floats
from cuda_ext.reference import fragments as composed
from cuda_ext.reference.fragments import NOWHERE

__all__ = [
    "NOWHERE",
    "composite_fragments",
    "composite_fragments_backward",
    "gather_fragments",
    "live_boxes",
    "scatter_fragments",
]


@torch.no_grad()
def gather_fragments(color: Tensor, alpha: Tensor, fragments: Sequence[int], out: Tensor) -> None:
    """Copy rectangles of patches into a buffer, one after the other.

    Args:
        color: [P, C] of all patches, each row by row, contiguous. alpha: [P].
        fragments: 6 integers each: the first pixel of the rectangle, the width of its patch, its width and height, its
            first row in `out`, and a sixth that `scatter_fragments` looks at.
        out: [N, C + 1] written where the pieces are.

    Raises:
        TypeError, ValueError: a tensor of the wrong shape, dtype or device, or a piece beyond one.
        NativeBuildError: the CUDA operators cannot be compiled.
    """
    pixels, channels = color.shape
    check_floats(color, color=(color, (-1, -1)), alpha=(alpha, (pixels,)), out=(out, (-1, channels + 1)))
    numbers = _checked_fragments(fragments, pixels, len(out), place=4)
    _contiguous(color=color, alpha=alpha, out=out)
    op: Any = torch.ops.ns_multigpu.gather_fragments if compiled_serves(color) else composed.gather_fragments
    op(color, alpha, numbers, out)


@torch.no_grad()
def scatter_fragments(gradients: Tensor, fragments: Sequence[int], v_color: Tensor, v_alpha: Tensor) -> None:
    """Write gradients to their fragments' pixels: the inverse of `gather_fragments` for fragments that do not overlap.

    Args:
        gradients: [N, C + 1].
        fragments: as there; the sixth number is the first row in `gradients`, or -1 for a piece that has none.
        v_color: [P, C] written where the pieces are, as is v_alpha [P].

    Raises:
        TypeError, ValueError, NativeBuildError: as `gather_fragments`.
    """
    pixels, channels = v_color.shape
    check_floats(
        v_color, gradients=(gradients, (-1, channels + 1)), v_color=(v_color, (-1, -1)), v_alpha=(v_alpha, (pixels,))
    )
    numbers = _checked_fragments(fragments, pixels, len(gradients), place=5)
    _contiguous(gradients=gradients, v_color=v_color, v_alpha=v_alpha)
    op: Any = torch.ops.ns_multigpu.scatter_fragments if compiled_serves(v_color) else composed.scatter_fragments
    op(gradients, numbers, v_color, v_alpha)


def composite_fragments(received: Tensor, layers: Sequence[int], sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Composite patches of layers, front to back. Differentiable by `received`.

    A pixel that no layer covers is black, with a coverage of 0.

    Args:
        received: [N, C + 1] colours, premultiplied, and alphas of the layers' pixels, each layer row by row. Below 0:
            see the module.
        layers: 7 integers each, those of a patch front to back: the patch, the rectangle x0, y0, x1, y1 there, its
            first row in `received`, and a seventh that `composite_fragments_backward` looks at.
        sizes: width and height of each patch.

    Returns:
        [Q, C] colours and [Q] alphas, one patch after the other, and [N] the transmittance in front of each cell
        image's pixel: 0 behind a layer that stopped. The last has no gradient.

    Raises:
        TypeError, ValueError: a tensor of the wrong shape or dtype, or a layer beyond its patch or `received`.
        NativeBuildError: the CUDA operators cannot be compiled.
    """
    check_floats(received, received=(received, (-1, -1)))
    _check_layers(layers, sizes, len(received))
    given = received.contiguous(), list(layers), list(sizes)
    return torch.ops.ns_multigpu.composite_fragments(*given) if compiled_serves(received) else _Composed.apply(*given)


@torch.no_grad()
def composite_fragments_backward(
    received: Tensor, before: Tensor, v_out: Tensor, v_alpha: Tensor, layers: Sequence[int], sizes: Sequence[int],
    count: int,
) -> Tensor:  # fmt: skip
    """Return the gradient of `composite_fragments`, of some of the layers.

    Args:
        received, layers, sizes: as there; the seventh number is the layer's first row in the result, or -1 where its
            gradient is not wanted.
        before: the third of its results. v_out: [Q, C], v_alpha: [Q], gradients of the other two.
        count: rows of the result.

    Returns:
        [count, C + 1].

    Raises:
        TypeError, ValueError, NativeBuildError: as `composite_fragments`.
    """
    rows, channels = received.shape[0], received.shape[1] - 1
    _check_layers(layers, sizes, rows)
    pixels = sum(sizes[k] * sizes[k + 1] for k in range(0, len(sizes), 2))
    check_floats(
        received, before=(before, (rows,)), v_out=(v_out, (pixels, channels)), v_alpha=(v_alpha, (pixels,))
    )  # fmt: skip
    for k in range(0, len(layers), 7):
        _, x0, y0, x1, y1, _, back = layers[k : k + 7]
        if not (back == -1 or 0 <= back <= count - (x1 - x0) * (y1 - y0)):
            raise ValueError(f"layer {k // 7} has its gradient at {back} of {count} rows.")
    op = torch.ops.ns_multigpu.composite_fragments_backward
    op = op if compiled_serves(received) else composed.composite_fragments_backward
    return op(received.contiguous(), before, v_out.contiguous(), v_alpha.contiguous(), list(layers), list(sizes), count)


@torch.no_grad()
def live_boxes(before: Tensor, fragments: Sequence[int], slots: int, least: float) -> Tensor:
    """Return boxes around the pixels of each cell image that receive enough transmittance to be visible. Nothing is
    read back.

    Args:
        before: [N] transmittance in front of each cell image's pixel: `composite_fragments`'.
        fragments: 6 integers each: slot of the result that it counts for, its first row in `before`, x0 and y0 of its
            first pixel, its width and height.
        slots: how many.
        least: what counts as enough.

    Returns:
        [slots, 5] int64: -x0, -y0, x1, y1 of the box around the pixels of all of a slot's pieces that get enough, and
        how many these are. Of none `NOWHERE` four times. The maximum of several such boxes is the box around them.

    Raises:
        TypeError, ValueError: a tensor of the wrong shape or dtype, or a piece beyond it or the slots.
        NativeBuildError: the CUDA operators cannot be compiled.
    """
    check_floats(before, before=(before, (-1,)))
    if len(fragments) % 6:
        raise ValueError(f"fragments holds 6 integers a fragment, got {len(fragments)} in all.")
    for k in range(0, len(fragments), 6):
        slot, first, _, _, width, height = fragments[k : k + 6]
        if not (0 <= slot < slots and width > 0 and height > 0 and 0 <= first <= len(before) - width * height):
            raise ValueError(
                f"piece {k // 6} is {tuple(fragments[k : k + 6])}, of {len(before)} rows and {slots} slots."
            )
    op: Any = torch.ops.ns_multigpu.live_boxes if compiled_serves(before) else composed.live_boxes
    return op(before.contiguous(), list(fragments), slots, least)


def _checked_fragments(fragments: Sequence[int], pixels: int, rows: int, place: int) -> list[int]:
    if len(fragments) % 6:
        raise ValueError(f"fragments holds 6 integers a fragment, got {len(fragments)} in all.")
    for k in range(0, len(fragments), 6):
        corner, stride, width, height = fragments[k : k + 4]
        at = fragments[k + place]
        within = corner >= 0 and 0 < width <= stride and height > 0
        within = within and corner + (height - 1) * stride + width <= pixels
        if not within or not (0 <= at <= rows - width * height or (place == 5 and at == -1)):
            raise ValueError(f"piece {k // 6} is {tuple(fragments[k : k + 6])}, of {pixels} pixels and {rows} rows.")
    return list(fragments)


def _check_layers(layers: Sequence[int], sizes: Sequence[int], rows: int) -> None:
    if len(layers) % 7 or len(sizes) % 2:
        raise ValueError(f"layers holds 7 integers each and sizes 2, got {len(layers)} and {len(sizes)} in all.")
    for k in range(0, len(layers), 7):
        patch, x0, y0, x1, y1, first = layers[k : k + 6]
        known = 0 <= patch < len(sizes) // 2
        within = known and 0 <= x0 < x1 <= sizes[2 * patch] and 0 <= y0 < y1 <= sizes[2 * patch + 1]
        if not within or not 0 <= first <= rows - (x1 - x0) * (y1 - y0):
            raise ValueError(
                f"layer {k // 7} is {tuple(layers[k : k + 7])}, of {len(sizes) // 2} patches, {rows} rows."
            )
        if k and patch < layers[k - 7]:
            raise ValueError(f"layer {k // 7} is of patch {patch}, behind one of patch {layers[k - 7]}.")


def _contiguous(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous.")


def _pixels(sizes: Sequence[int]) -> int:
    return sum(sizes[k] * sizes[k + 1] for k in range(0, len(sizes), 2))


@fake("composite_fragments")
def _composite_fake(received: Tensor, layers: Any, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    pixels = _pixels(sizes)
    return (
        received.new_empty(pixels, received.shape[1] - 1), received.new_empty(pixels), received.new_empty(len(received))
    )  # fmt: skip


@fake("composite_fragments_backward")
def _composite_backward_fake(received: Tensor, *rest: Any) -> Tensor:
    return received.new_empty(rest[-1], received.shape[1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    received, layers, sizes = inputs
    ctx.layers, ctx.sizes = layers, sizes
    ctx.save_for_backward(received, output[2])
    ctx.mark_non_differentiable(output[2])


def _gradient(ctx: Any, v_out: Tensor, v_alpha: Tensor, _: Any) -> tuple[Tensor, None, None]:
    received, before = ctx.saved_tensors
    # Here every row has its gradient, at its own place.
    layers = [n for k in range(0, len(ctx.layers), 7) for n in (*ctx.layers[k : k + 6], ctx.layers[k + 5])]
    given = received, before, v_out.contiguous(), v_alpha.contiguous(), layers, ctx.sizes, len(received)
    op = torch.ops.ns_multigpu.composite_fragments_backward
    return (op if compiled_serves(received) else composed.composite_fragments_backward)(*given), None, None


class _Composed(torch.autograd.Function):
    """`composite_fragments` where no operator serves."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, layers: list[int], sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        output = composed.composite_fragments(received, layers, sizes)
        _setup(ctx, (received, layers, sizes), output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _gradient(ctx, *grads)


torch.library.register_autograd(f"{NAMESPACE}::composite_fragments", _gradient, setup_context=_setup, lib=LIBRARY)
