"""Bad inputs, given to the real commands: what they print, with which status they end, and how long that takes.

    python -m benchmarks.bad_inputs --capture ../shared/data/fox --output benchmarks/results/bad-inputs.json

Each case makes its input from a small copy of the capture (COLMAP's layout), runs one command on CPU workers, and looks
for words that a person needs in what it prints. A case is good if they are there, no traceback is, and the status is
the one expected. `--only NAME ...` runs some.
"""

import argparse
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.environment import describe

BATCH = ("ns-train", "splatfacto-batch", "--machine.device-type", "cpu", "--vis", "tensorboard")
TWO = ("--machine.num-devices", "2")
SHORT = ("--max-num-images", "16", "--steps-per-eval-all-images", "0", "--steps-per-eval-image", "0")


@dataclass(frozen=True)
class Result:
    """What became of a case."""

    name: str
    command: str
    status: int
    seconds: float
    said: list[str]
    good: bool


@dataclass
class Place:
    """Where a case may do as it likes.

    Attributes:
        folder: empty, and its own. capture: a small copy of the capture. run: a finished run on it.
    """

    folder: Path
    capture: Path
    run: Path

    def colmap(self, *more: str) -> tuple[str, ...]:
        """The end of a command that reads the capture."""
        return ("colmap", "--colmap-path", "sparse/0", *more)

    def train(self, *more: str, data: str | None = None, end: Sequence[str] | None = None) -> list[str]:
        """A command that trains on the capture."""
        out = ("--output-dir", str(self.folder / "out"), "--data", data or str(self.capture))
        return [*BATCH, *SHORT, *out, *more, *(self.colmap() if end is None else end)]


Case = Callable[[Place], tuple[list[str], int, tuple[str, ...]]]
"""Makes an input; returns the command, the status to expect, and words to find."""
CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    """Adds a case under a name that says what is wrong."""

    def add(function: Case) -> Case:
        CASES[name] = function
        return function

    return add


# ---- COLMAP's files ----


def _cut(path: Path, part: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])


def _damaged(file: str, part: float, words: tuple[str, ...]) -> Case:
    def make(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
        _cut(place.capture / "sparse/0" / file, part)
        return place.train(*TWO), 1, (file, *words)

    return make


for _file in ("cameras", "images", "points3D"):
    CASES[f"{_file}.bin truncated"] = _damaged(f"{_file}.bin", 0.6, ("truncated",))
    CASES[f"{_file}.bin empty"] = _damaged(f"{_file}.bin", 0.0, ("empty",))


def _as_text(place: Path) -> None:
    """Writes a reconstruction as text, by nerfstudio's own functions."""
    from nerfstudio.data.utils import colmap_parsing_utils as colmap

    colmap.write_cameras_text(colmap.read_cameras_binary(place / "cameras.bin"), place / "cameras.txt")
    colmap.write_images_text(colmap.read_images_binary(place / "images.bin"), place / "images.txt")
    points = colmap.read_points3D_binary(place / "points3D.bin")
    lines = [
        " ".join(map(str, [p.id, *p.xyz, *p.rgb, p.error, *np.column_stack([p.image_ids, p.point2D_idxs]).ravel()]))
        for p in points.values()
    ]
    (place / "points3D.txt").write_text("\n".join(lines) + "\n")
    for name in ("cameras", "images", "points3D"):
        (place / f"{name}.bin").unlink()


for _file in ("cameras", "images", "points3D"):

    @case(f"{_file}.txt truncated")
    def _(place: Place, file: str = _file) -> tuple[list[str], int, tuple[str, ...]]:
        _as_text(place.capture / "sparse/0")
        lines = (place.capture / "sparse/0" / f"{file}.txt").read_text().splitlines()
        kept = [line for line in lines if line[:1] != "#"]
        cut = 1 if file == "cameras" else len(kept) // 2
        last = " ".join(kept[cut - 1].split()[: 6 if file == "cameras" else 7])
        (place.capture / "sparse/0" / f"{file}.txt").write_text("\n".join([*kept[: cut - 1], last]) + "\n")
        return place.train(*TWO), 1, (f"{file}.txt",)


@case("text files that are whole")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    _as_text(place.capture / "sparse/0")
    return place.train(), 0, ("Training finished",)


@case("points3D missing")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    (place.capture / "sparse/0/points3D.bin").unlink()
    return place.train(*TWO), 1, ("points3D.bin (or .txt) is missing", "--load-3D-points False")


@case("points3D missing, and not asked for")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    (place.capture / "sparse/0/points3D.bin").unlink()
    few = ("--pipeline.model.num-random", "500")
    return place.train(*few, end=place.colmap("--load-3D-points", "False")), 0, ("no seed points", "500 random")


@case("no points in points3D.bin")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    (place.capture / "sparse/0/points3D.bin").write_bytes(struct.pack("<Q", 0))
    return place.train("--pipeline.model.num-random", "500", *TWO), 0, ("no seed points", "500 random")


@case("camera model FULL_OPENCV")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    camera = struct.pack("<QiiQQ12d", 1, 1, 6, 132, 236, *([200.0, 200.0, 66.0, 118.0] + [0.0] * 8))
    (place.capture / "sparse/0/cameras.bin").write_bytes(camera)
    return place.train(), 1, ("FULL_OPENCV", "SIMPLE_RADIAL")


@case("an image without its camera")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    path = place.capture / "sparse/0/images.bin"
    data = bytearray(path.read_bytes())
    data[8 + 60 : 8 + 64] = struct.pack("<i", 77)
    path.write_bytes(data)
    return place.train(), 1, ("camera 77 is not in cameras.bin",)


@case("NaN in a pose")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    path = place.capture / "sparse/0/images.bin"
    data = bytearray(path.read_bytes())
    data[8 + 36 : 8 + 44] = struct.pack("<d", float("nan"))
    path.write_bytes(data)
    return place.train(), 1, ("its pose is NaN or infinite",)


@case("--colmap-path forgotten")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    return place.train(end=("colmap",)), 1, ("--colmap-path sparse/0",)


# ---- images ----


def _first(place: Place) -> Path:
    return sorted((place.capture / "images").iterdir())[1]


@case("an image truncated")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    _cut(_first(place), 0.5)
    return place.train(*TWO), 1, (_first(place).name, "truncated")


@case("an image of no bytes")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    _first(place).write_bytes(b"")
    return place.train(), 1, (_first(place).name, "unreadable")


@case("a text named .jpg")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    _first(place).write_text("this is no picture")
    return place.train(), 1, (_first(place).name, "unreadable")


@case("a CMYK image")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    Image.open(_first(place)).convert("CMYK").save(_first(place))
    return place.train(), 1, (_first(place).name, "CMYK", "RGB")


@case("an image of another size")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    Image.open(_first(place)).resize((50, 60)).save(_first(place))
    return place.train(), 1, (_first(place).name, "50x60")


@case("two images missing")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    gone = sorted((place.capture / "images").iterdir())[3:5]
    for path in gone:
        path.unlink()
    return place.train(*TWO), 1, ("2 fault(s)", *(path.name for path in gone))


@case("an image turned by EXIF")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    image = Image.open(_first(place)).rotate(90, expand=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(_first(place), exif=exif)
    return place.train(*TWO), 1, (_first(place).name, "EXIF", "auto-orient")


@case("EXIF says upside down")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    exif = Image.Exif()
    exif[0x0112] = 3
    Image.open(_first(place)).save(_first(place), exif=exif)
    return place.train(), 0, ("Note:", "EXIF", _first(place).name)


@case("alpha in one image of many")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    # A PNG under the name that COLMAP has: nerfstudio goes by content.
    Image.open(_first(place)).convert("RGBA").save(_first(place), format="PNG")
    return place.train(), 0, ("Note: 1 of 50 images have an alpha channel", _first(place).name)


@case("only images_4/ there, factor 2 asked for")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    (place.capture / "images").rename(place.capture / "images_4")
    return place.train(*TWO, end=place.colmap("--downscale-factor", "2")), 1, ("images_4 (--downscale-factor 4)",)


@case("no folder of images")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    shutil.rmtree(place.capture / "images")
    return place.train(), 1, ("images: there is no such folder",)


@case("no folder of masks")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    return place.train(end=place.colmap("--masks-path", "masks")), 1, ("masks", "there is no such file")


def _images_bin(place: Place, change: Callable[[list[bytes]], list[bytes]]) -> None:
    """Changes the list of a reconstruction's images; keypoints are left out."""
    path = place.capture / "sparse/0/images.bin"
    data, at, rows = path.read_bytes(), 8, list[bytes]()
    for _ in range(struct.unpack_from("<Q", data)[0]):
        end = data.index(b"\0", at + 64)
        rows.append(data[at : end + 1] + struct.pack("<Q", 0))
        at = end + 9 + 24 * struct.unpack_from("<Q", data, end + 1)[0]
    rows = change(rows)
    path.write_bytes(struct.pack("<Q", len(rows)) + b"".join(rows))


@case("one view alone")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    _images_bin(place, lambda rows: rows[:1])
    return place.train(*TWO), 1, ("1 view(s), and all are held out", "--eval-mode all")


@case("a frame listed twice")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    _images_bin(place, lambda rows: [*rows, struct.pack("<i", 999) + rows[0][4:]])
    return place.train(), 0, ("Listed more than once: 0001.jpg", "too good")


@case("a folder of spaces and umlauts")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    named = place.folder / "Füchse im Wald"
    shutil.copytree(place.capture, named)
    return place.train(*TWO, data=str(named)), 0, ("Training finished", "'")


# ---- nerfstudio's format ----


def _transforms(place: Place, change: Callable[[dict], None]) -> list[str]:
    names = sorted(path.name for path in (place.capture / "images").iterdir())[:6]
    frames = []
    for number, name in enumerate(names):
        pose = np.eye(4)
        pose[:3, 3] = [0.3 * number, 0.1 * number**2, 1.0]
        frames.append({"file_path": f"images/{name}", "transform_matrix": pose.tolist()})
    meta = {"fl_x": 200.0, "fl_y": 200.0, "cx": 66.0, "cy": 118.0, "w": 132, "h": 236, "frames": frames}
    change(meta)
    (place.capture / "transforms.json").write_text(json.dumps(meta))
    return place.train("--pipeline.model.num-random", "500", end=())


@case("transforms.json without seed points")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    return _transforms(place, lambda meta: None), 0, ("no seed points", "500 random")


@case("transforms.json cut short")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    command = _transforms(place, lambda meta: None)
    _cut(place.capture / "transforms.json", 0.7)
    return command, 1, ("transforms.json", "not valid JSON")


@case("transforms.json of no frames")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    return _transforms(place, lambda meta: meta.update(frames=[])), 1, ("it has no list of frames",)


@case("transforms.json without focal length")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    return _transforms(place, lambda meta: meta.pop("fl_x")), 1, ("transforms.json", "fx not specified")


@case("transforms.json that names other images")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    return _transforms(place, lambda meta: meta["frames"][2].update(file_path="images/none.jpg")), 1, ("none.jpg",)


@case("COLMAP's layout given to nerfstudio's parser")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    return place.train(end=()), 1, ("transforms.json", "colmap --colmap-path sparse/0")


# ---- options ----


@case("--data that is nowhere")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    return place.train(data="/no/such/place"), 1, ("--data /no/such/place",)


@case("more workers than cores")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    workers = (os.cpu_count() or 1) + 1
    return place.train("--machine.num-devices", str(workers)), 0, (f"Note: {workers} workers share",)


@case("999 workers")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    return place.train("--machine.num-devices", "999"), 1, ("--machine.num-devices 999", "GB of memory")


def _option(words: tuple[str, ...], found: tuple[str, ...], status: int = 1) -> Case:
    return lambda place: (place.train(*words), status, found)


CASES |= {
    "--max-num-images 0": _option(("--max-num-images", "0"), ("--max-num-images 0", "nothing to train")),
    "--max-num-images -5": _option(("--max-num-images", "-5"), ("--max-num-images -5",)),
    "no worker": _option(("--machine.num-devices", "0"), ("--machine.num-devices 0",)),
    "GPUs that are not there": _option(
        ("--machine.device-type", "cuda", "--machine.num-devices", "64"), ("--machine.num-devices 64", "torch sees")
    ),
    "device type mps": _option(("--machine.device-type", "mps"), ("mps is not supported",)),
    "a strategy misspelt": _option(("--pipeline.strategy", "tiel"), ("Did you mean 'tile'",)),
    "views that cannot be dealt out": _option((*TWO, "--pipeline.views-per-step", "3"), ("multiple of 2",)),
    "MCMC with a cap below the seed points": _option(
        ("--pipeline.model.densifier", "mcmc", "--pipeline.model.max-gs-num", "10"), ("max-gs-num 10",)
    ),
    "--rates-at-end 0": _option(("--rates-at-end", "0"), ("--rates-at-end 0.0",)),
    "--mixed-precision True": _option(("--mixed-precision", "True"), ("--mixed-precision True is not supported",)),
    "peer memory on a CPU": _option((*TWO, "--pipeline.transport", "peer"), ("--pipeline.transport peer",)),
    "--save-fallback-dir in /proc": _option(("--save-fallback-dir", "/proc/here"), ("--save-fallback-dir /proc/here",)),
    "--save-retry-seconds -1": _option(("--save-retry-seconds", "-1"), ("--save-retry-seconds -1",)),
    "--image-memory-gb 0": _option(("--pipeline.datamanager.image-memory-gb", "0"), ("image-memory-gb 0",)),
    "room for no two images": _option(("--pipeline.datamanager.image-memory-gb", "0.00001"), ("image-memory-gb",)),
    "several machines without torchrun": _option(("--machine.num-machines", "2"), ("torchrun --nnodes 2",)),
    "--load-dir that is nowhere": _option(("--load-dir", "/no/run"), ("--load-dir /no/run",)),
    "--load-checkpoint that is nowhere": _option(("--load-checkpoint", "/no/file.ckpt"), ("no such file",)),
    "--keep-checkpoints -1": _option(("--keep-checkpoints", "-1"), ("--keep-checkpoints -1",)),
}


@case("an output folder that is a file")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    (place.folder / "out").write_text("in the way")
    return place.train(), 1, ("cannot be written", "--output-dir")


# ---- going on ----


@case("--load-config alone")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    command = ["ns-train", "splatfacto-batch", "--load-config", str(place.run / "config.yml")]
    return command, 1, ("holds checkpoints up to step", "--load-dir", "--start-over True")


@case("--load-config of another method")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    command = ["ns-train", "splatfacto-tile", "--load-config", str(place.run / "config.yml")]
    return command, 1, ("method is splatfacto-batch",)


@case("--load-config of no run")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    (place.folder / "config.yml").write_text("a: [1, 2")
    command = ["ns-train", "splatfacto-batch", "--load-config", str(place.folder / "config.yml")]
    return command, 2, ("it is damaged, or no config.yml",)


@case("the same --timestamp twice")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    out = ("--output-dir", str(place.run.parents[2]), "--timestamp", "now", "--experiment-name", "fox")
    return place.train(*out), 1, ("holds checkpoints up to step",)


@case("a resume with another sh-degree")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    models = ("--load-dir", str(place.run / "nerfstudio_models"))
    return place.train(*models, "--pipeline.model.sh-degree", "1"), 1, ("--pipeline.model.sh-degree",)


@case("a resume with other options")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    command = ["ns-train", "splatfacto-batch", "--load-config", str(place.run / "config.yml"), "--load-dir"]
    more = ("--max-num-images", "24", "--pipeline.model.cull-alpha-thresh", "0.2")
    return (
        [*command, str(place.run / "nerfstudio_models"), *more],
        0,
        ("cull-alpha-thresh 0.2 (was 0.1)", "24 (was 16)"),
    )


@case("--load-step that is not there")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    models = ("--load-dir", str(place.run / "nerfstudio_models"), "--load-step", "777")
    return place.train(*models), 1, ("--load-step 777", "has no such step")


@case("a checkpoint cut short")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    (checkpoint,) = (place.run / "nerfstudio_models").glob("*.ckpt")
    _cut(checkpoint, 0.5)
    return place.train(*TWO, "--load-checkpoint", str(checkpoint)), 1, (checkpoint.name,)


@case("a run that was moved")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    moved = place.folder / "moved"
    place.run.rename(moved)
    out = ("--output-path", str(place.folder / "eval.json"))
    return ["ns-eval", "--load-config", str(moved / "config.yml"), *out], 0, ("Saved results",)


@case("config.yml copied alone")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    shutil.copy(place.run / "config.yml", place.folder / "config.yml")
    shutil.rmtree(place.run)
    out = ("--output-path", str(place.folder / "eval.json"))
    return ["ns-eval", "--load-config", str(place.folder / "config.yml"), *out], 1, ("no checkpoints beside it",)


@case("ns-render spiral")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    out = ("--output-path", str(place.folder / "spiral"), "--output-format", "images", "--seconds", "0.2")
    return ["ns-render", "spiral", "--load-config", str(place.run / "config.yml"), *out], 0, ("Render Complete",)


@case("a camera path that is none")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    (place.folder / "path.json").write_text("{}")
    command = ["ns-multigpu", "render", "--load-config", str(place.run / "config.yml"), "--camera-path-filename"]
    return [*command, str(place.folder / "path.json")], 1, ("this is no camera path",)


for _points in ("none", "-4", "0", "1e99"):
    CASES[f"plan --points {_points}"] = lambda place, points=_points: (
        ["ns-multigpu", "plan", "--points", points], 1 if points != "-4" else 2, ("points",),
    )  # fmt: skip
CASES["plan --points 4e6"] = lambda place: (["ns-multigpu", "plan", "--points", "4e6"], 0, ("4,000,000",))


# ---- running them ----


def small_copy(capture: Path, folder: Path, divisor: int = 8) -> None:
    """A capture with images of 1/divisor of their size, and cameras to match."""
    (folder / "images").mkdir(parents=True)
    size = (0, 0)
    for path in sorted((capture / "images").iterdir()):
        with Image.open(path) as image:
            size = (image.width // divisor, image.height // divisor)
            image.resize(size, Image.Resampling.BOX).save(folder / "images" / path.name)
    shutil.copytree(capture / "sparse", folder / "sparse")
    for path in (folder / "sparse").rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    file = folder / "sparse/0/cameras.bin"
    data = bytearray(file.read_bytes())
    count, model = struct.unpack_from("<Q", data)[0], struct.unpack_from("<i", data, 12)[0]
    if count != 1 or model > 4:
        raise SystemExit("--capture: give a capture of one camera whose first parameters are focal lengths and centre")
    lengths = {0: 3, 1: 4, 2: 3, 3: 3, 4: 4}[model]
    values = [value / divisor for value in struct.unpack_from(f"<{lengths}d", data, 32)]
    struct.pack_into("<QQ", data, 16, *size)
    struct.pack_into(f"<{lengths}d", data, 32, *values)
    file.write_bytes(data)


def run(name: str, command: Sequence[str], status: int, words: Sequence[str], folder: Path) -> Result:
    """Runs a command and looks at what it prints."""
    variables = {**os.environ, "PYTHONWARNINGS": "ignore", "COLUMNS": "400"}
    variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{variables['PATH']}"
    began = time.monotonic()
    process = subprocess.Popen(
        command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    said = [line.rstrip() for line in output.splitlines() if line.strip()]
    missing = [word for word in words if word not in output]
    good = process.returncode == status and not missing and "Traceback" not in output
    left = folder / "out"
    if status != 0 and left.is_dir() and any(path.is_dir() for path in left.glob("*/*/*")):
        good, missing = False, [*missing, "an empty run folder was left"]
    print(f"{'ok  ' if good else 'BAD '} {process.returncode} {time.monotonic() - began:5.1f} s  {name}", flush=True)
    if not good:
        print("\n".join([f"     missing: {missing}", *(f"     {line}" for line in said[-25:])]), flush=True)
    return Result(name, " ".join(command), process.returncode, round(time.monotonic() - began, 1), said[-12:], good)


def main() -> int:
    """Runs the cases; the status is 1 if one of them is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capture", type=Path, required=True)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    given = parser.parse_args()
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="bad-inputs-") as top:
        whole = Path(top) / "whole"
        small_copy(given.capture, whole / "fox")
        first = Place(whole, whole / "fox", whole / "runs/fox/splatfacto-batch/now")
        out = ("--output-dir", str(whole / "runs"), "--timestamp", "now", "--experiment-name", "fox")
        made = run("a good run", first.train(*out), 0, ("Training finished",), whole)
        if not made.good:
            return 1
        for number, (name, make) in enumerate(CASES.items()):
            if given.only and name not in given.only:
                continue
            folder = Path(top) / str(number)
            shutil.copytree(whole / "fox", folder / "fox")
            shutil.copytree(whole / "runs", folder / "runs")
            place = Place(folder, folder / "fox", folder / "runs/fox/splatfacto-batch/now")
            results.append(run(name, *make(place), folder))
            shutil.rmtree(folder)
    if given.output is not None:
        rows = [{**asdict(result), "command": result.command.replace(top, "...")} for result in results]
        given.output.write_text(json.dumps({"environment": describe(), "cases": rows}, indent=1) + "\n")
    bad = [result.name for result in results if not result.good]
    print(f"{len(results) - len(bad)} of {len(results)} as they should be. {'; '.join(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
