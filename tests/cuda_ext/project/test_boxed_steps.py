"""Steps that cull groups of points by their boxes: bit for bit those that look at each point."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_ext.ops.optim import fused_composed
from cuda_ext.ops.optim.fused import splat_forward
from cuda_ext.ops.optim.lazy_adam import LazyAdam
from cuda_ext.ops.project.boxes import new_boxes, splat_boxes
from tests.cuda_ext.fused_steps import Model
from tests.cuda_ext.lazy_steps import CAPACITY, StepRun, assert_same_bits, fresh_model, in_graphs
from tests.lib.ranks import DEVICES

F32, BF16 = torch.float32, torch.bfloat16
INF, NAN = torch.inf, torch.nan
pytestmark = pytest.mark.usefixtures("native")


def ordered_model(
    device: str, points: int = 777, views: int = 3, *, spoilt: bool = False, compact: bool = False
) -> Model:
    """Return a scene whose neighbouring rows are neighbours in space, ten times as wide as the images.

    Spoilt: with points without a position, whole groups of them too, at infinity, and of no size or any.
    """
    model = fresh_model(points, views, F32)
    means = model.params[0]
    means *= torch.tensor([10.0, 1.0, 1.0])
    order = torch.sort(means[:, 0]).indices
    model.params = [p[order].contiguous() for p in model.params]
    if spoilt:
        means, log_scales = model.params[0], model.params[2]
        means[64:96], means[200, 1], means[-3:] = NAN, NAN, NAN
        means[300, 0], means[301, 2], means[330] = INF, -INF, 1e30
        log_scales[400, 1], log_scales[430, 2], log_scales[460] = NAN, 60.0, -INF
    if compact:
        for moments in (model.exp_avgs, model.exp_avg_sqs):
            moments[:] = [moment.to(BF16) for moment in moments]
    lists = [[t.to(device) for t in tensors] for tensors in (model.params, model.exp_avgs, model.exp_avg_sqs)]
    return Model(*lists, *(t.to(device) for t in (model.scalars, model.viewmats, model.Ks)), model.sizes)


def same(found: Tensor, expected: Tensor) -> bool:
    """To the bit, NaN too."""
    int_types = {4: torch.int32, 2: torch.int16, 8: torch.int64}
    return torch.equal(*(t.contiguous().view(int_types[t.element_size()]) for t in (found, expected)))


def pair(
    device: str, lazy: bool, *, points: int = 777, spoilt: bool = False, compact: bool = False, **options: Any
) -> tuple[StepRun, StepRun]:
    """Return a run that tests each point, and one that tests boxes first."""
    plain, boxed = (
        StepRun(ordered_model(device, points, spoilt=spoilt, compact=compact), lazy, boxed=boxed, **options)
        for boxed in (False, True)
    )
    return plain, boxed


def follow(plain: StepRun, boxed: StepRun, steps: int = 14, block: int = 7) -> int:
    """Compare both runs step by step. Return how often a point left its group's box of before the step."""
    assert boxed.boxes is not None
    left = 0
    for step in range(steps):
        before = boxed.boxes.clone()
        plain.step(step)
        boxed.step(step)
        for name, a, b in zip(plain.rows._fields, boxed.rows, plain.rows, strict=True):
            assert same(a, b), f"step {step}: {name}"
        left += int((boxed.boxes != before).sum())
        if plain.lazy is not None and step % block == block - 1:
            plain.flush()
            boxed.flush()
    for kind in ("params", "exp_avgs", "exp_avg_sqs"):
        for a, b in zip(getattr(boxed.model, kind), getattr(plain.model, kind), strict=True):
            assert same(a, b), kind
    for name, a in boxed.statistics.items():
        assert same(a, plain.statistics[name]), name
    return left


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("speed", [1.0, 100.0])
@pytest.mark.parametrize("device", DEVICES)
def test_run_is_bitwise_the_same(device: str, speed: float, lazy: bool, compact: bool) -> None:
    """At a hundred times the rates points fly through the whole scene, out of all boxes."""
    plain, boxed = pair(device, lazy, compact=compact, speed=speed)
    left = follow(plain, boxed)
    assert left > (100 if speed > 1 else 20), "hardly a point has left its box"
    assert boxed.hidden[0] > (0.05 if speed > 1 else 0.3) * boxed.hidden[1], "hardly a group was culled"


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_points_that_are_nowhere_or_everywhere(device: str, lazy: bool) -> None:
    plain, boxed = pair(device, lazy, spoilt=True)
    follow(plain, boxed, 8)
    assert 0.2 * boxed.hidden[1] < boxed.hidden[0]


@pytest.mark.parametrize("points", [0, 1, 31, 32, 33, 256, 257])
@pytest.mark.parametrize("device", DEVICES)
def test_any_number_of_points(device: str, points: int) -> None:
    for lazy in (False, True):
        plain, boxed = pair(device, lazy, points=points)
        follow(plain, boxed, 3)


@pytest.mark.parametrize("views", [0, 1, 33, 70])
@pytest.mark.parametrize("device", DEVICES)
def test_any_number_of_views(device: str, views: int) -> None:
    for lazy in (False, True):
        runs = [StepRun(ordered_model(device, 300, views), lazy, boxed=boxed) for boxed in (False, True)]
        follow(runs[0], runs[1], 3)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_with_boxes_are_the_same(device: str) -> None:
    model = ordered_model(device)
    boxes = new_boxes(model.params[0])
    splat_boxes(model.params[0], model.params[2], boxes)
    inputs = (*model.params, model.viewmats, model.Ks, model.sizes, 3, CAPACITY)
    lazy = LazyAdam.make(len(model.params[0]), device)
    for missed in ({}, {"exp_avgs": model.exp_avgs, "exp_avg_sqs": model.exp_avg_sqs, "lazy": lazy}):
        plain = splat_forward(*inputs, **missed)
        boxed = splat_forward(*inputs, **missed, boxes=boxes)
        assert int(plain.count) > 160
        assert all(same(a, b) for a, b in zip(boxed, plain, strict=True))


@pytest.mark.gpu
def test_a_block_in_a_graph() -> None:
    plain, graphed = pair("cuda", True)
    warm = pair("cuda", True)[1]
    in_graphs(plain, graphed, warm)
    assert_same_bits(plain, graphed)


def test_boxes_without_widening_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_composed, "widen_boxes", lambda *_: None)
    plain, boxed = pair("cpu", False, speed=300.0)
    with pytest.raises(AssertionError, match=r"step \d+: "):
        follow(plain, boxed)


def test_boxes_of_before_a_flush_would_show() -> None:
    plain, boxed = pair("cpu", True, speed=300.0)
    boxed._make_boxes = lambda _: None  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match=r"step \d+: "):
        follow(plain, boxed)
