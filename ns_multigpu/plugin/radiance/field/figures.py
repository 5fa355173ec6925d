"""Statistics of a training batch of rays, for the log."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ns_multigpu.plugin.blocks.fused_blocks import Measured
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.run.objective import LogEntry, Row
from ns_multigpu.radiance.exchange import balance, bytes_a_ray
from ns_multigpu.radiance.segments import Segments
from ns_multigpu.radiance.slots import Slots


@dataclass(frozen=True)
class Figures:
    """Statistics of the last training batch.

    Attributes:
        segments: of all cells; `len` is their number. taken: number of samples on this rank.
        rays: number of rays. outside: [] fraction of rays that meet no cell.
    """

    segments: Segments | Slots
    taken: int | Tensor
    rays: int
    outside: Tensor

    @property
    def samples(self) -> int:
        """Number of samples on this rank. May wait for the device."""
        return int(self.taken)


def refuse_no_rays(model: Any, step: int) -> None:
    """Raise an InputError if no ray of the step has met a cell. May wait for the device.

    Args:
        model: a `NerfactoXLModel` that has just run the step.
    """
    if len(model.figures.segments) == 0:
        raise InputError(
            f"No ray of step {step} meets a cell. With --pipeline.model.disable-scene-contraction True space is "
            "the scene's box alone; the cameras look outside of it, or --pipeline.model.near-plane and far-plane leave "
            "none of it. Leave the contraction on, or change the dataparser's scene-scale."
        )


@torch.no_grad()
def log_entry(pipeline: Any, measured: Measured, rates: Mapping[str, float]) -> LogEntry:
    """Return this rank's measurements of the last step; see `Objective.log`.

    Args:
        pipeline: a `RadiancePipeline`. measured: complete losses and metrics. rates: learning rates by group.
    """
    model, world = pipeline.model, pipeline.world
    figures: Figures = model.figures
    _, losses, metrics = measured
    zero, poses = torch.zeros((), device=world.device), dict[str, Tensor]()
    model.camera_optimizer.get_loss_dict(poses)  # on rank 0 only
    # Proposal losses differ by rank and are summed; the others are equal on all ranks, and rank 0's count.
    shares = {
        name: losses.get(name, zero) if world.is_main or name == "interlevel_loss" else zero
        for name in dict.fromkeys([*losses, *poses])
    }
    mse = 10 ** (-metrics["psnr"] / 10) if world.is_main else zero
    more = {name: value for name, value in metrics.items() if name != "psnr"}
    model.camera_optimizer.get_metrics_dict(more)
    rays, segments = max(figures.rays, 1), len(figures.segments)
    row = {"segments_a_ray": segments / rays, "rays_outside": float(figures.outside)}

    def derived(by_rank: Mapping[str, list[float]]) -> Row:
        samples = [int(count) for count in by_rank["samples"]]
        naive, sent = bytes_a_ray(rays, segments, sum(samples), model.family.width)
        return {
            "samples_a_ray": sum(samples) / rays,
            "samples_imbalance": balance(samples),
            "bytes_a_ray": sent,
            "bytes_a_ray_of_samples": naive,
            "samples_by_rank": samples,
        }

    shared: Measured = (functools.reduce(torch.add, shares.values()), shares, {"mse": mse})
    by_rank = {"samples": float(figures.samples)}
    return LogEntry(shared, pipeline.images_per_step, row, more, rates, by_rank, derived)
