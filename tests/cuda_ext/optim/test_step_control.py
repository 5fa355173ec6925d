"""A step's bookkeeping on the CPU: statistics, gate and finite flag of gradients, compared with plain loops."""

from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import cuda_ext
from cuda_ext import LazyAdam, step_gate, step_message
from cuda_ext.ops.optim.fused import SplatRows
from cuda_ext.ops.optim.lazy_adam import MOST_STEPS
from cuda_ext.ops.optim.step_control import HEAD
from tests.cuda_ext.fused_steps import make_model, make_records, to
from tests.lib.ranks import on_gpus

F64 = torch.float64
OPS = torch.ops.ns_multigpu


@dataclass(frozen=True)
class MessageInputs:
    """Inputs of the step statistics."""

    own_rows: Tensor
    segment_counts: Tensor
    segment_capacity: Tensor
    segment_most: Tensor
    met: Tensor
    tile_offsets: Tensor
    bands: list[int]
    rank: int
    lines: int

    def on(self, device: str) -> tuple[Any, ...]:
        """Return the operator's arguments."""
        tensors = (
            self.own_rows,
            self.segment_counts,
            self.segment_capacity,
            self.segment_most,
            self.met,
            self.tile_offsets,
        )
        return (*(t.to(device, copy=True) for t in tensors), self.bands, self.rank, self.lines)


def make_message_inputs(ranks: int, bands: int, lines: int = 40, columns: int = 5, seed: int = 0) -> MessageInputs:
    """Bands of 0 to 3 rows of tiles, as far as there are lines, each with a row above and below that is not its own."""
    g = torch.Generator().manual_seed(seed)
    stretches: list[int] = []
    line = tile = 0
    for _ in range(bands):
        count = int(torch.randint(0, 4, (1,), generator=g))
        line += int(torch.randint(0, 2, (1,), generator=g))
        if line + count > lines:
            break
        wide = columns + int(torch.randint(0, 2, (1,), generator=g))
        stretches += [line, tile + wide, count, wide]
        line, tile = line + count, tile + (count + 2) * wide
    per_tile = torch.randint(0, 1000, (tile,), generator=g)
    tile_offsets = torch.cat([torch.zeros(1, dtype=torch.int64), per_tile.cumsum(0)]).int()
    own, counts, capacity, most, met = (torch.randint(0, 2**40, (n,), generator=g) for n in (1, ranks, ranks, ranks, 1))
    return MessageInputs(own, counts, capacity, most, met, tile_offsets, stretches, seed % ranks, lines)


def message_by_hand(message_inputs: MessageInputs) -> list[int]:
    to_ranks, offsets = message_inputs.segment_counts.tolist(), message_inputs.tile_offsets.tolist()
    work = [0] * message_inputs.lines
    for k in range(0, len(message_inputs.bands), 4):
        line, tile, count, columns = message_inputs.bands[k : k + 4]
        for i in range(count):
            first = tile + i * columns
            work[line + i] = sum(offsets[t + 1] - offsets[t] for t in range(first, first + columns))
    sent = sum(n for k, n in enumerate(to_ranks) if k != message_inputs.rank)
    lacking = max(n - capacity for n, capacity in zip(to_ranks, message_inputs.segment_capacity.tolist(), strict=True))
    return [int(message_inputs.own_rows), lacking, int(message_inputs.met), sent, *work]


CASES = [(1, 1), (1, 4), (2, 2), (3, 0), (5, 7), (8, 3), (8, 12)]  # ranks, bands


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("ranks", "bands"), CASES)
def test_message(ranks: int, bands: int, seed: int) -> None:
    message_inputs = make_message_inputs(ranks, bands, seed=seed)
    given = message_inputs.on("cpu")
    found = step_message(*given)
    assert found.dtype == torch.int64 and found.tolist() == message_by_hand(message_inputs)
    before = zip(message_inputs.segment_counts.tolist(), message_inputs.segment_most.tolist(), strict=True)
    assert given[3].tolist() == [max(pair) for pair in before], "the most of each, kept"
    for changed, kept in zip(
        given[:3],
        (message_inputs.own_rows, message_inputs.segment_counts, message_inputs.segment_capacity),
        strict=True,
    ):
        assert torch.equal(changed, kept)


def test_one_exceeded_segment_cancels_the_step() -> None:
    """One exceeded segment is enough, independent of the other segments' capacities."""
    message_inputs = replace(
        make_message_inputs(3, 0),
        segment_counts=torch.tensor([900, 3, 70]),
        segment_capacity=torch.tensor([1000, 2, 90]),
    )
    assert step_message(*message_inputs.on("cpu"))[1] == 1
    message_inputs.segment_capacity[1] = 3
    assert step_message(*message_inputs.on("cpu"))[1] == 0
    message_inputs.segment_capacity[1] = 50
    assert step_message(*message_inputs.on("cpu"))[1] == -20


@dataclass
class Gated:
    """Inputs and outputs of a gate."""

    messages: Tensor  # [ranks, HEAD + lines]
    limits: Tensor
    status: Tensor
    scalars: Tensor
    still: Tensor
    row_counts: Tensor
    lazy: LazyAdam | None
    totals: Tensor
    rank: int

    def to(self, device: str) -> "Gated":
        """Return a copy."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {k: t.to(device, copy=True) for k, t in parts.items() if isinstance(t, Tensor)}
        lazy = self.lazy
        if lazy is not None:
            lazy = LazyAdam(*(t.to(device, copy=True) for t in (lazy.last, lazy.table, lazy.steps)))
        return replace(self, **moved, lazy=lazy)

    def run(self) -> tuple[Tensor, Tensor]:
        """As a tile step does with 3 limits, and as a fused step with 2."""
        num_limits = len(self.limits)
        counts = [self.messages[:, k] for k in range(num_limits)]
        given = (counts, self.limits, self.status, self.scalars, self.still)
        if num_limits == 2:
            return step_gate(*given, row_counts=self.messages[:, 0], lazy=self.lazy)
        sent = self.messages[self.rank, HEAD - 1 : HEAD]
        return step_gate(
            *given, row_counts=self.row_counts, lazy=self.lazy, sent=sent, work=self.messages[:, HEAD:],
            totals=self.totals,
        )  # fmt: skip


def make_gated(ranks: int, segments: int, why: str, num_limits: int = 3, lines: int = 2 * 9, seed: int = 0) -> Gated:
    """Return `why` the step is not to be taken: "", "over <k>", "before" or "lazy"."""
    g = torch.Generator().manual_seed(seed)
    messages = torch.randint(0, 2**35, (ranks, HEAD + lines), generator=g)
    messages[:, 1] -= messages[:, 1].max()  # what is lacking: nothing, or less
    limits = messages[:, :num_limits].amax(0)  # equal to the limit, not above
    if why.startswith("over"):
        limits[int(why[-1])] -= 1
    status = torch.randint(0, 2**35, (num_limits + 2 + (num_limits == 3),), generator=g)
    status[num_limits + 1] = int(why == "before")
    lazy = None if why == "" and seed % 2 else LazyAdam.make(3, "cpu")
    if lazy is not None:
        lazy.steps.fill_(MOST_STEPS if why == "lazy" else MOST_STEPS - 1)
    scalars, still = torch.randn(2, 6, 8, generator=g)
    row_counts = torch.randint(1, 2**35, (segments,), generator=g)
    totals = torch.full((2, lines // 2), -1, dtype=torch.int64)
    return Gated(messages, limits, status, scalars, still, row_counts, lazy, totals, seed % ranks)


REASONS = ["", "over 0", "over 1", "over 2", "before", "lazy"]


def check_gate(gated: Gated, why: str) -> None:
    num_limits, before = len(gated.limits), gated.to("cpu")
    scalars, counts = gated.run()
    full = why != ""
    expected = [before.status[0] + (not full)]
    expected += [max(int(before.status[1 + k]), *before.messages[:, k].tolist(), 0) for k in range(num_limits)]
    expected += [int(full)]
    if num_limits == 3:
        expected += [before.status[5] + before.messages[gated.rank, 3]]
        work = before.messages[:, HEAD:].tolist()
        assert gated.totals.view(-1).tolist() == [sum(column) for column in zip(*work, strict=True)]
    assert gated.status.tolist() == [int(n) for n in expected]
    assert torch.equal(scalars, gated.still if full else gated.scalars)
    rows = before.row_counts if num_limits == 3 else before.messages[:, 0]
    assert counts.tolist() == ([0] * len(rows) if full else rows.tolist())
    assert torch.equal(gated.messages, before.messages) and torch.equal(gated.limits, before.limits)


@pytest.mark.parametrize("why", REASONS)
@pytest.mark.parametrize(("ranks", "segments"), [(1, 1), (2, 1), (3, 4), (8, 2)])
def test_gate(ranks: int, segments: int, why: str) -> None:
    for seed in range(4):
        check_gate(make_gated(ranks, segments, why, seed=seed), why)
        if why != "over 2":
            check_gate(make_gated(ranks, segments, why, num_limits=2, seed=seed), why)


def test_a_gate_stays_shut_until_the_status_is_zero() -> None:
    gated = make_gated(2, 1, "over 1")
    check_gate(gated, "over 1")
    gated.limits += 1
    check_gate(gated, "before")
    gated.status.zero_()
    check_gate(gated, "")


@pytest.mark.parametrize(
    ("degree", "lazy", "device"), [(3, False, "cpu"), *(on_gpus(*case) for case in product((0, 3), (False, True)))]
)
def test_finite_flag(degree: int, lazy: bool, device: str) -> None:
    model = make_model(200, 3).to(device)
    rows = model.forward(700, degree)
    given = {depth: make_records(to(rows, "cpu"), depth).to(device) for depth in (False, True)}
    alive, count, views = rows.radii[:, 0] > 0, int(rows.count), rows.view_ids.tolist()
    drawn = alive[:count].nonzero().squeeze(-1).tolist()
    line, dead = drawn[len(drawn) // 3], alive.tolist().index(False)

    def flag_value(
        at: int, number: int, value: float, seen: range | None = None, counted: SplatRows = rows, depth: bool = False
    ) -> float:
        changed = given[depth].clone()
        changed[at, number] = value
        finite_flag = torch.full((5,), 7.0, device=device, dtype=changed.dtype)
        deferred = LazyAdam.make(200, device) if lazy else None
        model.to(device).update(
            counted, changed, degree, finite_flag=finite_flag[3:4], finite_flag_views=seen, lazy=deferred, depth=depth
        )
        assert finite_flag[[0, 1, 2, 4]].tolist() == [7.0] * 4
        return float(finite_flag[3])

    for number in (1, 4, 5, 8, 11):
        for value in (float("inf"), -float("inf"), float("nan")):
            assert flag_value(line, number, value) != 0.0
            assert flag_value(dead, number, value) == 0.0
        assert flag_value(line, number, 1e30) == 0.0
    for depth in (False, True):
        assert (flag_value(line, 9, float("nan"), depth=depth) != 0.0) == depth
        assert device == "cuda" or flag_value(line, 12, float("nan"), depth=depth) == 0.0
    view = views[line]
    assert flag_value(line, 5, float("nan"), range(view, view + 1)) != 0.0
    assert flag_value(line, 5, float("nan"), range(view + 1, 3)) == flag_value(line, 5, float("nan"), range(view)) == 0
    none = rows._replace(count=torch.zeros_like(rows.count))
    assert flag_value(line, 5, float("nan"), None, none) == 0.0, "no row counts in a step that is not taken"


def test_opcheck() -> None:
    message_inputs, gated = make_message_inputs(2, 3), make_gated(2, 2, "over 1")
    assert gated.lazy is not None
    torch.library.opcheck(OPS.step_message, message_inputs.on("cpu"), test_utils="test_schema")
    counts = [gated.messages[:, k] for k in range(3)]
    given = (counts, gated.limits, gated.status, gated.scalars, gated.still, gated.row_counts, gated.lazy.steps)
    rest = (gated.messages[0, 3:4], gated.messages[:, HEAD:], gated.totals)
    torch.library.opcheck(OPS.step_gate, (*given, MOST_STEPS, *rest), test_utils="test_schema")
    short = (*given[:2], gated.status[:5].clone(), *given[3:5], gated.messages[:, 0])
    torch.library.opcheck(OPS.step_gate, (*short, None, MOST_STEPS, None, None, None), test_utils="test_schema")


def test_the_reference_is_the_same() -> None:
    message_inputs = make_message_inputs(3, 5)
    with cuda_ext.use_reference():
        assert step_message(*message_inputs.on("cpu")).tolist() == message_by_hand(message_inputs)
