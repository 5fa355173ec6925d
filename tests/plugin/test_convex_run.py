"""Runs with `--pipeline.model.primitive convex`: as on one worker, on from checkpoints; and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ns_multigpu.core.collectives import all_gather_rows
from ns_multigpu.core.world import World
from ns_multigpu.plugin.checkpoint.verify import checkpoints_in
from ns_multigpu.plugin.export.ply import export_ply
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.model.options import SplatModelConfig
from ns_multigpu.plugin.model.surfaces import check_primitive
from tests.plugin.course import follow, write_capture
from tests.plugin.rendering import camera
from tests.ranks import run_ranks

OPTIONS: dict[str, Any] = {
    "pipeline.views_per_step": 2, "pipeline.model.num_downscales": 0, "pipeline.model.primitive": "convex",
    "pipeline.model.warmup_length": 4, "pipeline.model.refine_every": 8, "pipeline.model.morton_order": True,
    "pipeline.model.densify_grad_thresh_convex": 1e-3,
}  # fmt: skip


def train(
    world: World, folder: Path, strategy: str, begun: Path | None = None, double: bool = True
) -> tuple[dict[str, Any], int]:
    """Trains and leaves a checkpoint in `folder`; returns sums over points, in single precision a picture too, and the
    first step."""
    options = OPTIONS | {"pipeline.strategy": strategy, "load_dir": begun}
    runs, saved = folder / f"runs-{strategy}-{world.size}", folder / f"{strategy}-{world.size}"
    steps = 10 if begun is None else 12
    trainer = follow(world, folder / "tiny", runs, options, steps, 1, double=double)
    saved.mkdir(exist_ok=True)
    assert trainer.checkpoints.write(steps - 1, saved) == ""
    model = trainer.pipeline.model
    whole = {
        name: all_gather_rows(value.detach(), world)[0] if model.sharded else value.detach()
        for name, value in model.gauss_params.items()
    }
    assert whole["corners"].shape[1] == 18 and all(bool(value.isfinite().all()) for value in whole.values())
    found: dict[str, Any] = {name: value.sum(0) for name, value in whole.items()} | {"count": len(whole["means"])}
    if not double:
        trainer.pipeline.eval()
        with torch.no_grad():
            found["rgb"] = model.get_outputs_for_camera(camera(28, 24))["rgb"]
        assert found["rgb"].shape == (24, 28, 3) and float(found["rgb"].std()) > 0.01
    return found, trainer._start_step


def test_a_run_is_as_on_one_worker_and_goes_on(tmp_path: Path) -> None:
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


REFUSED = [
    ({"rasterize_mode": "antialiased"}, "rasterize-mode antialiased.*which convexes lack; use classic"),
    ({"densifier": "mcmc"}, "densifier mcmc is not for 3D convexes"),
    ({"selective_adam": True}, "selective-adam True is not for 3D convexes .*only the fused steps of 3D Gaussians"),
    ({"optimizer_state": "compact"}, "optimizer-state compact is not for 3D convexes .*steps of 3D Gaussians"),
    ({"use_scale_regularization": True}, "use-scale-regularization True is not for 3D convexes .*which convexes lack"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_what_convexes_cannot_do_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        check_primitive(SplatModelConfig(primitive="convex", **options), "tile")
    check_primitive(SplatModelConfig(primitive="convex"), "pixel")
