"""Masks of the sky: read with the photographs, refused by name if bad, and counted in a run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import CameraType
from PIL import Image

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.loss import sky_loss
from ns_multigpu.plugin.capture.checks import transforms_problems
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.model.options import SplatModelConfig
from ns_multigpu.plugin.model.surfaces import check_primitive
from ns_multigpu.plugin.splats.depth_maps import read_maps
from ns_multigpu.plugin.splats.normal_maps import training_normals
from tests.lib.captures import read_by, transforms
from tests.lib.ranks import run_ranks
from tests.lib.reconstruction import EIGHT, HEIGHT, LENS, WIDTH, make_scene, write_images, write_model
from tests.lib.resuming import differing, everything, start, went_on
from tests.lib.training_run import TinyDataParserConfig, add_maps, facing_normals, sky_mask, write_capture
from tests.plugin.splats.test_depth_maps import parser_of
from tests.plugin.splats.test_normal_maps import spoil

WEIGHT, OPTION = 0.3, "--pipeline.model.sky-loss"


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """Return a capture of nerfstudio's with masks, and masks of the sky of half the photographs' size."""
    write_capture(tmp_path / "capture", wide=False, masks=True)
    add_maps(tmp_path / "capture", "sky_mask_path", sky_mask)
    return tmp_path / "capture"


def opened(folder: Path) -> Any:
    data = read_by(TinyDataParserConfig(data=folder))
    data.read_sky(OPTION)
    return data


def test_photographs_have_two_masks(capture: Path) -> None:
    data = opened(capture)
    data.check_capture()
    assert [shape.masks for shape in data.train_shapes] == [2] * 8 and [shape.masks for shape in data.eval_shapes] == [
        1
    ]
    for view, file in enumerate(data.train_dataset.image_filenames):
        number = int(file.stem)
        there = sky_mask(number).repeat(2, 0).repeat(2, 1) > 0
        mask = np.array(Image.open(capture / f"mask_{number}.png")) > 0
        found = data.train_share.image(view, torch.device("cpu"))["mask"].numpy()
        np.testing.assert_array_equal(found, np.stack([mask & ~there, mask & there], axis=-1))


@pytest.mark.parametrize("lens", [LENS, EIGHT], ids=["four", "eight"])
def test_masks_of_a_folder_are_undistorted_with_their_photographs(tmp_path: Path, lens: Any) -> None:
    scene = make_scene(lens=lens)
    write_model(tmp_path / "sparse/0", scene)
    write_images(tmp_path / "images", scene)
    for name in scene.names:  # the photograph is white where the sky is
        file = (tmp_path / "sky_masks" / name).with_suffix(".png")
        file.parent.mkdir(parents=True, exist_ok=True)
        values = np.zeros((HEIGHT, WIDTH), np.uint8)
        values[: HEIGHT // 2] = 255
        Image.fromarray(values).save(file)
        Image.fromarray(values).convert("RGB").save(tmp_path / "images" / name, quality=100)
    data = read_by(parser_of(tmp_path, depths_path=None))
    data.read_sky(OPTION)
    data.check_capture()
    for view in range(len(data.train_dataset)):
        image = data.train_share.image(view, torch.device("cpu"))
        there, white = image["mask"][..., 1], image["image"][..., 0] > 0
        assert bool((image["mask"][..., 0] == ~there).all()) and 0.3 < float(there.float().mean()) < 0.7
        assert float((there != white).float().mean()) < 0.08, "but for what is between pixels"


def test_the_sky_has_no_normals_and_no_depth(capture: Path) -> None:
    add_maps(capture, "normal_file_path", lambda number: facing_normals(number, (24, 28)))
    add_maps(capture, "depth_file_path", lambda _: np.full((24, 28), 2000, np.uint16))
    data = opened(capture)
    outputs = data.train_dataparser_outputs
    normals = training_normals(outputs, World.single(), data.sky).counts
    depths = read_maps(outputs, "metric", World.single(), sky=data.sky).counts
    files = [int(file.stem) for file in outputs.image_filenames]
    masks = [np.array(Image.open(capture / f"mask_{number}.png")) > 0 for number in files]
    there = [sky_mask(number).repeat(2, 0).repeat(2, 1) > 0 for number in files]
    kept = [int((mask & ~sky).sum()) for mask, sky in zip(masks, there, strict=True)]
    assert list(normals) == list(depths) == kept and max(kept) < 0.6 * 24 * 28


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda file: file.unlink(), "there is no such file"),
        (lambda file: file.write_bytes(b"no"), "it is truncated or unreadable"),
        (spoil(sky_mask(0, (12, 18))), "it has 18x12 pixels and its photograph 28x24: .*same aspect"),
        (spoil(np.zeros((12, 14, 3), np.uint8)), "a mask must have one channel and this is RGB"),
        (spoil(np.full((12, 14), 255, np.uint8)), "all of it is sky.*White is sky: invert the mask, or leave its view"),
    ],
)
def test_bad_masks_are_named_before_training(capture: Path, change: Any, said: str) -> None:
    change(capture / "sky_mask_path_2.png")
    with pytest.raises(InputError, match=rf"{OPTION}: 1 problem.*masks of the sky:\n .*path_2.png: {said}"):
        opened(capture)


def test_masks_are_counted_and_inverted_ones_refused(capture: Path, capsys: Any) -> None:
    opened(capture)
    said = capsys.readouterr().out
    assert "Loss of the sky: 8 masks, 40.5%" in said and "Warning" not in said
    for number in range(9):
        values = np.full((12, 14), 255, np.uint8)
        values[:2] = 0
        Image.fromarray(values).save(capture / f"sky_mask_path_{number}.png")
    with pytest.raises(InputError, match=rf"{OPTION}: 1 problem.*\n .*% of the seed points.*are they inverted\?"):
        opened(capture)
    first, second = run_ranks(opened_on, 2, capture)
    assert first == second and "are they inverted?" in first


@pytest.mark.parametrize("upper", [True, False])
def test_seed_points_are_sought_where_their_views_show_them(capture: Path, upper: bool) -> None:
    values = np.zeros((12, 14), np.uint8)
    values[:6] = 255
    add_maps(capture, "sky_mask_path", lambda _: values if upper else 255 - values)
    data = read_by(TinyDataParserConfig(data=capture))
    outputs = data.train_dataparser_outputs
    middle = outputs.dataparser_transform[:, 3] * outputs.dataparser_scale
    outputs.metadata["points3D_xyz"] = (middle + torch.tensor([0.0, 0.0, 0.2])).expand(20, 3)
    if not upper:
        data.read_sky(OPTION)
        return
    with pytest.raises(InputError, match="100% of the seed points in the views lie in the sky"):
        data.read_sky(OPTION)


def test_sky_is_half_of_white_or_more(capture: Path, capsys: Any) -> None:
    add_maps(capture, "normal_file_path", lambda number: facing_normals(number, (24, 28)))
    whole = training_normals(opened(capture).train_dataparser_outputs, World.single()).counts
    for value, none in ((127, True), (128, False)):
        for file in capture.glob("sky_mask_path_*.png"):
            Image.fromarray(np.where(np.array(Image.open(file)) > 0, value, 0).astype(np.uint8)).save(file)
        data = opened(capture)
        assert ("Warning: no mask has sky" in capsys.readouterr().out) == none
        data.check_capture()
        assert bool(data.train_share.image(0, torch.device("cpu"))["mask"][..., 1].any()) != none
        found = training_normals(data.train_dataparser_outputs, World.single(), data.sky).counts
        assert (list(found) == list(whole)) == none


def opened_on(world: World, folder: Path) -> str:
    try:
        data = read_by(TinyDataParserConfig(data=folder))
        data.world = world
        data.read_sky(OPTION)
    except InputError as error:
        return str(error)
    return ""


def test_every_rank_has_the_problems_of_all(capture: Path) -> None:
    for number in (2, 3):
        (capture / f"sky_mask_path_{number}.png").unlink()
    first, second = run_ranks(opened_on, 2, capture)
    assert first == second and "2 problem(s)" in first and "path_2.png" in first and "path_3.png" in first


def test_captures_without_masks_are_refused(capture: Path) -> None:
    with transforms(capture) as meta:
        del meta["frames"][3]["sky_mask_path"]
    assert "1 of 9 frames have no sky_mask_path (3.png first)" in transforms_problems(capture)[0]
    with transforms(capture) as meta:
        for frame in meta["frames"]:
            frame.pop("sky_mask_path", None)
    with pytest.raises(InputError, match=r"the capture has none: give sky_mask_path .*or a folder sky_masks next"):
        opened(capture)
    with pytest.raises(InputError, match=rf"{OPTION} -1.0: give a weight of 0 or more"):
        check_primitive(SplatModelConfig(sky_loss=-1.0), "tile")


def test_lenses_whose_masks_cannot_be_undistorted_are_refused(capture: Path) -> None:
    data = read_by(TinyDataParserConfig(data=capture))
    data.train_dataparser_outputs.cameras.camera_type[0] = CameraType.FISHEYE624.value
    with pytest.raises(InputError, match="FISHEYE624 cannot be undistorted"):
        data.read_sky(OPTION)


def begin(capture: Path, name: str, steps: int, **options: Any) -> Any:
    return start(World.single(), capture, capture.parent / name, steps, 2, **{"sky_loss": WEIGHT, **options})


@pytest.mark.parametrize("downscales", [0, 1])
def test_a_run_has_the_loss_of_its_sky(capture: Path, downscales: int) -> None:
    pipeline: Any = begin(capture, "run", 1, num_downscales=downscales, ssim_lambda=0.0).pipeline
    pipeline.train()
    losses, expected = pipeline.get_train_loss_dict(1)[1], 0.0
    for pixels in pipeline.model.rendering.pixels:
        view = pipeline.model.views[pixels.patch.view]
        mask = pipeline.datamanager.train_share.image(view.index, torch.device("cpu"))["mask"][..., 1:].float()
        factor = mask.shape[0] // view.height
        mask = mask.unfold(0, factor, factor).unfold(1, factor, factor).mean((-1, -2))
        expected += WEIGHT * float(sky_loss(pixels.alpha, mask, pixels.patch, view).detach()) / 2
    assert expected > 1e-3 and float(losses["sky_loss"].detach()) == pytest.approx(expected)
    plain: Any = begin(capture, "plain", 1, num_downscales=downscales, ssim_lambda=0.0, sky_loss=0.0).pipeline
    plain.train()
    assert "sky_loss" not in plain.get_train_loss_dict(1)[1]


@pytest.mark.parametrize("fused", ["always", "never"])
def test_a_run_clears_its_sky_and_resumes_bit_for_bit(capture: Path, fused: str) -> None:
    whole, resumed = went_on(lambda name, steps, **rest: begin(capture, name, steps, **rest), fused_steps=fused)
    assert differing(everything(whole), everything(resumed)) == []
    clear = begin(capture, "clear", 40, fused_steps=fused, sky_loss=30.0, densify_grad_thresh=1.0)
    before = drawn_in_the_sky(clear)
    clear.train()
    assert drawn_in_the_sky(clear) < 0.5 * before


def drawn_in_the_sky(trainer: Any) -> float:
    """Return the mean alpha of the first training view's sky."""
    data, model = trainer.pipeline.datamanager, trainer.pipeline.model.eval()
    mask = data.train_share.image(0, torch.device("cpu"))["mask"][..., 1]
    with torch.no_grad():
        alpha = model.get_outputs(data.train_camera(0))["accumulation"]
    model.train()
    return float(alpha[mask].mean())
