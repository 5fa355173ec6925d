"""Runs with `--pipeline.model.primitive convex`: as on one worker, on from checkpoints; and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.step_settings import Status
from ns_multigpu.plugin.blocks.initial_capacity import InitialCapacity
from ns_multigpu.plugin.blocks.training import Training
from ns_multigpu.plugin.checkpoint.verify import checkpoints_in
from ns_multigpu.plugin.export.ply import export_ply
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.faults.signals import NonFiniteError
from ns_multigpu.plugin.model.options import SplatModelConfig
from ns_multigpu.plugin.model.surfaces import check_primitive
from ns_multigpu.primitives.convexes.kernels import ConvexKernels
from tests.lib.ranks import run_ranks
from tests.lib.rendering import camera
from tests.lib.training_run import follow, sums_over_points, train_single, write_capture

OPTIONS: dict[str, Any] = {
    "pipeline.views_per_step": 2, "pipeline.model.num_downscales": 0, "pipeline.model.primitive": "convex",
    "pipeline.model.warmup_length": 4, "pipeline.model.refine_every": 8, "pipeline.model.morton_order": True,
    "pipeline.model.densify_grad_thresh_convex": 1e-3,
}  # fmt: skip


def train(
    world: World, folder: Path, strategy: str, begun: Path | None = None, double: bool = True
) -> tuple[dict[str, Any], int]:
    """Train and leave a checkpoint in `folder`, and return sums over points, in single precision a picture too, and the
    first step."""
    options = OPTIONS | {"pipeline.strategy": strategy, "load_dir": begun}
    runs, saved = folder / f"runs-{strategy}-{world.size}", folder / f"{strategy}-{world.size}"
    steps = 10 if begun is None else 12
    trainer = follow(world, folder / "tiny", runs, options, steps, 1, double=double)
    saved.mkdir(exist_ok=True)
    assert trainer.checkpoints.write(steps - 1, saved) == ""
    model = trainer.pipeline.model
    found = sums_over_points(model, world)
    assert found["corners"].shape == (18,)
    assert all(bool(torch.as_tensor(value).isfinite().all()) for value in found.values())
    if not double:
        trainer.pipeline.eval()
        with torch.no_grad():
            found["rgb"] = model.get_outputs_for_camera(camera(28, 24))["rgb"]
        assert found["rgb"].shape == (24, 28, 3) and float(found["rgb"].std()) > 0.01
    return found, trainer._start_step


def test_run_equals_one_worker_and_resumes(tmp_path: Path) -> None:
    write_capture(tmp_path / "tiny", wide=False)
    expected, start = train(World.single(), tmp_path, "tile")
    assert start == 0 and expected["count"] > 80, "it has been densified"
    for found, _ in run_ranks(train, 2, tmp_path, "tile"):
        assert found.pop("count") == expected["count"]
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    single, _ = train(World.single(), tmp_path, "batch", double=False)
    found, start = train(World.single(), tmp_path, "locality", tmp_path / "batch-1", double=False)
    assert start == 10 and found["count"] == single["count"] > 80
    assert float((found["rgb"] - single["rgb"]).abs().mean()) < 0.05, "two steps on, nearly the same picture"
    (checkpoint,) = checkpoints_in(tmp_path / "tile-2")
    with pytest.raises(InputError, match=r"a checkpoint of 3D convexes \(convex\), which have no place in PLY"):
        export_ply(checkpoint, tmp_path / "points.ply")
    with pytest.raises(InputError, match=r"3D convexes \(convex\), and this run is of 3D Gaussians \(3dgs\)"):
        options = OPTIONS | {"pipeline.model.primitive": "3dgs", "load_dir": tmp_path / "batch-1"}
        follow(World.single(), tmp_path / "tiny", tmp_path / "other", options, 14, 1, double=False)


def test_fused_steps_are_the_ordinary_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs include a refinement, and steps that exceeded their capacities and were retried."""
    write_capture(tmp_path / "tiny", wide=False)
    full: list[bool] = []
    learn = Training._learn

    def recorded(self: Training, status: Status, *rest: Any) -> None:
        full.append(status.full)
        learn(self, status, *rest)

    for strategy, ranks in (("tile", 2), ("batch", 1)):
        expected = train_single(World.single(), tmp_path, OPTIONS, strategy, "never")
        assert expected["count"] > 80
        with monkeypatch.context() as patch:
            patch.setattr(Training, "_learn", recorded)
            patch.setattr(InitialCapacity, "_guess", lambda self, pixels: (24, 12, 96))
            found = run_ranks(train_single, ranks, tmp_path, OPTIONS, strategy, "always")
        for one in found:
            torch.testing.assert_close(one, expected, rtol=1e-4, atol=2e-3)
    assert full.count(True) == 1 and full.count(False) > 1


def test_fused_steps_name_nonfinite_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_capture(tmp_path / "tiny", wide=False)
    usual, steps = ConvexKernels.draw_back, list[bool]()

    def spoilt(self: ConvexKernels, drawn: Any, v_color: torch.Tensor, *rest: Any) -> None:
        steps.append(True)
        usual(self, drawn, v_color if len(steps) < 6 else torch.full_like(v_color, torch.inf), *rest)

    monkeypatch.setattr(ConvexKernels, "draw_back", spoilt)
    options = {**OPTIONS, "fused_steps": "always", "steps_per_numeric_check": 4, "pipeline.model.stop_split_at": 0}
    with pytest.raises(NonFiniteError, match=r"  step 5: gradient of the rows \(views of the step: view \d"):
        follow(World.single(), tmp_path / "tiny", tmp_path / "runs", options, 10, 1, double=False)


REFUSED = [
    ({"rasterize_mode": "antialiased"}, "rasterize-mode antialiased.*which convexes lack; use classic"),
    ({"densifier": "mcmc"}, "densifier mcmc is not for 3D convexes"),
    ({"optimizer_state": "compact"}, "optimizer-state compact is not for 3D convexes .*steps of 3D Gaussians"),
    ({"use_scale_regularization": True}, "use-scale-regularization True is not for 3D convexes .*which convexes lack"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_options_unsupported_by_convexes_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        check_primitive(SplatModelConfig(primitive="convex", **options), "tile")
    check_primitive(SplatModelConfig(primitive="convex"), "pixel")
