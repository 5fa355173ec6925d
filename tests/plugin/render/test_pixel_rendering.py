"""Images of `pixel`: the same on any number of ranks, for any caller, with a crop, and colours by owner."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ns_multigpu.cells.options import PixelOptions
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.render.palette import rank_colors
from ns_multigpu.plugin.splats.pipeline import DistributedPipeline
from strategies import STRATEGIES
from strategies.pixel import pixel
from tests.lib.ranks import run_ranks
from tests.lib.rendering import POINTS, camera, make_pipeline
from tests.plugin.render.test_render_service import CROPS, SIZES

CELLS = 3


def pipeline_of(world: World, capture: Path) -> DistributedPipeline:
    STRATEGIES["pixel"] = partial(pixel, options=PixelOptions(cells=CELLS))
    try:
        pipeline = make_pipeline(world, capture, "pixel", background_color="white")
    finally:
        STRATEGIES["pixel"] = pixel
    pipeline.model.hold_shard(pipeline.strategy.placement, world)
    return pipeline


def looked_at(world: World, capture: Path) -> dict[str, Any]:
    """Images on rank 0, what a model's own method gives on all, metrics, and what must not have changed."""
    pipeline = pipeline_of(world, capture)
    placement: Any = pipeline.strategy.placement
    known = {name: value.clone() for name, value in placement.state().items()}
    images = {
        (size, name): pipeline.renders.render(camera(*size), crop) for size in SIZES for name, crop in CROPS.items()
    }
    of_points = placement.local.of_points
    assert of_points is None or len(of_points) == pipeline.model.num_points, "a crop is over with its image"
    unchanged = placement.state()
    same = all(torch.equal(value, unchanged[name]) for name, value in known.items() if name != "looked")
    same &= unchanged["looked"][:2].equal(known["looked"][:2])
    pipeline.eval()
    own = pipeline.model.get_outputs_for_camera(camera(*SIZES[0]))
    owners = None
    if world.size > 1:  # one rank has one colour
        owners = pipeline.renders.run_leading(
            lambda: pipeline.model.get_outputs_for_camera(camera(*SIZES[0]), CROPS["a part"])["rank"]
        )
    metrics = pipeline.get_average_eval_image_metrics()
    timing = ("num_rays_per_sec", "fps")
    return {
        "images": images, "own": own, "owners": owners, "same": same, "points": pipeline.model.num_points,
        "metrics": {k: v for k, v in metrics.items() if k not in timing}, "shared": pipeline.renders.shared,
    }  # fmt: skip


def close(found: Any, wanted: Any) -> None:
    for name in ("rgb", "depth", "accumulation", "background"):
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 3])
def test_images_are_those_of_one_rank_with_the_same_cells(capture: Path, ranks: int) -> None:
    (alone,), results = run_ranks(looked_at, 1, capture), run_ranks(looked_at, ranks, capture)
    assert sum(result["points"] for result in results) == POINTS and alone["shared"]
    whole = alone["images"][(SIZES[0], "")]
    for key, image in alone["images"].items():
        close(results[0]["images"][key], image)
    assert float((whole["rgb"] - alone["images"][(SIZES[0], "a part")]["rgb"]).abs().max()) > 0.05
    for result in (alone, *results):
        assert result["same"], "an image leaves nothing behind but boxes"
        close(result["own"], whole)
        assert result["metrics"] == pytest.approx(alone["metrics"], rel=1e-5)
    seen = results[0]["owners"]
    covered = results[0]["images"][(SIZES[0], "a part")]["accumulation"] > 0.5
    colors = torch.tensor(rank_colors(1, ranks))
    nearest = torch.cdist(seen[covered[..., 0]], colors).argmin(1)
    assert len(nearest.unique()) == ranks, "every rank's colour is seen"


def by_both_faces(world: World, capture: Path) -> list[Any]:
    """Return a picture by the legs' operators, and by their differentiable faces."""
    pipeline = pipeline_of(world, capture)
    pictures = pipeline.renders.pictures
    assert pictures._forward is not None
    found = [pipeline.renders.render(camera(*SIZES[0]))]
    pictures._forward = None
    return [*found, pipeline.renders.render(camera(*SIZES[0]))]


def test_operators_draw_what_functions_do(capture: Path) -> None:
    (found, wanted), _ = run_ranks(by_both_faces, 2, capture)
    close(found, wanted)


def test_process_without_training_blends_by_depth(capture: Path) -> None:
    """A process that holds the whole model, as nerfstudio's own commands do."""
    one = make_pipeline(World.single(), capture, "single", background_color="white")
    other = make_pipeline(World.single(), capture, "pixel", background_color="white")
    for pipeline in (one, other):
        pipeline.eval()
    other.model.shard_counts = None
    assert not other.renders.shared
    close(*(p.model.get_outputs_for_camera(camera(*SIZES[0])) for p in (other, one)))
