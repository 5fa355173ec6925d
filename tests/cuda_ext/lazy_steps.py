"""Runs of steps over a small model, dense and with deferred steps."""

from typing import Any

import torch
from torch import Tensor

from cuda_ext.ops.optim.adam import adam_scalars
from cuda_ext.ops.optim.fused import SplatRows
from cuda_ext.ops.optim.lazy_adam import LazyAdam, splat_flush
from cuda_ext.ops.project.boxes import box_views, new_boxes, splat_boxes
from tests.cuda_ext.fused_steps import Model, make_model

RATES = (2e-3, 1e-3, 5e-3, 2e-2, 2.5e-3, 5e-4)
CAPACITY = 2000
WHOLE_STEP_SCALE = 0.13


def step_scalars(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Adam's numbers of a step, counted from 0, with rates that fall."""
    lines = [adam_scalars(rate * 0.98**step, (0.9, 0.999), 1e-15, step + 1) for rate in RATES]
    return torch.tensor(lines, dtype=dtype)


def fresh_model(
    points: int, views: int = 2, dtype: torch.dtype = torch.float64, rest: int = 15, lenses: bool = False
) -> Model:
    """Return a scene wider than the images, at whose Adam nothing has happened yet."""
    model = make_model(points, views, seed=3, rest=rest, spread=1.2, lenses=lenses).to("cpu", dtype)
    for moments in (model.exp_avgs, model.exp_avg_sqs):
        for moment in moments:
            moment.zero_()
    return model


class StepRun:
    """Steps of one model whose cameras turn to and fro, so that points go in and out of view.

    Args:
        boxed: cull groups of points by their boxes.
        speed: how many times as large rates are.

    Attributes:
        rows: of the last step.
        longest_gap: the most steps that a point which is drawn had missed.
        hidden: of all pairs of a view and a group, how many were culled, and of how many.
    """

    def __init__(
        self, model: Model, lazy: bool, degree: int | None = 3, *, boxed: bool = False, speed: float = 1.0,
        **settings: Any,
    ) -> None:  # fmt: skip
        means = model.params[0]
        self.speed, self.hidden = speed, [0, 0]
        self.boxes = new_boxes(means) if boxed else None
        self._make_boxes(model)
        self.model, self.degree, self.settings = model, degree, settings
        self.lazy = LazyAdam.make(len(means), means.device, means.dtype) if lazy else None
        self.statistics = {k: torch.zeros_like(means[:, 0]) for k in ("grad2d", "seen", "radii_max")}
        self._viewmats = model.viewmats.clone()
        self.longest_gap, self._drawn = 0, [0, 0]

    @property
    def drawn_share(self) -> float:
        """Of the points, the share that a step drew, on average."""
        return self._drawn[0] / max(self._drawn[1], 1)

    def forward(self, step: int) -> SplatRows:
        self._turn(step)
        missed: dict[str, Any] = {}
        if self.boxes is not None:
            model = self.model
            table = self.lazy and self.lazy.table
            compact = model.exp_avgs[0].dtype == torch.bfloat16
            shows = box_views(self.boxes, model.viewmats, model.Ks, model.sizes, table=table, compact=compact)
            self.hidden[0] += int((~shows).sum())
            self.hidden[1] += shows.numel()
        if self.lazy is not None:
            missed = {"exp_avgs": self.model.exp_avgs, "exp_avg_sqs": self.model.exp_avg_sqs, "lazy": self.lazy}
        return self.model.forward(CAPACITY, self.degree, **self.settings, **missed, boxes=self.boxes)

    def step(self, step: int) -> None:
        model = self.model
        self.rows = self.forward(step)
        model.scalars = step_scalars(step, model.params[0].dtype).to(model.params[0].device)
        model.scalars[:, 0] *= self.speed
        drawn = self.rows.point_ids[self.rows.radii[:, 0] > 0].unique().long()
        self._drawn[0] += len(drawn)
        self._drawn[1] += len(model.params[0])
        if self.lazy is not None and len(drawn):
            self.longest_gap = max(self.longest_gap, int((self.lazy.steps - self.lazy.last[drawn].int()).max()))
        model.update(
            self.rows, row_records(self.rows, step), self.degree, lazy=self.lazy, boxes=self.boxes, opacity_weight=0.02,
            scale_weight=0.03, whole_step_scale=WHOLE_STEP_SCALE, **self.settings, **self.statistics,
        )  # fmt: skip

    def flush(self) -> None:
        assert self.lazy is not None
        splat_flush(self.model.params, self.model.exp_avgs, self.model.exp_avg_sqs, self.lazy)
        self._make_boxes(self.model)

    def _make_boxes(self, model: Model) -> None:
        if self.boxes is not None:
            splat_boxes(model.params[0], model.params[2], self.boxes)

    def _turn(self, step: int) -> None:
        angle = torch.tensor(0.9 * (step % 14 - 6.5) / 6.5, dtype=torch.float64)
        turn = torch.eye(4, dtype=torch.float64)
        turn[0, 0] = turn[2, 2] = angle.cos()
        turn[0, 2], turn[2, 0] = angle.sin(), -angle.sin()
        self.model.viewmats = turn.to(self._viewmats) @ self._viewmats


def in_graphs(plain: StepRun, graphed: StepRun, warm: StepRun) -> None:
    """Two blocks of seven steps and a flush on a GPU: `plain` by launches, which must not wait for the device,
    `graphed` by replaying a step and a flush, each captured once. All three start alike; `warm` is used up."""
    device = plain.model.params[0].device
    scalars = torch.zeros(6, 8, device=device)
    records = row_records(plain.forward(0), 0)
    cameras: list[Tensor] = []
    for step in range(7):
        plain._turn(step)
        cameras.append(plain.model.viewmats.clone())
    for one in (plain, graphed, warm):
        one.model.viewmats, one.model.scalars = cameras[0].clone(), scalars

    def take(one: StepRun) -> None:
        model = one.model
        missed = {"exp_avgs": model.exp_avgs, "exp_avg_sqs": model.exp_avg_sqs, "lazy": one.lazy}
        rows = model.forward(CAPACITY, **missed, boxes=one.boxes)
        model.update(rows, records, lazy=one.lazy, boxes=one.boxes)

    take(warm)
    warm.flush()
    graphs = (torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph())
    torch.cuda.synchronize()
    with torch.cuda.graph(graphs[0]):
        take(graphed)
    with torch.cuda.graph(graphs[1]):
        graphed.flush()
    for _ in range(2):
        for step in range(7):
            scalars.copy_(step_scalars(step, torch.float32))
            for one in (plain, graphed):
                one.model.viewmats.copy_(cameras[step])
            torch.cuda.set_sync_debug_mode("error")
            try:
                take(plain)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            graphs[0].replay()
        plain.flush()
        graphs[1].replay()


def assert_same_bits(one: StepRun, other: StepRun) -> None:
    """Parameters and moments."""
    for kind in ("params", "exp_avgs", "exp_avg_sqs"):
        for a, b in zip(getattr(one.model, kind), getattr(other.model, kind), strict=True):
            assert torch.equal(a, b)


def row_records(rows: SplatRows, step: int) -> Tensor:
    """Gradients [M, 16] that depend on the view and point of a row and on the step, not on where the row lies. What is
    not to be looked at is NaN."""
    key = (rows.view_ids * 1000 + rows.point_ids).to(torch.float64)[:, None]

    def waves(width: int, size: float, phase: float) -> Tensor:
        columns = torch.arange(width, device=key.device, dtype=torch.float64)
        return (size * torch.sin(key * 1.7 + columns * 2.3 + step * 0.61 + phase)).to(rows.means2d.dtype)

    none, colors = rows.means2d.new_full((len(key), 4), torch.nan), waves(3, 0.3, 3.0)
    geometry, absolute = (waves(2, 0.01, 0.0), waves(3, 0.1, 1.0), waves(1, 0.3, 2.0)), waves(2, 0.02, 4.0).abs()
    return torch.cat([*geometry, colors, none[:, :1], absolute, none], dim=1)


def distances(one: StepRun, other: StepRun) -> dict[str, Tensor]:
    """Return the differences of two models, element by element: parameters in units of the rate, moments of the
    largest."""
    found: dict[str, Tensor] = {}
    for kind in ("params", "exp_avgs", "exp_avg_sqs"):
        lists = (getattr(one.model, kind), getattr(other.model, kind))
        for i, (a, b) in enumerate(zip(*lists, strict=True)):
            a, b = a.double().cpu(), b.double().cpu()
            if a.numel() > 0:
                unit = RATES[i] if kind == "params" else float(a.abs().max()) or 1.0
                found[f"{kind} {i}"] = (a - b).abs().flatten() / unit
    return found


def differences(one: StepRun, other: StepRun, mean: bool = False) -> dict[str, float]:
    """Return the largest of each of the `distances`, or their mean."""
    return {name: float(d.mean() if mean else d.max()) for name, d in distances(one, other).items()}
