"""`benchmarks.captures.varied_exposure`: which photographs it changes, and by how much."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.captures.varied_exposure import exposures, main


def test_photographs_to_train_on_differ_and_held_out_ones_do_not(tmp_path: Path) -> None:
    for folder, side in (("images", 32), ("images_2", 16)):
        (tmp_path / "capture" / folder).mkdir(parents=True)
        for k in range(10):
            Image.new("RGB", (side, side), (100, 80, 60)).save(tmp_path / "capture" / folder / f"{k:02d}.png")
    (tmp_path / "capture" / "sparse").mkdir()
    main(["--data", str(tmp_path / "capture"), "--output", str(tmp_path / "copy"), "--stops", "1", "--seed", "3"])
    assert (tmp_path / "copy" / "sparse").is_dir()
    stops = exposures(10, 1.0, 3, 8)
    assert stops[0] == stops[8] == 0 and stops.sum() == pytest.approx(0, abs=1e-9) and stops.std() > 0.3
    for folder in ("images", "images_2"):
        for k, stop in enumerate(stops):
            light = [
                (np.asarray(Image.open(tmp_path / one / folder / f"{k:02d}.png")) / 255) ** 2.2
                for one in ("capture", "copy")
            ]
            assert np.log2(light[1] / light[0]).mean() == pytest.approx(stop, abs=0.05)
