"""The native operators of ns_multigpu: from points to splats, tiles, pixels and loss, forward and backward.

Every operator has one schema (`torch.ops.ns_multigpu.*`), a C++ twin for CPU that is compiled on first use, a dispatch
to gsplat 1.4.0's kernels on CUDA, and a pure-torch reference. Nothing is compiled at import; see `cuda_ext._load`.
"""

from cuda_ext._build import NativeBuildError
from cuda_ext._load import backend, build_native, compiler_problem, reference_forced, use_reference
from cuda_ext.loss import l1_ssim
from cuda_ext.projection import Projection, cull, project, sh_colors
from cuda_ext.rasterization import intersect, rasterize

__all__ = [
    "NativeBuildError",
    "Projection",
    "backend",
    "build_native",
    "compiler_problem",
    "cull",
    "intersect",
    "l1_ssim",
    "project",
    "rasterize",
    "reference_forced",
    "sh_colors",
    "use_reference",
]
