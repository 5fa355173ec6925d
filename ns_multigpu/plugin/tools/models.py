"""Evaluating and rendering a trained model, and making a mesh of it, with several workers.

`ns-multigpu eval` and `ns-multigpu render` do what ns-eval and ns-render do, and write the same files. Each worker
loads the whole model if it fits its device, and its part of the points if it does not. Of a radiance field each loads
its cells.
"""

import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from nerfstudio.utils.rich_utils import CONSOLE

from ns_multigpu.core.world import World, gpu_places
from ns_multigpu.plugin.capture.moved import DATA
from ns_multigpu.plugin.checkpoint.sharded_state import POINTS, shapes_in
from ns_multigpu.plugin.checkpoint.verify import SHARDS, read_checkpoint_file
from ns_multigpu.plugin.export.ply import run_checkpoint
from ns_multigpu.plugin.faults.errors import InputError, WorkerFailed
from ns_multigpu.plugin.launch import checks
from ns_multigpu.plugin.launch.launcher import run_workers, use_own_share_of_cores
from ns_multigpu.plugin.launch.process_world import set_world
from ns_multigpu.plugin.launch.ranks import Ranks, rendezvous_explained
from ns_multigpu.plugin.render.team import RENDER_MEMORY, asked_for, free_memory, size_for
from ns_multigpu.plugin.tools.meshing import Meshing
from ns_multigpu.plugin.tools.rendering import Rendering
from ns_multigpu.plugin.train.config import DistributedTrainerConfig, read_config
from ns_multigpu.plugin.train.pipeline import DistributedPipeline, DistributedPipelineConfig
from ns_multigpu.primitives.registry import titled

_LONGEST_PAUSE = timedelta(days=30)
"""Rank 0 may write a long video between two images; the others wait. One that dies is noticed at once all the same."""


class Work(Protocol):
    """What to do with a model."""

    @property
    def test_mode(self) -> Literal["test", "inference"]:
        """What the pipeline is set up for."""
        ...

    def run(self, run: DistributedTrainerConfig, checkpoint: Path, pipeline: DistributedPipeline) -> None:
        """Does it. Every rank calls it, and rank 0 writes."""


@dataclass(frozen=True)
class Evaluation:
    """The metrics of all held-out views, as ns-eval writes them.

    Attributes:
        output: the JSON file to write.
        images: folder for the rendered images, if wanted.
    """

    output: Path
    images: Path | None = None
    test_mode: Literal["test", "inference"] = "test"

    def check(self) -> None:
        """Whether it can be done, as far as that is to be seen from here.

        Raises:
            InputError: the results cannot be written there.
        """
        if self.output.suffix != ".json":
            raise InputError(f"--output-path {self.output}: give the name of a .json file.")

    def run(self, run: DistributedTrainerConfig, checkpoint: Path, pipeline: DistributedPipeline) -> None:
        """See `Work.run`."""
        results = pipeline.get_average_eval_image_metrics(output_path=self.images, get_std=True)
        if not pipeline.world.is_main:
            return
        told = {
            "experiment_name": run.experiment_name,
            "method_name": run.method_name,
            "checkpoint": str(checkpoint),
            "results": results,
        }
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(json.dumps(told, indent=2), "utf8")
        CONSOLE.print(f"Saved results to: {self.output}")


@dataclass
class ToolMachine:
    """Where the workers are, under the names of nerfstudio's options."""

    device_type: Literal["cpu", "cuda"]
    num_devices: int
    seed: int = 42


@dataclass
class ToolConfig:
    """What workers are started with: see `worker.Config`. `whole`: each holds all points."""

    load_config: Path
    checkpoint: Path
    work: Work
    machine: ToolMachine
    whole: bool
    max_restarts: int = field(default=0, init=False)

    def setup(self, *, local_rank: int = 0, world_size: int = 1) -> "ToolWorker":
        """The worker of this process."""
        return ToolWorker(self)


class ToolWorker:
    """One worker of a tool: see `worker.Trainer`."""

    def __init__(self, config: ToolConfig) -> None:
        self._config = config

    def setup(self) -> None:
        """Meets the other workers, and loads this one's part of the model."""
        ranks, device = Ranks.from_env(), self._config.machine.device_type
        use_own_share_of_cores(ranks)
        CONSOLE.quiet = ranks is not None and ranks.rank != 0
        with rendezvous_explained():
            world = World.from_env(device, control_timeout=_LONGEST_PAUSE)
        set_world(world)
        self._run = read_config(self._config.load_config)
        if isinstance(self._run.pipeline, DistributedPipelineConfig):
            self._run.pipeline.strategy = "batch" if self._config.whole else "tile"
        with CONSOLE.status("Loading the model"):
            self._pipeline = load_model(self._run, self._config.checkpoint, world, self._config.work.test_mode)

    def train(self) -> None:
        """Does the work."""
        self._config.work.run(self._run, self._config.checkpoint, self._pipeline)


def load_model(
    run: DistributedTrainerConfig, checkpoint: Path, world: World, test_mode: Literal["test", "inference"]
) -> DistributedPipeline:
    """The pipeline of a run with the points of a checkpoint: all of them on each rank, or, where the strategy spreads
    them, this rank's part; of a radiance field, this rank's cells. Every rank calls it; `world` must be this process's
    (`set_world`).

    Raises:
        InputError: the checkpoint is damaged.
    """
    run.pipeline.checkpoints = checkpoint.parent  # type: ignore[attr-defined]
    pipeline: DistributedPipeline = run.pipeline.setup(device=str(world.device), test_mode=test_mode)
    pipeline.eval()
    pipeline.load_file(checkpoint)
    of = f": {pipeline.model.total_points} Gaussians" if isinstance(run.pipeline, DistributedPipelineConfig) else ""
    CONSOLE.print(f"Loaded {checkpoint}{of}.")
    return pipeline


def run_tool(
    load_config: Path,
    step: int | None,
    work: Evaluation | Rendering | Meshing,
    num_devices: int | None,
    device_type: Literal["auto", "cpu", "cuda"],
    data: Path | None = None,
) -> None:
    """Does `work` with the checkpoint of a run, in as many worker processes as there are devices to be.

    Args:
        load_config: the run's config.yml.
        step: of the checkpoint; the newest by default.
        num_devices: workers; by default all GPUs, or as many CPU workers as trained the model. Under torchrun this
            process is one of them.
        device_type: of their devices; "auto" takes GPUs if there are any.
        data: where the capture is, if it is not where it was.

    Raises:
        InputError: it cannot be done.
        WorkerFailed: a worker failed; its traceback has been written to stderr.
    """
    ranks, run = Ranks.from_env(), read_config(load_config)
    if not isinstance(run, DistributedTrainerConfig):
        raise InputError(
            f"--load-config {load_config}: it is of the method {getattr(run, 'method_name', None)}, which is none of "
            "ours. Use ns-eval and ns-render, or ns-viewer."
        )
    field = not isinstance(run.pipeline, DistributedPipelineConfig)
    if field and isinstance(work, Meshing):
        raise InputError(
            f"--load-config {load_config}: it is of the method {run.method_name}, which has no Gaussians to make a "
            "mesh of. Use ns-export tsdf."
        )
    if data is not None:
        os.environ[DATA] = str(data)  # which the workers get, too
    work.check()
    kind: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type != "auto":
        kind = device_type
    places = gpu_places() if kind == "cuda" else 0
    usual = run.machine.num_devices if kind == "cpu" or places == sys.maxsize else max(places, 1)
    checkpoint = run_checkpoint(load_config, step)
    state = read_checkpoint_file(checkpoint)["pipeline"]
    cells = _cells_in(state, checkpoint) if field else sys.maxsize
    workers = num_devices if num_devices is not None else min(usual, cells) if ranks is None else 1
    try:
        checks.check_devices(kind, workers, ranks, places)
    except InputError as error:
        raise InputError(str(error).replace("--machine.", "--")) from None
    together = workers if ranks is None else ranks.size
    if together > cells:
        raise InputError(
            f"--num-devices {together}: {checkpoint} has {cells} cells, and each device wants one at least. Use "
            f"{cells} devices or fewer."
        )
    whole = not field and _fits_each(state, checkpoint, run, kind, together)
    config = ToolConfig(load_config, checkpoint, work, ToolMachine(kind, workers), whole)
    checks.prepare_operators(kind)
    if ranks is None and workers > 1:
        try:
            run_workers(config, workers)
        except WorkerFailed as error:
            print(error.report.rstrip(), file=sys.stderr)
            raise
        return
    torch.manual_seed(config.machine.seed)
    worker: Any = config.setup()
    worker.setup()
    worker.train()


def _cells_in(state: Mapping[str, Any], checkpoint: Path) -> int:
    """How many cells a radiance field has, by the pipeline's state in its checkpoint."""
    cells = dict(state.get(SHARDS, {})).get("cells")
    if not isinstance(cells, int):
        raise InputError(f"{checkpoint} is not a checkpoint of a radiance field of ours: it has no cells.")
    return cells


def _fits_each(
    state: Mapping[str, Any], checkpoint: Path, run: Any, kind: Literal["cpu", "cuda"], together: int
) -> bool:
    """Whether each of so many devices can hold all points of a checkpoint."""
    shapes = {name: shape for name, shape in shapes_in(state).items() if name.startswith(POINTS)}
    if not shapes:
        title = titled(run.pipeline.model.primitive)
        raise InputError(f"{checkpoint} is not a checkpoint of {title}: it has no {POINTS}means.")
    points, size = next(iter(shapes.values()))[0], 4 * sum(math.prod(shape[1:]) for shape in shapes.values())
    memory = asked_for(RENDER_MEMORY, float, 0)
    room = memory * 1e9 if memory is not None else free_memory() if kind == "cuda" else None
    return size_for(points, size, kind, together, room, together).whole
