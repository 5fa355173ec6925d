"""Dense Adam that touches only the points that are drawn: the other points' steps are deferred within a block of steps.

A step without a gradient decays a parameter's moments and moves it by a fixed share of exp_avg / sqrt(exp_avg_sq). So
any number of such steps can be taken later, and at once, from a small table of what has been missed since each step of
the block (cuda_ext/csrc/common/lazy_adam.h has the formulas). `splat_forward` sees points where the missed steps lead
them, `splat_update` takes them before a step with a gradient, and `splat_flush` takes all that are left.

Between a flush and the first step after it parameters and moments are those of dense Adam, up to rounding. In between
they are not, so only these three operators may access them.

Moments may be compact, as bfloat16 (see `splat_update`). They are rounded where they are written: when a
point is drawn, and at a flush, rather than in every step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cuda_ext.dispatch.library import LIBRARY
from cuda_ext.dispatch.load import kernels_serve
from cuda_ext.ops.common.checks import check_floats, check_tensors
from cuda_ext.reference.compact import COMPACT
from cuda_ext.reference.lazy_adam import MOST_STEPS, PARAMETERS, new_table, splat_flush_composed

__all__ = ["MOST_STEPS", "LazyAdam", "lazy_serves", "splat_flush"]

_MOST_EPS = 1e-12


@dataclass(frozen=True)
class LazyAdam:
    """Steps deferred since the last flush.

    At most `MOST_STEPS` steps may be taken between two flushes. On CUDA one more does nothing at all (so look at
    `steps` before); otherwise it is an error.

    Attributes:
        last: [N] uint8, the step of the block up to which a point is there.
        table: [MOST_STEPS + 1, 6, 8] of each tensor's parameters, what was missed since each step: the sum S of rates,
            Adam's eps, the moments' decay (two), a bound on how far S moves a parameter, S times eps, and two zeros.
        steps: [1] int32, the steps taken. One whose scalars move nothing (rate 0, betas 1) is not counted.
    """

    last: Tensor
    table: Tensor
    steps: Tensor

    @classmethod
    def make(cls, points: int, device: torch.device | str, dtype: torch.dtype = torch.float32) -> "LazyAdam":
        """Return a state without deferred steps."""
        last = torch.zeros(points, dtype=torch.uint8, device=device)
        return cls(last, new_table(dtype, device), torch.zeros(1, dtype=torch.int32, device=device))

    def check(self, means: Tensor) -> None:
        """Check shapes, dtypes and devices against the points' means.

        Raises:
            TypeError, ValueError: one is wrong.
        """
        check_floats(means, table=(self.table, (MOST_STEPS + 1, len(PARAMETERS), 8)))
        for name, tensor, kind, size in (
            ("last", self.last, torch.uint8, means.shape[0]),
            ("steps", self.steps, torch.int32, 1),
        ):
            if tensor.shape != (size,):
                raise ValueError(f"lazy: {name} must have the shape [{size}], not {list(tensor.shape)}.")
            if tensor.dtype != kind or tensor.device != means.device:
                raise TypeError(
                    f"lazy: {name} is {tensor.dtype} on {tensor.device}; it must be {kind} on {means.device}."
                )


def lazy_serves(betas: tuple[float, float], eps: float) -> bool:
    """Return whether deferred steps equal dense Adam with these options.

    It needs beta1^2 < beta2 (or exp_avg / sqrt(exp_avg_sq), by which points move, has no bound) and an `eps` of at most
    1e-12: that matters only where gradients are hardly larger, for parameters that deferred steps move a little less
    exactly.
    """
    return betas[0] >= 0.0 and betas[0] ** 2 < betas[1] < 1.0 and 0.0 <= eps <= _MOST_EPS


@torch.no_grad()
def splat_flush(
    params: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor], lazy: LazyAdam
) -> None:
    """Apply all deferred steps in place and begin a new block. Without deferred steps nothing changes.

    On CUDA nothing is read back, so it can be captured in a CUDA graph.

    Args:
        params, exp_avgs, exp_avg_sqs: as `splat_update` takes them.
        lazy: the deferred steps.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, device or shape.
        NativeBuildError: the operators cannot be compiled.
    """
    check_parameters(params, exp_avgs, exp_avg_sqs)
    lazy.check(params[0])
    op: Any = torch.ops.ns_multigpu.splat_flush if kernels_serve(params[0]) else splat_flush_composed
    lists = ([t.detach() for t in tensors] for tensors in (params, exp_avgs, exp_avg_sqs))
    op(*lists, lazy.last, lazy.table, lazy.steps)


def check_parameters(params: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor]) -> None:
    """Check the six parameters and their moments: of the parameters' dtype, or all bfloat16 with float32 parameters.

    Raises:
        TypeError, ValueError: one has the wrong dtype, device or shape.
    """
    moments = [*exp_avgs, *exp_avg_sqs]
    compact = [moment for moment in moments if moment.dtype == COMPACT]
    if compact and (len(compact) < len(moments) or params[0].dtype != torch.float32):
        dtypes = ", ".join(sorted({str(moment.dtype) for moment in moments}))
        raise TypeError(
            f"Adam's moments must all be of the parameters' dtype, or all be {COMPACT} with parameters in "
            f"torch.float32: they are {dtypes}, and the parameters {params[0].dtype}."
        )
    for what, tensors in (("params", params), ("exp_avgs", exp_avgs), ("exp_avg_sqs", exp_avg_sqs)):
        if len(tensors) != len(PARAMETERS):
            raise ValueError(f"{what} must be {', '.join(PARAMETERS)}, not {len(tensors)} tensors.")
        points = params[0].shape[0]
        shapes = ((points, 3), (points, 4), (points, 3), (points,), (points, 3), (points, -1, 3))
        named = zip(PARAMETERS, tensors, shapes, strict=True)
        checked = {f"{what}: {name}": (tensor, shape) for name, tensor, shape in named}
        if compact and what != "params":
            check_tensors(COMPACT, params[0].device, **checked)
        else:
            check_floats(params[0], **checked)


LIBRARY.impl("splat_flush", splat_flush_composed, "CPU")
