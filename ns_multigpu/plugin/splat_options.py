"""Splatfacto's options, those of MCMC added, and the densifier that they describe."""

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from nerfstudio.models.splatfacto import SplatfactoModelConfig

from ns_multigpu.core.world import World
from ns_multigpu.primitives.densifier import ReplicatedDensifier
from ns_multigpu.primitives.mcmc import McmcDensifier
from ns_multigpu.primitives.sharded_densifier import ShardedDensifier
from ns_multigpu.primitives.sharded_mcmc import ShardedMcmc


def _splat_model() -> type:
    from ns_multigpu.plugin.splat_model import SplatModel  # it needs this module

    return SplatModel


@dataclass
class SplatModelConfig(SplatfactoModelConfig):
    """Splatfacto's options, under their own names. Those that count steps count images seen, over all ranks.

    The options of MCMC bear the names of nerfstudio's later versions, where its `strategy` is our `densifier`.
    """

    _target: type = field(default_factory=_splat_model)
    optimizer_state: Literal["full", "compact"] = "full"
    """How Adam keeps its two moments of every parameter of the Gaussians: "full", as float32, 8 bytes a parameter and
    472 a Gaussian; "compact", as bfloat16 that is rounded up or down at random, half of that. With compact a Gaussian
    takes 484 bytes in all instead of 720. For fused steps only (see --fused-steps)."""
    selective_adam: bool = False
    """Only Gaussians that a view of the step's batch draws, on any GPU, take Adam's step; the others keep parameters
    and moments (Mallick et al. 2024, Taming 3DGS). The results differ from Splatfacto's, and what that does to quality
    has not been measured. Bias corrections count the model's steps, as dense Adam's do. For fused steps only (see
    --fused-steps)."""
    densifier: Literal["default", "mcmc"] = "default"
    """How points are added and removed: "default" splits, clones and prunes; "mcmc" relocates, up to max-gs-num."""
    morton_order: bool = False
    """Order the Gaussians at each refinement along a Morton curve within small cells, which are dealt out: neighbours
    in space, neighbours in memory. Where they are spread over the GPUs, they always are in that order."""
    rebalance_above: float = 1.1
    """Where the Gaussians are spread over the GPUs: spread them anew, at a refinement, once a GPU has more than this
    times the mean of the work."""
    max_gaussians: int | None = None
    """With default, the most Gaussians the whole model may have, over all ranks: a refinement that would exceed it only
    prunes. By default what fits the GPUs' memory (see docs/planning.md); on a CPU any number."""
    max_gs_num: int = 1_000_000
    """With mcmc, the most Gaussians the whole model may have, over all ranks."""
    noise_lr: float = 5e5
    """With mcmc, noise on positions in units of their learning rate."""
    mcmc_opacity_reg: float = 0.01
    """With mcmc, weight of the mean opacity in the loss."""
    mcmc_scale_reg: float = 0.01
    """With mcmc, weight of the mean scale in the loss."""
    mcmc_min_opacity: float = 0.005
    """With mcmc, a Gaussian of at most this opacity is dead and gets relocated."""


def make_densifier(
    options: SplatModelConfig, views: int, world: World, seed: int, *, sharded: bool = False
) -> ReplicatedDensifier | McmcDensifier:
    """The densifier, which counts images seen and decides alike on every rank.

    Args:
        options: Splatfacto's.
        views: training views of the capture: refinement pauses for an epoch after opacities were reset.
        world: the ranks whose statistics are summed.
        seed: the run's seed.
        sharded: every rank holds a part of the points, and not all of them.
    """
    if options.densifier == "mcmc":
        mcmc = (
            partial(ShardedMcmc, world=world, threshold=options.rebalance_above)
            if sharded
            else partial(McmcDensifier, morton=options.morton_order)
        )
        return mcmc(
            cap_max=options.max_gs_num,
            noise_lr=options.noise_lr,
            refine_start_iter=options.warmup_length,
            refine_stop_iter=options.stop_split_at,
            refine_every=options.refine_every,
            min_opacity=options.mcmc_min_opacity,
            seed=seed,
        )
    default = (
        partial(ShardedDensifier, threshold=options.rebalance_above)
        if sharded
        else partial(ReplicatedDensifier, morton=options.morton_order)
    )
    return default(
        prune_opa=options.cull_alpha_thresh,
        grow_grad2d=options.densify_grad_thresh,
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
    )
