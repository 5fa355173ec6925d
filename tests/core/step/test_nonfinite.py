"""The steps that `NonFiniteSteps` finds."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.transport import Returned, launched
from ns_multigpu.core.step.nonfinite import NonFiniteSteps

ROWS, NAN = 3, torch.nan


def agreed(records: torch.Tensor, rows: int = ROWS, more: float = 0.0, counted: int = 5) -> tuple[int, torch.Tensor]:
    """Return what one rank finds of records [3, 16], of which so many are rows; and the further gradients."""
    steps = NonFiniteSteps(World.single(), 12, skips=True)
    ids = SimpleNamespace(point_ids=torch.arange(ROWS, dtype=torch.int32), count=torch.tensor([rows]))
    back: Any = Returned(ids, records, torch.zeros(1, 0, dtype=torch.int64))  # type: ignore[arg-type]
    further = torch.tensor([[more, 1.0]]).view(torch.int64)
    found = launched(steps.agree(back, [torch.tensor([counted])], torch.tensor([5]), further))
    return int(steps.by_rank), found.view(torch.float32)


@pytest.mark.parametrize("number", [0, 11, 12])
def test_numbers_that_are_gradients_count(number: int) -> None:
    records = torch.zeros(ROWS, 16)
    records[1, number] = NAN
    assert agreed(records)[0] == (number < 12)


def test_padding_does_not_count() -> None:
    records = torch.zeros(ROWS, 16)
    records[2] = NAN
    assert agreed(records, rows=2)[0] == 0 and agreed(records)[0] == 1


def test_gradients_of_views_count_and_are_cleared() -> None:
    found, more = agreed(torch.zeros(ROWS, 16), more=NAN)
    assert found == 1 and more.tolist() == [[0.0, 0.0]]
    assert agreed(torch.zeros(ROWS, 16), more=2.0)[1].tolist() == [[2.0, 1.0]]


def test_a_step_that_exceeds_a_capacity_is_not_skipped() -> None:
    """Its gradients are incomplete: it is retried."""
    assert agreed(torch.full((ROWS, 16), NAN), counted=6)[0] == 0
