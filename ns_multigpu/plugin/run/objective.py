"""Objectives: what a run trains, behind the interface that its trainer, checkpoints and logs use.

Splats (`train.splats`) and a radiance field (`radiance.run.objective`) are two. Launching, the loop, faults, saving,
logs, viewer and evaluation are the run's, the same for each.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nerfstudio.engine.optimizers import Optimizers
from torch import Tensor

from ns_multigpu.core.dist.replicas import broadcast_in_place
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.blocks.fused_blocks import FusedBlocks, Measured
from ns_multigpu.plugin.checkpoint.atomic_save import Opened
from ns_multigpu.plugin.checkpoint.training_copy import Content
from ns_multigpu.plugin.faults.guards import Guards

if TYPE_CHECKING:
    from ns_multigpu.plugin.run.config import RunConfig
    from ns_multigpu.plugin.run.pipeline import RunPipeline

Row = dict[str, Any]


@dataclass(frozen=True)
class LogEntry:
    """Log entry of one step on this rank.

    Attributes:
        measured: this rank's shares of the loss, its terms and the metrics, which are summed over ranks; `mse` becomes
            PSNR. Names are the same on every rank.
        images: images that all ranks see in a step.
        row: values for metrics.jsonl, the same on every rank.
        metrics: rank 0's values for nerfstudio's writers.
        rates: learning rates, by parameter group.
        by_rank: numbers of this rank, which are gathered. derived: computes further values of the row from them, given
            a list over ranks for each.
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
    """State of a run after its checkpoint has been loaded.

    Attributes:
        steps: completed steps. whole: True if the checkpoint matches this state exactly and need not be written again.
        lines: messages for the user.
    """

    steps: int
    whole: bool
    lines: Sequence[str]


class Objective(ABC):
    """Base of objectives: training of one kind of model on one rank, in step with the others. Every rank calls each
    method.

    Args:
        config: a `RunConfig`, whose `max_num_iterations` is the run's length.
        pipeline: a `RunPipeline`. world: the ranks. guards: receives steps and gradients.

    Attributes:
        optimizers: see `build_optimizers`.
        blocks: runs several steps at once if steps are fused; else None, and `step` runs one.
    """

    unit: ClassVar[str]
    """Plural name of the unit counted for the user; a step sees `units_per_step` of them."""

    def __init__(self, config: "RunConfig", pipeline: "RunPipeline", world: World, guards: Guards) -> None:
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
        """Prepare the model for `step`, before nerfstudio's callbacks."""
        del step

    @abstractmethod
    def step(self, step: int, *, metrics: bool) -> Measured:
        """Run a step on this rank's share of the batch.

        Args:
            metrics: whether to compute metrics as well as losses.

        Returns:
            this rank's share of the loss, of its terms, and of the metrics.
        """

    @abstractmethod
    def replicated(self) -> dict[str, Tensor]:
        """Return, by name, the parameters that all ranks hold alike."""

    @property
    def placement_changed(self) -> bool:
        """True if points have moved to other ranks since the last `follow_placement`; the same on every rank."""
        return False

    @abstractmethod
    def follow_placement(self, folder: Path) -> None:
        """Move to other ranks what follows the model's placement, and draw `partition.png` in the run's folder: which
        rank owns what. Every rank calls it at the start and after each change."""

    def release(self) -> None:
        """Free what a cancelled step has left."""
        self.optimizers.zero_grad_all()

    # ---- words and numbers ----

    @property
    @abstractmethod
    def units_per_step(self) -> int:
        """Number of `unit` that all ranks together see in a step."""

    @property
    @abstractmethod
    def rays_per_step(self) -> int:
        """Approximate number of pixels that all ranks together see in a step: nerfstudio shows speed in rays."""

    @abstractmethod
    def log(self, measured: Measured) -> LogEntry:
        """Return this rank's measurements of the last step."""

    @abstractmethod
    def size(self) -> dict[str, int]:
        """Return the size of the model for the run's summary, by name of what is counted."""

    @abstractmethod
    def lost(self, steps: int) -> tuple[str, int]:
        """Return a description of the model after `steps` steps, and the bytes of its checkpoint."""

    # ---- checkpoints ----

    @abstractmethod
    def content(self, step: int) -> Content:
        """Return the objective's part of a checkpoint after `step`; the run adds its own."""

    @abstractmethod
    def resume(self, opened: Opened) -> Resumed:
        """Load a checkpoint.

        Raises:
            InputError: on every rank: it is another method's, or does not fit this run.
        """
