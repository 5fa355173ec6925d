"""Gaussian splatting as Markov chain Monte Carlo over shards: together, the ranks hold the same Gaussians as one rank
with `morton`, for any placement.

Gaussians are drawn by opacity over the whole model. Every rank makes the same draws in integers, and finds its own from
the sums over all Gaussians before them. The source's rows are sent to the dead Gaussian's rank. If owners hold ranges
of the order, it remains there until the next reordering.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cuda_ext.reference.relocation import draws, numbered
from ns_multigpu.core.dist.collectives import exchange_rows, gather_on_device, sum_in_place
from ns_multigpu.core.random import keyed_generator, seed_from
from ns_multigpu.primitives.densify.mcmc import (
    McmcDensifier,
    all_moments,
    counted,
    grown,
    move_copies,
    quanta,
)
from ns_multigpu.primitives.densify.reshard import Resharding, ShardedPoints
from ns_multigpu.primitives.deterministic import sigmoid


@dataclass(frozen=True)
class _Draws:
    """Random draws from a sharded model.

    Attributes:
        count: number of draws, D.
        asked: draws requested by each rank; empty if nothing could be drawn.
        mine: [M] int64, the draws of this rank's Gaussians, ascending. rows: [M] int64, the rows of these.
    """

    count: int
    asked: Sequence[int]
    mine: Tensor
    rows: Tensor


@dataclass
class ShardedMcmc(ShardedPoints, McmcDensifier):
    """Relocation, growth and noise for shards. See `McmcDensifier`; parameters and moments are those of this rank's
    Gaussians, every rank calls all methods together, and the work of every Gaussian counts the same.
    """

    def _places(self, count: int) -> tuple[int, Tensor | None]:
        first, places = sum(self.shard_index.of_ranks(count, self.world)[: self.world.rank]), self.shard_index.places
        if places is not None:
            self.shard_index.check(count, self.world)
        return first, places

    def _sum_over_ranks(self, sums: dict[str, Tensor]) -> None:
        """Do nothing: a rank counts all that is drawn of its own Gaussians."""

    def _prefetches(self) -> bool:
        return False  # ranks exchange row counts

    def _relocate(
        self, params: Any, optimizers: dict[str, Any], image: int, steep: Tensor | None, taken: Tensor | None = None
    ) -> None:
        world = self.world
        opacities = sigmoid(params["opacities"].detach().flatten())
        dead = opacities <= self.min_opacity
        targets = torch.where(dead)[0]
        start = seed_from(self.seed, "relocate", image)
        drawn = self._draw(
            self._weights(opacities, steep), len(targets), lambda total, count: draws(count, total, start, dead.device)
        )
        if drawn.count == 0:
            return
        # The draws go to the dead by their places: the first to the one that stands before all others.
        slots = self.shard_index.among(targets, len(dead), drawn.asked, world)
        to, here = self._owners(drawn.count, slots)[drawn.mine], self._owners(drawn.count, drawn.mine)[slots]
        traffic = torch.stack([torch.bincount(ranks, minlength=world.size) for ranks in (to, here)])
        send, receive = traffic.tolist()
        order, places = torch.sort(to, stable=True).indices, targets[torch.sort(here, stable=True).indices]
        sources, copies = drawn.rows[order], counted(drawn.rows, len(dead))
        numbers = numbered(drawn.rows)[order]
        copied = self._copied(params, sources, copies, numbers)  # where their sources are
        # As in gsplat the moments of what is moved stay as they are.
        self._share_out(params, copies, cleared=all_moments(params, optimizers))
        rows = exchange_rows(torch.cat([x.flatten(1) for x in copied.values()], 1), send, receive, world)
        widths = [math.prod(value.shape[1:]) for value in params.values()]
        for value, row in zip(params.values(), rows.split(widths, 1), strict=True):
            value.data[places] = row.reshape(-1, *value.shape[1:])

    def _growth(self, params: Any, image: int, steep: Tensor | None, num_new: int) -> Tensor:
        opacities = sigmoid(params["opacities"].detach().flatten())
        weights = opacities if steep is None else self._weights(opacities, steep)
        asked = num_new if self.world.is_main else 0
        generator = keyed_generator(self.seed, "grow", image)

        def drawn(total: int, count: int) -> Tensor:
            return torch.randint(total, (count,), generator=generator)

        return self._draw(weights, asked, drawn).rows

    def _whole(self, count: int) -> int:
        return sum(self.shard_index.of_ranks(count, self.world))

    def _rearrange(self, params: Any, optimizers: dict[str, Any], sources: Tensor, orders: bool) -> None:
        index_map = self._split(params, sources)
        work = partial(torch.ones_like, index_map.source)
        if orders:
            categories = (torch.arange(len(index_map.source), device=sources.device) >= index_map.n_kept).long()
            self.reordering = self._resharding.in_order(params, optimizers, index_map, categories, work, move_copies)
        else:
            done = self._resharding.place(params, optimizers, index_map, None, None, work, move_copies)
            self.reordering = done or self.reordering

    def _can_change_owners(self) -> bool:
        # Ranges of an order stay even. Owners that places have are to be near what is placed there.
        return not self.shard_index.placement.in_ranges

    def _send_to_owners(self, params: Any, optimizers: dict[str, Any]) -> None:
        means = params["means"]
        none = torch.empty(0, dtype=torch.int64, device=means.device)
        self.reordering = self._resharding.send_to_owners(
            params, optimizers, grown(len(means), none, means.new_zeros(0, 3))
        )

    @property
    def _resharding(self) -> Resharding:
        return Resharding(self.shard_index, self.threshold, self.world)

    def _draw(self, weights: Tensor, asked: int, numbers: Callable[[int, int], Tensor]) -> _Draws:
        """Draw as `pick` does from all ranks' weights, by global index, for all ranks together.

        Args:
            asked: number of draws for this rank.
            numbers: given the weights' total and a count, returns [count] int64 below the total.
        """
        each = quanta(weights)
        gathered = gather_on_device(torch.stack([each.sum(), each.new_full((), asked)]), self.world)
        totals, wanted = ([row[k] for row in gathered] for k in (0, 1))
        total, count = sum(totals), sum(wanted)
        if count == 0 or total == 0:
            none = torch.empty(0, dtype=torch.int64, device=weights.device)
            return _Draws(0, [], none, none)
        starts = self.shard_index.before(each, totals, self.world)
        drawn = numbers(total, count).to(weights.device)
        # The first of this rank's Gaussians that ends beyond a number has it, if it begins before.
        rows = torch.searchsorted(starts + each, drawn, right=True)
        beyond = torch.nn.functional.pad(starts, (0, 1), value=total)
        mine = torch.where(beyond[rows] <= drawn)[0]
        return _Draws(count, wanted, mine, rows[mine])

    def _owners(self, count: int, mine: Tensor) -> Tensor:
        """Return the owner of each of `count` items, [count] int64, from every rank's own items."""
        owners = torch.zeros(count, dtype=torch.int64, device=mine.device)
        owners.index_fill_(0, mine, self.world.rank)
        sum_in_place(owners, self.world)
        return owners
