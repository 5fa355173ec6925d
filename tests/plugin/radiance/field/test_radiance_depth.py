"""Median depth of rays through cells: by what is behind them, and the same where a ray's segments are two ranks'."""

import pytest
import torch

from ns_multigpu.plugin.radiance.field.sampling import Group, median_depth
from ns_multigpu.radiance.integrals import TRANSMITTANCE, Samples
from ns_multigpu.radiance.segments import Segments

# Three rays through cells 0 and 1, which meet at 2: what each sample of length 1 takes of the light that is left.
TAKEN = {0: [[0.1, 0.2], [0.0, 0.3], [0.0, 0.0]], 1: [[0.1, 0.0], [0.9, 0.0], [0.0, 0.0]]}
LEFT = [0.72, 0.7, 1.0]  # that extends into cell 1
"""The first ray is seen through for the most part: its weights are 0.1, 0.18, 0.072 and 0. Those of the second are 0,
0.3, 0.63 and 0. Nothing is in the way of the third."""


def found(background: str, alone: int | None = None) -> torch.Tensor:
    """Return [3] of both cells, or of one rank's `alone`."""
    segments = Segments(
        3, torch.arange(3).repeat(2), torch.tensor([0.0, 2.0]).repeat_interleave(3),
        torch.tensor([2.0, 4.0]).repeat_interleave(3), (0, 3, 6), torch.tensor([[0, 3], [1, 4], [2, 5]]),
        torch.tensor([2, 2, 2]),
    )  # fmt: skip
    groups = []
    for cell in (0, 1) if alone is None else (alone,):
        edges = torch.arange(3.0).expand(3, 3) + 2 * cell
        density = -torch.log1p(-torch.tensor(TAKEN[cell]))
        first = 0 if alone is not None else 3 * cell
        groups.append(Group(torch.arange(3) + first, Samples(edges, density, edges, {}), 2))
    before = torch.tensor([1.0, 1.0, 1.0, *LEFT])[:, None]
    whole = {TRANSMITTANCE: torch.tensor([LEFT[0] * 0.9, LEFT[1] * 0.1, LEFT[2]])[:, None]}
    return median_depth(groups, before, whole, segments, 3 * (alone or 0), background)[:, 0]


@pytest.mark.parametrize(("background", "expected"), [("last_sample", [3.5, 2.5, 3.5]), ("mean", [1.5, 2.5, 3.5])])
def test_with_a_mean_colour_behind_it_is_half_of_what_is_seen(background: str, expected: list[float]) -> None:
    torch.testing.assert_close(found(background), torch.tensor(expected))
    by_rank = torch.stack([found(background, cell) for cell in (0, 1)])
    torch.testing.assert_close(by_rank.sum(0), torch.tensor(expected))
    assert bool(((by_rank > 0).sum(0) == 1).all()), "one rank has it"
