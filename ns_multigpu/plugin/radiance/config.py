"""The configuration of a run of `nerfacto-xl`: how its workers come to life is that of all our methods."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro

from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch import checks
from ns_multigpu.plugin.model.batch_scaling import ScalingChoice
from ns_multigpu.plugin.radiance.trainer import RadianceTrainer
from ns_multigpu.plugin.train.config import DistributedTrainerConfig
from ns_multigpu.plugin.train.recipe import Recipe


@dataclass
class RadianceTrainerConfig(DistributedTrainerConfig):
    """Configuration of a training run of a radiance field with any number of workers."""

    _target: type = field(default_factory=lambda: RadianceTrainer)
    mixed_precision: bool = False
    """Networks run in bfloat16 in training, as torch's autocast chooses; parameters and sums are float32."""
    fused_steps: Literal["auto", "always", "never"] = "auto"
    """Whether to take steps of fixed shapes, which on GPUs are captured in CUDA graphs: "auto" does where that can
    be, and says so, or what is in the way; "always" refuses to start where it cannot."""
    # The others are of splats alone: a step of rays has no views to scale by, and is counted in steps.
    use_grad_scaler: tyro.conf.Suppress[bool] = False
    eval_at_start: tyro.conf.Suppress[bool] = False
    max_num_images: tyro.conf.Suppress[int | None] = None
    batch_scaling: tyro.conf.Suppress[ScalingChoice] = "auto"
    rates_at_end: tyro.conf.Suppress[float] = 1.0
    rates_fall_from: tyro.conf.Suppress[float] = 0.5
    recipe: tyro.conf.Suppress[Recipe] = "splatfacto"
    save_in_background: tyro.conf.Suppress[bool] = False
    save_fallback_dir: tyro.conf.Suppress[Path | None] = None
    save_retry_seconds: tyro.conf.Suppress[float] = 0.0

    def check_method(self) -> None:
        """Whether the options go together.

        Raises:
            InputError: they do not.
        """
        model: Any = self.pipeline.model
        if model.cells < 0:
            raise InputError(f"--pipeline.model.cells {model.cells}: give how many cells, or 0 for one a GPU.")
        if model.background_color == "sky" and model.spread in ("mega", "block"):
            raise InputError(
                "--pipeline.model.background-color sky: all cells share one sky, and with --pipeline.model.spread "
                f"{model.spread} each field is trained alone. Give another background."
            )
        if model.spread == "mega" and model.disable_scene_contraction:
            raise InputError(
                "--pipeline.model.spread mega: each field has what is outside of its tile contracted around it. Leave "
                "out --pipeline.model.disable-scene-contraction."
            )

    def prepare(self) -> None:
        """Builds the operators on GPUs, once and in sight, before several workers ask for them; a CPU needs none."""
        if self.machine.device_type != "cpu":
            checks.prepare_operators(self.machine.device_type)

    def _in_short(self) -> str:
        ranks = self.machine.num_devices * self.machine.num_machines
        devices = f"{ranks} {'CPU worker' if self.machine.device_type == 'cpu' else 'GPU'}{'' if ranks == 1 else 's'}"
        pipeline: Any = self.pipeline
        data = pipeline.datamanager
        where = data.data or data.dataparser.data
        what = {"ddp": "one field, a share of the rays", "block": "a field of a group of cameras"}.get(
            pipeline.model.spread, "a cell"
        )
        return (
            f"{self.method_name} on {devices}, {what} or more each: {self.max_num_iterations:,} steps of "
            f"{data.train_num_rays_per_batch:,} rays of {where}\n"
            f"Run folder {self.get_base_dir()} (config.yml there has all options; --verbose True prints them)"
        )
