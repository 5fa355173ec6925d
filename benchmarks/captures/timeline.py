"""Timeline of a run's host and GPU, step by step: a profile of some blocks of fused steps, and a picture of profiles.

    torchrun --nproc-per-node 2 -m benchmarks.captures.timeline profile --output OUT --at 6600 -- \\
        splatfacto-batch --max-num-images 7000 colmap --data FOX --colmap-path sparse/0 --downscale-factor 1
    python -m benchmarks.captures.timeline draw --traces before=OUT-0.json.gz after=OTHER-0.json.gz --picture steps.png

`profile` runs ns-train in this process; from image --at on torch's profiler watches so many blocks, which takes some
percent of their speed. OUT-R.json.gz is rank R's trace, which chrome://tracing shows, too. `draw` shows as many
milliseconds of each: kernels by what they are for, and when the host launched or waited.
"""

import argparse
import gzip
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

EVENT_TYPES = {
    "exchange": r"nccl|barrier_kernel|PtoP|pack_kernel|touch_kernel|unpack_kernel|multi_tensor",
    "forward": r"forward<|forward_kernel",
    "backward": r"backward<|backward_kernel",
    "update": r"update_kernel|starts_kernel|adam|flush",
    "loss": r"band_kernel|totals_kernel",
    "project, sort": r"rows_kernel|flag_kernel|Radix|emit_kernel|count_kernel|offsets_kernel|::pack|order|Scan",
}
"""Purpose of a kernel by a part of its name; the first match counts."""
COLOURS = {
    "exchange": "#d62728", "forward": "#1f77b4", "backward": "#17507a", "update": "#2ca02c", "loss": "#9467bd",
    "project, sort": "#ff7f0e", "other": "#999999", "launches": "#333333", "waits": "#cccccc",
}  # fmt: skip


def profile(output: Path, at: int, blocks: int, argv: list[str]) -> None:
    """Run ns-train and profile `blocks` blocks from image `at` on."""
    import torch
    from nerfstudio.scripts.train import entrypoint

    from ns_multigpu.plugin.blocks import fused_blocks

    plain, watched = fused_blocks.FusedBlocks.take, list[Any]()
    rank = os.environ.get("RANK", "0")

    def take(self: Any, steps: range, **more: Any) -> Any:
        if not watched and steps[0] * self._pipeline.batch_size >= at:
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            watched.append(torch.profiler.profile(activities=activities))
            watched[0].__enter__()
        result = plain(self, steps, **more)
        watched.extend([None] * bool(watched))
        if len(watched) == 1 + blocks:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            watched[0].__exit__(None, None, None)
            watched[0].export_chrome_trace(f"{output}-{rank}.json.gz")
        return result

    fused_blocks.FusedBlocks.take = take  # type: ignore[method-assign]
    sys.argv = ["ns-train", *argv]
    entrypoint()


def kind_of(name: str) -> str:
    """Return the purpose of a kernel."""
    return next((kind for kind, pattern in EVENT_TYPES.items() if re.search(pattern, name)), "other")


PART, MILLISECONDS = 0.4, 8.0
"""Beginning of the drawn part of a trace, from 0 (its begin) to 1 (its end), and length of that part."""


def bars(
    trace: Path, part: float = PART, milliseconds: float = MILLISECONDS
) -> tuple[list[tuple[str, float, float]], list[tuple[str, float, float]], float]:
    """Return the device's and the host's activities in a window of a trace, each (kind, begin, ms).

    Also returns the part of the whole trace in which the device was busy.
    """
    with gzip.open(trace) as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not device:
        raise SystemExit(f"{trace}: nothing in it ran on a GPU. Profile a run on one.")
    first, last = min(e["ts"] for e in device), max(e["ts"] + e["dur"] for e in device)
    begin_us = first + part * (last - first)
    shown = [
        (kind_of(e["name"]), (e["ts"] - begin_us) / 1e3, e["dur"] / 1e3)
        for e in device
        if begin_us <= e["ts"] < begin_us + 1e3 * milliseconds
    ]
    host = [
        ("waits" if "Synchronize" in e["name"] else "launches", (e["ts"] - begin_us) / 1e3, e["dur"] / 1e3)
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and begin_us <= e["ts"] < begin_us + 1e3 * milliseconds
    ]
    busy = sum(e["dur"] for e in device if "barrier_kernel" not in e["name"] and "nccl" not in e["name"])
    return shown, host, busy / (last - first)


def draw(traces: dict[str, Path], picture: Path) -> None:
    """Draw a picture of traces, one above the other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(len(traces), 1, figsize=(12, 1.5 * len(traces) + 0.8), sharex=True, squeeze=False)
    for (title, trace), axis in zip(traces.items(), axes[:, 0], strict=True):
        device, host, busy = bars(trace)
        for row, some in ((0, device), (1, host)):
            for kind, begin, took in some:
                axis.barh(row, took, left=begin, height=0.8, color=COLOURS[kind], linewidth=0)
        axis.set_yticks([0, 1], ["GPU", "host"])
        axis.set_xlim(0, MILLISECONDS)
        axis.set_title(f"{title}: the GPU computes {busy:.0%} of the time", loc="left", fontsize=10)
    axes[-1, 0].set_xlabel("ms")
    marks = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=marks, loc="lower center", ncol=len(COLOURS), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(picture, dpi=110)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("profile")
    one.add_argument("--output", type=Path, required=True, help="what traces' names begin with")
    one.add_argument("--at", type=int, default=6600, help="image from which on")
    one.add_argument("--blocks", type=int, default=4)
    one.add_argument("run", nargs="+", help="after --: the method and its options, as for ns-train")
    other = commands.add_parser("draw")
    other.add_argument("--traces", nargs="+", required=True, help="TITLE=FILE")
    other.add_argument("--picture", type=Path, required=True)
    options = parser.parse_args(argv)
    if options.command == "profile":
        profile(options.output, options.at, options.blocks, options.run)
        return
    if wrong := [one for one in options.traces if "=" not in one]:
        parser.error(f"--traces {wrong[0]}: give TITLE=FILE")
    traces = {title: Path(file) for title, file in (one.split("=", 1) for one in options.traces)}
    if missing := [file for file in traces.values() if not file.is_file()]:
        parser.error(f"--traces: there is no file {missing[0]}. `profile` writes one for each rank")
    draw(traces, options.picture)


if __name__ == "__main__":
    main()
