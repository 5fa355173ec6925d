"""Cases of `bad_inputs`, and the folders that they may change."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

BATCH = ("ns-train", "splatfacto-batch", "--machine.device-type", "cpu", "--vis", "tensorboard")
TWO = ("--machine.num-devices", "2")
SHORT = ("--max-num-images", "16", "--steps-per-eval-all-images", "0", "--steps-per-eval-image", "0")


@dataclass
class Place:
    """Folders that a case may change.

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


def cut(path: Path, part: float) -> None:
    """Leaves the first part of a file."""
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
