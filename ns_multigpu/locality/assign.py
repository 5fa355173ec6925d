"""Assignment of a batch's patches to ranks (section 4.2.2): machines first, then the GPUs of each."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cuda_ext.ops.exchange.assign_patches import POWERS, assign_patches

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Weights:
    """Weights of the objective's terms at one level: see `assign_patches`.

    Attributes:
        alpha: of points that are drawn where they are. beta, gamma, delta: of the norms of what ranks send, receive and
            draw. power: p of the norms.
    """

    alpha: float
    beta: float
    gamma: float
    delta: float
    power: int = 4

    def __post_init__(self) -> None:
        if min(self.alpha, self.beta, self.gamma, self.delta) < 0 or self.power not in POWERS:
            raise ValueError(f"weights must not be negative, and power one of {POWERS}: {self}")


BETWEEN = Weights(alpha=1.0, beta=0.5, gamma=0.5, delta=0.2)
"""Over machines: what crosses counts most, and whose link is busiest.

The paper takes weights from measured times (appendix C.1). Times differ from run to run, and with them would plans and
the order of sums: a resumed run would not equal an uninterrupted one. So weights are constants."""
WITHIN = Weights(alpha=0.0, beta=0.2, gamma=0.5, delta=1.0)
"""Over a machine's ranks: levelness alone (section 4.2.2)."""


@dataclass(frozen=True)
class Assigner:
    """Assigner of patches to ranks, for batches.

    Attributes:
        machines, per_machine: ranks are machines * per_machine; those of a machine follow one another.
        between, within: weights over machines and over a machine's ranks.
        most_swaps: of each search: a budget that gives the same on every rank; 0 ends with the linear sum assignment.
        seconds: of each search; 0 for none. A clock may end a search at another swap on another rank: give it only
            where one rank plans for all.
    """

    machines: int
    per_machine: int
    between: Weights = BETWEEN
    within: Weights = WITHIN
    most_swaps: int = 200
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.machines < 1 or self.per_machine < 1:
            raise ValueError(f"{self.machines} machines of {self.per_machine} ranks: at least one of each is needed")

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.machines * self.per_machine

    def assign(self, needed: Floats) -> Ints:
        """Return the rank that draws each patch, [P] int64.

        Machines differ by one patch at most, and so do the ranks of a machine. Where that leaves a choice, work decides
        which of them has one patch less.

        Args:
            needed: [P, ranks] points that each patch needs from each rank: the matrix A.

        Raises:
            ValueError: the shape is another, or a number is negative.
        """
        if needed.ndim != 2 or needed.shape[1] != self.ranks:
            raise ValueError(f"needed must be [patches, {self.ranks} ranks], not {list(needed.shape)}")
        counts = torch.from_numpy(np.ascontiguousarray(needed, dtype=np.float64))
        if self.machines == 1:
            return self._level(counts, counts.sum(1), counts.new_zeros(self.ranks), self.within)
        totals = counts.sum(1)
        by_machine = counts.view(len(counts), self.machines, self.per_machine)
        machine = self._level(by_machine.sum(2), totals, counts.new_zeros(self.machines), self.between)
        ranks = np.zeros_like(machine)
        for k in range(self.machines):
            mine = torch.from_numpy(machine == k)
            # Rows that this machine's ranks send to others are fixed; those from other machines go to who draws.
            sent = by_machine[~mine, k].sum(0)
            inner = self._level(by_machine[mine, k].contiguous(), totals[mine], sent, self.within)
            ranks[machine == k] = k * self.per_machine + inner
        return ranks

    def _level(self, counts: torch.Tensor, totals: torch.Tensor, sent: torch.Tensor, weights: Weights) -> Ints:
        if counts.shape[1] == 1:
            return np.zeros(len(counts), dtype=np.int64)
        found = assign_patches(
            counts, totals, sent, alpha=weights.alpha, beta=weights.beta, gamma=weights.gamma, delta=weights.delta,
            power=weights.power, most_swaps=self.most_swaps, seconds=self.seconds,
        )  # fmt: skip
        return found.ranks.numpy()


@dataclass(frozen=True)
class Volume:
    """Cost of an assignment, in points.

    Attributes:
        sent, received, drawn: [ranks] float64.
        between: points that go from one machine to another. total: from one rank to another.
    """

    sent: Floats
    received: Floats
    drawn: Floats
    between: float
    total: float

    @staticmethod
    def of(needed: Floats, ranks: Ints, per_machine: int) -> "Volume":
        """Return the volume of patches that need `needed` points from each rank [P, R] and are drawn by `ranks` [P].

        A point that shows in two patches of a rank counts twice.
        """
        patches, count = needed.shape
        here = needed[np.arange(patches), ranks]
        totals = needed.sum(1)
        sent = needed.sum(0) - np.bincount(ranks, weights=here, minlength=count)
        received = np.bincount(ranks, weights=totals - here, minlength=count).astype(np.float64)
        drawn = np.bincount(ranks, weights=totals, minlength=count).astype(np.float64)
        near = needed.reshape(patches, -1, per_machine).sum(2)[np.arange(patches), ranks // per_machine]
        return Volume(sent, received, drawn, float((totals - near).sum()), float((totals - here).sum()))


def in_runs(patches: int, ranks: int) -> Ints:
    """Assign patches whose work is unknown, [patches]: neighbours to one rank, and one patch more to some."""
    return np.arange(patches, dtype=np.int64) * ranks // max(patches, ranks)


def by_capacity(needed: Floats) -> Ints:
    """Assign each patch to the rank that has most of its points and has capacity left, without a search.

    Patches with most points on one rank come first. Ranks differ by one patch at most. Returns [P] int64 for [P, R].
    """
    patches, ranks = needed.shape
    least, spare = divmod(patches, ranks)
    order = np.argsort(-needed.max(1, initial=0.0), kind="stable")
    preferred = np.argsort(-needed, axis=1, kind="stable")
    held, found = np.zeros(ranks, dtype=np.int64), np.zeros(patches, dtype=np.int64)
    for patch in order:
        for rank in preferred[patch]:
            if held[rank] < least or (held[rank] == least and spare > 0):
                spare -= int(held[rank] == least)
                held[rank] += 1
                found[patch] = rank
                break
    return found
