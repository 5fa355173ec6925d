"""An image that all ranks render together is the one that a process with all points renders."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from nerfstudio.data.scene_box import OrientedBox

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.render.palette import rank_colors
from tests.lib.ranks import on_gpus, run_ranks
from tests.lib.rendering import POINTS, camera, make_pipeline

BOUNDS = {1: (0, 90), 2: (0, 50, 90), 3: (0, 20, 20, 90), 4: (0, 0, 60, 61, 90)}
"""With three ranks and more, one has no points."""
CROPS = {
    "": None,
    "a part": OrientedBox.from_params((0.3, 0.0, 0.1), (0.1, 0.2, 0.3), (1.0, 1.2, 1.4)),
    "nothing": OrientedBox.from_params((50.0, 0.0, 0.0), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}
SIZES = [(70, 61), (40, 17), (33, 9), (1, 1)]


def _images(world: World, capture: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Return all sizes and crops: on rank 0, on all ranks, and on the last one; and what must not have changed."""
    pipeline = make_pipeline(world, capture, bounds=BOUNDS[world.size], **options)
    work = pipeline.strategy.assignment.work  # type: ignore[attr-defined]
    work.counts = {0: [5, 1, 0, 9], 3: [7, 7]}
    pipeline.train()  # what an evaluation shows does not depend on it
    before = torch.get_rng_state()
    found: dict[str, Any] = {"images": {}, "elsewhere": []}
    last = world.size - 1
    for size in SIZES:
        for name, crop in CROPS.items():
            outputs = pipeline.renders.render(camera(*size), crop)
            found["images"][(size, name)] = outputs
            found["elsewhere"].append((outputs is not None) == (world.rank == 0))
    there = pipeline.renders.render(camera(*SIZES[0]), roots=(last,))
    found["elsewhere"].append((there is not None) == (world.rank == last))
    found["everywhere"] = pipeline.model.get_outputs_for_camera(camera(*SIZES[0])) if world.size > 1 else there
    found["same state"] = bool(torch.equal(before, torch.get_rng_state())) and pipeline.model.training
    found["same state"] &= work.counts == {0: [5, 1, 0, 9], 3: [7, 7]}
    found["same state"] &= all(param.grad is None for param in pipeline.model.parameters())
    found["points"] = pipeline.model.num_points
    return found


def _expected(capture: Path, options: dict[str, Any], device: str = "cpu") -> dict[Any, Any]:
    """By the model's own method, in one process that holds all points."""
    pipeline = make_pipeline(World.single(device), capture, "single", **options)
    pipeline.eval()
    assert (
        pipeline.model.render_override is not None
        and pipeline.model.render_override.outputs(camera(4, 4), None) is None
    )
    return {
        (size, name): pipeline.model.get_outputs_for_camera(camera(*size), crop)
        for size in SIZES
        for name, crop in CROPS.items()
    }


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys() == {"rgb", "depth", "accumulation", "background"}
    for name, value in expected.items():
        torch.testing.assert_close(found[name].cpu(), value.cpu(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("size", "device"), [*((n, "cpu") for n in (1, 2, 3, 4)), *(on_gpus(n) for n in (1, 2, 4))])
def test_an_image_of_all_ranks_is_that_of_one(capture: Path, size: int, device: str) -> None:
    options = {"background_color": "random", "rasterize_mode": "antialiased" if size == 3 else "classic"}
    expected = _expected(capture, options, device)
    whole = expected[(SIZES[0], "")]
    clear = whole["accumulation"] == 0
    assert 0 < int(clear.sum()) < 0.8 * clear.numel(), "the scene must show the depth of pixels that nothing covers"
    assert float(whole["rgb"].std()) > 0.05 and bool((whole["depth"][clear] == whole["depth"].max()).all())
    assert not torch.equal(expected[(SIZES[0], "a part")]["rgb"], whole["rgb"])
    # Forked from a server that has imported everything, unless there are GPUs, which cannot be shared that way.
    results = run_ranks(_images, size, capture, options, device=device)
    assert sum(result["points"] for result in results) == POINTS
    assert size < 3 or any(result["points"] == 0 for result in results)
    for key, outputs in expected.items():
        _same(results[0]["images"][key], outputs)
    for result in results:
        assert all(result["elsewhere"]), "an image is there where it is wanted and nowhere else"
        assert result["same state"]
        _same(result["everywhere"], whole)


def _owners(world: World, capture: Path) -> Any:
    """On rank 0 what it gets when it leads, and how many renderings that took: before it looks at `rank`, and after."""
    pipeline = make_pipeline(world, capture, bounds=BOUNDS[world.size], background_color="white")
    pipeline.eval()
    rendered: list[bool] = []
    render = pipeline.renders._render
    pipeline.renders._render = lambda request, roots: rendered.append(request.owners) or render(request, roots)

    def work() -> Any:
        outputs = pipeline.model.get_outputs_for_camera(camera(*SIZES[0]))
        names, before = list(outputs), list(rendered)
        there = "rank" in outputs and list(rendered) == before
        seen, again = outputs["rank"], outputs["rank"]
        crop = pipeline.model.get_outputs_for_camera(camera(*SIZES[0]), CROPS["nothing"])["rank"]
        return names, before, there and seen is again, dict(outputs), crop

    found = pipeline.renders.run_leading(work)
    return rendered, found


@pytest.mark.parametrize("size", [2, 4])
def test_owner_image_is_rendered_while_it_is_shown(capture: Path, size: int) -> None:
    results = run_ranks(_owners, size, capture)
    assert [rendered for rendered, _ in results] == [[False, True, False, True]] * size, "two images, each looked at"
    names, before, there, outputs, crop = results[0][1]
    assert names == ["rgb", "depth", "accumulation", "rank", "background"]
    assert before == [False] and there, "nothing is rendered for a name, and one look is enough"
    expected = make_pipeline(World.single(), capture, "single", background_color="white")
    expected.eval()
    torch.testing.assert_close(outputs["rgb"], expected.model.get_outputs_for_camera(camera(*SIZES[0]))["rgb"])
    # Spherical harmonics that are the owner's colour from everywhere: what no code of the output knows of.
    owners = torch.cat([torch.full((b - a,), k) for k, (a, b) in enumerate(pairwise(BOUNDS[size]))])
    colors = torch.tensor(rank_colors(1, size))[owners]
    expected.model.gauss_params["features_dc"] = torch.nn.Parameter((colors - 0.5) / 0.28209479177387814)
    expected.model.gauss_params["features_rest"].data.zero_()
    seen = expected.model.get_outputs_for_camera(camera(*SIZES[0]))["rgb"]
    torch.testing.assert_close(outputs["rank"], seen, rtol=1e-4, atol=1e-5)
    assert float((seen - outputs["rgb"]).abs().max()) > 0.1 and float(seen.std()) > 0.05
    assert bool((crop == 1).all()), "of no points the background"


def test_an_image_without_pixels_is_refused(capture: Path) -> None:
    pipeline = make_pipeline(World.single(), capture)
    with pytest.raises(ValueError, match="0x5 pixels"):
        pipeline.renders.render(camera(0, 5))


def _evaluated(world: World, capture: Path, strategy: str, folder: Path, step: int) -> dict[str, Any]:
    pipeline = make_pipeline(world, capture, strategy, BOUNDS[world.size])
    every = pipeline.get_average_eval_image_metrics(output_path=folder, get_std=True)
    one, images = pipeline.get_eval_image_metrics_and_images(step)
    return {"mean": every, "one": one, "image": images["img"], "training": pipeline.training}


@pytest.mark.parametrize("size", [2, 3])
def test_held_out_metrics_are_those_of_one_process(capture: Path, tmp_path: Path, size: int) -> None:
    expected = _evaluated(World.single(), capture, "single", tmp_path / "one", 7)
    results = run_ranks(_evaluated, size, capture, "tile", tmp_path / "many", 7)
    timing = {"num_rays_per_sec", "fps", "num_rays_per_sec_std", "fps_std"}
    assert {"psnr", "ssim", "psnr_std", "ssim_std"} <= expected["mean"].keys() and expected["mean"]["psnr_std"] > 0
    for result in results:
        assert result["training"]
        assert result["mean"] == results[0]["mean"] and result["mean"].keys() == expected["mean"].keys()
        for name in expected["mean"].keys() - timing:
            assert result["mean"][name] == pytest.approx(expected["mean"][name], rel=1e-5), name
        for name, value in expected["one"].items():
            assert result["one"][name] == pytest.approx(value, rel=1e-5), name
        torch.testing.assert_close(result["image"], expected["image"], rtol=1e-5, atol=1e-6)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(files) == 5 and files == sorted(path.name for path in (tmp_path / "many").iterdir())
