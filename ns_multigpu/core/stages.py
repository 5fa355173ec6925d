"""The stages of a step: its views in groups that follow each other, each of which is drawn while rows of the next one
are on their way; gradients leave as a stage has been differentiated. (Gaian overlaps the two in the same way.)

A row is of one view, and so of one stage: rows cross once, and each sum is that of a step without stages, term by term.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ns_multigpu.core.pairs import Pairs
from ns_multigpu.core.plan import Plan
from ns_multigpu.core.types import Patch, Pixels


def stages_of(views: int, wanted: int) -> tuple[range, ...]:
    """Positions of the views of each stage: as many stages as wanted, but none without a view.

    Raises:
        ValueError: less than one stage is wanted.
    """
    if wanted < 1:
        raise ValueError(f"a step has 1 stage at least, not {wanted}.")
    count = max(1, min(wanted, views))
    cuts = [views * k // count for k in range(count + 1)]
    return tuple(range(first, end) for first, end in pairwise(cuts))


def summed(pairs: Pairs, stages: int) -> Pairs:
    """What is counted of all stages, [ranks][numbers of each stage], summed over these."""
    each = len(pairs[0]) // stages
    return tuple(tuple(sum(row[number::each]) for number in range(each)) for row in pairs)


def part_of(plan: Plan, stage: range) -> Plan:
    """What of a plan is of the views of a stage."""
    drawn, owned = (
        tuple(tuple(patch for patch in patches if patch.view in stage) for patches in ranks)
        for ranks in (plan.drawn, plan.owned)
    )
    return replace(plan, drawn=drawn, owned=owned, hidden=tuple(p for p in plan.hidden if p.view in stage))


def in_order(pixels: Sequence[Pixels], patches: Sequence[Patch]) -> list[Pixels]:
    """What was drawn stage by stage, in the order of a rank's patches."""
    place = {patch: k for k, patch in enumerate(patches)}
    return sorted(pixels, key=lambda one: place[one.patch])
