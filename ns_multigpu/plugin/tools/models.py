"""Evaluation, rendering and meshing of a trained model with several workers.

`ns-multigpu eval` and `ns-multigpu render` do the same as ns-eval and ns-render, and write the same files. Each worker
loads the full model if it fits its device, otherwise its shard of the points. Of a radiance field each loads its cells.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from nerfstudio.utils.rich_utils import CONSOLE

from ns_multigpu.core.dist.world import World, gpu_places
from ns_multigpu.plugin.capture.moved import DATA
from ns_multigpu.plugin.checkpoint.verify import read_checkpoint_file
from ns_multigpu.plugin.export.ply import run_checkpoint
from ns_multigpu.plugin.faults.errors import InputError, WorkerFailed
from ns_multigpu.plugin.launch import checks
from ns_multigpu.plugin.launch.launcher import run_workers, use_own_share_of_cores
from ns_multigpu.plugin.launch.process_world import set_world
from ns_multigpu.plugin.launch.ranks import Ranks, rendezvous_explained
from ns_multigpu.plugin.render.team import RENDER_MEMORY, Devices, asked_for, free_memory
from ns_multigpu.plugin.run.config import RunConfig, read_config
from ns_multigpu.plugin.run.pipeline import RunPipeline, RunPipelineConfig
from ns_multigpu.plugin.tools.meshing import Meshing
from ns_multigpu.plugin.tools.rendering import FilmRendering

_LONGEST_PAUSE = timedelta(days=30)
"""Timeout of the control group: rank 0 may write a long video between two images. A worker that dies is detected at
once regardless.
"""


class Work(Protocol):
    """Task of the workers."""

    @property
    def test_mode(self) -> Literal["test", "inference"]:
        """Pipeline's test mode."""
        ...

    def run(self, run: RunConfig, checkpoint: Path, pipeline: RunPipeline) -> None:
        """Run the task. Every rank calls it, and rank 0 writes."""


@dataclass(frozen=True)
class Evaluation:
    """Metrics of all held-out views, as ns-eval writes them.

    Attributes:
        output: the JSON file to write.
        images: folder for the rendered images, if wanted.
    """

    output: Path
    images: Path | None = None
    test_mode: Literal["test", "inference"] = "test"

    def check(self) -> None:
        """Check the options, before a model is loaded.

        Raises:
            InputError: the output file is invalid.
        """
        if self.output.suffix != ".json":
            raise InputError(f"--output-path {self.output}: give the name of a .json file.")

    def run(self, run: RunConfig, checkpoint: Path, pipeline: RunPipeline) -> None:
        """Evaluate all held-out views; see `Work.run`."""
        results = pipeline.get_average_eval_image_metrics(output_path=self.images, get_std=True)
        if not pipeline.world.is_main:
            return
        summary = {
            "experiment_name": run.experiment_name,
            "method_name": run.method_name,
            "checkpoint": str(checkpoint),
            "results": results,
        }
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(json.dumps(summary, indent=2), "utf8")
        CONSOLE.print(f"Saved results to: {self.output}")


@dataclass
class ToolMachine:
    """Machine options of the workers, under nerfstudio's names."""

    device_type: Literal["cpu", "cuda"]
    num_devices: int
    seed: int = 42


@dataclass
class ToolConfig:
    """Configuration of a worker: see `worker.Config`. `changes` are applied to the pipeline's configuration."""

    load_config: Path
    checkpoint: Path
    work: Work
    machine: ToolMachine
    changes: Mapping[str, Any]
    max_restarts: int = field(default=0, init=False)

    def setup(self, *, local_rank: int = 0, world_size: int = 1) -> "ToolWorker":
        """Return the worker of this process."""
        return ToolWorker(self)


class ToolWorker:
    """Worker of a tool: see `worker.Trainer`."""

    def __init__(self, config: ToolConfig) -> None:
        self._config = config

    def setup(self) -> None:
        """Join the other workers, and load this worker's part of the model."""
        ranks, device = Ranks.from_env(), self._config.machine.device_type
        use_own_share_of_cores(ranks)
        CONSOLE.quiet = ranks is not None and ranks.rank != 0
        with rendezvous_explained():
            world = World.from_env(device, control_timeout=_LONGEST_PAUSE)
        set_world(world)
        self._run = read_config(self._config.load_config)
        for name, value in self._config.changes.items():
            setattr(self._run.pipeline, name, value)
        with CONSOLE.status("Loading the model"):
            self._pipeline = load_model(self._run, self._config.checkpoint, world, self._config.work.test_mode)

    def train(self) -> None:
        """Run the task."""
        self._config.work.run(self._run, self._config.checkpoint, self._pipeline)


def load_model(run: RunConfig, checkpoint: Path, world: World, test_mode: Literal["test", "inference"]) -> RunPipeline:
    """Return a run's pipeline with the points of a checkpoint. Every rank calls it.

    Each rank loads all points, or its shard if the strategy shards them; of a radiance field, its cells. `world` must
    be this process's (`set_world`).

    Raises:
        InputError: the checkpoint is damaged.
    """
    run.pipeline.checkpoints = checkpoint.parent  # type: ignore[attr-defined]
    pipeline: RunPipeline = run.pipeline.setup(device=str(world.device), test_mode=test_mode)
    pipeline.eval()
    pipeline.load_file(checkpoint)
    CONSOLE.print(f"Loaded {checkpoint}: {pipeline.described}.")
    return pipeline


def run_tool(
    load_config: Path,
    step: int | None,
    work: Evaluation | FilmRendering | Meshing,
    num_devices: int | None,
    device_type: Literal["auto", "cpu", "cuda"],
    data: Path | None = None,
) -> None:
    """Run `work` on a run's checkpoint, with one worker process per device.

    Args:
        load_config: the run's config.yml.
        step: of the checkpoint; the newest by default.
        num_devices: workers; by default all GPUs, or as many CPU workers as trained the model. Under torchrun this
            process is one of them.
        device_type: of their devices; "auto" takes GPUs if there are any.
        data: current path of the capture, if it was moved.

    Raises:
        InputError: the options or the run are invalid.
        WorkerFailed: a worker failed; its traceback has been written to stderr.
    """
    ranks, run = Ranks.from_env(), read_config(load_config)
    config = cast(RunPipelineConfig, run.pipeline)
    if data is not None:
        os.environ[DATA] = str(data)  # inherited by the workers
    work.check()
    kind: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type != "auto":
        kind = device_type
    places = gpu_places() if kind == "cuda" else 0
    usual = run.machine.num_devices if kind == "cpu" or places == sys.maxsize else max(places, 1)
    checkpoint = run_checkpoint(load_config, step)
    state = read_checkpoint_file(checkpoint)["pipeline"]
    most = config.most_ranks(state, checkpoint)
    usual = usual if most is None else min(usual, most)
    workers = num_devices if num_devices is not None else usual if ranks is None else 1
    try:
        checks.check_devices(kind, workers, ranks, places)
    except InputError as error:
        raise InputError(str(error).replace("--machine.", "--")) from None
    together = workers if ranks is None else ranks.size
    if most is not None and together > most:
        raise InputError(
            f"--num-devices {together}: {checkpoint} has {most} cells, and each device wants one at least. Use "
            f"{most} devices or fewer."
        )
    memory = asked_for(RENDER_MEMORY, float, 0)
    budget = memory * 1e9 if memory is not None else free_memory() if kind == "cuda" else None
    plan = config.team_plan(state, checkpoint, Devices(kind, together, budget, together))
    changes = {} if plan is None else dict(plan.changes)
    start = ToolConfig(load_config, checkpoint, work, ToolMachine(kind, workers), changes)
    checks.prepare_operators(kind)
    if ranks is None and workers > 1:
        try:
            run_workers(start, workers)
        except WorkerFailed as error:
            print(error.report.rstrip(), file=sys.stderr)
            raise
        return
    torch.manual_seed(start.machine.seed)
    worker: Any = start.setup()
    worker.setup()
    worker.train()
