"""Gaussian splatting as Markov chain Monte Carlo over shards: one after the other, the ranks hold the Gaussians that
one rank with `morton` would have.

Gaussians are drawn by opacity over the whole model: every rank makes the same draws, in integers, and knows from the
ranks' sums whose each is. The rows of a relocated Gaussian's source travel to where the dead one was.
"""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ns_multigpu.core.collectives import all_gather_ints, exchange_rows
from ns_multigpu.core.random import keyed_generator
from ns_multigpu.core.world import World
from ns_multigpu.primitives.mcmc import McmcDensifier, clear_moments, grown, running_sums
from ns_multigpu.primitives.sharded_order import Reordering, clock, order_keys, plan_move
from ns_multigpu.primitives.sharded_rows import move_rows
from ns_multigpu.primitives.steady import sigmoid


@dataclass(frozen=True)
class _Draws:
    """What is drawn from a model that is spread over the ranks.

    Attributes:
        owners: [D] int64, the rank that has the Gaussian of each draw.
        mine: [M] int64, the draws of this rank's Gaussians, ascending. rows: [M] int64, which those are.
    """

    owners: Tensor
    mine: Tensor
    rows: Tensor


@dataclass
class ShardedMcmc(McmcDensifier):
    """Relocation, growth and noise for shards. See `McmcDensifier`; parameters and moments are those of this rank's
    Gaussians, every rank calls all methods together, and the work of every Gaussian counts the same.

    Attributes:
        world: the ranks.
        threshold: ranges are made anew where a rank has more than this times the mean number of Gaussians.
        reordering: what the last refinement did; whoever logs it sets it to None.
    """

    morton: bool = True
    world: World = field(default_factory=World.single)
    threshold: float = 1.1
    reordering: Reordering | None = field(default=None, init=False)
    _counts: tuple[int, ...] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.morton:
            raise ValueError("shards are ranges of an order: a sharded densifier cannot do without it")

    def forget(self) -> None:
        """Learns the ranks' numbers of Gaussians anew: to be called where anybody else has changed them."""
        self._counts = None

    def _first_row(self, count: int) -> int:
        if self._counts is None:
            self._counts = tuple(row[0] for row in all_gather_ints([count], self.world))
        if self._counts[self.world.rank] != count:
            raise RuntimeError(
                f"rank {self.world.rank} has {count} Gaussians, not the {self._counts[self.world.rank]} of the last "
                "refinement: call forget() on every rank where a model is replaced"
            )
        return sum(self._counts[: self.world.rank])

    def _relocate(self, params: Any, optimizers: dict[str, Any], image: int) -> None:
        world = self.world
        opacities = sigmoid(params["opacities"].detach().flatten())
        dead = opacities <= self.min_opacity
        targets = torch.where(dead)[0]
        wanted = [row[0] for row in all_gather_ints([len(targets)], world)]
        draws = self._draw(opacities.masked_fill(dead, 0.0), sum(wanted), keyed_generator(self.seed, "relocate", image))
        if len(draws.owners) == 0:
            return
        # The draws go to the dead in their order: those of rank 0 first.
        ends = list(accumulate(wanted))
        to = torch.searchsorted(torch.tensor(ends, device=targets.device), draws.mine, right=True)
        here = draws.owners[ends[world.rank] - len(targets) : ends[world.rank]]
        traffic = torch.stack([torch.bincount(ranks, minlength=world.size) for ranks in (to, here)])
        send, receive = traffic.tolist()
        places = targets[torch.sort(here, stable=True).indices]
        self._share_out(params, draws.rows)
        for name, value in params.items():
            # As in gsplat the moments of what was moved here stay as they are.
            value.data[places] = exchange_rows(value.data[draws.rows], send, receive, world)
            clear_moments(optimizers.get(name), value, draws.rows)

    def _growth(self, params: Any, image: int) -> Tensor:
        opacities = sigmoid(params["opacities"].detach().flatten())
        count = sum(row[0] for row in all_gather_ints([len(opacities)], self.world))
        return self._draw(opacities, self._room(count), keyed_generator(self.seed, "grow", image)).rows

    @torch.no_grad()
    def _rearrange(self, params: Any, optimizers: dict[str, Any], sources: Tensor) -> None:
        means = params["means"]
        started = clock(means.device)
        regrouping = grown(len(means), sources)
        categories = (torch.arange(len(regrouping.source), device=means.device) >= len(means)).long()
        keys, order = torch.sort(order_keys(regrouping.positions(means), categories, self.world), stable=True)
        move = plan_move(keys, torch.ones_like(keys), self.world, self.threshold)
        row_bytes = move_rows(params, optimizers, regrouping.ordered(order), move, self.world)
        self.reordering = move.record(started, row_bytes)
        self._counts = move.counts_after

    def _draw(self, weights: Tensor, count: int, generator: torch.Generator) -> _Draws:
        """What `pick` draws from all ranks' weights, one after the other."""
        sums = running_sums(weights)
        totals = [row[0] for row in all_gather_ints([int(sums[-1]) if len(sums) else 0], self.world)]
        if count == 0 or sum(totals) == 0:
            none = torch.empty(0, dtype=torch.int64, device=weights.device)
            return _Draws(none, none, none)
        drawn = torch.randint(sum(totals), (count,), generator=generator).to(weights.device)
        owners = torch.searchsorted(torch.tensor(list(accumulate(totals)), device=weights.device), drawn, right=True)
        mine = torch.where(owners == self.world.rank)[0]
        rows = torch.searchsorted(sums, drawn[mine] - sum(totals[: self.world.rank]), right=True)
        return _Draws(owners, mine, rows)
