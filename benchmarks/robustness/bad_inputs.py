"""Bad inputs, given to the real commands: what they print, with which status they end, and how long that takes.

    python -m benchmarks.robustness.bad_inputs --capture ../shared/data/fox \\
        --output benchmarks/results/data/runs/bad-inputs.json

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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

from PIL import Image

from benchmarks.lib.environment import describe
from benchmarks.robustness import bad_captures, bad_commands
from benchmarks.robustness.bad_cases import CASES, Place

assert bad_captures and bad_commands, "they put their cases into CASES"


@dataclass(frozen=True)
class Result:
    """Outcome of a case."""

    name: str
    command: str
    status: int
    seconds: float
    message: str
    said: list[str]
    good: bool


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
    seconds, text = round(time.monotonic() - began, 1), message_of(said, words).replace(f"{folder}/", "")
    return Result(name, " ".join(command), process.returncode, seconds, text, said[-12:], good)


def message_of(said: Sequence[str], words: Sequence[str]) -> str:
    """Return the part of the output that a user reads: the framed error, lines with the words, or the last lines."""
    start = next((position for position, line in enumerate(said) if line.startswith("Cannot start")), None)
    if start is not None:
        return " ".join(line.strip() for line in takewhile(lambda line: line[:1] != "─", said[start + 1 :]))
    found = [line.strip(" │") for line in said if any(word in line for word in words)]
    return " ".join(found or said[-1:])


def table(results: Sequence[Result]) -> str:
    """The results as a table in Markdown."""
    rows = ["| input | status | seconds | what it says |", "| --- | --- | --- | --- |"]
    for one in results:
        text = one.message.replace("|", "\\|")
        rows.append(f"| {one.name} | {one.status} | {one.seconds:.0f} | {text[:400]}{'…' if len(text) > 400 else ''} |")
    return "\n".join(rows)


def main() -> int:
    """Runs the cases; the status is 1 if one of them is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capture", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--table", type=Path, help="runs nothing; prints the table of an earlier --output")
    given = parser.parse_args()
    if given.table is not None:
        print(table([Result(**row) for row in json.loads(given.table.read_text())["cases"]]))
        return 0
    if given.capture is None:
        parser.error("--capture is missing")
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
