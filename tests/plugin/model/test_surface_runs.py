"""Runs with `--pipeline.model.primitive` 2dgs or convex: as on one worker, on from checkpoints; and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.step_settings import Status
from ns_multigpu.core.types import Patch, Pixels, View
from ns_multigpu.plugin.blocks.initial_capacity import InitialCapacity
from ns_multigpu.plugin.blocks.training import Training
from ns_multigpu.plugin.checkpoint.verify import checkpoints_in
from ns_multigpu.plugin.export.ply import export_ply
from ns_multigpu.plugin.export.splat import export_splat
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.faults.signals import NonFiniteError
from ns_multigpu.plugin.model.options import SplatModelConfig
from ns_multigpu.plugin.model.surfaces import check_primitive, weights
from ns_multigpu.primitives.convexes.kernels import ConvexKernels
from ns_multigpu.primitives.surfels.losses import distortion_loss, normal_loss, normals_of_depth
from tests.lib.ranks import run_ranks
from tests.lib.reconstruction import add_model
from tests.lib.rendering import camera
from tests.lib.training_run import follow, sums_over_points, train_single, write_capture

COMMON: dict[str, Any] = {
    "pipeline.views_per_step": 2, "pipeline.model.num_downscales": 0, "pipeline.model.warmup_length": 4,
    "pipeline.model.refine_every": 8, "pipeline.model.morton_order": True,
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "2dgs": {
        **COMMON, "pipeline.model.primitive": "2dgs", "pipeline.model.normal_loss_start": 6,
        "pipeline.model.distortion_loss": 0.1, "pipeline.model.distortion_loss_start": 3,
        "pipeline.model.depth_loss": 0.1, "pipeline.model.depth_loss_start": 5,
        "pipeline.model.densify_grad_thresh_2dgs": 1e-9,
    },
    "convex": {
        **COMMON, "pipeline.model.primitive": "convex", "pipeline.model.densify_grad_thresh_convex": 1e-3,
    },
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_capture(tmp_path / "tiny", wide=False)
    add_model(tmp_path / "tiny")
    return tmp_path


def train(
    world: World, folder: Path, primitive: str, strategy: str, begun: Path | None = None, double: bool = True
) -> tuple[dict[str, Any], int]:
    """Train and leave a checkpoint in `folder`, and return sums over points, in single precision a picture too, and the
    first step."""
    options = OPTIONS[primitive] | {"pipeline.strategy": strategy, "load_dir": begun}
    runs, saved = folder / f"runs-{strategy}-{world.size}", folder / f"{strategy}-{world.size}"
    steps = 10 if begun is None else 12
    trainer = follow(world, folder / "tiny", runs, options, steps, 1, double=double)
    saved.mkdir(exist_ok=True)
    assert trainer.checkpoints.write(steps - 1, saved) == ""
    model = trainer.pipeline.model
    found = sums_over_points(model, world)
    name, width = {"2dgs": ("scales", 2), "convex": ("corners", 18)}[primitive]
    assert found[name].shape == (width,)
    assert all(bool(torch.as_tensor(value).isfinite().all()) for value in found.values())
    if not double:
        trainer.pipeline.eval()
        with torch.no_grad():
            found["rgb"] = model.get_outputs_for_camera(camera(28, 24))["rgb"]
        assert found["rgb"].shape == (24, 28, 3) and float(found["rgb"].std()) > 0.01
    return found, trainer._start_step


@pytest.mark.parametrize("primitive", OPTIONS)
def test_run_equals_one_worker_and_resumes(folder: Path, primitive: str) -> None:
    expected, start = train(World.single(), folder, primitive, "tile")
    assert start == 0 and expected["count"] > 80, "it has been densified"
    for found, _ in run_ranks(train, 2, folder, primitive, "tile"):
        assert found.pop("count") == expected["count"]
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    single, _ = train(World.single(), folder, primitive, "batch", double=False)
    found, start = train(World.single(), folder, primitive, "locality", folder / "batch-1", double=False)
    assert start == 10 and found["count"] == single["count"] > 80
    assert float((found["rgb"] - single["rgb"]).abs().mean()) < 0.05, "two steps on, nearly the same picture"
    (checkpoint,) = checkpoints_in(folder / "tile-2")
    (check_surfel_files if primitive == "2dgs" else check_convex_files)(checkpoint, folder, expected)
    title = {"2dgs": "2D Gaussians", "convex": "3D convexes"}[primitive]
    with pytest.raises(InputError, match=rf"{title} \({primitive}\), and this run is of 3D Gaussians \(3dgs\)"):
        options = OPTIONS[primitive] | {"pipeline.model.primitive": "3dgs", "load_dir": folder / "batch-1"}
        follow(World.single(), folder / "tiny", folder / "other", options, 14, 1, double=False)


def check_surfel_files(checkpoint: Path, folder: Path, expected: dict[str, Any]) -> None:
    kept, total = export_ply(checkpoint, folder / "points.ply")
    header, _, body = (folder / "points.ply").read_bytes().partition(b"end_header\n")
    properties = [line.split()[-1] for line in header.decode().splitlines() if line.startswith("property")]
    assert [name for name in properties if name.startswith("scale")] == ["scale_0", "scale_1"]
    table = np.frombuffer(body, "<f4").reshape(kept, len(properties))
    assert kept <= total == expected["count"] and len(properties) == 61
    scale = float(table[:, properties.index("scale_1")].sum())
    assert kept < total or abs(scale - float(expected["scales"][1])) < 0.1
    with pytest.raises(InputError, match="three scales"):
        export_splat(checkpoint, folder / "points.splat")


def check_convex_files(checkpoint: Path, folder: Path, _: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"a checkpoint of 3D convexes \(convex\), which have no place in PLY"):
        export_ply(checkpoint, folder / "points.ply")


@pytest.mark.parametrize("primitive", OPTIONS)
def test_fused_steps_are_the_ordinary_ones(folder: Path, primitive: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all losses from their starts on, refinements, and steps that exceeded their capacities and were retried."""
    full: list[bool] = []
    learn = Training._learn

    def recorded(self: Training, status: Status, *rest: Any) -> None:
        full.append(status.full)
        learn(self, status, *rest)

    for strategy, ranks in (("tile", 2), ("batch", 1)):
        expected = train_single(World.single(), folder, OPTIONS[primitive], strategy, "never")
        assert expected["count"] > 80
        with monkeypatch.context() as patch:
            patch.setattr(Training, "_learn", recorded)
            patch.setattr(InitialCapacity, "_guess", lambda self, pixels: (24, 12, 96))
            found = run_ranks(train_single, ranks, folder, OPTIONS[primitive], strategy, "always")
        for one in found:
            torch.testing.assert_close(one, expected, rtol=1e-4, atol=2e-3)
    assert full.count(True) == 1 and full.count(False) > 1


def test_fused_steps_name_nonfinite_values(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, steps = ConvexKernels.draw_back, list[bool]()

    def spoilt(self: ConvexKernels, drawn: Any, v_color: torch.Tensor, *rest: Any) -> None:
        steps.append(True)
        usual(self, drawn, v_color if len(steps) < 6 else torch.full_like(v_color, torch.inf), *rest)

    monkeypatch.setattr(ConvexKernels, "draw_back", spoilt)
    options = {
        **OPTIONS["convex"],
        "fused_steps": "always",
        "steps_per_numeric_check": 4,
        "pipeline.model.stop_split_at": 0,
    }
    with pytest.raises(NonFiniteError, match=r"  step 5: gradient of the rows \(views of the step: view \d"):
        follow(World.single(), folder / "tiny", folder / "runs", options, 10, 1, double=False)


def test_losses_count_from_their_starts_and_for_2d_gaussians_alone() -> None:
    options: Any = SplatModelConfig(primitive="2dgs", distortion_loss=0.5)
    assert weights(options, 2999) == {} and weights(options, 3000) == {"distortion": 0.5}
    assert weights(options, 7000) == {"normals": 0.05, "distortion": 0.5}
    assert weights(replace(options, primitive="3dgs"), 7000) == {}
    deep = replace(options, depth_loss=0.01, depth_loss_start=40)
    assert weights(deep, 39) == {} and weights(deep, 3000) == {"depth": 0.01, "distortion": 0.5}
    assert weights(replace(deep, primitive="3dgs"), 7000) == {"depth": 0.01}


REFUSED = [
    ("2dgs", {"rasterize_mode": "antialiased"}, "tile", "rasterize-mode antialiased.*filter of their own; use classic"),
    ("2dgs", {"densifier": "mcmc"}, "tile", "densifier mcmc is not for 2D Gaussians"),
    ("2dgs", {"optimizer_state": "compact"}, "tile", "optimizer-state compact .*only the fused steps of 3D Gaussians"),
    ("2dgs", {}, "pixel", "normal-loss 0.05: with the strategy pixel.*Add --pipeline.model.normal-loss 0"),
    ("2dgs", {"distortion_loss": -1.0}, "tile", "distortion-loss -1.0: give a weight of 0 or more"),
    ("2dgs", {"normal_loss": float("nan")}, "tile", "normal-loss nan: give a weight"),
    ("convex", {"rasterize_mode": "antialiased"}, "tile", "antialiased.*which convexes lack; use classic"),
    ("convex", {"densifier": "mcmc"}, "tile", "densifier mcmc is not for 3D convexes"),
    ("convex", {"optimizer_state": "compact"}, "tile", "compact is not for 3D convexes .*steps of 3D Gaussians"),
    ("convex", {"use_scale_regularization": True}, "tile", "True is not for 3D convexes .*which convexes lack"),
]


@pytest.mark.parametrize(("primitive", "options", "strategy", "said"), REFUSED)
def test_unsupported_options_are_refused(primitive: Any, options: dict[str, Any], strategy: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        check_primitive(SplatModelConfig(primitive=primitive, **options), strategy)
    if options.get("normal_loss", 0) == 0:  # what these options are for
        check_primitive(SplatModelConfig(**{"distortion_loss": 0.0, **options}), strategy)
    check_primitive(SplatModelConfig(primitive="convex"), "pixel")


def test_normals_of_a_plane_and_shares_of_its_loss() -> None:
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(2)).double())[0]
    viewmat = torch.eye(4).double()
    viewmat[:3, :3] = turn * turn.det()
    K = torch.tensor([[30.0, 0, 11.2], [0, 28.0, 8.9], [0, 0, 1]]).double()
    view = View(viewmat, K, 22, 18)
    normal = torch.nn.functional.normalize(torch.tensor([0.3, -0.2, -1.0]).double(), dim=0)
    y, x = torch.meshgrid(torch.arange(18) + 0.5, torch.arange(22) + 0.5, indexing="ij")
    rays = torch.stack([(x - 11.2) / 30, (y - 8.9) / 28, torch.ones_like(x)], dim=-1).double()
    depth = (-2.0 / (rays @ normal))[..., None]
    found = normals_of_depth(depth, view, (0, 0))[1:-1, 1:-1]
    torch.testing.assert_close(found, (normal @ viewmat[:3, :3]).expand_as(found))

    def pixels(patch: Patch) -> Pixels:
        x0, y0, x1, y1 = patch.rendered(view)
        there = (normal @ viewmat[:3, :3]).expand(18, 22, 3) * torch.linspace(0.2, 1, 22)[:, None]
        extra = {"normals": there[y0:y1, x0:x1], "distortion": depth[y0:y1, x0:x1]}
        full = torch.ones_like(depth)[y0:y1, x0:x1]
        return Pixels(patch, full.expand(-1, -1, 3), full, depth[y0:y1, x0:x1], extra=extra)

    whole = pixels(Patch.whole(0, view))
    cut = [pixels(Patch(0, a, 0, b, 18, halo=1)) for a, b in ((0, 9), (9, 22))]
    for loss in (normal_loss, distortion_loss):
        torch.testing.assert_close(sum(loss(part, view) for part in cut), loss(whole, view))
    inside = 1 - torch.linspace(0.2, 1, 22).double()
    expected = (inside[1:-1].sum() * 16 + (22 * 18 - 20 * 16)) / (22 * 18)
    torch.testing.assert_close(normal_loss(whole, view), expected)
    torch.testing.assert_close(distortion_loss(whole, view), depth.mean())
