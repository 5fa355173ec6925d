"""The CUDA kernels for cameras' poses and gradients by them, run on a CPU (`emulated`), against autograd in float64."""

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_ext.ops.optim.fused import SplatRows
from cuda_ext.ops.optim.lazy_adam import LazyAdam
from cuda_ext.ops.optim.poses import Mode, correct_views, correction_gradients
from tests.cuda_ext.emulated import POSES, compiled
from tests.cuda_ext.fused_steps import Model, to
from tests.cuda_ext.lazy_steps import StepRun, fresh_model, row_records
from tests.strategies.scene import make_corrections, make_views


class _Arguments(ctypes.Structure):
    """`Arguments` of `poses.cpp`."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("points", "rest_floats", "rows", "views", "intrinsics_rows")),
        *((name, ctypes.c_int32) for name in ("degree", "compact")),
        *((name, ctypes.c_void_p * 6) for name in ("values", "moments1", "moments2")),
        *((name, ctypes.c_void_p) for name in ("viewmats", "Ks", "features", "records", "sizes", "point_ids", "radii")),
        *((name, ctypes.c_void_p) for name in ("starts", "last", "table", "v_viewmats")),
    )


class _Corrections(ctypes.Structure):
    """`PoseCorrections` of `view_poses.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("viewmats", "corrections", "indices")),
        ("views", ctypes.c_int32), ("number", ctypes.c_int32), ("se3", ctypes.c_bool),
    )  # fmt: skip


class _Gradients(ctypes.Structure):
    """`PoseGradients` of `view_poses.h`."""

    _fields_ = (
        ("v_viewmats", ctypes.c_void_p), ("ranks", ctypes.c_int32),
        ("shift_penalty", ctypes.c_float), ("turn_penalty", ctypes.c_float), ("out", ctypes.c_void_p),
    )  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("emulated"), POSES, "poses.cpp")


def by_kernel(library: ctypes.CDLL, run: StepRun, rows: SplatRows, records: Tensor) -> Tensor:
    model, lazy, views = run.model, run.lazy, len(run.model.viewmats)
    points, count = len(model.params[0]), int(rows.count)
    keys = rows.view_ids[:count].long() * points + rows.point_ids[:count]
    groups = (points + 31) // 32
    firsts = (torch.arange(groups + 1) * 32).clamp(max=points) + torch.arange(views)[:, None] * points
    tensors = {
        "viewmats": model.viewmats, "Ks": model.Ks, "features": rows.features, "records": records,
        "sizes": torch.tensor(model.sizes, dtype=torch.int32), "point_ids": rows.point_ids, "radii": rows.radii,
        "starts": torch.searchsorted(keys, firsts).int(), "v_viewmats": torch.full_like(model.viewmats, torch.nan),
    }  # fmt: skip
    if lazy is not None:
        tensors |= {"last": lazy.last, "table": lazy.table}
    kept = {name: tensor.contiguous() for name, tensor in tensors.items()}
    lists: dict[str, Any] = {"values": model.params, "moments1": model.exp_avgs, "moments2": model.exp_avg_sqs}
    library.pose_gradients(
        ctypes.byref(
            _Arguments(
                points=points, rest_floats=3 * model.params[5].shape[1], rows=len(rows.point_ids), views=views,
                intrinsics_rows=model.Ks.shape[1], degree=run.degree, compact=model.exp_avgs[0].dtype == torch.bfloat16,
                **{name: (ctypes.c_void_p * 6)(*(x.data_ptr() for x in given)) for name, given in lists.items()},
                **{name: tensor.data_ptr() for name, tensor in kept.items()},
            )
        )
    )  # fmt: skip
    return kept["v_viewmats"]


@pytest.mark.parametrize(
    ("degree", "rest", "lazy", "compact", "lenses"),
    [(3, 15, False, False, False), (3, 15, True, False, False), (1, 8, True, True, False), (3, 15, False, False, True)],
)
def test_gradients_are_autograds(
    library: ctypes.CDLL, degree: int, rest: int, lazy: bool, compact: bool, lenses: bool
) -> None:
    model = fresh_model(600, rest=rest, lenses=lenses)
    if compact:
        model = in_float(model, torch.bfloat16)
    run = StepRun(model, lazy, degree, antialiased=True, speed=5.0)
    for step in range(9):
        run.step(step)
    rows = run.forward(9)
    records = row_records(rows, 9)
    here = StepRun(in_float(model, model.exp_avgs[0].dtype if compact else torch.float32), lazy, degree)
    if run.lazy is not None:
        here.lazy = LazyAdam(run.lazy.last.clone(), run.lazy.table.float(), run.lazy.steps)
        assert int(run.lazy.last.min()) < 5, "some points have missed steps"
    found = by_kernel(library, here, to(rows, "cpu"), records.float())
    expected = torch.empty_like(model.viewmats)
    model.update(rows, records, degree, antialiased=True, lazy=run.lazy, v_viewmats=expected)
    assert int(rows.count) > 600, "a thread has several rows"
    assert float(expected[:, :3].abs().min()) > 0
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def in_float(model: Model, kind: torch.dtype) -> Model:
    """Return a copy in single precision, with moments of this type."""
    found = model.to("cpu")
    first, second = ([m.to(kind, copy=True) for m in given] for given in (model.exp_avgs, model.exp_avg_sqs))
    return Model(found.params, first, second, found.scalars, found.viewmats, found.Ks, found.sizes)


@pytest.mark.parametrize("mode", ["SO3xR3", "SE3"])
def test_corrections_are_the_references(library: ctypes.CDLL, mode: Mode) -> None:
    views, g = make_views(40, torch.float64), torch.Generator().manual_seed(4)
    viewmats, corrections = torch.stack([view.viewmat for view in views]), 5 * make_corrections(40, torch.float64)
    indices = torch.tensor([0, 0, *range(2, 40)])
    v_viewmats = torch.randn(2, 40, 4, 4, generator=g, dtype=torch.float64)
    given = [x.float() for x in (viewmats, corrections, indices, v_viewmats)]
    out, gradient = torch.full((40, 4, 4), torch.nan), torch.full((43, 6), torch.nan)
    numbers = [x.data_ptr() for x in given]
    into = ctypes.byref(_Corrections(*numbers[:3], 40, 43, mode == "SE3"))
    library.correct_views(into, ctypes.c_void_p(out.data_ptr()))
    library.correction_gradients(into, ctypes.byref(_Gradients(numbers[3], 2, 0.3, 0.2, gradient.data_ptr())))
    expected = torch.empty_like(viewmats)
    correct_views(viewmats, corrections, indices.double(), mode, expected)
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-6)
    wanted = correction_gradients(viewmats, corrections, indices.double(), mode, v_viewmats, (0.3, 0.2))
    torch.testing.assert_close(gradient, wanted.float(), rtol=1e-4, atol=2e-3 if mode == "SE3" else 2e-5)
    assert float(wanted[1].abs().max()) == 0, "no view has it, and it is zero"
    assert float(wanted[0].abs().max()) > 1, "two views have it"
