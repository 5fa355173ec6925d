"""The operators of `cuda_ext.ops.exchange.fragments` in torch's own: a piece after the other."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

NOWHERE = -(1 << 30)
"""A bound of nothing."""


def gather_fragments(color: Tensor, alpha: Tensor, fragments: Sequence[int], out: Tensor) -> None:
    """See `cuda_ext.ops.exchange.fragments.gather_fragments`."""
    channels = color.shape[1]
    for corner, stride, width, height, first, _ in _rows(fragments, 6):
        there = out[first : first + width * height].view(height, width, channels + 1)
        there[..., :channels] = color.as_strided((height, width, channels), (stride * channels, channels, 1),
                                                 color.storage_offset() + corner * channels)  # fmt: skip
        there[..., channels] = alpha.as_strided((height, width), (stride, 1), alpha.storage_offset() + corner)


def scatter_fragments(gradients: Tensor, fragments: Sequence[int], v_color: Tensor, v_alpha: Tensor) -> None:
    """See `cuda_ext.ops.exchange.fragments.scatter_fragments`."""
    channels = v_color.shape[1]
    for corner, stride, width, height, _, back in _rows(fragments, 6):
        if back < 0:
            continue
        there = gradients[back : back + width * height].view(height, width, channels + 1)
        v_color.as_strided((height, width, channels), (stride * channels, channels, 1),
                           v_color.storage_offset() + corner * channels).copy_(there[..., :channels])  # fmt: skip
        v_alpha.as_strided((height, width), (stride, 1), v_alpha.storage_offset() + corner).copy_(there[..., channels])


def composite_fragments(received: Tensor, layers: Sequence[int], sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Composite as `cuda_ext.ops.exchange.fragments.composite_fragments`; third: the part of each pixel seen by its
    layer."""
    channels = received.shape[1] - 1
    before = received.new_empty(len(received))
    colors, through = _canvases(received, sizes, channels)
    left = [one.clone() for one in through]
    for patch, x0, y0, x1, y1, first, _ in _rows(layers, 7):
        piece = received[first : first + (y1 - y0) * (x1 - x0)].view(y1 - y0, x1 - x0, channels + 1)
        rest = through[patch][y0:y1, x0:x1]
        before[first : first + rest.numel()].view_as(rest).copy_(rest)
        colors[patch][y0:y1, x0:x1] += rest[..., None] * piece[..., :channels]
        alpha = piece[..., channels]
        kept = left[patch][y0:y1, x0:x1]
        kept.copy_(torch.where(rest > 0, rest * (1 - alpha.abs()), kept))
        rest.copy_(torch.where(alpha < 0, 0, rest * (1 - alpha.abs())))
    flat = [torch.cat([one.reshape(-1, *one.shape[2:]) for one in some]) for some in (colors, left) if some]
    if not flat:
        return received.new_zeros(0, channels), received.new_zeros(0), before
    return flat[0], 1 - flat[1], before


def composite_fragments_backward(
    received: Tensor, before: Tensor, v_out: Tensor, v_alpha: Tensor, layers: Sequence[int], sizes: Sequence[int],
    count: int,
) -> Tensor:  # fmt: skip
    """See `cuda_ext.ops.exchange.fragments.composite_fragments_backward`."""
    channels = received.shape[1] - 1
    gradients = received.new_zeros(count, channels + 1)
    behind, rest = _canvases(received, sizes, channels)  # what later layers make of a pixel, and let through
    starts = [0]
    for k in range(0, len(sizes), 2):
        starts.append(starts[-1] + sizes[k] * sizes[k + 1])
    rows = list(_rows(layers, 7))
    for patch, x0, y0, x1, y1, first, back in reversed(rows):
        width, height = sizes[2 * patch : 2 * patch + 2]
        own = slice(starts[patch], starts[patch + 1])
        inner = (slice(y0, y1), slice(x0, x1))
        v_c, v_a = v_out[own].view(height, width, channels)[inner], v_alpha[own].view(height, width)[inner]
        pixels = slice(first, first + (y1 - y0) * (x1 - x0))
        piece = received[pixels].view(y1 - y0, x1 - x0, channels + 1)
        light, color, last = before[pixels].view(y1 - y0, x1 - x0), behind[patch][inner], rest[patch][inner]
        alpha = piece[..., channels]
        color[alpha < 0], last[alpha < 0] = 0, 1  # nothing behind counts
        if back >= 0:
            there = gradients[back : back + light.numel()].view(y1 - y0, x1 - x0, channels + 1)
            there[..., :channels] = light[..., None] * v_c
            by_covered = light * (v_a * last - (v_c * color).sum(-1))
            there[..., channels] = torch.where(alpha < 0, -by_covered, by_covered)
        through = 1 - alpha.abs()
        color.copy_(piece[..., :channels] + through[..., None] * color)
        last *= through
    return gradients


def live_boxes(before: Tensor, fragments: Sequence[int], slots: int, least: float) -> Tensor:
    """See `cuda_ext.ops.exchange.fragments.live_boxes`."""
    boxes = torch.full((slots, 5), NOWHERE, dtype=torch.int64, device=before.device)
    boxes[:, 4] = 0
    for slot, first, x0, y0, width, height in _rows(fragments, 6):
        live = before[first : first + width * height].view(height, width) >= least
        across = torch.arange(x0, x0 + width, device=before.device)
        down = torch.arange(y0, y0 + height, device=before.device)
        columns, lines = live.any(0), live.any(1)
        found = [torch.where(columns, -across, NOWHERE).max(), torch.where(lines, -down, NOWHERE).max()]
        found += [torch.where(columns, across + 1, NOWHERE).max(), torch.where(lines, down + 1, NOWHERE).max()]
        boxes[slot, :4] = torch.maximum(boxes[slot, :4], torch.stack(found))
        boxes[slot, 4] += live.sum()
    return boxes


def _rows(numbers: Sequence[int], width: int) -> Iterator[Sequence[int]]:
    return (numbers[k : k + width] for k in range(0, len(numbers), width))


def _canvases(like: Tensor, sizes: Sequence[int], channels: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return zeros [h, w, channels] and ones [h, w] for each patch."""
    pairs = list(_rows(sizes, 2))
    return [like.new_zeros(h, w, channels) for w, h in pairs], [like.new_ones(h, w) for w, h in pairs]
