"""Objectives: what a run trains, as its trainer, checkpoints and logs know it.

Splats (`train.splats`) and a radiance field (`radiance.objective`) are two. Launching, the loop, faults, saving, logs,
viewer and evaluation are the run's, the same for each.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from nerfstudio.engine.optimizers import Optimizers
from torch import Tensor

from ns_multigpu.core.dist.replicas import broadcast_in_place
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.blocks.fused_blocks import FusedBlocks, Measured
from ns_multigpu.plugin.checkpoint.atomic_save import Opened
from ns_multigpu.plugin.checkpoint.training_copy import Content
from ns_multigpu.plugin.faults.guards import Guards

Row = dict[str, Any]


@dataclass(frozen=True)
class LogEntry:
    """One log of a step, as far as this rank knows it.

    Attributes:
        measured: this rank's shares of the loss, of its terms and of the metrics, which are summed over ranks; a share
            of `mse` becomes PSNR. The same names on every rank.
        images: that all ranks see in a step.
        row: for metrics.jsonl, the same on every rank.
        metrics: for nerfstudio's writers, rank 0's.
        rates: learning rates, by group of parameters.
        by_rank: numbers of this rank, which all ranks learn. derived: makes more of the row from them, a list each.
    """

    measured: Measured
    images: float
    row: Mapping[str, Any]
    metrics: Mapping[str, Any]
    rates: Mapping[str, float]
    by_rank: Mapping[str, float] = field(default_factory=dict[str, float])
    derived: Callable[[Mapping[str, list[float]]], Row] = lambda _: {}


@dataclass(frozen=True)
class Resumed:
    """A run after its checkpoint has been loaded.

    Attributes:
        steps: taken so far. whole: whether the checkpoint is of this very moment, and need not be written again.
        lines: for the user.
    """

    steps: int
    whole: bool
    lines: Sequence[str]


class Objective(ABC):
    """Trains one kind of model on one rank, in step with the others. Every rank calls each method.

    Args:
        config: a `RunConfig`, whose `max_num_iterations` is the run's length.
        pipeline: a `RunPipeline`. world: the ranks. guards: told of steps and gradients.

    Attributes:
        optimizers: see `build_optimizers`.
        blocks: takes several steps at once, where steps are fused; else None, and `step` takes one.
    """

    unit: ClassVar[str]
    """What a step sees, in the plural, of which `units_per_step` are counted for the user."""

    def __init__(self, config: Any, pipeline: Any, world: World, guards: Guards) -> None:
        self.config, self.pipeline, self.world, self.guards = config, pipeline, world, guards
        self.blocks: FusedBlocks | None = None
        self.optimizers: Any = self.build_optimizers()

    # ---- before the first step ----

    @abstractmethod
    def build_optimizers(self) -> Optimizers:
        """Return the optimizers, before a checkpoint is loaded into them."""

    def prepare(self) -> None:
        """Make all ranks ready for their first step, once a checkpoint has been loaded."""
        for param in self.replicated().values():
            broadcast_in_place(param.data, self.world)

    @abstractmethod
    def begin(self, first: int) -> None:
        """Choose how steps are taken from the step `first` on, and say so.

        Raises:
            InputError: steps must be fused and cannot be, or options do not go together.
        """

    # ---- steps ----

    def begin_step(self, step: int) -> None:
        """Make the model that of `step`, before nerfstudio's callbacks."""
        del step

    @abstractmethod
    def step(self, step: int, *, metrics: bool) -> Measured:
        """Take a step on this rank's share of the batch.

        Args:
            metrics: whether to compute metrics as well as losses.

        Returns:
            this rank's share of the loss, of its terms, and of the metrics.
        """

    @abstractmethod
    def replicated(self) -> dict[str, Tensor]:
        """Return, by name, the parameters that all ranks hold alike."""

    @property
    def partition_due(self) -> bool:
        """Whether the model has been spread over the ranks anew; the same on every rank."""
        return False

    @abstractmethod
    def draw_partition(self, folder: Path) -> None:
        """Draw `partition.png` in the run's folder: which rank owns what."""

    def release(self) -> None:
        """Free what a step that was given up has left."""
        self.optimizers.zero_grad_all()

    # ---- words and numbers ----

    @property
    @abstractmethod
    def units_per_step(self) -> int:
        """How many of `unit` all ranks together see in a step."""

    @property
    @abstractmethod
    def rays_per_step(self) -> int:
        """Pixels that all ranks together see in a step, or nearly: nerfstudio shows speed in rays."""

    @abstractmethod
    def log(self, measured: Measured) -> LogEntry:
        """Return what this rank measured of the last step."""

    @abstractmethod
    def size(self) -> dict[str, int]:
        """Return how large the model is, for the run's summary: a number, by what it counts."""

    @abstractmethod
    def lost(self, steps: int) -> tuple[str, int]:
        """Return the model after so many steps, in words, and the bytes that a checkpoint of it takes."""

    # ---- checkpoints ----

    @abstractmethod
    def content(self, step: int) -> Content:
        """Return what a checkpoint after `step` holds; the run adds what is its own."""

    @abstractmethod
    def resume(self, opened: Opened) -> Resumed:
        """Load a checkpoint.

        Raises:
            InputError: on every rank: it is another method's, or does not fit this run.
        """
