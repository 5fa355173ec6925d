"""A tiny radiance field in cells, in double precision, that any number of ranks can render: for the law tests."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ns_multigpu.core.dist.world import World
from ns_multigpu.radiance.contraction import Domain
from ns_multigpu.radiance.exchange import all_segments, cells_of, sum_gradients
from ns_multigpu.radiance.integrals import COLOUR, DEPTH, MOMENT, Distortion, Family, Samples, State
from ns_multigpu.radiance.partition import Partition, partition, spacing
from ns_multigpu.radiance.segments import Segments, clip

FAMILY = Family([COLOUR, DEPTH, MOMENT, Distortion()])


def rays(count: int = 40) -> tuple[Tensor, Tensor]:
    """Origins and directions [R, 3]: from inside, from outside, along axes, and from a face of a cell."""
    g = torch.Generator().manual_seed(2)
    origins = 2 * torch.rand(count, 3, generator=g, dtype=torch.float64) - 1
    directions = torch.nn.functional.normalize(torch.randn(count, 3, generator=g, dtype=torch.float64), dim=1)
    directions[:3] = torch.eye(3, dtype=torch.float64)
    origins[:3] = torch.tensor([[-1.5, 0.1, 0.2], [0.3, -1.4, 0.1], [0.2, 0.3, -1.3]])
    return origins, directions


def cut(cells: int, domain: Domain | None = None) -> Partition:
    """Cells of a cloud of points that is denser on one side."""
    g = torch.Generator().manual_seed(1)
    points = torch.randn(500, 3, generator=g, dtype=torch.float64) * torch.tensor([1.0, 0.7, 0.2]) + 0.1
    return partition(points, cells, domain or Domain.unbounded())


@dataclass(frozen=True)
class Outcome:
    """Results of a step on a rank: equal on all ranks, except `gradients` of its own cells and of shared parameters."""

    colour: Tensor
    depth: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]
    sent: int


def render(part: Partition, segments: Segments, own: range, params: dict[str, Tensor]) -> list[Tensor]:
    """Return the states of the segments of some cells."""
    origins, directions = (x.to(segments.near) for x in rays(segments.rays))
    rows: list[Tensor] = []
    for cell in own:
        rows_ = slice(segments.begins[cell], segments.begins[cell + 1])
        ray = segments.ray[rows_]
        steps = torch.linspace(0, 1, 9).to(segments.near)
        edges = segments.near[rows_, None] + (segments.far - segments.near)[rows_, None] * steps
        middles = (edges[:, 1:] + edges[:, :-1]) / 2
        where = origins[ray][:, None] + directions[ray][:, None] * middles[..., None]
        density = torch.nn.functional.softplus(where @ params[f"cell {cell}"]).squeeze(-1)
        colour = torch.sigmoid(where @ params["shared"])
        rows.append(FAMILY.within(Samples(edges, density, spacing(edges), {"colour": colour})))
    return rows


def step(world: World, cells: int) -> Outcome:
    """Render the rays and take the gradients of a loss that uses every integral."""
    part = cut(cells)
    origins, directions = (x.to(world.device) for x in rays())
    near = torch.full_like(origins[:, 0], 0.05)
    segments = clip(origins, directions, near, near * 200, part.boxes())
    own = cells_of(world.rank, cells, world.size)
    params = {"shared": torch.randn(3, 3, generator=torch.Generator().manual_seed(9), dtype=torch.float64)}
    for cell in own:
        params[f"cell {cell}"] = torch.randn(3, 1, generator=torch.Generator().manual_seed(cell), dtype=torch.float64)
    params = {name: param.to(world.device).requires_grad_() for name, param in params.items()}
    rows = torch.cat(render(part, segments, own, params))
    whole, _ = FAMILY.fold(all_segments(rows, segments, world), segments.order)
    loss = loss_of(whole)
    loss.backward()
    sum_gradients([params["shared"]], world)
    gradients = {name: p.grad.cpu() for name, p in params.items() if p.grad is not None}
    colour, depth, loss = (x.detach().cpu() for x in (whole["colour"], whole["depth"], loss))
    return Outcome(colour, depth, loss, gradients, world.traffic.sent)


def loss_of(whole: State) -> Tensor:
    """Of colour, opacity, depth and distortion."""
    return (
        (whole["colour"] - 0.3).square().mean()
        + 0.1 * whole["transmittance"].mean()
        + 0.2 * whole["depth"].square().mean()
        + 0.5 * whole["distortion"].mean()
    )
