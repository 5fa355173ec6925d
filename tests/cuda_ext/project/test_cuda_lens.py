"""Cameras with lenses on CUDA: our kernels against the CPU twins and the fp64 reference."""

import pytest
import torch

import cuda_ext
from cuda_ext.ops.optim.lazy_adam import LazyAdam
from cuda_ext.ops.project.boxes import box_views, new_boxes, splat_boxes
from tests.cuda_ext.fused_steps import make_model, make_records, to
from tests.cuda_ext.graphs import OUR_KERNELS
from tests.cuda_ext.project.test_cuda_projection import close
from tests.cuda_ext.projections import PROJECT_INPUTS, projected
from tests.cuda_ext.rims import box_of_each
from tests.cuda_ext.scenes import lens_scene

pytestmark = OUR_KERNELS
F64 = torch.float64
MANY = 70  # views: more than fit into the arguments of one launch


@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize("views", [2, MANY])
def test_project(views: int, antialiased: bool) -> None:
    scene = lens_scene(1300 if views == 2 else 100, views, seed=2)
    rows = scene.all_rows()
    out, gradients = projected(scene.on("cuda"), (rows[0].cuda(), rows[1].cuda()), antialiased)
    with cuda_ext.use_reference():
        expected, wanted = projected(scene.to(F64), rows, antialiased)
    agree = (out[4].cpu().sign() == expected[4].sign()).all(-1)
    assert agree.float().mean() > 0.999 and 0.1 < (expected[4][:, 0] > 0).float().mean() < 0.9
    assert (out[4].cpu()[agree] - expected[4][agree]).abs().max() <= 1
    for got, want, name in zip(out[:4], expected[:4], ("means2d", "conics", "depths", "opacities"), strict=True):
        close(name, got.cpu()[agree], want[agree], 1e-4)
    if agree.all():
        for name, got, want in zip(PROJECT_INPUTS, gradients, wanted, strict=True):
            close(name, got, want, 1e-3)


def test_culling() -> None:
    """As on the CPU, but for points at the rim; boxes show where points are kept, also if these may have moved."""
    scene = lens_scene(20_000, 4, seed=3)
    device = scene.on("cuda")
    kept = [torch.zeros(4, 20_000, dtype=torch.bool) for _ in range(2)]
    for mask, of in zip(kept, (scene, device), strict=True):
        view_ids, point_ids = (ids.long().cpu() for ids in of.cull())
        mask[view_ids, point_ids] = True
    assert (kept[0] ^ kept[1]).sum() <= 1e-3 * kept[0].sum() and kept[0].sum() > 1000
    boxes = box_of_each(scene.means, scene.scales.amax(-1))
    table = LazyAdam.make(1, "cpu").table
    table[:, 0, 4] = 0.1
    for moves in (None, table):
        wanted = box_views(boxes, scene.viewmats, scene.Ks, scene.sizes, table=moves)
        moved = None if moves is None else moves.cuda()
        found = box_views(boxes.cuda(), device.viewmats, device.Ks, device.sizes, table=moved).cpu()
        assert found[kept[1]].all() and (found ^ wanted).sum() <= 1e-3 * wanted.sum() and not wanted.all()


@pytest.mark.parametrize("degree", [None, 0, 3])
@pytest.mark.parametrize("lazy", [False, True])
def test_fused(lazy: bool, degree: int | None) -> None:
    """Rows, parameters, moments and the gradient by the cameras' matrices, as the CPU composes them in float64."""
    model = make_model(2000, 3, seed=4, lenses=True).to("cpu").to("cpu", F64)
    device = model.to("cuda")
    capacity, deferred = 6100, {"cpu": LazyAdam.make(2000, "cpu", F64), "cuda": LazyAdam.make(2000, "cuda")}
    moments = {
        of.params[0].device.type: {"exp_avgs": of.exp_avgs, "exp_avg_sqs": of.exp_avg_sqs} for of in (model, device)
    }
    options = {name: {**moments[name], "lazy": deferred[name]} if lazy else {} for name in moments}
    expected = model.forward(capacity, degree, **options["cpu"])
    found = device.forward(capacity, degree, **options["cuda"])
    boxes = new_boxes(device.params[0])
    splat_boxes(device.params[0], device.params[2], boxes)
    boxed = device.forward(capacity, degree, boxes=boxes, **options["cuda"])
    rows = [{}, {}, {}]
    for one, of in zip(rows, (expected, found, boxed), strict=True):
        for line in (of.radii > 0).all(-1).nonzero()[:, 0].tolist():
            one[int(of.view_ids[line]), int(of.point_ids[line])] = line
    assert rows[1].keys() == rows[2].keys() and len(rows[0].keys() ^ rows[1].keys()) <= 3 and len(rows[0]) > 500
    both = sorted(rows[0].keys() & rows[1].keys())
    ours, theirs = ([rows[k][key] for key in both] for k in (1, 0))
    for name, relative in (("means2d", 1e-5), ("conics", 1e-4), ("opacities", 1e-5), ("depths", 1e-5)):
        close(name, getattr(found, name)[ours], getattr(expected, name)[theirs], relative)
    close("features", found.features[ours], expected.features[theirs], 1e-4)

    same = to(found, "cpu", F64)
    records = make_records(same).float()
    by_poses = [torch.zeros(3, 4, 4, dtype=F64), torch.zeros(3, 4, 4, device="cuda")]
    deferring = {name: {"lazy": deferred[name]} if lazy else {} for name in deferred}
    model.update(same, records.double(), degree, v_viewmats=by_poses[0], **deferring["cpu"])
    device.update(found, records.cuda(), degree, v_viewmats=by_poses[1], **deferring["cuda"])
    close("v_viewmats", by_poses[1], by_poses[0], 1e-3)
    for got, want in zip((*device.exp_avgs, *device.params), (*model.exp_avgs, *model.params), strict=True):
        close("parameters and moments", got, want, 1e-3)
