"""Broken captures: COLMAP's files, images, nerfstudio's format. Imported for its cases."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.robustness.bad_cases import CASES, TWO, Case, Place, case, cut

# ---- COLMAP's files ----


def _damaged(file: str, part: float, words: tuple[str, ...]) -> Case:
    def make(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
        cut(place.capture / "sparse/0" / file, part)
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
        end = 1 if file == "cameras" else len(kept) // 2
        last = " ".join(kept[end - 1].split()[: 6 if file == "cameras" else 7])
        (place.capture / "sparse/0" / f"{file}.txt").write_text("\n".join([*kept[: end - 1], last]) + "\n")
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
    (place.capture / "sparse").rename(place.capture / "model")
    return place.train(end=("colmap",)), 1, ("--colmap-path model/0",)


# ---- images ----


def _first(place: Place) -> Path:
    return sorted((place.capture / "images").iterdir())[1]


@case("an image truncated")
def _(place: Place) -> tuple[list[str], int, tuple[str, ...]]:
    cut(_first(place), 0.5)
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
    return place.train(*TWO), 1, ("problems: 2", *(path.name for path in gone))


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
    cut(place.capture / "transforms.json", 0.7)
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
    return place.train(end=()), 1, ("transforms.json", "end the command with: colmap")
