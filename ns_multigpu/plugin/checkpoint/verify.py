"""Where checkpoints lie, and whether one is whole.

A checkpoint is `nerfstudio_models/step-N.ckpt`, which nerfstudio's commands read, and the folder that it names in
`nerfstudio_models_state/`, which only training reads, unless the model's points lie there too (see sharded_state). The
folder's `manifest.json` holds the size and the checksum of every file, the .ckpt's too. The .ckpt is put in its place
last, by one rename: until then there is no checkpoint, and from then on it is whole.
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
"""Version of the checkpoint's layout; one with a larger number cannot be read. In 1 all checksums are blake2b."""

OURS = "ns_multigpu"
"""Key of the .ckpt under which the training state is named: {"format": int, "state": folder name}."""

SHARDS = "ns_multigpu.shards"
"""Key of the pipeline's state in a .ckpt whose points lie in the state folder (see sharded_state): {"state": folder
name, "counts": points by rank, "shapes": {parameter: shape of the whole}}."""

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d+)\.ckpt")
_BLOCK = 1 << 20


class DamagedCheckpoint(InputError):
    """A file of a checkpoint is missing, truncated or altered. The message names it."""


@dataclass(frozen=True)
class Stamp:
    """Size in bytes and checksum of a file's contents, which says of what kind it is: see `Digest`."""

    size: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        values: what is neither a tensor nor a file: counters, seed, versions (JSON).
        checkpoint: of the .ckpt.
        files: of the files in the state folder, by name.
        format: the version of the layout that it was written in.
    """

    values: dict[str, Any]
    checkpoint: Stamp
    files: dict[str, Stamp] = field(default_factory=dict)
    format: int = FORMAT


def states_folder(models: Path) -> Path:
    """The folder of the training states that belong to the checkpoints in `models`."""
    return models.with_name(models.name + "_state")


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name; -1 if it is not named as checkpoints are."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match.group(1)) if match else -1


def checkpoints_in(models: Path) -> list[Path]:
    """The checkpoints in a folder, whole or not, by step."""
    return sorted((path for path in models.glob("step-*.ckpt") if step_of(path) >= 0), key=step_of)


class Digest:
    """A checksum that is told a file's contents piece by piece: CRC-32, which one damage in four billion escapes.

    blake2b, of older checkpoints, takes five times as long: half of what a thread had to do for a file.
    """

    _KIND = "crc32:"

    def __init__(self) -> None:
        self._sum = 0

    def update(self, data: Any) -> None:
        """Adds bytes; other threads go on meanwhile."""
        self._sum = zlib.crc32(data, self._sum)

    def hexdigest(self) -> str:
        """It, and of what kind it is."""
        return f"{self._KIND}{self._sum:08x}"

    @classmethod
    def like(cls, written: str) -> Any:
        """An empty one of the kind of one that was written."""
        return cls() if written.startswith(cls._KIND) else _blake2b()


def stamp_of(path: Path, digest: Any) -> Stamp:
    """Reads a whole file.

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
    """The text of `manifest.json`, which carries a checksum of itself."""
    body = {
        "format": manifest.format,
        "values": manifest.values,
        "checkpoint": [manifest.checkpoint.size, manifest.checkpoint.digest],
        "files": {name: [stamp.size, stamp.digest] for name, stamp in sorted(manifest.files.items())},
    }
    return json.dumps({**body, "digest": _digest_of(body)}, indent=1).encode()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a state folder.

    Raises:
        DamagedCheckpoint: it is missing, or not as it was written.
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
    """Whether this version can read a layout.

    Raises:
        InputError: it is a newer one.
    """
    if isinstance(version, int) and version > FORMAT:
        raise InputError(
            f"{path} was written by a newer version of ns_multigpu (checkpoint format {version}; this one reads up to "
            f"{FORMAT}). Update ns_multigpu to go on from it; ns-eval, ns-render and ns-viewer read it as it is."
        )


def read_checkpoint_file(path: Path) -> dict[str, Any]:
    """A .ckpt, its tensors mapped from the file and not yet read. Only tensors and plain values are unpickled.

    Raises:
        DamagedCheckpoint: it is missing or cannot be read.
        InputError: it is not a checkpoint, or a newer version wrote it.
    """
    if not path.is_file():
        raise DamagedCheckpoint(f"{path} is missing")
    try:
        with torch.serialization.safe_globals(_numpy_scalars()):
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a damaged file can fail in any way
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
    """The state folder that a .ckpt names; None if it is plain nerfstudio's.

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
    """What is wrong with the files of a checkpoint, each named.

    Args:
        path: the .ckpt.
        folder: its state folder.
        part, parts: look at every `parts`-th file, from the `part`-th on, so that ranks share the reading.
    """
    files = [(path, manifest.checkpoint), *((folder / name, stamp) for name, stamp in sorted(manifest.files.items()))]
    found = [_problem(file, stamp) for file, stamp in files[part::parts]]
    return [text for text in found if text]


def cut_short(folder: Path, manifest: Manifest) -> list[str]:
    """Which files of a state folder are missing or have another size, each named; only the list of tensors is read."""
    found = [
        _problem(folder / name, stamp, contents=name == ".metadata") for name, stamp in sorted(manifest.files.items())
    ]
    return [text for text in found if text]


def check_checkpoint(path: Path) -> Manifest | None:
    """The manifest of a checkpoint of which every byte is as it was written; None for a plain nerfstudio one.

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


def latest_checkpoint(models: Path, tell: Any = None) -> Path | None:
    """The newest checkpoint in `models` that is whole and has a training state.

    Args:
        models: a run's `nerfstudio_models` folder; it need not exist.
        tell: called with a line about each newer one that is passed over.
    """
    for path in reversed(checkpoints_in(models)):
        try:
            if check_checkpoint(path) is not None:
                return path
            reason = f"{path} has no training state"
        except InputError as error:
            reason = str(error)
        if tell is not None:
            tell(f"Passing over a checkpoint: {reason}")
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
    """What nerfstudio's own trainer leaves in a scheduler's state, beside plain values."""
    multiarray: Any = import_module("numpy.core.multiarray")
    return [multiarray.scalar, np.dtype, type(np.dtype(np.float64)), type(np.dtype(np.float32))]
