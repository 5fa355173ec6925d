"""Parts of a step that defers points that are not drawn (`cuda_ext.ops.optim.lazy_adam`), and their least times."""

import torch
from torch import Tensor

from benchmarks.kernels.floors import BYTES_PER_MS, Counts
from benchmarks.kernels.fused_path import FusedPath
from benchmarks.scenes.garden import DEGREE, Scene
from cuda_ext import LazyAdam, SplatRows, splat_flush, splat_forward, splat_update
from cuda_ext.ops.optim.adam import adam_scalars

BLOCK = 50
"""Steps between two flushes."""

_MISSED = 25
"""Steps that every point has missed."""
_SHIFT = 1e-12
"""Sum of the missed steps' rates: negligible motion, but not zero, so that kernels cannot skip it."""


class LazyParts:
    """`splat_forward`, `splat_update` and `splat_flush` of a scene with deferred steps of all points.

    Each can be repeated. The two that write first restore that, which is 1 byte a point. The scene is unchanged.

    Args:
        path: the scene's, with sufficient capacities.
    """

    def __init__(self, path: FusedPath) -> None:
        self._scene: Scene = path.scene
        self._rows = path.capacities.rows
        scene = self._scene
        self._moments = [[torch.full_like(p, value) for p in scene.raw()] for value in (1e-6, 1e-10)]
        self._lazy = LazyAdam.make(scene.points, scene.device)
        self._table = self._lazy.table.clone()
        self._table[:_MISSED, :, :2] = torch.tensor([_SHIFT, 1e-15], device=scene.device)
        line = adam_scalars(_SHIFT, (0.9, 0.999), 1e-15, 1000)
        self._scalars = torch.tensor([line] * 6, device=scene.device)
        self._put_back()

    def _put_back(self) -> None:
        self._lazy.last.zero_()
        self._lazy.table.copy_(self._table)
        self._lazy.steps.fill_(_MISSED)

    def forward(self, boxes: Tensor | None = None) -> SplatRows:
        s, lazy = self._scene, self._lazy
        return splat_forward(
            *s.raw(), viewmats=s.viewmats, Ks=s.Ks, sizes=s.size, degree=DEGREE, capacity=self._rows,
            exp_avgs=self._moments[0], exp_avg_sqs=self._moments[1], lazy=lazy, boxes=boxes,
        )  # fmt: skip

    def update(self, rows: SplatRows, records: Tensor, boxes: Tensor | None = None) -> None:
        s = self._scene
        self._put_back()
        moments = (self._moments[0], self._moments[1], self._scalars)
        splat_update(s.raw(), *moments, s.viewmats, s.Ks, s.size, rows, records, DEGREE, lazy=self._lazy, boxes=boxes)

    def flush(self) -> None:
        self._put_back()
        splat_flush(self._scene.raw(), self._moments[0], self._moments[1], self._lazy)


def lazy_floors(counts: Counts, floor: dict[str, float]) -> dict[str, float]:
    """Return `floors` of the parts of a lazy step, including its share of a flush.

    Args:
        floor: those of the ordinary step.
    """

    def bytes_ms(count: float) -> float:
        return count / BYTES_PER_MS

    parts = {
        "forward": floor["splat_forward"] + bytes_ms(counts.points + 2 * 236 * counts.visible),
        "update": bytes_ms((48 + 1418) * counts.visible),
        "flush": bytes_ms(1418 * counts.points),
    }
    rest = floor["step"] - floor["splat_forward"] - floor["update"]
    return {**parts, "step": rest + parts["forward"] + parts["update"] + parts["flush"] / BLOCK}
