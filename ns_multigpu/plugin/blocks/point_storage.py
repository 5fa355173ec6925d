"""Storage of points while steps are fused: tensors with spare capacity, so that refinements do not move them.

A step's CUDA graph fixes addresses and sizes. A refinement makes new tensors of another length, and rebuilding and
capturing the step took the host 5 to 7 ms, every 25 steps if four GPUs draw a view each. Here the new values are copied
to the old addresses and the graph stays valid. Its kernels also process the spare rows, which have NaN positions and so
are never drawn.
"""

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cuda_ext.ops.optim.adam import AdamStep
from ns_multigpu.core.schema import POSITION
from ns_multigpu.primitives.gaussians.schema import ORDER

MOST_SPARED = 1 << 20
"""Largest model, in points, that gets spare capacity. Larger models have long steps, next to which a capture is cheap,
and memory is scarcer."""
WITH_CAP = 4
"""Factor on `MOST_SPARED` for models with a cap: the capacity will be needed. A refinement briefly holds a second model
in addition."""

_GROWS = 1 << 15
"""Spare points of a small model, up to its own size: a model triples in its first 2,000 images, and triples again.

Processing that capacity takes a step some 10 us longer; rebuilding the step takes the host as long as a thousand such
steps.
"""


def capacity_for(count: int, cap: int | None = None) -> int:
    """Return the capacity in points for `count` points: a quarter more, up to twice as many for a small model, in
    multiples of 64.

    It is at most the `cap` that densification stops at, if there is one.
    """
    wanted = max(64, -(-(count + _spare(count)) // 64) * 64)
    return wanted if cap is None else min(wanted, -(-max(count, cap) // 64) * 64)


def _spare(count: int) -> int:
    return max(count // 4, min(count, _GROWS))


class PointStorage:
    """Parameters, moments and statistics of a model's points, as passed to fused steps.

    All ranks of a sharded model have equal capacity, set by the longest shard, so they rebuild their steps together.

    Args:
        names: names of the parameters, in their kernels' order.
        cap: points that densification stops at; None without a cap.

    Attributes:
        params: by name, [C, ...]: the model's parameters are the first rows.
        moments: by name, Adam's exp_avg and exp_avg_sq, [C, ...].
        statistics: by name, densification's running sums, [C].
    """

    def __init__(self, *, names: Sequence[str] = ORDER, cap: int | None = None) -> None:
        self._names, self._cap = tuple(names), cap
        self._most = MOST_SPARED if cap is None else WITH_CAP * MOST_SPARED
        self._has_capacity = False  # True if the stored tensors have spare capacity
        self.params: dict[str, Tensor] = {}
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        self.statistics: dict[str, Tensor] = {}

    @property
    def rows(self) -> int:
        """Capacity C in points."""
        return len(self.params[POSITION])

    def keeps(self, points: int) -> bool:
        """Return whether the storage may remain valid after a refinement replaces the tensors of a model of `points`
        points.

        `points` is the largest shard's count. If False, call `forget` before the refinement, so that each old tensor is
        freed as its replacement is made.
        """
        return self._has_capacity and points <= self._most

    def has_capacity(self, points: int) -> bool:
        """Return whether `points` points (the largest shard's count) fit the present storage without much waste."""
        most = max(2 * points, points + 2 * _spare(points))
        return self._has_capacity and points <= self.rows <= max(most, capacity_for(points, self._cap))

    @torch.no_grad()
    def follows(
        self, params: MutableMapping[str, Any], adam: AdamStep, state: MutableMapping[str, Any], most: int
    ) -> bool:
        """Return whether a refinement kept all points in this storage; if so, update it as `hold` would.

        Args:
            params, adam, state, most: see `hold`; `adam` is from before the refinement.
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
        """Release the stored tensors; only the model's remain."""
        self._has_capacity = False
        self.params, self.moments, self.statistics = {}, {}, {}

    @torch.no_grad()
    def hold(
        self, params: MutableMapping[str, Any], adam: AdamStep, state: MutableMapping[str, Any], most: int | None = None
    ) -> bool:
        """Copy a model's points into this storage; its tensors and its optimizers' become views of it.

        Args:
            params: the model's parameters by name.
            adam: step of their optimizers in the kernels' order, possibly followed by others.
            state: densification's state; its running sums are those present of `grad2d`, `count` and `radii`.
            most: points of the largest shard, the same on all ranks; None for this rank's count.

        Returns:
            True if all tensors kept their addresses: a step made at the last call remains valid.
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
        self.params[POSITION][count:].fill_(torch.nan)  # operators skip points without a position
        for name, there in self.params.items():
            params[name].data = there[:count]
        for place, name in enumerate(names):
            adam.place_moments(place, *(moment[:count] for moment in self.moments[name]))
        for name, there in self.statistics.items():
            state[name] = there[:count]
        return same

    def _fits(self, count: int, params: MutableMapping[str, Any], adam: AdamStep, sums: dict[str, Tensor]) -> bool:
        """Return whether the storage has capacity for `count` points without much waste, and equal types."""
        if not self.has_capacity(count):
            return False
        here = [(x.dtype, x.shape[1:]) for x in self._all()]
        return sums.keys() == self.statistics.keys() and here == [
            (x.dtype, x.shape[1:]) for x in self._given(params, adam, sums)
        ]

    def _make(self, rows: int, params: MutableMapping[str, Any], adam: AdamStep, sums: dict[str, Tensor]) -> None:
        """Allocate `rows` rows and copy the points. Old tensors are freed one by one, so there are never two models."""
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
        """Return the arguments of `hold` in the order of `_all`."""
        moments = [*adam.exp_avgs[: len(self._names)], *adam.exp_avg_sqs[: len(self._names)]]
        return [*(params[name].detach() for name in self._names), *moments, *sums.values()]

    def _all(self) -> list[Tensor]:
        """Return all stored tensors, in the order of `hold`."""
        firsts, seconds = zip(*self.moments.values(), strict=True)
        return [*self.params.values(), *firsts, *seconds, *self.statistics.values()]


def _sums(state: MutableMapping[str, Any]) -> dict[str, Tensor]:
    """Return the running sums of densification that are present."""
    return {name: state[name] for name in ("grad2d", "count", "radii") if isinstance(state.get(name), Tensor)}


def _with_capacity(x: Tensor, rows: int) -> Tensor:
    """Return zeros [rows, ...] with the values of `x` in the first rows."""
    made = x.new_zeros(rows, *x.shape[1:])
    made[: len(x)] = x
    return made
