"""Mega-NeRF and Block-NeRF: fields learn from their own rays, pictures are blended, runs go on on other ranks."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from nerfstudio.cameras.rays import RayBundle
from torch import Tensor

from benchmarks.baselines.separate_fields import BASELINES, BlockModelConfig, MegaModelConfig, blended_samples
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.radiance.partition import Partition
from tests.lib.radiance_scene import fog, model, rays
from tests.lib.ranks import run_ranks
from tests.plugin.radiance.field.test_radiance_model import compare, step_of
from tests.plugin.radiance.run.test_radiance_run import (
    configured,
    near,
    opened,
    resumed_from_the_middle,
    trained,
)


def attend(made: Any, points: Tensor, cells: Partition) -> None:
    """Give a model the boxes that its fields attend to, as its pipeline does."""
    made.boxes = made.separation.focus(points, cells)


VARIANTS: dict[str, dict[str, Any]] = {
    "mega": {"kind": MegaModelConfig, "before": attend},
    "block": {"kind": BlockModelConfig, "before": attend},
}


@pytest.mark.parametrize(("way", "options"), [("mega", {}), ("block", {"disable_scene_contraction": True})])
def test_any_number_of_ranks_is_one(way: str, options: dict[str, Any]) -> None:
    given = {**VARIANTS[way], **options}
    one = step_of(World.single(), 3, given)
    assert {name.split(".")[0] for name in one["gradients"]} == {"cells", "camera_optimizer"}
    assert (one["outside"] > 0) == ("disable_scene_contraction" in options), "some rays miss a box"
    compare(one, run_ranks(step_of, 2, 3, given), exact=way != "mega")  # it adds blended samples up over the ranks


def test_separate_fields_share_no_gradients() -> None:
    """With Mega-NeRF's or Block-NeRF's rays, a field's gradients are those of its own rays, and heads are its own."""
    for spread in VARIANTS:
        ours: Any = model(World.single(), 3, **VARIANTS[spread])
        ours.begin_step(3)
        outputs = ours(rays(2.0))
        bounds = ours.figures.segments.begins
        assert all(b > a for a, b in itertools.pairwise(bounds)) and bounds[-1] > 48, "rays are seen by several"
        outputs["rgb"][bounds[1] : bounds[2]].sum().backward()
        graded = {name[:8] for name, p in ours.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
        assert graded == {"cells.1.", "camera_o"}, f"{spread}: only poses are trained together"
        assert ours.shared_parameters().keys() <= {"camera_optimizer.pose_adjustment"}
        heads = [cell.head.mlp_head.layers[0].weight for cell in ours.cells.values()]
        assert not torch.equal(heads[0], heads[1]), "each begins with numbers of its own"


def test_blends_show_what_all_fields_show() -> None:
    """Fields of equal fog give equal fog without seams, by blended samples and by blended pixels."""
    for spread in VARIANTS:
        with torch.no_grad():
            through = 1 - fog(3, **VARIANTS[spread])(rays(2.0))["accumulation"][:, 0]
        assert float((0.85 + through.log()).abs().max()) < 0.15, spread


def test_samples_are_blended_by_their_place_in_the_overlap() -> None:
    """A ray from a tile of density 1 into one of density 3: over the overlap it rises from one to the other."""
    ours: Any = model(World.single(), 2, **VARIANTS["mega"])
    (split,) = ours.partition.tree.splits
    direction = torch.eye(3)[split.axis][None]
    bundle = RayBundle(direction * (split.plane - 0.5), direction, torch.ones(1, 1), torch.zeros(1, 1).long())
    bundle.nears, bundle.fars = torch.zeros(1, 1), torch.ones(1, 1)
    segments = ours.spread.take(bundle)
    edges = torch.stack(
        [torch.linspace(float(a), float(b), 41) for a, b in zip(segments.near, segments.far, strict=True)]
    )

    def field(density: float) -> Any:
        return lambda positions, _: (torch.full_like(positions[:, 0], density), positions * 0 + density)

    fields = {0: field(1.0), 1: field(3.0)}
    density, colour = blended_samples(edges, bundle, segments, ours.spread, fields, lambda _: None)
    places = ((edges[:, 1:] + edges[:, :-1]) / 2)[segments.order[0]].flatten()
    found = density[segments.order[0]].flatten()
    assert (found.diff() >= -1e-5).all() and float(found[0]) == 1 and float(found[-1]) == 3
    between = (found > 1.01) & (found < 2.99)
    assert int(between.sum()) >= 4 and len(found[between].unique()) >= 4, "not the mean wherever both count"
    assert float(found[(places - 0.5).abs().argmin()]) == pytest.approx(2, abs=0.5)
    torch.testing.assert_close(colour, density[..., None].expand(-1, -1, 3))


def test_a_blend_is_of_the_fields_that_are_near() -> None:
    """Only one of three fields has fog: pixels have more of it, the more of the ray (or of the camera) is its."""
    for spread in VARIANTS:
        ours = fog(3, **VARIANTS[spread])
        for number in (1, 2):
            for module in ours.cells[str(number)].modules():
                if hasattr(module, "average_init_density"):
                    module.average_init_density = 0.0
        with torch.no_grad():
            seen = ours(rays(2.0))["accumulation"][:, 0]
        assert float(seen.min()) < 0.01 and float(seen.max()) > 0.5
        assert int(((seen > 0.02) & (seen < 0.5)).sum()) > 3, f"{spread}: some are blended"


def of_baseline(way: str, capture: Path, out: Path, **options: Any) -> Any:
    """Return a baseline's configuration, made small as `configured` makes the method's."""
    return configured(capture, out, method=BASELINES[way], **options)


@pytest.mark.parametrize("way", VARIANTS)
def test_evaluation_in_one_process_shows_what_was_trained(way: str, capture: Path, tmp_path: Path) -> None:
    expected = trained(World.single(), of_baseline(way, capture, tmp_path)).pipeline.get_average_eval_image_metrics()
    loaded, _, _ = opened(of_baseline(way, capture, tmp_path))
    found = loaded.get_average_eval_image_metrics()
    assert found["psnr"] == expected["psnr"] and found["ssim"] == expected["ssim"]


def train_variants(world: World, capture: Path, out: Path) -> dict[str, tuple[dict[str, Tensor], ...]]:
    """Train each way on two ranks, and go on from its middle on one."""
    makers = {way: lambda folder, way=way: of_baseline(way, capture, folder, steps=8) for way in VARIANTS}
    return resumed_from_the_middle(world, makers, out)


def test_runs_resume_with_other_world_sizes(capture: Path, tmp_path: Path) -> None:
    ends = run_ranks(train_variants, 2, capture, tmp_path)
    for way, (two, again) in ends[0].items():
        assert near(two, again) == near(ends[1][way][0], again) == [], way
        assert {name[:8] for name in two if name.startswith("cells.")} == {"cells.0."}
        assert {name[:8] for name in again if name.startswith("cells.")} == {f"cells.{cell}." for cell in range(3)}


def test_bad_options_are_named(capture: Path, tmp_path: Path) -> None:
    config = of_baseline("mega", capture, tmp_path, disable_scene_contraction=True)
    with pytest.raises(InputError, match="disable-scene-contraction: each field of Mega-NeRF"):
        config.check_method()
    with pytest.raises(InputError, match=r"depth-loss 0\.1: the baselines have none"):
        of_baseline("block", capture, tmp_path, depth_loss=0.1).check_method()
    config = of_baseline("block", capture, tmp_path, cells=40)
    with pytest.raises(InputError, match="groups of cameras are empty"):
        config.pipeline.setup(device="cpu", test_mode="val")
    for way in VARIANTS:
        config = of_baseline(way, capture, tmp_path, background_color="sky")
        with pytest.raises(InputError, match=r"background-color sky: .*each field is trained alone"):
            config.check_method()


def test_they_have_nerfacto_xls_recipe() -> None:
    for config in BASELINES.values():
        usual: Any = copy.deepcopy(config)
        assert usual.optimizers.keys() == {"proposal_networks", "fields", "camera_opt"}
        assert (usual.fused_steps, usual.pipeline.model.background_color) == ("never", "last_sample")
