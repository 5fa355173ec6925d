"""The device's own clock, read where its stream has got to."""

import time

import torch
from torch import Tensor

from cuda_ext.dispatch.library import LIBRARY
from cuda_ext.dispatch.load import kernels_serve


@torch.no_grad()
def add_clock(total: Tensor, sign: int) -> None:
    """Add or takes off the time at which the device comes here: around some work, first with -1 and then with 1, that
    adds how long the work took. On CUDA nothing is read back, and a graph can hold it: each replay adds its own.

    A GPU's clock may go on by a microsecond at a time. In the sum of many steps that evens out.

    Args:
        total: [1] int64 nanoseconds.
        sign: 1 or -1.

    Raises:
        TypeError, ValueError: dtype, shape or sign are wrong.
        RuntimeError: on CUDA without our kernels.
        NativeBuildError: the operators cannot be compiled.
    """
    if total.dtype != torch.int64:
        raise TypeError(f"total is {total.dtype}; it must be torch.int64.")
    if total.shape != (1,) or sign not in (1, -1):
        raise ValueError(f"total must be [1], not {list(total.shape)}, and sign 1 or -1, not {sign}.")
    if total.device.type != "cpu" and not kernels_serve(total):
        raise RuntimeError(
            f"Only our CUDA kernels read the clock on {total.device}, and they are switched off: unset "
            "NS_MULTIGPU_OPS=reference and NS_MULTIGPU_CUDA=gsplat."
        )
    torch.ops.ns_multigpu.add_clock(total, sign)


def _composed(total: Tensor, sign: int) -> None:
    total += sign * time.perf_counter_ns()


LIBRARY.impl("add_clock", _composed, "CPU")
