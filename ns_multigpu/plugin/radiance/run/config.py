"""The configuration of a run of `nerfacto-xl`: how its workers come to life is that of all our methods."""

from dataclasses import dataclass
from typing import Any, Literal

from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch import checks
from ns_multigpu.plugin.radiance.run.objective import RadianceObjective
from ns_multigpu.plugin.train.config import RunConfig
from ns_multigpu.plugin.train.objective import Objective


@dataclass
class RadianceTrainerConfig(RunConfig):
    """Options of a run that trains a radiance field."""

    mixed_precision: bool = False
    """Networks run in bfloat16 in training, as torch's autocast chooses; parameters and sums are float32."""
    fused_steps: Literal["auto", "always", "never"] = "auto"
    """Whether to take steps of fixed shapes, which on GPUs are captured in CUDA graphs: "auto" does where that can
    be, and says so, or what is in the way; "always" refuses to start where it cannot."""

    def objective(self) -> type[Objective]:
        """See `RunConfig.objective`."""
        return RadianceObjective

    def check_precision(self) -> None:
        """See `RunConfig.check_precision`: networks may run in bfloat16, whose losses nobody scales."""
        if self.use_grad_scaler:
            raise InputError(
                "--use-grad-scaler True: networks run in bfloat16, whose range is that of single precision, so that no "
                "loss has to be scaled. Leave it out."
            )

    def check_method(self) -> None:
        """Whether the options go together.

        Raises:
            InputError: they do not.
        """
        model: Any = self.pipeline.model
        if model.cells < 0:
            raise InputError(f"--pipeline.model.cells {model.cells}: give how many cells, or 0 for one a GPU.")

    def prepare(self) -> None:
        """Builds the operators on GPUs, once and in sight, before several workers ask for them; a CPU needs none."""
        if self.machine.device_type != "cpu":
            checks.prepare_operators(self.machine.device_type)

    def length_in_words(self, ranks: int) -> str:
        """Return how many steps, of how many rays, a run of so many ranks takes."""
        pipeline: Any = self.pipeline
        held = "one field, a share of the rays" if pipeline.model.spread == "ddp" else "a cell"
        steps = f"{self.max_num_iterations:,} steps"
        if self.max_num_images is not None:  # how many that is follows from the photographs' size
            steps = f"{self.max_num_images:,} images, or {steps},"
        return f", {held} or more each: {steps} of {pipeline.datamanager.train_num_rays_per_batch:,} rays"
