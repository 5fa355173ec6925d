"""The densifier that a model's options describe."""

import math
from functools import partial
from typing import TYPE_CHECKING

from ns_multigpu.core.assign.shard_index import ShardIndex
from ns_multigpu.core.densifier import Densifier
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.primitives.densify.densifier import ReplicatedDensifier
from ns_multigpu.primitives.densify.mcmc import McmcDensifier
from ns_multigpu.primitives.densify.sharded_densifier import ShardedDensifier
from ns_multigpu.primitives.densify.sharded_mcmc import ShardedMcmc
from ns_multigpu.primitives.registry import PRIMITIVES

if TYPE_CHECKING:
    from ns_multigpu.plugin.model.options import SplatModelConfig


ANY_NUMBER = 1 << 40
"""Placeholder cap without effect: one that suits the capture is chosen once the capture is known
(`splats/capacity.py`)."""


def make_densifier(
    options: "SplatModelConfig", views: int, world: World, seed: int, *, shard_index: ShardIndex | None = None
) -> Densifier:
    """Return the densifier, which counts images seen and decides alike on every rank.

    Args:
        options: Splatfacto's.
        views: training views of the capture: refinement pauses for an epoch after opacities were reset.
        world: the ranks whose statistics are summed.
        seed: the run's seed.
        shard_index: what this rank holds of a model of which every rank has a part; None where each has all of it.

    Raises:
        InputError: the size from which on points are pruned is no length, or another number makes no sense.
    """
    if options.refine_every < 1:
        raise InputError(f"--pipeline.model.refine-every {options.refine_every}: give 1 or more images.")
    for name in ("noise_lr", "mcmc_opacity_reg", "mcmc_scale_reg", "mcmc_whole_step_scale"):
        if not 0 <= getattr(options, name) < math.inf:
            raise InputError(
                f"--pipeline.model.{name.replace('_', '-')} {getattr(options, name):g}: give 0 or more, and finite."
            )
    if not 0 < options.mcmc_min_opacity < 1:
        value = f"{options.mcmc_min_opacity:g}"
        raise InputError(f"--pipeline.model.mcmc-min-opacity {value}: give a number between 0 and 1.")
    if not options.cull_scale_thresh > 0:
        raise InputError(
            f"--pipeline.model.cull-scale-thresh {options.cull_scale_thresh:g}: what is larger is pruned. Give a size "
            "above 0, or inf to prune nothing by size."
        )
    if options.densifier == "mcmc":
        mcmc = (
            partial(ShardedMcmc, shard_index=shard_index, threshold=options.rebalance_above)
            if shard_index is not None
            else partial(McmcDensifier, morton=options.morton_order)
        )
        return mcmc(
            cap_max=ANY_NUMBER if options.max_gaussians is None else options.max_gaussians,
            noise_lr=options.noise_lr,
            refine_start_iter=options.warmup_length,
            refine_stop_iter=options.stop_split_at,
            refine_every=options.refine_every,
            min_opacity=options.mcmc_min_opacity,
            picks=options.mcmc_picks,
            world=world,
            seed=seed,
        )
    default = (
        partial(ShardedDensifier, shard_index=shard_index, threshold=options.rebalance_above)
        if shard_index is not None
        else partial(ReplicatedDensifier, morton=options.morton_order)
    )
    steep = {"2dgs": options.densify_grad_thresh_2dgs, "convex": options.densify_grad_thresh_convex}
    return default(
        prune_opa=options.cull_alpha_thresh if options.primitive != "convex" else options.cull_alpha_thresh_convex,
        grow_grad2d=steep.get(options.primitive, options.densify_grad_thresh),
        grow_scale3d=options.densify_size_thresh,
        grow_scale2d=options.split_screen_size,
        prune_scale3d=options.cull_scale_thresh,
        prune_scale2d=options.cull_screen_size,
        refine_scale2d_stop_iter=options.stop_screen_size_at,
        refine_start_iter=options.warmup_length,
        refine_stop_iter=options.stop_split_at,
        reset_every=options.reset_alpha_every * options.refine_every,
        refine_every=options.refine_every,
        pause_refine_after_reset=views + options.refine_every,
        absgrad=options.use_absgrad,
        world=world,
        seed=seed,
        split_rule=PRIMITIVES[options.primitive].split_rule,
    )
