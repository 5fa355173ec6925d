"""Configuration of a run that trains splats."""

from dataclasses import dataclass
from typing import Any, cast

from ns_multigpu.plugin.launch import checks
from ns_multigpu.plugin.model.batch_scaling import RateSchedule, ScalingChoice, scaling_rule
from ns_multigpu.plugin.model.surfaces import check_primitive
from ns_multigpu.plugin.run.config import RunConfig
from ns_multigpu.plugin.run.objective import Objective
from ns_multigpu.plugin.splats.depth_maps import needs_tracks
from ns_multigpu.plugin.splats.objective import SplatObjective
from ns_multigpu.plugin.splats.recipe import Recipe, apply_recipe, recipe_lines
from strategies import STRATEGIES


@dataclass
class RecipeOption:
    """The option that `--help` lists first: the fields of a dataclass begin with those of its last base."""

    recipe: Recipe = "best"
    """Preset of the options that decide image quality; options that you give take precedence. "best" gives the best
    held-out images that we know how to get; "splatfacto" has the values of nerfstudio's splatfacto, which are the
    defaults shown here. "best" sets others (docs/use/recipes.md): rates-at-end, rates-fall-from,
    optimizers.features-rest.optimizer.lr, and of pipeline.model resolution-schedule, densifier, gs-per-seed, exposure,
    mcmc-picks, mcmc-whole-step-scale, noise-lr, morton-order, stop-split-at, refine-every."""


@dataclass
class DistributedTrainerConfig(RunConfig, RecipeOption):
    """Options of a run that trains splats."""

    max_num_images: int | None = 30000
    """Training ends once this many images have been seen by all ranks together, or after max_num_iterations steps."""
    batch_scaling: ScalingChoice = "auto"
    """Scaling of learning rates, Adam's betas and eps with the batch size: by its square root (sqrt), the same decaying
    to no scaling by the end (sqrt-to-none), in proportion (linear), or none. auto: sqrt-to-none if each image is seen
    100 times or more, else sqrt."""
    rates_at_end: float = 1.0
    """Factor on learning rates, besides their own schedules, at the end of training; 1 for no decay."""
    rates_fall_from: float = 0.5
    """Fraction of the run after which rates decay to rates_at_end, exponentially with the images seen; 0 is the
    start."""

    def rate_schedule(self, batch: int, views: int) -> RateSchedule:
        """Return the schedule of learning rates if each step sees `batch` images of a capture of `views` training
        views."""
        images = max(self.steps_for(batch), 1) * batch
        rule = scaling_rule(self.batch_scaling, images, views)
        return RateSchedule(rule, batch, images, self.rates_at_end, self.rates_fall_from)

    def complete(self, ranks: int) -> None:
        """Set the options of `recipe`.

        Raises:
            InputError: the recipe is not for this method, or the decay of rates is out of range.
        """
        apply_recipe(self, ranks)
        checks.check_rates_at_end(self.rates_at_end, self.rates_fall_from)

    def check_method(self) -> None:
        """Raise an InputError unless the strategy and the primitive go together."""
        checks.check_strategy(strategy := str(getattr(self.pipeline, "strategy", "")), STRATEGIES)
        check_primitive(cast(Any, self.pipeline).model, strategy)

    def check_precision(self) -> None:
        """Raise an InputError unless single precision is used, as Splatfacto does."""
        checks.check_precision(self.mixed_precision, self.use_grad_scaler)

    def needs_tracks(self) -> bool:
        """See `RunConfig.needs_tracks`."""
        pipeline = cast(Any, self.pipeline)
        return needs_tracks(pipeline.datamanager, pipeline.model)

    def objective(self) -> type[Objective]:
        """See `RunConfig.objective`."""
        return SplatObjective

    def length_in_words(self, ranks: int) -> str:
        """Return the number of images that a run on `ranks` ranks sees, in words."""
        batch = cast(Any, self.pipeline).batch(ranks)
        return f": {self.steps_for(batch) * batch:,} images"

    def short_summary(self) -> str:
        """Return the same, and the lines of the recipe."""
        return super().short_summary() + "".join(f"\n{line}" for line in recipe_lines(self))
