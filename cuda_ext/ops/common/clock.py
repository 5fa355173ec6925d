"""The device's own clock, read where its stream has got to."""

import time

import torch
from torch import Tensor

from cuda_ext.dispatch.library import LIBRARY
from cuda_ext.dispatch.load import kernels_serve


@torch.no_grad()
def add_clock(total: Tensor, sign: int) -> None:
    """Add `sign` times the device's current time to `total`, in stream order.

    Called with -1 before some work and with 1 after it, it adds the work's duration. Nothing is read back on CUDA, so a
    CUDA graph can contain it; each replay adds its own duration. A GPU's clock may advance by a microsecond at a time,
    which averages out over many steps.

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
            "NS_MULTIGPU_OPS=reference."
        )
    torch.ops.ns_multigpu.add_clock(total, sign)


def _composed(total: Tensor, sign: int) -> None:
    total += sign * time.perf_counter_ns()


LIBRARY.impl("add_clock", _composed, "CPU")
