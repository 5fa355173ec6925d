"""Which of several ways steps are taken, by the time that they take.

Bytes do not say what a step takes: where links are fast it is what a way has to be computed. So each way is taken for
some steps, and the one that was fastest stays. The way that steps are begun with is taken until a trial has been made.

A trial costs steps that were slower than need be, and buffers that are made anew. What it has cost is counted, in steps
of the fastest way. After the first one another is made only where the model has changed, and only so seldom that all
trials together stay below a hundredth of the steps.

One way is the plain one, whose steps do not go by counts. What others do changes as more views are counted, and a trial
sees the beginning of it. So they have to be clearly ahead of the plain way in a trial, and are timed once more when
they have been taken for a while: one that is slower then than the plain way was in the trial is left.

Nothing here measures: whoever takes the steps tells how long they took. Told the same, all ranks choose the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

FIRST = 32
"""Steps before the first trial: what plans go by, such as counts, is known of some views then."""
WARM = 8
"""Steps of each way that do not count: they make buffers, and find out how much room they need. Half of them guess."""
TIMED = 32
"""Steps of each way that do."""
MOST = 16
"""Steps of a block that counts, at most."""
_GIVE_UP = 1.5
"""A way that takes so many times as long as the best one is not looked at any longer, after one block."""
_BETTER = 1.02
"""Another way has to be so many times as fast as the present one: the views of its steps are not the same."""
_AHEAD = 1.05
"""A way has to be so many times as fast as the plain one, to be taken in its place."""
PROOF = 256
"""Steps of the chosen way before it is timed once more: it has counted many more views by then."""
_EXCUSED = 4
"""Blocks of a way, at most, that do not count because their steps were taken again."""
_CHANGED = 1.2
"""The model has changed where it has so many times as many points as at the last trial, or as few."""
_PART = 100
"""All trials but the first take one in so many steps at most."""
_MARK = -4
"""Marks the row of a checkpoint."""


@dataclass(frozen=True)
class Block:
    """Some steps that have been taken, the same on all ranks.

    Attributes:
        steps: how many. taken: of the run, these included.
        seconds: of the slowest rank; asked for in trials alone.
        again: whether some of them were taken twice, for there was not enough room.
        points: of the model. placings: how often its points have been placed anew.
        ready: whether these steps are like those to come: images of their full size.
    """

    steps: int
    taken: int
    seconds: float
    points: int
    placings: int
    again: bool = False
    ready: bool = True


@dataclass
class _Timed:
    """What steps of a way took."""

    steps: int = 0
    seconds: float = 0.0
    excused: int = 0

    @property
    def mean(self) -> float:
        """Seconds a step."""
        return self.seconds / self.steps

    def counts(self, block: Block) -> bool:
        """Adds a block up, unless it is excused; whether it did."""
        if block.again and self.excused < _EXCUSED:
            self.excused += 1
            return False
        self.steps, self.seconds = self.steps + block.steps, self.seconds + block.seconds
        return True


class Trials:
    """Chooses a way for the steps to come. A way is changed between blocks, in `after` alone.

    Args:
        ways: their names. The first is what is begun with.
        ranks: of the run: a choice that was saved serves as many.
        plain: the name of the plain way.

    Attributes:
        way: of the next block. chosen: by the last trial.
        trying: whether that is one of a trial: its time is to be told, and it has `most` steps at most.
        number: of trials begun.
        settles: whether the last block was the one after which room is given up that the way does not need.
        growth: how many times as many points there are as when a trial was last over; at the first, 1.
    """

    def __init__(self, ways: Sequence[str], ranks: int, plain: str) -> None:
        self._ways, self._ranks, self.way, self._plain = tuple(ways), ranks, ways[0], plain
        self.trying, self.number, self.growth = False, 0, 1.0
        self.settles = False
        self.chosen = self.way
        self._waited = 0  # steps that were ready since there was reason to look
        self._tried: tuple[int, int | None] | None = None  # points and placings at the last trial
        self._lost = self._last = 0.0  # steps that trials have cost, and that the last one has
        self._left: list[str] = []
        self._warm = 0
        self._spent: list[tuple[int, float]] = []
        self._times: dict[str, _Timed] = {}
        self._until_proof: int | None = None  # steps of the chosen way; None where it is the plain one, or was timed
        self._proof: _Timed | None = None  # while it is timed once more

    @property
    def most(self) -> int | None:
        """Steps of the next block at most; None where that is all the same."""
        if not self.trying:
            return None
        half = WARM // 2
        return MOST if self._warm <= 0 else self._warm - half if self._warm > half else self._warm

    def after(self, block: Block, spare: Callable[[], bool] = lambda: True) -> str | None:
        """Told of each block; sets the way of the next.

        Args:
            spare: whether there is memory for another way's buffers. It is asked for where a trial is due.

        Returns:
            what to tell the user, where a trial is over, or what it has chosen is left.
        """
        if self._proof is not None:
            return self._prove(block, self._proof)
        if self.trying:
            return self._time(block)
        self._waited = self._waited + block.steps if block.ready else 0
        if self._tried is not None and self._tried[1] is None:  # of a run that goes on
            self._tried = self._tried[0], block.placings
        if self._waited >= FIRST and self._due(block):
            self._waited = 0
            if spare():
                self._begin(block)
        elif self._until_proof is not None and block.ready:
            self._until_proof -= block.steps
            if self._until_proof <= 0:
                self.trying, self._proof, self._until_proof = True, _Timed(), None
        return None

    def figures(self) -> dict[str, float]:
        """Milliseconds a step of each way in the last trial, and how many steps all trials have cost."""
        if self.trying or not self._times:
            return {}
        times = {f"exchange_ms_{way}": 1e3 * self._times[way].mean for way in self._ways}
        return {**times, "exchange_trials_cost": self._lost}

    def knowledge(self) -> list[list[int]]:
        """What a checkpoint keeps: what was chosen, and how large the model was. A trial under way is made again."""
        if self._tried is None:
            return []
        cost = [round(1000 * steps) for steps in (self._lost, self._last)]
        return [[_MARK, self._ranks, self._ways.index(self.chosen), self._tried[0], *cost]]

    def learn_again(self, knowledge: Sequence[Sequence[int]]) -> None:
        """Goes on with what `knowledge` returned; rows of others, or of a run with other ranks, are left out."""
        for row in knowledge:
            if self.owns(row) and row[1] == self._ranks:
                _, _, chosen, points, lost, last = row
                self.way = self.chosen = self._ways[chosen]
                self._tried, self._lost, self._last = (points, None), lost / 1000, last / 1000

    @staticmethod
    def owns(row: Sequence[int]) -> bool:
        """Whether a row of a checkpoint is one of these."""
        return row[0] == _MARK

    def _due(self, block: Block) -> bool:
        if self._tried is None:
            return True
        points, placings = self._tried
        ratio = max(block.points, 1) / max(points, 1)
        changed = not 1 / _CHANGED < ratio < _CHANGED or block.placings != placings
        return changed and _PART * (self._lost + self._last) <= block.taken

    def _begin(self, block: Block) -> None:
        self.growth = 1.0 if self._tried is None else max(block.points, 1) / max(self._tried[0], 1)
        self.trying, self.number = True, self.number + 1
        self._spent, self._times = [], {}
        self._left = [self.chosen, *(way for way in self._ways if way != self.chosen)]
        self._next()

    def _next(self) -> None:
        self.way, self._warm = self._left.pop(0), WARM
        self._times[self.way] = _Timed()

    def _time(self, block: Block) -> str | None:
        self._spent.append((block.steps, block.seconds))
        before, self._warm = self._warm, self._warm - block.steps
        self.settles = before > WARM // 2 >= self._warm
        if before > 0:
            return None
        now = self._times[self.way]
        if not now.counts(block):
            return None
        best = min(one.mean for one in self._times.values() if one.steps)
        if now.steps < TIMED and now.mean <= _GIVE_UP * best:
            return None
        if self._left:
            self._next()
            return None
        return self._choose(block)

    def _choose(self, block: Block) -> str:
        fastest = min(self._ways, key=self._cost)
        # At first none is at home. Later the plain way has to be clearly behind to be left, and that is enough.
        enough = 1.0 if self._tried is None or self._plain in (fastest, self.chosen) else _BETTER
        if self._cost(fastest) * enough < self._cost(self.chosen):
            self.chosen = fastest
        self.way, self.trying, self._tried = self.chosen, False, (block.points, block.placings)
        self._until_proof = None if self.way == self._plain else PROOF
        best = self._times[self.way].mean
        self._last = max(sum(seconds for _, seconds in self._spent) / best - sum(steps for steps, _ in self._spent), 0)
        self._lost += self._last
        others = ", ".join(f"{way} {1e3 * self._times[way].mean:.1f}" for way in self._ways if way != self.way)
        return f"{self.way}, {1e3 * best:.1f} ms a step; {others}"

    def _cost(self, way: str) -> float:
        """What ways are compared by: seconds a step, more of a way that is to be clearly ahead."""
        return self._times[way].mean * (1.0 if way == self._plain else _AHEAD)

    def _prove(self, block: Block, proof: _Timed) -> str | None:
        """Times the way that was chosen, once more."""
        proof.counts(block)
        if proof.steps < TIMED:
            return None
        self.trying, self._proof, before = False, None, self._times[self._plain].mean
        if proof.mean <= before:
            return None
        left, self.way = self.way, self._plain
        self.chosen = self.way
        return f"{self.way}: {left} took {1e3 * proof.mean:.1f} ms a step after a while, {self.way} {1e3 * before:.1f}"
