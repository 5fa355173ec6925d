"""Steps in two calls: first of the groups of points that have no row, then of those that have."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_ext.ops.boxes import mark_groups, new_boxes, splat_boxes
from cuda_ext.ops.fused import SplatRows
from cuda_ext.ops.lazy_adam import LazyAdam
from cuda_ext.reference.boxes import groups_of
from tests.cuda_ext.fused_steps import Model, as_records, make_gradients
from tests.cuda_ext.test_boxed_steps import ordered_model, same

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
POINTS, VIEWS, CAPACITY = 777, 3, 1600
pytestmark = pytest.mark.usefixtures("native")


class Taken:
    """A model, with all that a step writes."""

    def __init__(self, device: str, compact: bool) -> None:
        self.model = ordered_model(device, POINTS, VIEWS, compact=compact)
        g = torch.Generator().manual_seed(3)
        for moments, draw in ((self.model.exp_avgs, torch.randn), (self.model.exp_avg_sqs, torch.rand)):
            moments[:] = [(0.1 * draw(one.shape, generator=g)).to(one) for one in moments]
        self.boxes = new_boxes(self.model.params[0])
        splat_boxes(self.model.params[0], self.model.params[2], self.boxes)
        self.statistics = {name: torch.ones(POINTS, device=device) for name in ("grad2d", "seen", "radii_max")}
        self.witness = torch.full((1,), 5.0, device=device)

    def update(self, rows: SplatRows, gradients: Tensor, **more: Any) -> None:
        self.model.update(
            rows, gradients, witness=self.witness, boxes=self.boxes, opacity_weight=0.3, scale_weight=0.2,
            **self.statistics, **more,
        )  # fmt: skip

    def written(self) -> list[Tensor]:
        model = self.model
        return [*model.params, *model.exp_avgs, *model.exp_avg_sqs, self.boxes, *self.statistics.values(), self.witness]


def marks_of(model: Model, rows: SplatRows, callers: int) -> Tensor:
    """Of so many callers, each of which has every so-manieth view."""
    marks = torch.full((callers, groups_of(POINTS)), 9, dtype=torch.uint8, device=rows.point_ids.device)
    there = rows.view_ids[: int(rows.count)]
    for caller in range(callers):
        own = rows.point_ids[: int(rows.count)][there % callers == caller].contiguous()
        room = torch.cat([own, torch.full_like(own, 0)])  # behind the count there is whatever there is
        mark_groups(room, torch.tensor([len(own)], device=own.device), marks[caller])
    return marks


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("callers", [1, 2])
@pytest.mark.parametrize("device", DEVICES)
def test_two_calls_give_the_bits_of_one(device: str, callers: int, compact: bool) -> None:
    whole, parts = Taken(device, compact), Taken(device, compact)
    begun = [one.clone() for one in parts.written()]
    rows = whole.model.forward(CAPACITY)
    assert int(rows.count) < CAPACITY
    gradients = as_records(make_gradients(rows))
    marks = marks_of(whole.model, rows, callers)
    assert set(marks.unique().tolist()) == {0, 1}
    resting = (marks == 0).all(0).repeat_interleave(32)[:POINTS]
    assert 100 < int(resting.sum()) < POINTS - 100
    if callers > 1:
        assert not torch.equal(marks[0], marks[1]), "what one marks, another does not"
    whole.update(rows, gradients)
    # Rows and gradients are not there yet.
    nothing = SplatRows(*(torch.full_like(one, 7) for one in rows))
    parts.update(nothing, torch.full_like(gradients, torch.nan), marks=marks, marked=False)
    for k, (now, before, there) in enumerate(zip(parts.written(), begun, whole.written(), strict=True)):
        if k < 18:  # parameters and moments
            assert same(now[resting], there[resting]) and same(now[~resting], before[~resting])
            assert not same(now[resting], before[resting])
        elif k > 18:  # statistics, and the witness
            assert same(now, before)
    parts.update(rows, gradients, marks=marks)
    for now, there in zip(parts.written(), whole.written(), strict=True):
        assert same(now, there)


@pytest.mark.parametrize("device", DEVICES)
def test_groups_with_rows_are_marked(device: str) -> None:
    """As many rows count as there are, and as there is room for."""
    ids = torch.tensor([0, 3, 31, 64, 65, -1, 200], dtype=torch.int32, device=device)
    for count, expected in ((0, []), (1, [0]), (3, [0]), (4, [0, 2]), (6, [0, 2]), (7, [0, 2, 6]), (99, [0, 2, 6])):
        marks = torch.full((8,), 9, dtype=torch.uint8, device=device)
        mark_groups(ids, torch.tensor([count], device=device), marks[:7])
        assert marks.tolist() == [int(k in expected) for k in range(7)] + [9]
    many = torch.arange(0, 32 * 5000, 2, dtype=torch.int32, device=device)
    marks = torch.zeros(5001, dtype=torch.uint8, device=device)
    mark_groups(many, torch.tensor([len(many)], device=device), marks)
    assert marks.tolist() == [1] * 5000 + [0]


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    ids, marks = torch.arange(40, dtype=torch.int32), torch.zeros(2, dtype=torch.uint8)
    arguments = (ids.to(device), torch.tensor([40], device=device), marks.to(device))
    torch.library.opcheck(torch.ops.ns_multigpu.mark_groups.default, arguments)


def test_wrong_arguments_are_named() -> None:
    taken = Taken("cpu", False)
    rows = taken.model.forward(CAPACITY)
    gradients, marks = as_records(make_gradients(rows)), marks_of(taken.model, rows, 1)
    for wrong, error, said in (
        ({"marks": marks[:, 1:]}, ValueError, r"marks must have the shape \[-1, 25\]"),
        ({"marks": marks.int()}, TypeError, "marks is torch.int32"),
    ):
        with pytest.raises(error, match=said):
            taken.update(rows, gradients, **wrong)
    lazy = LazyAdam.make(POINTS, "cpu")
    for more in ({"selective": True}, {"lazy": lazy}):
        with pytest.raises(ValueError, match="marks are for steps that all points take"):
            taken.model.update(rows, gradients, marks=marks, **more)
    with pytest.raises(ValueError, match=r"count must have the shape \[1\]"):
        mark_groups(rows.point_ids, rows.count[0], marks[0])
    with pytest.raises(TypeError, match=r"point_ids is torch\.int64"):
        mark_groups(rows.point_ids.long(), rows.count, marks[0])
