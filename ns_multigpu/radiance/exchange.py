"""The only exchange of a step: every rank receives the integrals of all segments (NeRF-XL, section 4.3).

Each rank joins the same segments to the same rays and has the same loss. Its graph has only its own segments, so that
the backward pass needs no exchange. Gradients of shared parameters are summed at the end of a step.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ns_multigpu.core.assign.placement import even_bounds
from ns_multigpu.core.dist.collectives import all_gather_into, sum_in_place
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.transport import Collective, Parts, launched
from ns_multigpu.radiance.segments import Segments


def cells_of(rank: int, cells: int, ranks: int) -> range:
    """Return the cells of a rank; ranks differ by one cell at most.

    Raises:
        ValueError: there are fewer cells than ranks.
    """
    if cells < ranks:
        raise ValueError(f"{cells} cells for {ranks} ranks: each rank wants a cell at least")
    bounds = even_bounds(cells, ranks)
    return range(bounds[rank], bounds[rank + 1])


def all_segments(own: Tensor, segments: Segments, world: World) -> Tensor:
    """All-gather the states of all segments: this rank's with gradients, others' without. Every rank calls it.

    All ranks have all segments, so no sizes are exchanged. One collective, padded to the largest rank, sends the
    states.

    Args:
        own: [m, F] the states of this rank's segments, in their order.
        segments: those of all cells.
        world: the ranks.

    Returns:
        [M, F].

    Raises:
        ValueError: `own` has not as many rows as this rank has segments.
    """
    held = [b - a for a, b in pairwise(segments_of_ranks(segments, world.size))]
    if len(own) != held[world.rank]:
        raise ValueError(f"{len(own)} states for {held[world.rank]} segments of rank {world.rank}")
    return launched(gathered(own, held, world))


def gathered(own: Tensor, held: Sequence[int], world: World) -> Parts[Tensor]:
    """All-gather rows of all ranks: this rank's with gradients, others' without. The collective is yielded.

    Args:
        own: this rank's rows. held: number of each rank's rows.
    """
    if world.group is None or max(held) == 0:
        return own
    sent = own.detach()
    if max(held) > len(own):
        sent = torch.cat([sent, sent.new_zeros(max(held) - len(own), *sent.shape[1:])])
    table = own.new_empty(world.size, *sent.shape)
    sent = sent.contiguous()
    yield Collective(lambda: all_gather_into(table, sent, world))
    parts = [table[rank, :count] for rank, count in enumerate(held)]
    parts[world.rank] = own
    return torch.cat(parts)


def segments_of_ranks(segments: Segments, ranks: int) -> list[int]:
    """Return the first segment of each rank, and the total: [ranks + 1]."""
    cells = len(segments.begins) - 1
    return [segments.begins[bound] for bound in even_bounds(cells, ranks)]


@torch.no_grad()
def sum_gradients(shared: Iterable[Tensor], world: World) -> None:
    """Sum the gradients of shared parameters over the ranks in one collective. Every rank calls it.

    A rank whose cells meet no ray has none, which counts as zero.

    Args:
        shared: the same parameters on every rank, in the same order.
    """
    launched(sum_gradients_in_parts(shared, world))


def sum_gradients_in_parts(shared: Iterable[Tensor], world: World) -> Parts[None]:
    """Sum as `sum_gradients` does, and yield the collective to be launched between CUDA graphs."""
    params = list(shared)
    if world.group is None or not params:
        return
    graded = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    flat = torch.cat([grad.reshape(-1) for grad in graded])
    yield Collective(lambda: sum_in_place(flat, world))
    for param, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        param.grad = part.view_as(param).clone()


def bytes_a_ray(rays: int, segments: int, samples: int, width: int) -> tuple[float, float]:
    """Return the average bytes sent per ray: for all samples (section 4.2), and for segments (section 4.3).

    Args:
        rays: number of rays. segments, samples: totals of all rays in all cells. width: numbers per segment.

    Returns:
        bytes of samples, each with density, colour, and two ends; and bytes of segments.
    """
    return samples * 6 * 4 / max(rays, 1), segments * width * 4 / max(rays, 1)


def balance(counts: Sequence[int]) -> float:
    """Return the largest count of a rank over the mean; 1 if all are equal or zero."""
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 1.0
