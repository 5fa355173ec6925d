"""Results on different numbers of threads."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def same_on_threads(run: Callable[[], Iterable[Tensor]]) -> list[Tensor]:
    """Return what `run` returns, after asserting that it has the same bits on 1, 2 and 3 threads."""
    before, found = torch.get_num_threads(), list[list[Tensor]]()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(list(run()))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    return found[0]
