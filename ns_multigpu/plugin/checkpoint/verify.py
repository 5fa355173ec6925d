"""Layout of checkpoints, and checks that one is complete.

A checkpoint is `nerfstudio_models/step-N.ckpt`, which nerfstudio's commands read, and the folder in
`nerfstudio_models_state/` that it names. Training reads that folder; other commands do so only if it holds the model's
points (see sharded_state). The folder's `manifest.json` has the size and checksum of every file, including the .ckpt.
One rename puts the .ckpt in place at the end, so a checkpoint is absent or complete.
"""

import hashlib
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ns_multigpu.plugin.faults.errors import InputError

FORMAT = 2
"""Version of the checkpoint's layout; larger numbers are refused. Version 1 uses blake2b checksums only."""

OURS = "ns_multigpu"
"""Key of the .ckpt under which the training state is named: {"format": int, "state": folder name}."""

SHARDS = "ns_multigpu.shards"
"""Key of the pipeline's state in a .ckpt whose points are in the state folder (see sharded_state): {"state": folder
name, "counts": points by rank, "shapes": {parameter: full shape}}.
"""

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d+)\.ckpt")
_BLOCK = 1 << 20


class DamagedCheckpoint(InputError):
    """Checkpoint file that is missing, truncated or altered; the message names it."""


@dataclass(frozen=True)
class Stamp:
    """Size in bytes and checksum of a file's contents; the checksum names its algorithm, see `Digest`."""

    size: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """Files and values of a checkpoint.

    Attributes:
        values: counters, seed, versions and other plain values (JSON).
        checkpoint: stamp of the .ckpt.
        files: stamps of the files in the state folder, by name.
        format: version of the layout.
    """

    values: dict[str, Any]
    checkpoint: Stamp
    files: dict[str, Stamp] = field(default_factory=dict)
    format: int = FORMAT


def states_folder(models: Path) -> Path:
    """Return the folder of the training states of the checkpoints in `models`."""
    return models.with_name(models.name + "_state")


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name; -1 for any other name."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match.group(1)) if match else -1


def checkpoints_in(models: Path) -> list[Path]:
    """Return the checkpoints in a folder, complete or not, sorted by step."""
    return sorted((path for path in models.glob("step-*.ckpt") if step_of(path) >= 0), key=step_of)


class Digest:
    """Incremental CRC-32 checksum of a file; it misses one damage in four billion.

    The blake2b of older checkpoints takes five times as long, half of a thread's time for a file.
    """

    _KIND = "crc32:"

    def __init__(self) -> None:
        self._sum = 0

    def update(self, data: Any) -> None:
        """Add bytes; zlib releases the interpreter lock."""
        self._sum = zlib.crc32(data, self._sum)

    def hexdigest(self) -> str:
        """Return the checksum with the name of its algorithm."""
        return f"{self._KIND}{self._sum:08x}"

    @classmethod
    def like(cls, written: str) -> Any:
        """Return an empty digest of the algorithm of `written`."""
        return cls() if written.startswith(cls._KIND) else _blake2b()


def stamp_of(path: Path, digest: Any) -> Stamp:
    """Read a file and return its stamp.

    Args:
        digest: an empty one.
    """
    size = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return Stamp(size, digest.hexdigest())


def dump_manifest(manifest: Manifest) -> bytes:
    """Return the text of `manifest.json`, including its own checksum."""
    body = {
        "format": manifest.format,
        "values": manifest.values,
        "checkpoint": [manifest.checkpoint.size, manifest.checkpoint.digest],
        "files": {name: [stamp.size, stamp.digest] for name, stamp in sorted(manifest.files.items())},
    }
    return json.dumps({**body, "digest": _digest_of(body)}, indent=1).encode()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a state folder.

    Raises:
        DamagedCheckpoint: it is missing or altered.
        InputError: a newer version wrote it.
    """
    path = folder / MANIFEST
    try:
        raw = path.read_bytes()
        body = json.loads(raw)
        digest = body.pop("digest")
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing") from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error
    if digest != _digest_of(body):
        refuse_newer(body.get("format"), path)
        raise DamagedCheckpoint(f"{path} has been altered: it does not have its checksum")
    refuse_newer(body["format"], path)
    files = {name: Stamp(*stamp) for name, stamp in body["files"].items()}
    manifest = Manifest(body["values"], Stamp(*body["checkpoint"]), files, body["format"])
    if raw != dump_manifest(manifest):
        raise DamagedCheckpoint(f"{path} has been altered: it is not written as it was")
    return manifest


def refuse_newer(version: Any, path: Path) -> None:
    """Raise if a layout is newer than this version.

    Raises:
        InputError: it is.
    """
    if isinstance(version, int) and version > FORMAT:
        raise InputError(
            f"{path} was written by a newer version of ns_multigpu (checkpoint format {version}; this one reads up to "
            f"{FORMAT}). Update ns_multigpu to go on from it; ns-eval, ns-render and ns-viewer read it as it is."
        )


def read_checkpoint_file(path: Path) -> dict[str, Any]:
    """Read a .ckpt, with memory-mapped tensors. Only tensors and plain values are unpickled.

    Raises:
        DamagedCheckpoint: it is missing or unreadable.
        InputError: it is not a checkpoint, or a newer version wrote it.
    """
    if not path.is_file():
        raise DamagedCheckpoint(f"{path} is missing")
    try:
        with torch.serialization.safe_globals(_numpy_scalars()):
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a damaged file raises any exception type
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DamagedCheckpoint(f"{path} is damaged, or no checkpoint: {reason}") from error
    if not isinstance(content, dict) or not {"step", "pipeline"} <= content.keys():
        raise InputError(f"{path} is not a checkpoint of nerfstudio: it has no 'step' and 'pipeline'.")
    if isinstance(content.get(OURS), dict):
        refuse_newer(content[OURS].get("format"), path)
    elif not isinstance(content.get("optimizers"), dict):
        raise DamagedCheckpoint(f"{path} has been altered: it has neither a training state nor optimizers")
    return content


def state_of(path: Path, content: Mapping[str, Any]) -> Path | None:
    """Return the state folder that a .ckpt names; None for a plain nerfstudio checkpoint.

    Raises:
        DamagedCheckpoint: it is missing.
    """
    ours = content.get(OURS)
    if ours is None:
        return None
    name = ours.get("state") if isinstance(ours, dict) else None
    if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
        raise DamagedCheckpoint(f"{path} has been altered: it names no training state")
    folder = states_folder(path.parent) / name
    if not folder.is_dir():
        raise DamagedCheckpoint(f"The training state of {path} is missing: it belongs into {folder}")
    return folder


def problems(path: Path, folder: Path, manifest: Manifest, part: int = 0, parts: int = 1) -> list[str]:
    """Check the files of a checkpoint against its manifest; return the problems, each with its file.

    Args:
        path: the .ckpt.
        folder: its state folder.
        part, parts: check every `parts`-th file, from the `part`-th on, to distribute the reading over ranks.
    """
    files = [(path, manifest.checkpoint), *((folder / name, stamp) for name, stamp in sorted(manifest.files.items()))]
    found = [_problem(file, stamp) for file, stamp in files[part::parts]]
    return [text for text in found if text]


def cut_short(folder: Path, manifest: Manifest) -> list[str]:
    """Return the files of a state folder that are missing or differ in size. Only the tensor metadata is read."""
    found = [
        _problem(folder / name, stamp, contents=name == ".metadata") for name, stamp in sorted(manifest.files.items())
    ]
    return [text for text in found if text]


def check_checkpoint(path: Path) -> Manifest | None:
    """Verify every byte of a checkpoint and return its manifest; None for a plain nerfstudio checkpoint.

    Raises:
        DamagedCheckpoint: a file is missing, truncated or altered.
        InputError: it is no checkpoint, or a newer version wrote it.
    """
    folder = state_of(path, read_checkpoint_file(path))
    if folder is None:
        return None
    manifest = read_manifest(folder)
    if found := problems(path, folder, manifest):
        raise DamagedCheckpoint("; ".join(found))
    return manifest


def latest_checkpoint(models: Path, report: Any = None) -> Path | None:
    """Return the newest complete checkpoint in `models` with a training state.

    Args:
        models: a run's `nerfstudio_models` folder; it need not exist.
        report: called with a line about each newer one that is skipped.
    """
    for path in reversed(checkpoints_in(models)):
        try:
            if check_checkpoint(path) is not None:
                return path
            reason = f"{path} has no training state"
        except InputError as error:
            reason = str(error)
        if report is not None:
            report(f"Passing over a checkpoint: {reason}")
    return None


def _problem(path: Path, stamp: Stamp, *, contents: bool = True) -> str:
    try:
        size = path.stat().st_size
        if size != stamp.size:
            what = "truncated" if size < stamp.size else "altered"
            return f"{path} has been {what}: it has {size} bytes and was written with {stamp.size}"
        whole = not contents or stamp_of(path, Digest.like(stamp.digest)) == stamp
        return "" if whole else f"{path} has been altered: its contents do not have their checksum"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"


def _digest_of(body: Mapping[str, Any]) -> str:
    digest = _blake2b()
    digest.update(json.dumps(body, sort_keys=True).encode())
    return str(digest.hexdigest())


def _blake2b() -> Any:
    return hashlib.blake2b(digest_size=16)


def _numpy_scalars() -> list[Any]:
    """Return the types in a scheduler's state of nerfstudio's trainer, next to plain values."""
    multiarray: Any = import_module("numpy.core.multiarray")
    return [multiarray.scalar, np.dtype, type(np.dtype(np.float64)), type(np.dtype(np.float32))]
