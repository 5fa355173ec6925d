"""Boxes of groups: what they hold, and that one shows wherever a point of it would be kept."""

import pytest
import torch
from torch import Tensor

import cuda_ext
from cuda_ext.ops.optim.lazy_adam import LazyAdam
from cuda_ext.ops.project.boxes import box_views, new_boxes, splat_boxes
from cuda_ext.reference.boxes import widen_boxes
from tests.cuda_ext.rims import Cameras, box_of_each, keeps, keeps_moving, make_cameras, rim
from tests.lib.ranks import DEVICES

F32, F64 = torch.float32, torch.float64
INF, NAN = torch.inf, torch.nan
POINTS = 32


def boxes_of(means: Tensor, log_scales: Tensor) -> Tensor:
    boxes = new_boxes(means).fill_(7.0)
    splat_boxes(means, log_scales, boxes)
    return boxes


def shown(boxes: Tensor, cameras: Cameras, table: Tensor | None = None, **options: bool) -> Tensor:
    return box_views(
        boxes, cameras.viewmats, cameras.Ks, cameras.sizes, near=cameras.near, far=cameras.far, table=table, **options
    )


def test_boxes_hold_their_points() -> None:
    g = torch.Generator().manual_seed(0)
    means, log_scales = torch.randn(75, 3, generator=g), torch.randn(75, 3, generator=g)
    boxes = boxes_of(means, log_scales)
    assert boxes.shape == (3, 8)
    for group, box in enumerate(boxes):
        of = slice(POINTS * group, POINTS * (group + 1))
        assert torch.equal(box[:3], means[of].amin(0)) and torch.equal(box[3:6], means[of].amax(0))
        assert box[6] == log_scales[of].max() and box[7] == 0
    assert boxes_of(means[:0], log_scales[:0]).shape == (0, 8)


@pytest.mark.parametrize("device", DEVICES)
def test_points_without_a_position_or_a_size(device: str) -> None:
    """A non-finite position is invisible; a non-finite size may overlap everything."""
    means, log_scales = torch.zeros(160, 3), torch.zeros(160, 3)
    means[:32] = NAN
    log_scales[:32] = 5.0
    means[33, 1] = NAN
    log_scales[33] = 9.0
    means[70, 0], means[71, 2] = INF, -INF
    log_scales[100, 2] = NAN
    log_scales[130, 0], log_scales[131] = INF, -INF
    boxes = boxes_of(means.to(device), log_scales.to(device)).cpu()
    assert boxes[0].tolist() == [INF] * 3 + [-INF] * 4 + [0.0]
    assert boxes[1].tolist() == [0.0] * 8
    assert boxes[2].tolist() == [0.0, 0.0, -INF, INF, 0.0, 0.0, 0.0, 0.0]
    assert boxes[3].tolist() == boxes[4].tolist() == [0.0] * 6 + [INF, 0.0]
    cameras = make_cameras(1.0, 0.01, 100.0, F32)
    cameras.viewmats, cameras.Ks = cameras.viewmats.to(device), cameras.Ks.to(device)
    for table in (None, LazyAdam.make(1, device).table):
        found = shown(boxes.to(device), cameras, table)
        assert not found[:, 0].any(), "no view sees points without a position"
        assert found[:, 2].all(), "a point at infinity may be anywhere"


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize(("unit", "near", "far"), [(1.0, 0.01, 1e10), (1.0, 0.5, 2.0), (1e4, 1e-6, 1e6), (1e-3, 1, 4)])
def test_a_box_shows_where_its_point_is_kept(unit: float, near: float, far: float, dtype: torch.dtype) -> None:
    """With nothing to spare: each point is a box of its own, and lies at the rim of what is kept."""
    cameras = make_cameras(unit, near, far, dtype)
    kept = keeps(cameras)
    for view in range(len(cameras.viewmats)):
        means, scales = rim(kept, unit, view, 700, dtype, seed=view)
        assert len(means) > 240
        found, wanted = shown(box_of_each(means, scales), cameras), kept(means, scales)
        assert wanted[view].all()
        assert not (wanted & ~found).any()
        if unit < 1e4:  # there, rounding of far places is larger than the near plane's distance
            assert (found & ~wanted).float().mean() < 0.04, "boxes show where nothing is"


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("way", [1.0, 0.05, 1e-4, 0.0])
@pytest.mark.parametrize(("unit", "near", "dtype"), [(1.0, 0.01, F32), (1.0, 0.5, F64), (1e4, 1e-6, F32)])
def test_a_box_shows_where_a_point_that_may_have_moved_is_kept(
    unit: float, near: float, way: float, dtype: torch.dtype
) -> None:
    """The bounds are those of each point's last step, and the box does not know which that was."""
    cameras = make_cameras(unit, near, 5.0, dtype, seed=2)
    g = torch.Generator().manual_seed(4)
    table = LazyAdam.make(1, "cpu", dtype).table
    table[:, 0, 4], table[:, 2, 4] = torch.rand(2, 65, generator=g).to(dtype) * torch.tensor([[way * unit], [0.2]])
    most = float(table[:, 0, 4].max())
    for moved, grown in ((1.7321 * most, float(table[:, 2, 4].max())), (0.3 * most, 0.0)):
        kept = keeps_moving(cameras, torch.full((), moved, dtype=dtype), grown)
        for view in range(len(cameras.viewmats)):
            means, scales = rim(kept, unit, view, 400, dtype, seed=view)
            assert len(means) > 110
            assert shown(box_of_each(means, scales), cameras, table)[kept(means, scales)].all()


@pytest.mark.parametrize("way", [0.0, 1e-3])
def test_culled_set_is_tight(way: float) -> None:
    cameras = make_cameras(1.0, 0.01, 5.0, F32)
    g = torch.Generator().manual_seed(1)
    means, scales = 2 * torch.randn(20000, 3, generator=g), (torch.randn(20000, generator=g) - 5).exp()
    table = LazyAdam.make(1, "cpu").table
    table[:, 0, 4] = way
    boxes, kept = box_of_each(means, scales), keeps(cameras)(means, scales)
    for given in (None, table):
        found = shown(boxes, cameras, given)
        assert found[kept].all() and 0.02 < kept.float().mean() < 0.3
        assert found.float().mean() < (1.12 if given is None else 1.4) * kept.float().mean()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_kernel_equals_the_reference(device: str, lazy: bool, compact: bool) -> None:
    """But for boxes at the very rim, of which there are one in a thousand at most."""
    cameras = make_cameras(1.0, 0.05, 5.0, F32)
    g = torch.Generator().manual_seed(1)
    lower = 2 * torch.randn(20000, 3, generator=g)
    sides = torch.randn(20000, 3, generator=g).exp() / 8
    log_scale = torch.randn(20000, 1, generator=g) - 4
    boxes = torch.cat([lower, lower + sides, log_scale, torch.zeros_like(log_scale)], 1)
    table = LazyAdam.make(1, "cpu").table if lazy else None
    if table is not None:
        table[:, 0, 4], table[:, 2, 4] = 0.02, 0.1
    with cuda_ext.use_reference():
        expected = shown(boxes, cameras, table, compact=compact)
    cameras.viewmats, cameras.Ks = cameras.viewmats.to(device), cameras.Ks.to(device)
    table = None if table is None else table.to(device)
    found = shown(boxes.to(device), cameras, table, compact=compact).cpu()
    assert 0.1 < expected.float().mean() < 0.9
    assert (found != expected).float().mean() < 1e-3
    if lazy:
        assert (shown(boxes.to(device), cameras, table, compact=not compact).cpu() != expected).float().mean() > 1e-3


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("side", [0.1, 1.0, 30.0])
def test_boxes_around_behind_and_outside_the_camera_view(side: float, table: bool) -> None:
    """Of a camera at the origin that looks along z, with 90 degrees across."""
    K = torch.tensor([[[50.0, 0, 50], [0, 50, 50], [0, 0, 1]]])
    cameras = Cameras(torch.eye(4)[None], K, [100, 100], 0.01, 100.0)

    def shows(*centre: float) -> bool:
        at = torch.tensor(centre)
        box = torch.cat([at - side / 2, at + side / 2, torch.tensor([-12.0, 0.0])])
        return bool(shown(box[None], cameras, LazyAdam.make(1, "cpu").table if table else None))

    assert shows(0, 0, 0) and shows(0, 0, side), "the camera is in the box, or at its side"
    assert not shows(0, 0, -side) and shows(0, 0, 100 + 0.4 * side) and not shows(0, 0, 101 + side)
    deep = 2 * side
    for x, y in ((1, 0), (-1, 0), (0, 1), (0, -1)):
        # Its nearest corner to the image is at the far side: at depth 2.5 the border is 2.5 away.
        assert shows(2.9 * side * x, 2.9 * side * y, deep)
        assert not shows(3.5 * side * x, 3.5 * side * y, deep)


def test_boxes_only_widen() -> None:
    g = torch.Generator().manual_seed(0)
    means, log_scales = torch.randn(50, 3, generator=g), torch.randn(50, 3, generator=g)
    boxes = boxes_of(means, log_scales)
    before = boxes.clone()
    middle = 0.5 * (boxes[:, :3] + boxes[:, 3:6]).repeat_interleave(POINTS, 0)[:50]
    widen_boxes(0.5 * (means + middle), log_scales - 1, boxes)
    assert torch.equal(boxes, before), "the points have not left them"
    means[40, 1], log_scales[3, 2] = 100.0, 8.0
    widen_boxes(means, log_scales, boxes)
    assert boxes[1, 4] == 100 and boxes[0, 6] == 8
    assert (boxes[:, :3] <= boxes_of(means, log_scales)[:, :3]).all()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    ops, cameras = torch.ops.ns_multigpu, make_cameras(1.0, 0.05, 5.0, F32)
    means = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).to(device)
    boxes = boxes_of(means, means)
    torch.library.opcheck(ops.splat_boxes.default, (means, means, boxes))
    views = (cameras.viewmats.to(device), cameras.Ks.to(device), cameras.sizes, 0.3, 0.05, 5.0)
    for table in (None, LazyAdam.make(1, device).table):
        torch.library.opcheck(ops.box_views.default, (boxes, *views, table, False), test_utils="test_schema")
