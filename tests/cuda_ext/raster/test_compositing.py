"""The scalar functions that the CUDA rasterization shares between its kernels, run on the host."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cuda_ext import compiler_problem
from cuda_ext.build.native import required_compiler
from tests.cuda_ext.splats import make_splats

_CODE = r"""
#include "common/compositing.h"
using namespace nsmg;
// For each of n splats (x, y, a, b, c, opacity): whether it may overlap the box, and the pixel centres that it covers.
extern "C" void overlaps(const float* s, int n, const int* box, int* may, int* counts) {
  for (int i = 0; i < n; ++i, s += 6) {
    const ScaledSplat splat = scale_splat(s[0], s[1], s[2], s[3], s[4], s[5]);
    may[i] = overlaps_box(splat, box[0] + 0.5f, box[2] - 0.5f, box[1] + 0.5f, box[3] - 0.5f);
    counts[i] = 0;
    for (int y = box[1]; y < box[3]; ++y)
      for (int x = box[0]; x < box[2]; ++x) {
        const float dx = splat.mean_x - (x + 0.5f), dy = splat.mean_y - (y + 0.5f);
        const float sigma = sigma2_of_column(splat.b * dx, splat.a * dx * dx, splat.c, dy);
        counts[i] += float_bits(sigma) < splat.limit;
      }
  }
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if problem := compiler_problem():
        pytest.skip(problem)
    folder = tmp_path_factory.mktemp("compositing")
    source, target = folder / "compositing.cpp", folder / "compositing.so"
    source.write_text(_CODE)
    include = Path(__file__).parents[3] / "cuda_ext" / "csrc"
    flags = ["-std=c++17", "-O2", "-fPIC", "-shared", f"-I{include}"]
    subprocess.run([*required_compiler(), *flags, str(source), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def _overlaps(library: ctypes.CDLL, splats: Tensor, box: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    splats = splats.float().contiguous()
    may, counts = torch.zeros(len(splats), dtype=torch.int32), torch.zeros(len(splats), dtype=torch.int32)
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (splats, may, counts)]
    library.overlaps(pointers[0], len(splats), (ctypes.c_int * 4)(*box), *pointers[1:])
    return may.bool(), counts


@pytest.mark.parametrize(
    "sizes", [(0.5, 4.0), (0.0, 0.1), (40.0, 300.0), (0.01, 15.0), (0.01, 900.0)],
    ids=["mixed", "sub-pixel", "huge", "needles", "long needles"],
)  # fmt: skip
@pytest.mark.parametrize("corner", [(16, 8), (3992, 2152)])
def test_no_splat_is_lost_and_few_are_kept_in_vain(
    library: ctypes.CDLL, sizes: tuple[float, float], corner: tuple[int, int]
) -> None:
    splats = make_splats(20_000, 40, 24, sizes=sizes, opacities=(0.003, 1.0))
    x, y = corner
    means = splats.means2d + torch.tensor([x - 16, y - 8])
    means[::2] = (means[::2] * 2).round() / 2  # on pixels' centres and edges
    table = torch.cat([means, splats.conics, splats.row_opacities[:, None]], dim=1)
    may, counts = _overlaps(library, table, (x, y, x + 8, y + 8))
    assert bool(may[counts > 0].all())
    assert int((counts > 0).sum()) > 500 and bool((~may).any())
    if sizes[0] >= 0.5:  # thin ones pass between the centres
        assert int((may & (counts == 0)).sum()) < 0.1 * int((counts > 0).sum())


def test_splats_without_support_or_bounds(library: ctypes.CDLL) -> None:
    rows = [
        [4, 4, 1, 0, 1, 0.0],  # transparent
        [4, 4, 1, 0, 1, 0.0039],  # below 1/255
        [4, 4, 1, 0, 1, float("nan")],
        [400, 4, 0.01, 0, -0.001, 0.5],  # a saddle, along whose other axis sigma < 0
        [400, 4, 0.0, 0, 0.0, 0.5],  # flat: counts everywhere
    ]
    may, counts = _overlaps(library, torch.tensor(rows), (0, 0, 8, 8))
    assert may.tolist() == [False, False, False, True, True]
    assert counts.tolist() == [0, 0, 0, 0, 64]
