"""Measure `ns-multigpu export` of a sharded model of random Gaussians with harmonics of degree 3.

    python -m benchmarks.scaling.exports FOLDER [--count 8000000] [--outputs model.ply "model.sog --color rgb"]

The folder keeps the checkpoint and the files. Memory is the most that the larger of the processes, Python and
splat-transform, holds at once.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.checkpoint.atomic_save import save
from ns_multigpu.plugin.checkpoint.sharded_state import split_state, without_points
from ns_multigpu.primitives.gaussians.schema import SCHEMA

OUTPUTS = ("model.ply", "model.splat", "model.spz", "model.sog --color rgb", "levels/lod-meta.json --color rgb")
SPREAD = {"scales": 0.5, "features_rest": 0.1}
MEAN = {"scales": -6.0}


def make_checkpoint(folder: Path, count: int) -> None:
    """Write a run's folder with a checkpoint of `count` random Gaussians."""
    generator, world = torch.Generator().manual_seed(0), World.single()
    params = {
        one.name: torch.empty(count, *one.sized(3)).normal_(
            MEAN.get(one.name, 0.0), SPREAD.get(one.name, 1.0), generator=generator
        )
        for one in SCHEMA
    }
    tensors, marker = split_state({}, params, world)
    if error := save(folder / "nerfstudio_models", 1, lambda: without_points({}, marker), tensors, {}, world):
        raise SystemExit(error)
    (folder / "config.yml").write_text("Only its folder is read.\n")


def main() -> None:
    """Measure each output and print a row for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=8_000_000)
    parser.add_argument("--outputs", nargs="+", default=OUTPUTS, help="names with options of the command")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    config = given.folder / "config.yml"
    if not config.exists():
        # In a process of its own: a child's peak includes its parent's.
        made = multiprocessing.get_context("spawn").Process(target=make_checkpoint, args=(given.folder, given.count))
        made.start()
        made.join()
    print("| output | seconds | processor seconds | bytes | peak memory |\n| --- | --- | --- | --- | --- |")
    for output in given.outputs:
        name, *words = output.split()
        path, began = given.folder / name, time.perf_counter()
        command = [sys.executable, "-m", "ns_multigpu.cli", "export", "--load-config", config, "--output-path", path]
        process = subprocess.Popen([*map(str, command), *words], stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        files = [file for file in path.parent.rglob("*") if file.is_file()] if path.parent != given.folder else [path]
        size = sum(file.stat().st_size for file in files) if status == 0 else 0
        print(
            f"| `{output}` | {seconds:.0f} | {used.ru_utime + used.ru_stime:.0f} | {size:,} | "
            f"{used.ru_maxrss * 1024 / 1e9:.1f} GB |" + (f" status {status}" if status else ""),
            flush=True,
        )


if __name__ == "__main__":
    main()
