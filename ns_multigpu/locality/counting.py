"""Counts of the points that training views show: by group for the graph, and by rank for each patch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy  # its parts are loaded when they are first asked for
import torch
from numpy.typing import NDArray
from torch import Tensor

from cuda_ext.ops.project.patch_counts import patch_counts
from ns_multigpu.core.step.step_settings import HALO
from ns_multigpu.core.types import View
from ns_multigpu.locality.groups import Groups
from ns_multigpu.locality.patches import cuts, patches_of

Ints = NDArray[np.int64]
_AT_ONCE = 1 << 25
"""Counts that are held at once before they are thinned or converted."""


class PatchCounter:
    """Counter of a sample's points in patches of views. A point counts by its centre, in all halos that hold it.

    Halos are those of fused steps. The smaller ones of ordinary steps would leave out splats whose centre is outside.

    Args:
        groups: of the sample, with boxes. means: [S, 3] world coordinates. far: largest depth that views draw.
    """

    def __init__(self, groups: Groups, means: Tensor, far: float) -> None:
        self._size, self._far = groups.size, far
        self._points = means.detach().float()[groups.order].cpu().T.contiguous()
        lower, upper = groups.lower.float().cpu(), groups.upper.float().cpu()
        self._boxes = torch.cat([(lower + upper) / 2, (upper - lower) / 2], dim=1).T.contiguous()

    def by_group(self, views: Sequence[View]) -> Any:
        """Return the points [V, C] of each group that views show, as csr of int64 without zeros."""
        groups = self._boxes.shape[1]
        labels, step = torch.arange(groups), max(1, _AT_ONCE // groups)
        parts = [
            scipy.sparse.csr_matrix(self._count(views[first : first + step], 1, labels, groups)[:, 0].numpy())
            for first in range(0, len(views), step)
        ]
        return scipy.sparse.vstack(parts, format="csr", dtype=np.int64)

    def by_rank(self, views: Sequence[View], factor: int, owners: Ints, ranks: int) -> NDArray[np.float32]:
        """Return the points [V, factor^2, ranks] that views' patches need from the owners [C] of groups."""
        labels, step = torch.from_numpy(owners), max(1, _AT_ONCE // (factor * factor * ranks))
        found = np.empty((len(views), factor * factor, ranks), dtype=np.float32)
        for first in range(0, len(views), step):
            found[first : first + step] = self._count(views[first : first + step], factor, labels, ranks).numpy()
        return found

    def _count(self, views: Sequence[View], factor: int, labels: Tensor, num_labels: int) -> Tensor:
        sides = [(_padded(view.width, factor), _padded(view.height, factor)) for view in views]
        columns, rows = (torch.tensor(side, dtype=torch.int32) for side in zip(*sides, strict=True))
        halos = torch.tensor([HALO * (len(patches_of(view, 0, factor)) > 1) for view in views], dtype=torch.int32)
        Ks = torch.stack([view.K for view in views]).float().cpu()
        lenses = torch.stack([Ks[:, 0, 0], Ks[:, 1, 1], Ks[:, 0, 2], Ks[:, 1, 2]], dim=1)
        poses = torch.stack([view.viewmat for view in views]).float().cpu()
        return patch_counts(
            self._points, self._size, self._boxes, labels, num_labels, poses, lenses, columns, rows, halos,
            far=self._far,
        )  # fmt: skip


def _padded(pixels: int, factor: int) -> list[int]:
    """Return `cuts` with the last one repeated, [factor + 1]."""
    found = cuts(pixels, factor)
    return found + found[-1:] * (factor + 1 - len(found))
