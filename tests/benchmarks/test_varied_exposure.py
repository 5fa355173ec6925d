"""`benchmarks.captures.varied_exposure`: which photographs it changes, and by how much."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.captures.varied_exposure import exposures, main, photographs
from tests.lib.colmap_files import shots, write_capture


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--data", "none", "--output", "copy", "--stops", "1"), "no photographs in a folder images"),
        (("--data", "capture", "--output", "capture", "--stops", "1"), "--output capture is there already"),
        (("--data", "capture", "--output", "copy", "--stops", "0"), "need stops above 0"),
    ],
)
def test_bad_input_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "capture" / "images").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "capture" / "images" / "0.png")
    with pytest.raises(SystemExit):
        main(words)
    assert said in capsys.readouterr().err and not (tmp_path / "copy").exists()


def test_photographs_to_train_on_differ_and_held_out_ones_do_not(tmp_path: Path) -> None:
    for folder, side in (("images", 32), ("images_2", 16)):
        (tmp_path / "capture" / folder).mkdir(parents=True)
        for k in range(10):
            Image.new("RGB", (side, side), (100, 80, 60)).save(tmp_path / "capture" / folder / f"{k:02d}.png")
    (tmp_path / "capture" / "sparse").mkdir()
    main(["--data", str(tmp_path / "capture"), "--output", str(tmp_path / "copy"), "--stops", "1", "--seed", "3"])
    assert (tmp_path / "copy" / "sparse").is_dir()
    stops = exposures(10, 1.0, 3)
    assert stops[0] == stops[8] == 0 and stops.sum() == pytest.approx(0, abs=1e-9) and stops.std() > 0.3
    for folder in ("images", "images_2"):
        for k, stop in enumerate(stops):
            light = [
                (np.asarray(Image.open(tmp_path / one / folder / f"{k:02d}.png")) / 255) ** 2.2
                for one in ("capture", "copy")
            ]
            assert np.log2(light[1] / light[0]).mean() == pytest.approx(stop, abs=0.05)


def test_photographs_are_counted_by_image_id(tmp_path: Path) -> None:
    """As `--eval-mode interval` does: names may be in another order."""
    images = shots(10)
    for shot in images:
        shot.image = 100 - shot.image
    capture = write_capture(tmp_path / "capture", images)
    Image.new("RGB", (8, 8)).save(capture / "images" / "0000.png")  # without a pose
    assert photographs(capture) == [*sorted((shot.name for shot in images), reverse=True), "0000.png"]
