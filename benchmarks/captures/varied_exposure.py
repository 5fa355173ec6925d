"""Make a copy of a capture whose training photographs differ in exposure, as with a camera's automatic exposure.

    python -m benchmarks.captures.varied_exposure --data FOX --output FOX-1-STOP --stops 1

Each photograph is made 2^u times as bright, in linear light, with u drawn evenly from -STOPS to STOPS; every 8th, which
`benchmarks.captures.recipes` holds out, is unchanged. So a recipe's result on the copy is measured against the mean
exposure, and can be compared with its result on the capture itself. Smaller copies of an image get the same factor.
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from ns_multigpu.plugin.capture.colmap import look_at

SUFFIXES = (".jpg", ".jpeg", ".png")
HELD_OUT = 8
"""Interval of the photographs that are held out."""


def main(argv: Sequence[str] | None = None) -> None:
    """Write the copy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a capture in COLMAP's layout")
    parser.add_argument("--output", type=Path, required=True, help="a folder that does not exist yet")
    parser.add_argument("--stops", type=float, required=True)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    names = photographs(options.data)
    if not names:
        parser.error(f"--data {options.data}: there are no photographs in a folder images: give a capture's folder.")
    if options.output.exists():
        parser.error(f"--output {options.output} is there already: give a folder that is not.")
    if options.stops <= 0:
        parser.error(f"--stops {options.stops:g}: need stops above 0.")
    shutil.copytree(options.data, options.output)
    folders = [folder for folder in options.output.iterdir() if folder.name.split("_")[0] == "images"]
    stops = exposures(len(names), options.stops, options.seed)
    for name, stop in zip(names, stops, strict=True):
        for folder in folders if stop else ():
            change(folder / name, stop)
    print(f"{options.output}: {len(names)} photographs, {np.count_nonzero(stops)} of another exposure.")


def photographs(capture: Path) -> list[str]:
    """Return the names of a capture's photographs, within `images`, by image id: `--eval-mode interval` counts so.

    Those that COLMAP's model in sparse/0 does not list come last.
    """
    whole = capture / "images"
    names = sorted(str(file.relative_to(whole)) for file in whole.rglob("*") if file.suffix.lower() in SUFFIXES)
    number = {view.name: index for index, view in enumerate(look_at(capture / "sparse" / "0").views)}
    return sorted(names, key=lambda name: number.get(name, len(number)))


def exposures(views: int, stops: float, seed: int) -> np.ndarray:
    """Return [views], by how many stops each photograph is brighter: 0 for held-out ones, mean 0 over the others."""
    drawn = np.random.default_rng(seed).uniform(-stops, stops, views)
    held_out = np.arange(views) % HELD_OUT == 0
    drawn[held_out] = 0.0
    drawn[~held_out] -= drawn[~held_out].mean()
    return drawn


def change(file: Path, stops: float) -> None:
    """Make a photograph brighter by `stops` stops. Values beyond white are clipped."""
    image = Image.open(file)
    pixels = np.asarray(image.convert("RGB"), dtype=np.float32) / 255
    # A power of light is one of what a display's gamma has made of it.
    brighter = np.clip(pixels * 2 ** (stops / 2.2), 0, 1)
    made = Image.fromarray((brighter * 255 + 0.5).astype(np.uint8))
    exif = image.info.get("exif", b"")
    made.save(file, **({"quality": 92, "exif": exif} if file.suffix.lower() != ".png" else {}))


if __name__ == "__main__":
    main()
