"""Plans of coming batches, computed while the device works (section 5, "asynchronous online placement").

A batch's patches' needs from each rank are known only when it is drawn. Points move slowly, so a view's last measured
needs are used (`Access`). In the first epoch, needs are counted from the groups' boxes, or exactly.

All ranks must use the same plan without waiting for each other. Each computes all plans from the same data:

- A plan's inputs are copied when its batch is submitted, by the step's own thread, at the same step on every rank.
  Later measurements do not change it. A search ends by itself or after a number of swaps, never by a clock.
  Differences by rounding alone count as equal, since machines may have different processors.
- Ranks agree on each plan. A rank publishes the step through which its plans are ready (`ready_through`) with the step
  statistics of each step. `serve` uses a plan only up to the least of these. A plan that one rank lacks is a miss on
  all ranks: then the rule of `by_capacity` is applied to the same copy.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ns_multigpu.locality.assign import Assigner, by_capacity, in_runs

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Access:
    """Rows that each view's patches needed from each rank when last drawn.

    Args:
        patches: of a view. ranks: in all.
    """

    def __init__(self, patches: int, ranks: int) -> None:
        if min(patches, ranks) < 1:
            raise ValueError(f"{patches} patches, {ranks} ranks: at least one of each is needed")
        self.patches, self.ranks = patches, ranks
        self._needed: dict[int, NDArray[np.float32]] = {}

    def record(self, views: Sequence[int], needed: Floats) -> None:
        """Store what views needed: [len(views) * patches, ranks], view after view. The same on every rank.

        Raises:
            ValueError: the shape is another.
        """
        if needed.shape != (len(views) * self.patches, self.ranks):
            raise ValueError(
                f"needed must be [{len(views)} views * {self.patches} patches, {self.ranks} ranks], not "
                f"{list(needed.shape)}"
            )
        rows = needed.astype(np.float32).reshape(len(views), self.patches, self.ranks)
        self._needed.update(zip(views, rows, strict=True))

    def of(self, view: int) -> Floats | None:
        """Return a copy of what a view needed, [patches, ranks], or None if it has not been measured."""
        known = self._needed.get(view)
        return None if known is None else known.astype(np.float64)

    def forget(self) -> None:
        """Clear all records after points were redistributed."""
        self._needed = {}

    def state(self) -> tuple[Ints, NDArray[np.float32]]:
        """Return the measured views [K] and what they needed [K, patches, ranks], for a checkpoint."""
        views = sorted(self._needed)
        none = np.zeros((0, self.patches, self.ranks), dtype=np.float32)
        return np.array(views, dtype=np.int64), np.stack([self._needed[view] for view in views]) if views else none

    def load_state(self, views: Ints, needed: NDArray[np.float32]) -> None:
        """Restore the state that `state` returned."""
        self.forget()
        self.record(views.tolist(), needed.reshape(-1, self.ranks).astype(np.float64))


@dataclass(frozen=True)
class AssignedPlan:
    """Assignment of a step.

    Attributes:
        ranks: [P] int64, the rank that draws each patch, view after view.
        planned: whether it is the plan; else the rule served.
    """

    ranks: Ints
    planned: bool


class Planner:
    """Planner that computes plans in its own thread and returns them without waiting.

    Args:
        assigner: makes a plan. It must have no clock, for ranks must find the same.

    Attributes:
        num_planned, misses: plans given out, and steps that the rule served instead.

    Raises:
        ValueError: the assigner has a clock.
    """

    def __init__(self, assigner: Assigner) -> None:
        if assigner.seconds > 0:
            raise ValueError("an assigner with a clock ends at other swaps on other ranks: set seconds to 0")
        self._assigner = assigner
        self._waiting: deque[tuple[int, Floats]] = deque()
        self._data: dict[int, Floats | int] = {}
        self._plans: dict[int, Ints] = {}
        self._through = self._last = -1
        self._error: Exception | None = None
        self._closed = False
        self._changed = threading.Condition()
        self.num_planned = self.misses = 0
        self._thread = threading.Thread(target=self._work, name="ns_multigpu plans", daemon=True)
        self._thread.start()

    def submit(self, step: int, needed: Floats | int) -> None:
        """Request the plan of a coming step, some steps ahead. Every rank calls it at the same step.

        Args:
            step: its number; steps are submitted in ascending order.
            needed: [P, ranks], what its patches need; copied. Or how many patches there are, where nothing is known:
                the step's patches are assigned without measured work, which counts as a miss.

        Raises:
            ValueError: the step comes before one already submitted, or the shape is wrong.
        """
        data = needed if isinstance(needed, int) else np.array(needed, dtype=np.float64)
        if not isinstance(data, int) and (data.ndim != 2 or data.shape[1] != self._assigner.ranks):
            raise ValueError(f"needed must be [patches, {self._assigner.ranks}], not {list(data.shape)}")
        with self._changed:
            if step <= self._last:
                raise ValueError(f"step {step} comes after step {self._last}, which was submitted before")
            self._last = step
            self._data[step] = data
            if not isinstance(data, int):
                self._waiting.append((step, data))
            self._update_ready()
            self._changed.notify_all()

    def ready_through(self) -> int:
        """Return the last step such that it and all submitted before it have plans or need none; initially -1."""
        with self._changed:
            return self._through

    def serve(self, step: int, agreed: int) -> AssignedPlan:
        """Return the step's plan if all ranks have it, else that of the rule without search. Does not wait.

        Args:
            step: one that was submitted; earlier ones are dropped.
            agreed: the least of all ranks' `ready_through`, gathered in an earlier step.

        Raises:
            KeyError: the step was not submitted, or was already served.
            RuntimeError: the planning thread failed: what it said is the cause.
        """
        with self._changed:
            if self._error is not None:
                raise RuntimeError(f"planning batches failed: {self._error}") from self._error
            if step not in self._data:
                raise KeyError(f"step {step} was not submitted, or was served before")
            data = self._data[step]
            plan = self._plans.get(step) if step <= agreed else None
            for old in [one for one in self._data if one <= step]:
                del self._data[old]
                self._plans.pop(old, None)
            self._waiting = deque(one for one in self._waiting if one[0] > step)
            self._update_ready()
            if plan is not None:
                self.num_planned += 1
                return AssignedPlan(plan, True)
            self.misses += 1
        if isinstance(data, int):
            return AssignedPlan(in_runs(data, self._assigner.ranks), False)
        return AssignedPlan(by_capacity(data), False)

    def close(self) -> None:
        """Stop the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _update_ready(self) -> None:
        """Update `ready_through`. The caller holds the lock."""
        missing = [step for step, data in self._data.items() if not isinstance(data, int) and step not in self._plans]
        through = min(missing) - 1 if missing else self._last
        self._through = max(self._through, through)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                step, needed = self._waiting.popleft()
            try:
                plan = self._assigner.assign(needed)
            except Exception as error:  # said by `serve`, in the step's thread
                with self._changed:
                    self._error = error
                return
            with self._changed:
                if step in self._data:
                    self._plans[step] = plan
                self._update_ready()
