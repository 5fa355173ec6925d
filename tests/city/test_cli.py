"""The command `ns-multigpu city`, and what nerfstudio's COLMAP parser makes of its folder."""

import inspect
from pathlib import Path

import docstring_parser
import numpy as np
import pytest
import torch
from PIL import Image

from ns_multigpu.city import City, CityCapture
from ns_multigpu.city.colmap_writer import quaternion
from ns_multigpu.cli import COMMANDS, main

SMALL = ["--blocks", "1", "--views", "9", "--width", "96", "--height", "64", "--points", "500", "--samples", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("city") / "new"
    main(["city", "--output-path", str(folder), "--depth", "png", *SMALL])
    return folder


def capture() -> CityCapture:
    return CityCapture(City(1, 0), "aerial", 9, 96, 64, samples=1)


def test_pictures_and_depth_are_the_captures(folder: Path) -> None:
    made = capture()
    assert sorted(p.name for p in (folder / "images").iterdir()) == [f"{made.name(v)}.png" for v in range(9)]
    for view in (0, 8):
        rgb, depth = made.render(view)
        assert np.array_equal(np.asarray(Image.open(folder / "images" / f"{made.name(view)}.png")), rgb.numpy())
        stored = np.asarray(Image.open(folder / "depth" / f"{made.name(view)}.png")).astype(np.float64) * 0.01
        assert np.abs(stored - depth.numpy()).max() <= 0.0051


def test_nerfstudio_reads_it_and_points_project_onto_the_depth(folder: Path) -> None:
    from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig

    config = ColmapDataParserConfig(data=folder, colmap_path=Path("sparse/0"), downscale_factor=1)
    outputs = {split: config.setup().get_dataparser_outputs(split=split) for split in ("train", "test")}
    assert [len(outputs[s].image_filenames) for s in ("train", "test")] == [7, 2]
    made = capture()
    matched = 0
    for split, out in outputs.items():
        xyz = out.metadata["points3D_xyz"].double()
        assert xyz.shape == (500, 3) and out.metadata["points3D_rgb"].dtype == torch.uint8
        for at, view in enumerate(made.split(split)):  # type: ignore[arg-type]
            assert out.image_filenames[at] == folder / "images" / f"{made.name(int(view))}.png"
            camera = out.cameras[at]
            assert (int(camera.width), int(camera.height)) == (96, 64)
            pose = camera.camera_to_worlds.double()
            local = (xyz - pose[:, 3]) @ pose[:, :3]
            z = -local[:, 2] / out.dataparser_scale
            u = float(camera.fx) * local[:, 0] / -local[:, 2] + float(camera.cx)
            v = float(camera.cy) - float(camera.fy) * local[:, 1] / -local[:, 2]
            inside = (z > 1) & (u > 1) & (u < 95) & (v > 1) & (v < 63)
            seen = made.depth(int(view)).double()
            row, column = v[inside].long(), u[inside].long()
            # A point may lie behind what a view sees, never before the nearest thing in and around its pixel.
            around = torch.nn.functional.unfold(seen[None, None].float(), 3, padding=1)[0].reshape(9, 64, 96)
            front = z[inside] - around.amin(dim=0)[row, column]
            assert (front > -0.5).float().mean() > 0.98, "points float in front of the surfaces"
            off = z[inside] - seen[row, column]
            matched += int((off.abs() < 1.0).sum())
    assert matched > 1000


def test_quaternions_turn_as_their_matrices_do() -> None:
    rng = np.random.default_rng(0)
    q = rng.normal(size=(200, 4))
    q[:6] = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 1, 1, 0], [1e-7, 1, 0, 0]]
    q /= np.linalg.norm(q, axis=1, keepdims=True)
    w, x, y, z = q.T
    matrix = np.stack(
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y),
         2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x),
         2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)], axis=1
    ).reshape(-1, 3, 3)  # fmt: skip
    assert np.abs(np.abs((quaternion(matrix) * q).sum(axis=1)) - 1).max() < 1e-9


def test_time_varying_capture_stores_its_times(tmp_path: Path) -> None:
    main(
        [
            "city",
            "--output-path",
            str(tmp_path),
            "--capture",
            "street",
            "--time-varying",
            "--image-format",
            "jpg",
            *SMALL,
        ]
    )
    lines = (tmp_path / "times.txt").read_text().splitlines()
    assert lines[0] == "street_000000.jpg 0.000000" and lines[-1] == "street_000008.jpg 1.000000"
    assert Image.open(tmp_path / "images" / "street_000004.jpg").size == (96, 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--blocks", "0"], "blocks is 0"), (["--views", "1"], "views is 1"), (["--width", "0"], "width is 0"),
        (["--points", "0"], "points is 0"), (["--workers", "0"], "workers is 0"),
        (["--depth-unit", "0"], "depth-unit is 0"), (["--eval-interval", "1"], "eval_interval is 1"),
        (["--altitude", "12"], "roofs"),
    ],
)  # fmt: skip
def test_bad_values_end_with_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["city", "--output-path", str(tmp_path / "out"), "--views", "3", *arguments])
    assert ended.value.code == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "images").exists()


def test_folders_that_cannot_be_written_end_with_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    for output in (tmp_path, tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SystemExit) as ended:
            main(["city", "--output-path", str(output), *SMALL])
        assert ended.value.code == 1
        assert str(output) in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_overwrite_writes_into_a_folder_that_holds_something(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    main(["city", "--output-path", str(tmp_path), "--overwrite", *SMALL, "--views", "2"])
    assert (tmp_path / "note.txt").read_text() == "mine" and len(list((tmp_path / "images").iterdir())) == 2


@pytest.mark.parametrize("old", ["--output", "--out"])
def test_old_names_of_the_output_are_taken_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str
) -> None:
    for words in ([old, str(tmp_path / "a")], [f"{old}={tmp_path / 'a'}", "--overwrite"]):
        main(["city", *words, *SMALL, "--views", "2"])
        assert capsys.readouterr().err.count(f"note: {old} is now called --output-path.") == 1
        assert (tmp_path / "a/images").is_dir()
    main(["city", "--output-path", str(tmp_path / "a"), "--overwrite", *SMALL, "--views", "2"])
    assert "note" not in capsys.readouterr().err


def test_every_command_that_writes_names_its_output_alike() -> None:
    names = {name: set(inspect.signature(command).parameters) for name, command in COMMANDS.items()}
    assert {name for name, parameters in names.items() if "output_path" not in parameters} == {"plan"}
    assert not {"output", "output_dir", "out"} & set.union(*names.values())


def test_help_names_the_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0 and "city" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_each_option_has_an_explanation(name: str) -> None:
    """One line of a docstring with the wrong indent moves all explanations from the options into one paragraph."""
    documented = docstring_parser.parse(COMMANDS[name].__doc__ or "")
    assert {param.arg_name for param in documented.params} == set(inspect.signature(COMMANDS[name]).parameters)
    assert all(param.description for param in documented.params)
    assert "Args:" not in (documented.description or "")
