"""Where points lie while steps are fused: in tensors with room to spare, so that a refinement moves none of them.

The CUDA graph of a step knows addresses and sizes. A refinement makes new tensors of another length, and the step had
to be made and captured again, which took the host 5 to 7 ms, every 25 steps where four GPUs draw a view
each. Here the new values are copied to where the old ones were, and the graph stays as it is. Its kernels go over the
room that is left as well; what lies there has no position, and so is never seen.
"""

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cuda_ext.ops.optim.adam import AdamStep
from ns_multigpu.core.schema import POSITION
from ns_multigpu.primitives.gaussians.schema import ORDER

MOST_SPARED = 1 << 20
"""Points of a model at most that gets room to spare: with more, a step takes so long that a capture is nothing beside
it, and memory is worth more."""
WITH_CAP = 4
"""So many times as many where points stop at a cap: the room is for them, and will be needed. Beside it there is a
second model for a moment, when a refinement makes one."""

_GROWS = 1 << 15
"""Points that a small model soon has more, if it has as many: in the first 2,000 images a model triples, and triples
again. A step over room for so many takes some 10 us longer; to make it anew takes the host as long as a thousand such
steps."""


def capacity_for(count: int, cap: int | None = None) -> int:
    """How many points there is to be room for when there are `count`: a quarter more, and of a small model up to twice
    as many, in steps of 64; but no more than for the `cap` that they stop at, if there is one."""
    wanted = max(64, -(-(count + _spare(count)) // 64) * 64)
    return wanted if cap is None else min(wanted, -(-max(count, cap) // 64) * 64)


def _spare(count: int) -> int:
    return max(count // 4, min(count, _GROWS))


class PointStorage:
    """The parameters, moments and statistics of a model's points as fused steps are given them.

    Of a sharded model all ranks have as much room, by the longest shard: so they make their steps anew together.

    Args:
        names: of the parameters, in their kernels' order.
        cap: points that densification stops at; None for no such number.

    Attributes:
        params: by name, [C, ...]: the model's parameters are the first rows.
        moments: by name, Adam's exp_avg and exp_avg_sq, [C, ...].
        statistics: by name, densification's running sums, [C].
    """

    def __init__(self, *, names: Sequence[str] = ORDER, cap: int | None = None) -> None:
        self._names, self._cap = tuple(names), cap
        self._most = MOST_SPARED if cap is None else WITH_CAP * MOST_SPARED
        self._has_capacity = False  # what is held now has room to spare
        self.params: dict[str, Tensor] = {}
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        self.statistics: dict[str, Tensor] = {}

    @property
    def rows(self) -> int:
        """C, how many points there is room for."""
        return len(self.params[POSITION])

    def keeps(self, points: int) -> bool:
        """Whether what is held may still serve once a refinement has replaced the tensors of a model of so many points
        (on the rank that has the most). If not, it is to be forgotten before: each tensor is to go when there is a new
        one in its place."""
        return self._has_capacity and points <= self._most

    def has_capacity(self, points: int) -> bool:
        """Whether so many points (on the rank that has the most) would lie where points lie now."""
        most = max(2 * points, points + 2 * _spare(points))
        return self._has_capacity and points <= self.rows <= max(most, capacity_for(points, self._cap))

    @torch.no_grad()
    def follows(
        self, params: MutableMapping[str, Any], adam: AdamStep, state: MutableMapping[str, Any], most: int
    ) -> bool:
        """Whether a refinement has left all points here, in the room that they had; then this is as after `hold`.

        Args:
            params, adam, state, most: as of `hold`; `adam` is of before the refinement.
        """
        same = all(params[name] is adam.params[k] for k, name in enumerate(self._names))
        if not (same and adam.is_current() and self.has_capacity(most)):
            return False
        sums, count = _sums(state), len(params[POSITION])
        given = self._given(params, adam, sums) if sums.keys() == self.statistics.keys() else []
        here = self._all()
        if len(given) != len(here) or any(
            len(x) != count or x.data_ptr() != there.data_ptr() for there, x in zip(here, given, strict=True)
        ):
            return False
        self.params[POSITION][count:].fill_(torch.nan)
        return True

    def forget(self) -> None:
        """Holds nothing any longer: the model's tensors are to be the only ones."""
        self._has_capacity = False
        self.params, self.moments, self.statistics = {}, {}, {}

    @torch.no_grad()
    def hold(
        self, params: MutableMapping[str, Any], adam: AdamStep, state: MutableMapping[str, Any], most: int | None = None
    ) -> bool:
        """Brings a model's points here; afterwards its tensors, and its optimizers', are views of these.

        Args:
            params: the model's parameters by name.
            adam: of their optimizers, in the kernels' order; and perhaps of others behind them.
            state: densification's, whose running sums are `grad2d`, `count` and `radii`, as far as they are there.
            most: points of the rank that has the most, where each has its own; the same on all.

        Returns:
            whether all of it lies where it lay at the last call: a step made then still serves.
        """
        count, names = len(params[POSITION]), self._names
        most = count if most is None else most
        sums = _sums(state)
        if most > self._most:
            self._has_capacity = False
            self.params = {name: params[name].detach() for name in names}
            self.moments = {name: (adam.exp_avgs[k], adam.exp_avg_sqs[k]) for k, name in enumerate(names)}
            self.statistics = sums
            return False
        same = self._fits(most, params, adam, sums)
        if not same:
            self._make(capacity_for(most, self._cap), params, adam, sums)
        moved = [
            (there, x)
            for there, x in zip(self._all(), self._given(params, adam, sums), strict=True)
            if there.data_ptr() != x.data_ptr()
        ]
        if moved:
            torch._foreach_copy_([there[:count] for there, _ in moved], [x for _, x in moved])  # pyright: ignore
        self.params[POSITION][count:].fill_(torch.nan)  # no operator sees a point without a position
        for name, there in self.params.items():
            params[name].data = there[:count]
        for place, name in enumerate(names):
            adam.place_moments(place, *(moment[:count] for moment in self.moments[name]))
        for name, there in self.statistics.items():
            state[name] = there[:count]
        return same

    def _fits(self, count: int, params: MutableMapping[str, Any], adam: AdamStep, sums: dict[str, Tensor]) -> bool:
        """Whether what is held has room for `count` points, not far too much, and is of their kind."""
        if not self.has_capacity(count):
            return False
        here = [(x.dtype, x.shape[1:]) for x in self._all()]
        return sums.keys() == self.statistics.keys() and here == [
            (x.dtype, x.shape[1:]) for x in self._given(params, adam, sums)
        ]

    def _make(self, rows: int, params: MutableMapping[str, Any], adam: AdamStep, sums: dict[str, Tensor]) -> None:
        """Room for so many rows, with the points in it. What was held is let go before, and each tensor as soon as the
        new one has its values: there are never two models."""
        self.forget()
        count = len(params[POSITION])
        for place, name in enumerate(self._names):
            self.params[name] = _with_capacity(params[name].detach(), rows)
            params[name].data = self.params[name][:count]
            first = _with_capacity(adam.exp_avgs[place], rows)
            adam.place_moments(place, first[:count], adam.exp_avg_sqs[place])
            second = _with_capacity(adam.exp_avg_sqs[place], rows)
            adam.place_moments(place, first[:count], second[:count])
            self.moments[name] = (first, second)
        self.statistics = {name: _with_capacity(x, rows) for name, x in sums.items()}
        sums.update({name: there[:count] for name, there in self.statistics.items()})
        self._has_capacity = True

    def _given(self, params: MutableMapping[str, Any], adam: AdamStep, sums: dict[str, Tensor]) -> list[Tensor]:
        """What `hold` is given, in the order of `_all`."""
        moments = [*adam.exp_avgs[: len(self._names)], *adam.exp_avg_sqs[: len(self._names)]]
        return [*(params[name].detach() for name in self._names), *moments, *sums.values()]

    def _all(self) -> list[Tensor]:
        """Everything, in the order of `hold`."""
        firsts, seconds = zip(*self.moments.values(), strict=True)
        return [*self.params.values(), *firsts, *seconds, *self.statistics.values()]


def _sums(state: MutableMapping[str, Any]) -> dict[str, Tensor]:
    """Densification's running sums, as far as they are there."""
    return {name: state[name] for name in ("grad2d", "count", "radii") if isinstance(state.get(name), Tensor)}


def _with_capacity(x: Tensor, rows: int) -> Tensor:
    """[rows, ...] with the values of `x` in front, and zeros."""
    made = x.new_zeros(rows, *x.shape[1:])
    made[: len(x)] = x
    return made
