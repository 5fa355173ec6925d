"""`--recipe`: a preset of many options. Options on the command line take precedence.

Schedules count images from the start and span 30,000, as splatfacto's do, so a short run ends in the middle of them.
Fitted to a run of 7,000 they cost up to 0.4 dB (benchmarks/results/recipes.md). Three settings follow the run's length.
Refinements are more frequent in a short run, which would otherwise be half over before the model has grown to its cap.
A long run has more Gaussians. All rates decay over the last part.
"""

import sys
from collections.abc import Sequence
from typing import Any, Literal

from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.primitives.densify.cap import per_seed
from ns_multigpu.primitives.registry import PRIMITIVES

Recipe = Literal["splatfacto", "best"]

_RECIPE_LINE = "_recipe_told"
"""Name of a config's attribute that holds the message about its recipe; never saved."""


def best(images: int) -> dict[str, Any]:
    """Return the options of the recipe in docs/use/recipes.md and their values, for a run that sees `images` images.

    MCMC (Kheradmand et al. 2024) with a cap that suits the capture adds Gaussians by opacity and screen gradients.
    Initial Gaussians are sized as splatfacto's: the small ones of gsplat's MCMC leave holes where few views overlap
    (benchmarks/results/recipes.md).

    Each view pulls the model in another direction, and Adam's steps stay long. So positions of small Gaussians move in
    proportion to their size, and all rates decay to a tenth over the last 15 % of the run. Without noise, and with
    neighbours next to each other in memory, a step passes over most of what its views do not draw. Images get full
    size twice as early as splatfacto's, and the rate of higher harmonics is four times as high.
    """
    return {
        "rates_at_end": 0.1,
        "rates_fall_from": 0.85,
        "optimizers.features_rest.optimizer.lr": 0.0005,
        "pipeline.model.resolution_schedule": 1500,
        "pipeline.model.densifier": "mcmc",
        "pipeline.model.gs_per_seed": per_seed(images),
        "pipeline.model.exposure": "auto",
        "pipeline.model.mcmc_picks": "both",
        "pipeline.model.mcmc_whole_step_scale": 0.006,
        "pipeline.model.noise_lr": 0.0,
        "pipeline.model.morton_order": True,
        "pipeline.model.stop_split_at": max(25000, round(images * 5 / 6)),
        "pipeline.model.refine_every": min(max(round(images / 150), 50), 100),
    }


def apply_recipe(config: Any, ranks: int, argv: Sequence[str] | None = None) -> None:
    """Set the options of `config.recipe` that the command line does not name.

    A config that was read from a run's file already includes its recipe and is unchanged.

    Args:
        config: a `DistributedTrainerConfig`, as the command line gave it; changed in place.
        ranks: number of ranks of the run.
        argv: the words of the command line; by default this process's.

    Raises:
        InputError: the run resumes from a file, and a recipe is given.
    """
    words = sys.argv[1:] if argv is None else argv
    named = {word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    if "load_config" in named and "recipe" in named:
        raise InputError(
            f"--recipe {config.recipe}: a run that goes on keeps the recipe that it began with. Leave --recipe out, or "
            "begin another run, without --load-config."
        )
    if config.recipe == "splatfacto" or "load_config" in named:
        return
    model = config.pipeline.model
    kind, default = PRIMITIVES[model.primitive], model.densifier == "default" and "pipeline.model.densifier" in named
    if default or ("densifier", "mcmc") in kind.lacks:
        why = "the default densifier is asked for" if default else f"{kind.title} do not support it"
        vars(config)[_RECIPE_LINE] = (
            f"Recipe: splatfacto. {config.recipe} is MCMC, and {why}: it sets nothing (docs/use/recipes.md)."
        )
        return
    batch = config.pipeline.batch(ranks)
    recipe_lines: list[str] = []
    for name, value in best(config.steps_for(batch) * batch).items():
        if name in named:
            continue
        *parents, last = name.split(".")
        place: Any = config
        for parent in parents:
            place = place[parent] if isinstance(place, dict) else getattr(place, parent)
        setattr(place, last, value)
        if value is not None:
            recipe_lines.append(f"--{name.replace('_', '-')} {value}")
    vars(config)[_RECIPE_LINE] = f"Recipe: {config.recipe} ({' '.join(recipe_lines)}; docs/use/recipes.md)."


def recipe_lines(config: Any) -> list[str]:
    """Return the lines on the recipe for the start of a run: one."""
    better = " (--recipe best gives better images)" if config.recipe == "splatfacto" else ""
    return [vars(config).get(_RECIPE_LINE, f"Recipe: {config.recipe}{better}.")]
