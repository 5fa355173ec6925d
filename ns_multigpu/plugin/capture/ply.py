"""Points of a .ply file: text or binary, without open3d. The format: https://paulbourke.net/dataformats/ply."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ns_multigpu.plugin.capture.colmap import Damaged

_TYPES = {
    "char": "i1", "uchar": "u1", "short": "i2", "ushort": "u2", "int": "i4", "uint": "u4", "float": "f4",
    "double": "f8", "int8": "i1", "uint8": "u1", "int16": "i2", "uint16": "u2", "int32": "i4", "uint32": "u4",
    "float32": "f4", "float64": "f8",
}  # fmt: skip
_COLOURS = (("red", "green", "blue"), ("diffuse_red", "diffuse_green", "diffuse_blue"), ("r", "g", "b"))
_ORDERS = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}
_END = b"end_header"
_LONGEST_HEADER = 1 << 16
_QUICKER = 20
"""Factor by which more points of a binary file than of a text are read."""


def read_ply(path: Path) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    """Return the positions [n, 3] of a file's vertices, and their colours [n, 3] or [0, 3] if it has none.

    Colours that are not bytes are scaled: numbers up to 1, 255 or 65535 are white.

    Raises:
        Damaged: the file is no .ply, ends too early, or has no vertices with x, y and z.
        OSError: the file cannot be read.
    """
    xyz, rgb, _ = sample_ply(path, None)
    return xyz, rgb


def sample_ply(path: Path, most: int | None) -> tuple[NDArray[np.float64], NDArray[np.uint8], int]:
    """Return positions and colours as `read_ply` does, and the number of the file's vertices. Raise as it does.

    Args:
        path: the file.
        most: of a text file with at least twice as many vertices, and of a binary one with 40 times as many, every kth
            is read, if all positions are finite; None for all.
    """
    data = path.read_bytes()
    end = data.find(b"\n", data.find(_END))
    if not data.startswith(b"ply") or _END not in data or end < 0:
        raise Damaged(f"{path}: it is no .ply file, or is truncated in its header")
    order, count, kind = _header(path, data[:end].decode("latin1").split("\n"))
    body = memoryview(data)[end + 1 :]
    read = _text_rows if order == "" else _binary_rows
    rows = read(path, body, count, kind, most)
    names = kind.names or ()
    xyz = np.stack([rows[axis].astype(np.float64) for axis in "xyz"], axis=-1)
    channels = next((found for found in _COLOURS if {*found} <= {*names}), None)
    if channels is None or count == 0:
        return xyz, np.zeros((0, 3), np.uint8), count
    rgb = np.stack([rows[name] for name in channels], axis=-1)
    return xyz, rgb if rgb.dtype == np.uint8 else _bytes(rgb), count


def _bytes(rgb: NDArray[Any]) -> NDArray[np.uint8]:
    """Return colours [n, 3] of numbers up to 1 (if they are fractions), 255 or 65535 as bytes."""
    most = 1 if rgb.dtype.kind == "f" else 255
    white = next((white for white in (1, 255) if most <= white and rgb.max() <= white), 65535)
    return (rgb.astype(np.float64).clip(0, white) * (255 / white)).round().astype(np.uint8)


def map_ply(path: Path) -> NDArray[Any]:
    """Return the vertices of a binary file as records [n], memory-mapped: only rows that are used are read.

    Raises:
        Damaged: the file is no .ply, is text, ends too early, or has no vertices with x, y and z.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(_LONGEST_HEADER)
    end = head.find(b"\n", head.find(_END))
    if not head.startswith(b"ply") or _END not in head or end < 0:
        raise Damaged(f"{path}: it is no .ply file, or is truncated in its header")
    order, count, kind = _header(path, head[:end].decode("latin1").splitlines())
    if order == "":
        raise Damaged(f"{path}: it is text. Give a binary .ply file")
    if (whole := (path.stat().st_size - end - 1) // kind.itemsize) < count:
        raise Damaged(f"{path}: it is truncated: it ends in point {whole + 1} of {count}")
    return np.memmap(path, kind, "r", end + 1, (count,)) if count else np.empty(0, kind)


def _header(path: Path, lines: list[str]) -> tuple[str, int, np.dtype[Any]]:
    """Return the byte order ("" for text), the number of vertices, and the record of one."""
    words = [line.split() for line in lines]
    order = next((_ORDERS.get(row[1]) for row in words if row[:1] == ["format"] and len(row) > 1), None)
    first = next((n for n, row in enumerate(words) if row[:1] == ["element"]), len(words))
    if order is None or words[first : first + 1] == [] or words[first][1:2] != ["vertex"]:
        raise Damaged(f"{path}: its header names no known format, or vertices are not its first element")
    fields: list[tuple[str, str]] = []
    for row in words[first + 1 :]:
        if row[:1] != ["property"]:
            if row[:1] == ["comment"]:
                continue
            break
        if len(row) != 3 or row[1] not in _TYPES:
            raise Damaged(f"{path}: a property of its vertices is not a number: {' '.join(row)}")
        exact = order == "" and row[2] in "xyz"  # text has all digits, whatever type is declared
        fields.append((row[2], "f8" if exact else order + _TYPES[row[1]]))
    if not {"x", "y", "z"} <= {name for name, _ in fields}:
        raise Damaged(f"{path}: its vertices have no x, y and z")
    return order, int(words[first][2]), np.dtype(fields)


def _binary_rows(path: Path, body: memoryview, count: int, kind: np.dtype[Any], most: int | None) -> NDArray[Any]:
    if len(body) < count * kind.itemsize:
        raise Damaged(f"{path}: it is truncated: it ends in point {len(body) // kind.itemsize + 1} of {count}")
    rows = np.frombuffer(body, kind, count)
    step = count // (_QUICKER * most) if most else 1
    return rows[::step] if step > 1 and all(np.isfinite(rows[axis]).all() for axis in "xyz") else rows


def _text_rows(path: Path, body: memoryview, count: int, kind: np.dtype[Any], most: int | None) -> NDArray[Any]:
    columns, step, text = len(kind.names or ()), count // most if most else 1, bytes(body)
    if step > 1 and b"n" not in text and b"N" not in text:  # neither NaN nor infinity
        lines = text.splitlines()[:count]
        some = lines[::step]
        values = _numbers(b"\n".join([*some, lines[-1]]))
        if len(lines) == count and len(values) == (len(some) + 1) * columns:
            return _rows(values[:-columns], kind)
    values = _numbers(text)
    if (whole := len(values) // columns) < count:
        raise Damaged(f"{path}: it is truncated or no number: it ends in point {whole + 1} of {count}")
    return _rows(values[: count * columns], kind)


def _numbers(text: bytes) -> NDArray[np.float64]:
    """Return the numbers of a text up to a word that is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.fromstring(text, np.float64, sep=" ")


def _rows(values: NDArray[np.float64], kind: np.dtype[Any]) -> NDArray[Any]:
    names = kind.names or ()
    table = values.reshape(-1, len(names))
    rows = np.empty(len(table), kind)
    for name, column in zip(names, table.T, strict=True):
        rows[name] = column
    return rows
