"""Running sums of samples along rays: very many short rows."""

import torch
from torch import Tensor

_RATIO = 512
"""Largest ratio of rows to columns (rounded up to a power of two) for which `torch.cumsum` is fast on a GPU."""


def running_sum(rows: Tensor) -> Tensor:
    """Return inclusive running sums of rows [n, S]: `rows.cumsum(1)`.

    A GPU computes it in chunks. PyTorch 2.11 chooses a power of two of threads per row from the ratio of n to S. If n
    is too large for S, it chooses 512 threads, of which all but S idle. On an H200, 65,536 rows of 48 samples took 363
    microseconds at once, and take 32 in chunks.

    Args:
        rows: [n, S], at least one column.
    """
    most = most_rows(rows.shape[1])
    return in_chunks(rows, most) if rows.is_cuda and len(rows) > most else rows.cumsum(1)


def most_rows(columns: int) -> int:
    """Return the largest number of rows of this many columns for which `torch.cumsum` is fast."""
    return _RATIO << (columns - 1).bit_length()


def in_chunks(rows: Tensor, most: int) -> Tensor:
    """Compute `running_sum` in chunks of `most` rows."""
    return torch.cat([piece.cumsum(1) for piece in rows.split(most)])
