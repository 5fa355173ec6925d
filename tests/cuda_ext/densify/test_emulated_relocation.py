"""The CUDA kernel that puts parts of points side by side, run on a CPU (`emulated`), against the reference."""

import ctypes

import pytest
import torch
from torch import Tensor

import cuda_ext
from cuda_ext.reference.relocation import MOST_COPIES, numbered
from tests.cuda_ext.densify.test_relocation import START, gaussians, places
from tests.cuda_ext.emulated import compiled


class _Inputs(ctypes.Structure):
    """`ShareInputs` of `relocation.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("quats", "copies", "sources", "numbers")),
        ("min_opacity", ctypes.c_float), ("points", ctypes.c_int),
    )  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("relocation"), ("densify/relocation",), "relocation.cpp")


def share_out(library: ctypes.CDLL, points: list[Tensor], given: list[Tensor | None], moment: Tensor) -> None:
    """`cuda_ext.share_out` by the kernel. `given`: copies, sources and numbers."""
    means, quats, scales, logits = points
    pointers = [None if x is None else x.data_ptr() for x in (quats, *given)]
    inputs = _Inputs(*pointers, min_opacity=0.005, points=len(means))
    tensors = (ctypes.c_void_p(x.data_ptr()) for x in (means, scales, logits, moment))
    library.share_out(ctypes.byref(inputs), *tensors)


@pytest.mark.parametrize("with_copies", [False, True])
def test_parts_are_those_of_the_reference(library: ctypes.CDLL, with_copies: bool) -> None:
    sources, copies = cuda_ext.draw_sources(*places(), start=START)
    if not with_copies:
        copies[7] = 3 * MOST_COPIES
    numbers = numbered(sources)
    given = [copies, sources, numbers] if with_copies else [copies, None, None]
    points, expected = gaussians(), gaussians()
    for x in (points, expected):
        x[3][:40] += 12.0  # opaque
    if with_copies:
        for x in (points, expected):
            cuda_ext.copy_rows(x, sources)
    moment, cleared = torch.ones(len(copies)), torch.ones(len(copies))
    share_out(library, points, list(given), moment)
    cuda_ext.share_out(
        *expected, copies, min_opacity=0.005, sources=given[1], numbers=given[2], cleared=[cleared]
    )  # fmt: skip
    assert int((copies > 1).sum()) > 10 and torch.equal(moment, cleared) and not bool(moment.all())
    for found, wanted in zip(points, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
