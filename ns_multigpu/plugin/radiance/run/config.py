"""Configuration of a `nerfacto-xl` run; workers start as in all our methods."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from ns_multigpu.plugin.capture.tracks import OPTION
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch import checks
from ns_multigpu.plugin.radiance.run.objective import RadianceObjective
from ns_multigpu.plugin.run.config import RunConfig
from ns_multigpu.plugin.run.objective import Objective


@dataclass
class RadianceTrainerConfig(RunConfig):
    """Options of a run that trains a radiance field."""

    mixed_precision: bool = False
    """Networks run in bfloat16 in training, as torch's autocast selects; parameters and sums are float32."""
    fused_steps: Literal["auto", "always", "never"] = "auto"
    """Training steps of fixed shapes, captured in CUDA graphs on GPUs. auto: if supported, else the reason is printed.
    always: an error if not supported."""

    def objective(self) -> type[Objective]:
        """See `RunConfig.objective`."""
        return RadianceObjective

    def check_precision(self) -> None:
        """See `RunConfig.check_precision`: networks may run in bfloat16, which needs no loss scaling."""
        if self.use_grad_scaler:
            raise InputError(
                "--use-grad-scaler True: networks run in bfloat16, whose range is that of single precision, so that no "
                "loss has to be scaled. Leave it out."
            )

    def check_method(self) -> None:
        """Check that the options are consistent.

        Raises:
            InputError: they are not.
        """
        model: Any = self.pipeline.model
        if model.cells < 0:
            raise InputError(f"--pipeline.model.cells {model.cells}: give how many cells, or 0 for one a GPU.")
        if model.depth_loss != "auto" and not 0 <= model.depth_loss < math.inf:
            raise InputError(f"{OPTION} {model.depth_loss}: give a weight of 0 or more, or auto.")

    def needs_tracks(self) -> bool:
        """See `RunConfig.needs_tracks`."""
        model: Any = self.pipeline.model
        return model.depth_loss not in ("auto", 0)

    def prepare(self) -> None:
        """Build the GPU operators once, visibly, before several workers need them; a CPU needs none."""
        if self.machine.device_type != "cpu":
            checks.prepare_operators(self.machine.device_type)

    def length_in_words(self, ranks: int) -> str:
        """Return a line with the number of steps and rays of a run."""
        pipeline: Any = self.pipeline
        held = "one field, a share of the rays" if pipeline.model.spread == "ddp" else "a cell"
        steps = f"{self.max_num_iterations:,} steps"
        if self.max_num_images is not None:  # their number depends on the photographs' size
            steps = f"{self.max_num_images:,} images, or {steps},"
        return f", {held} or more each: {steps} of {pipeline.datamanager.train_num_rays_per_batch:,} rays"
