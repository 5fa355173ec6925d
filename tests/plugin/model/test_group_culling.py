"""Boxes by which training culls groups of points: before each step they contain the points, after any change."""

from pathlib import Path
from typing import Any

import pytest

from cuda_ext.ops.project.boxes import new_boxes, splat_boxes
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step import step
from ns_multigpu.primitives.gaussians.kernels import GaussianKernels
from tests.lib.training_run import follow

MODEL = "pipeline.model."
OPTIONS: dict[str, Any] = {
    "fused_steps": "always", "steps_per_checksum": 0, MODEL + "num_downscales": 0, MODEL + "warmup_length": 4,
    MODEL + "background_color": "black", MODEL + "refine_every": 5, MODEL + "reset_alpha_every": 6,
    MODEL + "densify_grad_thresh": 0.0005, MODEL + "cull_alpha_thresh": 0.06, MODEL + "stop_screen_size_at": 0,
    "optimizers.means.optimizer.lr": 0.05, "optimizers.scales.optimizer.lr": 0.1,
}  # fmt: skip


class Watched:
    """Looks at every model that is projected.

    Attributes:
        boxes: by step, whether it had any. counts: points by step. widened: boxes larger than they had to be.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.boxes: list[bool] = []
        self.counts: list[int] = []
        self.widened = 0
        project = GaussianKernels.project

        def watched(kernels: Any, model: Any, *rest: Any) -> Any:
            self._look(model)
            return project(kernels, model, *rest)

        monkeypatch.setattr(GaussianKernels, "project", watched)
        monkeypatch.setattr(step, "GROUPS_FROM", 0)

    def _look(self, model: Any) -> None:
        means, log_scales, boxes = model.params[0], model.params[2], model.boxes
        self.boxes.append(boxes is not None)
        self.counts.append(int(means.isfinite().all(1).sum()))
        if boxes is None:
            return
        fresh = new_boxes(means)
        splat_boxes(means, log_scales, fresh)
        assert (boxes[:, :3] <= fresh[:, :3]).all(), "a point is below its box"
        assert (boxes[:, 3:] >= fresh[:, 3:]).all(), "a point is above its box, or larger"
        self.widened += int((boxes != fresh).any())


@pytest.mark.parametrize("method", ["splatfacto-batch", "splatfacto-tile"])
def test_boxes_hold_what_training_makes_of_points(
    method: str, tmp_path: Path, capture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    follow(World.single(), capture, tmp_path / "runs", OPTIONS, 40, 1, method=method, double=False)
    assert len(watched.boxes) >= 40 and all(watched.boxes)
    assert len(set(watched.counts)) > 2, "refinements must have changed the points"
    assert 0 < watched.widened < len(watched.boxes), "made again for each block, and wider within it"


def test_no_culling_boxes_with_noise(tmp_path: Path, capture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    options = {**OPTIONS, MODEL + "densifier": "mcmc", MODEL + "reset_alpha_every": 100}
    follow(World.single(), capture, tmp_path / "runs", options, 12, 1, double=False)
    assert len(watched.boxes) >= 12 and not any(watched.boxes)
