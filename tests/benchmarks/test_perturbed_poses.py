"""`benchmarks.captures.perturbed_poses`: which poses it moves, by how much, and what remains."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from benchmarks.captures.perturbed_poses import extent, main, perturbed, pose_errors, poses_of
from benchmarks.captures.varied_exposure import HELD_OUT
from ns_multigpu.plugin.capture.colmap import look_at
from tests.lib.colmap_files import shots, write_capture, write_text

VIEWS = 18


def copied(folder: Path, *more: str) -> tuple[Path, Path]:
    """Return a capture whose ids and names are in opposite orders, and its copy."""
    images = shots(VIEWS)
    for shot in images:
        shot.image = 100 - shot.image
    capture, copy = write_capture(folder / "capture", images), folder / "copy"
    main(["--data", str(capture), "--output", str(copy), "--degrees", "0.5", "--share", "0.01", *more])
    return capture, copy


def test_training_poses_move_by_what_is_asked_and_held_out_ones_do_not(tmp_path: Path) -> None:
    capture, copy = copied(tmp_path)
    (turns, centres), (turned, shifted) = poses_of(capture), poses_of(copy)
    degrees, moved = np.degrees((turned * turns.inv()).magnitude()), np.linalg.norm(shifted - centres, axis=1)
    held_out = np.arange(VIEWS) % HELD_OUT == 0
    assert (degrees[held_out] == 0).all() and (moved[held_out] == 0).all() and held_out.sum() == 3
    assert (degrees[~held_out] > 0).all() and (moved[~held_out] > 0).all()
    # The mean length of a vector with three components of deviation 1 is 1.6.
    assert 0.5 < degrees[~held_out].mean() / (1.6 * 0.5) < 1.5
    assert 0.5 < moved[~held_out].mean() / (1.6 * 0.01 * extent(centres)) < 1.5
    views = [look_at(one / "sparse" / "0").views for one in (capture, copy)]
    assert views[0] == views[1] and views[0][0].name == shots(VIEWS)[-1].name  # by id


def test_all_else_is_as_it_was(tmp_path: Path) -> None:
    capture, copy = copied(tmp_path)
    assert (copy / "images").is_symlink() and (copy / "images").resolve() == (capture / "images").resolve()
    for name in ("cameras.bin", "points3D.bin"):
        assert (copy / "sparse" / "0" / name).read_bytes() == (capture / "sparse" / "0" / name).read_bytes()
    sizes = [(one / "sparse" / "0" / "images.bin").stat().st_size for one in (capture, copy)]
    assert sizes[0] == sizes[1]


def test_errors_are_gaussian_and_seeded() -> None:
    rng = np.random.default_rng(5)
    turns, centres = poses_like(rng, 4000)
    turned, shifted = perturbed(turns, centres, 2.0, 0.1, 7)
    vectors = np.degrees((turned * turns.inv()).as_rotvec())
    assert np.allclose(vectors.std(0), 2, rtol=0.05) and np.allclose(vectors.mean(0), 0, atol=0.15)
    shift = (shifted - centres) / extent(centres)
    assert np.allclose(shift.std(0), 0.1, rtol=0.05) and np.allclose(shift.mean(0), 0, atol=0.01)
    assert np.array_equal(shifted, perturbed(turns, centres, 2.0, 0.1, 7)[1])
    assert not np.array_equal(shifted, perturbed(turns, centres, 2.0, 0.1, 8)[1])


def poses_like(rng: np.random.Generator, views: int) -> tuple[Any, Any]:
    """Return random poses, as of `poses_of`."""
    return Rotation.random(views, rng), rng.standard_normal((views, 3))


def test_pose_errors_of_some_views(tmp_path: Path) -> None:
    capture, copy = copied(tmp_path)
    (turns, centres), (turned, shifted) = poses_of(capture), poses_of(copy)
    names = [view.name for view in look_at(capture / "sparse" / "0").views]
    chosen = [5, 1]
    poses = np.concatenate([turns.as_matrix()[chosen], centres[chosen][:, :, None]], 2)
    found = pose_errors(copy, [names[index] for index in chosen], poses)
    assert found["degrees"] == pytest.approx(np.degrees((turned * turns.inv()).magnitude())[chosen].mean())
    moved = np.linalg.norm(shifted - centres, axis=1)[chosen].mean()
    assert found["share"] == pytest.approx(moved / extent(shifted))


def test_aligned_errors_ignore_a_common_motion(tmp_path: Path) -> None:
    capture, copy = copied(tmp_path)
    turns, centres = poses_of(copy)
    names = [view.name for view in look_at(copy / "sparse" / "0").views]
    common = Rotation.from_rotvec([0.1, -0.2, 0.3])
    poses = np.concatenate([(common * turns).as_matrix(), (1.1 * common.apply(centres) + 2)[:, :, None]], 2)
    found = pose_errors(copy, names, poses)
    assert found["degrees"] == pytest.approx(np.degrees(common.magnitude())) and found["share"] > 0.1
    assert found["aligned_degrees"] < 1e-4 and found["aligned_share"] < 1e-6
    other = pose_errors(capture, names, poses)
    assert 0.1 < other["aligned_degrees"] < 1 and 0.002 < other["aligned_share"] < 0.02


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"--data": "none"}, "needs COLMAP's binary files"),
        ({"--data": "text"}, "needs COLMAP's binary files"),
        ({"--data": "damaged"}, "images.bin: it is truncated"),
        ({"--output": "capture"}, "--output capture is there already"),
        ({"--degrees": "-1"}, "--degrees -1: give a finite number, 0 or above"),
        ({"--share": "inf"}, "--share inf: give a finite number, 0 or above"),
    ],
)
def test_bad_input_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, words: dict[str, str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("capture", "damaged"):
        write_capture(Path(name))
    write_text(Path("text/sparse/0"), shots(3))
    damaged = Path("damaged/sparse/0/images.bin")
    damaged.write_bytes(damaged.read_bytes()[:90])
    given = {"--data": "capture", "--output": "copy", "--degrees": "1", "--share": "0.01"} | words
    with pytest.raises(SystemExit):
        main([word for pair in given.items() for word in pair])
    assert said in " ".join(capsys.readouterr().err.split()) and not Path("copy").exists()
