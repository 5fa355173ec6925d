"""Make a copy of a capture whose training poses are inaccurate, as where a reconstruction is poor.

    python -m benchmarks.captures.perturbed_poses --data FOX --output FOX-HALF-DEGREE --degrees 0.5 --share 0.005

Each training camera turns about its own centre by a rotation vector whose three components have a standard deviation of
--degrees. Its centre moves by a vector whose three components have one of --share of the cameras' extent. Both are
Gaussian. Every 8th view by image id, which `--eval-mode interval` holds out, keeps its pose. So held-out views are
compared at their true poses. Seed points and their tracks remain as they are, and photographs are linked.
`benchmarks.captures.radiance --truth FOX` reports how far poses are from the true ones after training.
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from nerfstudio.data.utils.colmap_parsing_utils import read_images_binary, write_images_binary
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from benchmarks.captures.varied_exposure import HELD_OUT
from ns_multigpu.plugin.capture.colmap import look_at

_MODEL = Path("sparse") / "0"

Floats = NDArray[np.float64]


def main(argv: Sequence[str] | None = None) -> None:
    """Write the copy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a capture with COLMAP's binary model in sparse/0")
    parser.add_argument("--output", type=Path, required=True, help="a folder that does not exist yet")
    parser.add_argument("--degrees", type=float, required=True, help="standard deviation about each axis")
    parser.add_argument("--share", type=float, required=True, help="standard deviation along each axis, by the extent")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    for name in ("degrees", "share"):
        if not 0 <= getattr(options, name) < np.inf:
            parser.error(f"--{name} {getattr(options, name):g}: give a finite number, 0 or above.")
    if options.output.exists():
        parser.error(f"--output {options.output} is there already: give a folder that is not.")
    model = options.data / _MODEL
    if (model / "cameras.txt").exists() or not (model / "images.bin").exists():
        parser.error(f"--data {options.data}: {_MODEL} needs COLMAP's binary files: colmap model_converter makes them.")
    if problems := look_at(model).problems:
        parser.error(f"--data {options.data}: {problems[0]}.")
    images = read_images_binary(model / "images.bin")
    numbers = sorted(images)
    turns, centres = poses_of(options.data)
    moved = perturbed(turns, centres, options.degrees, options.share, options.seed)
    for index in training(len(numbers)):
        to_camera = moved[0][index].inv()
        number, shift = numbers[index], -to_camera.apply(moved[1][index])
        images[number] = images[number]._replace(qvec=np.roll(to_camera.as_quat(), 1), tvec=shift)
    (options.output / _MODEL).mkdir(parents=True)
    for file in model.iterdir():
        if file.name != "images.bin":
            shutil.copyfile(file, options.output / _MODEL / file.name)
    for entry in options.data.iterdir():
        if entry.name != "sparse":
            (options.output / entry.name).symlink_to(entry.resolve())
    write_images_binary(images, options.output / _MODEL / "images.bin")
    print(f"{options.output}: {len(numbers)} views, {len(training(len(numbers)))} of another pose.")


def training(views: int) -> list[int]:
    """Return the indices of the views that `--eval-mode interval` trains on."""
    return [index for index in range(views) if index % HELD_OUT]


def poses_of(capture: Path) -> tuple[Rotation, Floats]:
    """Return a capture's poses by image id: rotations from camera to world in COLMAP's axes, and centres [n, 3]."""
    poses = np.array(look_at(capture / _MODEL).poses)
    turns = Rotation.from_quat(np.roll(poses[:, :4], -1, axis=1)).inv()
    return turns, -turns.apply(poses[:, 4:])


def extent(centres: Floats) -> float:
    """Return the greatest distance of a camera from the mean of all centres [n, 3]."""
    return float(np.linalg.norm(centres - centres.mean(0), axis=1).max())


def perturbed(turns: Rotation, centres: Floats, degrees: float, share: float, seed: int) -> tuple[Rotation, Floats]:
    """Return poses with errors, as of `poses_of`.

    Args:
        turns, centres: n poses. degrees, share, seed: see this module.
    """
    drawn = np.random.default_rng(seed).standard_normal((2, len(centres), 3))
    shift = share * extent(centres) * drawn[1]
    return Rotation.from_rotvec(degrees * drawn[0], degrees=True) * turns, centres + shift


def pose_errors(capture: Path, names: Sequence[str], poses: Floats) -> dict[str, float]:
    """Return the mean errors of poses: "degrees", and "share" of the cameras' extent.

    "aligned_degrees" and "aligned_share" are those without the motion and the scale that all poses have in common,
    which photographs of training views do not determine.

    Args:
        capture: has the true poses. names: of the views, within `images`.
        poses: [n, 3, 4] from camera to world, in COLMAP's world and axes.
    """
    turns, centres = poses_of(capture)
    numbers = {view.name: index for index, view in enumerate(look_at(capture / _MODEL).views)}
    true = [numbers[name] for name in names]
    found, wanted = poses[:, :, 3], centres[true]
    apart = Rotation.concatenate(
        [Rotation.from_matrix(pose[:, :3]) * turns[k].inv() for pose, k in zip(poses, true, strict=True)]
    )
    around, target = found - found.mean(0), wanted - wanted.mean(0)
    common = Rotation.align_vectors(target, around)[0]
    aligned = common.apply(around) * np.linalg.norm(target) / np.linalg.norm(around)
    size = extent(centres)
    return {
        "degrees": float(np.degrees(apart.magnitude()).mean()),
        "share": float(np.linalg.norm(found - wanted, axis=1).mean()) / size,
        "aligned_degrees": float(np.degrees((apart.mean().inv() * apart).magnitude()).mean()),
        "aligned_share": float(np.linalg.norm(aligned - target, axis=1).mean()) / size,
    }


if __name__ == "__main__":
    main()
