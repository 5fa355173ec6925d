"""A small reconstruction in COLMAP's files, binary or text, by its published format."""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

SIZE = (40, 30)


@dataclass
class Shot:
    """An image as COLMAP has it: id, camera's id and name."""

    image: int
    camera: int
    name: str


def shots(count: int = 10) -> list[Shot]:
    return [Shot(number + 1, 1, f"shot {number:02d}.jpg") for number in range(count)]


def write_binary(folder: Path, images: list[Shot], *, model: int = 1, points: int = 20, colors: int = 200) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    focal = {0: (30.0, 20.0, 15.0), 1: (30.0, 31.0, 20.0, 15.0)}.get(model, (30.0, 31.0, 20.0, 15.0) + (0.0,) * 8)
    (folder / "cameras.bin").write_bytes(struct.pack(f"<QiiQQ{len(focal)}d", 1, 1, model, *SIZE, *focal))
    rows = [struct.pack("<Q", len(images))]
    for number, shot in enumerate(images):
        pose = (1.0, 0.0, 0.0, 0.0, 0.1 * number, 0.05 * number * number, 2.0)
        keypoints = b"".join(struct.pack("<ddq", 1.0, 2.0, -1) for _ in range(number % 3))
        rows.append(struct.pack("<i7di", shot.image, *pose, shot.camera) + shot.name.encode() + b"\0")
        rows.append(struct.pack("<Q", number % 3) + keypoints)
    (folder / "images.bin").write_bytes(b"".join(rows))
    rng, rows = np.random.default_rng(3), [struct.pack("<Q", points)]
    for number in range(points):
        track = b"".join(struct.pack("<ii", 1, 0) for _ in range(number % 4))
        rows.append(struct.pack("<Q3d3BdQ", number, *rng.random(3), 10, 20, number % colors, 0.5, number % 4) + track)
    (folder / "points3D.bin").write_bytes(b"".join(rows))
    return folder


def write_text(folder: Path, images: list[Shot], points: int = 20, colors: int = 200) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cameras.txt").write_text(f"# cameras\n1 PINHOLE {SIZE[0]} {SIZE[1]} 30 31 20 15\n")
    lines = ["# images"]
    for number, shot in enumerate(images):
        name = shot.name.replace(" ", "_")
        lines += [
            f"{shot.image} 1 0 0 0 {0.1 * number} {0.05 * number**2} 2 {shot.camera} {name}",
            "1 2 -1" * (number % 2),
        ]
    (folder / "images.txt").write_text("\n".join(lines) + "\n")
    rng = np.random.default_rng(3)
    rows = [" ".join(map(str, [n, *rng.random(3), 1, 2, n % colors, 0.5, *([1, 0] * (n % 3))])) for n in range(points)]
    (folder / "points3D.txt").write_text("# points\n" + "\n".join(rows) + "\n")
    return folder


def write_images(folder: Path, images: list[Shot], size: tuple[int, int] = SIZE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, shot in enumerate(images):
        pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / shot.name)
    return folder


def write_capture(folder: Path, images: list[Shot] | None = None, points: int = 20) -> Path:
    """Return a capture in COLMAP's layout, with its model in sparse/0."""
    images = shots() if images is None else images
    write_binary(folder / "sparse/0", images, points=points)
    write_images(folder / "images", images)
    return folder
