"""The dataparser `city` and its dataset."""

import copy
import pickle

import pytest
import torch
from nerfstudio.data.datasets.base_dataset import InputDataset

from ns_multigpu.city import CityCapture
from ns_multigpu.plugin.capture import city_dataparser as module
from ns_multigpu.plugin.capture.city_dataparser import CAPTURE, CityDataParserConfig, CityDataset, render_device


@pytest.fixture()
def config() -> CityDataParserConfig:
    return CityDataParserConfig(
        blocks=1, views=18, width=60, height=40, samples=1, points=300, depth=True, render_device="cpu"
    )


def test_outputs_follow_nerfstudios_conventions(config: CityDataParserConfig) -> None:
    parser = config.setup()
    train, test = (parser.get_dataparser_outputs(split) for split in ("train", "test"))
    capture: CityCapture = train.metadata[CAPTURE]
    assert len(train.image_filenames) == len(train.cameras) == 15 and len(test.cameras) == 3
    assert [p.name for p in test.image_filenames] == [f"aerial_{v:06d}.png" for v in (0, 8, 16)]
    assert not any(p.exists() for p in train.image_filenames)
    every = torch.cat([train.cameras.camera_to_worlds, test.cameras.camera_to_worlds])[:, :, 3]
    assert every.abs().max() == pytest.approx(1.0, abs=1e-5)
    assert every.mean(dim=0).abs().max() < 1e-4
    # The transform and scale convert cameras and points back to metres.
    back = test.transform_poses_to_original_space(test.cameras.camera_to_worlds, camera_convention="opengl")
    torch.testing.assert_close(back, capture.c2w[[0, 8, 16]], atol=1e-3, rtol=0)
    seeds = capture.seed_points(300)
    xyz = train.metadata["points3D_xyz"] / train.dataparser_scale - train.dataparser_transform[:, 3]
    torch.testing.assert_close(xyz, seeds.xyz, atol=1e-3, rtol=0)
    assert torch.equal(train.metadata["points3D_rgb"], seeds.rgb) and seeds.rgb.dtype == torch.uint8


def test_items_are_the_captures_pictures(config: CityDataParserConfig) -> None:
    parser = config.setup()
    outputs = parser.get_dataparser_outputs("test")
    assert parser.dataset_type is CityDataset and issubclass(CityDataset, InputDataset)
    dataset = parser.dataset_type(outputs)
    capture: CityCapture = outputs.metadata[CAPTURE]
    item = dataset.get_data(1, image_type="uint8")
    rgb, depth = capture.render(8)
    assert torch.equal(item["image"], rgb)
    torch.testing.assert_close(item["depth_image"][..., 0], depth * outputs.dataparser_scale)
    assert dataset[1]["image"].dtype == torch.float32
    torch.testing.assert_close(dataset[1]["image"], rgb / 255.0)
    item["image"].zero_()  # a picture handed out may be written to
    assert torch.equal(dataset.get_data(1, image_type="uint8")["image"], rgb)


def test_camera_rays_end_at_the_depth(config: CityDataParserConfig) -> None:
    """Camera, picture size, scale and depth fit together: neighbouring views agree on where surfaces are."""
    outputs = config.setup().get_dataparser_outputs("train")
    dataset = CityDataset(outputs)
    bundle = outputs.cameras.generate_rays(camera_indices=2)
    depth = dataset[2]["depth_image"]
    along = -(bundle.directions @ outputs.cameras.camera_to_worlds[2, :, 2])
    places = bundle.origins + bundle.directions * depth / along[..., None]
    metres = places / outputs.dataparser_scale - outputs.dataparser_transform[:, 3]
    ground = metres[..., 2].abs() < 0.02
    assert ground.float().mean() > 0.2 and metres[..., 2].min() > -0.02


@pytest.mark.parametrize("scale", [0.5, 0.29])
def test_a_scaled_dataset_renders_at_its_cameras_size(config: CityDataParserConfig, scale: float) -> None:
    dataset = CityDataset(config.setup().get_dataparser_outputs("train"), scale_factor=scale)
    item = dataset[0]
    size = (int(dataset.cameras.height[0]), int(dataset.cameras.width[0]))
    assert item["image"].shape == (*size, 3) and item["depth_image"].shape == (*size, 1)


def test_a_config_is_enough_to_make_the_same_again(config: CityDataParserConfig) -> None:
    one = config.setup().get_dataparser_outputs("train")
    two = pickle.loads(pickle.dumps(copy.deepcopy(config))).setup().get_dataparser_outputs("train")
    assert torch.equal(one.cameras.camera_to_worlds, two.cameras.camera_to_worlds)
    assert torch.equal(one.metadata["points3D_xyz"], two.metadata["points3D_xyz"])
    assert torch.equal(CityDataset(one)[4]["image"], CityDataset(two)[4]["image"])


def test_images_are_rendered_on_demand(config: CityDataParserConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("rendered too early")

    monkeypatch.setattr("ns_multigpu.city.capture.render_rgb", refuse)
    config.views = 20_000
    dataset = CityDataset(config.setup().get_dataparser_outputs("train"))
    assert len(dataset) == 17_500 and len(dataset.cameras) == 17_500
    with pytest.raises(AssertionError, match="too early"):
        dataset[0]


def test_times_are_given_if_the_city_moves(config: CityDataParserConfig) -> None:
    assert config.setup().get_dataparser_outputs("train").cameras.times is None
    config.time_varying = True
    parser = config.setup()
    assert parser.includes_time
    outputs = parser.get_dataparser_outputs("test")
    assert outputs.cameras.times.shape == (3, 1)
    assert outputs.cameras.times[:, 0].tolist() == pytest.approx([0, 8 / 17, 16 / 17])


def test_errors(config: CityDataParserConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config.blocks = 0
    with pytest.raises(ValueError, match="blocks is 0"):
        config.setup().get_dataparser_outputs("train")
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: False)
    assert render_device("auto").type == "cpu"
    with pytest.raises(RuntimeError, match="no CUDA device"):
        render_device("cuda")
    config.blocks = 1
    outputs = config.setup().get_dataparser_outputs("train")
    del outputs.metadata[CAPTURE]
    with pytest.raises(ValueError, match="reads files"):
        CityDataset(outputs)
