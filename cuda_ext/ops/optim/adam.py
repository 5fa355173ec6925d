"""Adam over all parameters at once: one launch a step, learning rates and bias corrections read where they lie.

`torch.optim.Adam` launches about a dozen kernels for each parameter group, and nerfstudio keeps an optimizer for each
group. `FusedAdam` is that optimizer (same options, same state_dict) with its step done by `ns_multigpu::adam_step`;
`fused_step` steps several of them with one launch. What changes every step, six numbers a parameter, is computed on the
host in double precision and goes to the device through pinned memory without waiting for it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cuda_ext.dispatch.library import LIBRARY
from cuda_ext.dispatch.load import kernels_serve
from cuda_ext.ops.optim.ring import ScalarRing

SCALARS = 8
"""Numbers a parameter: see `adam_scalars`."""


def adam_scalars(rate: float, betas: tuple[float, float], eps: float, step: float) -> tuple[float, ...]:
    """Return the numbers that Adam's step number `step` (from 1) takes: a line of `adam_step`'s `scalars`.

    Returns:
        learning rate, beta1, beta2, eps, 1 / (1 - beta1^step), 1 / sqrt(1 - beta2^step), 1 - beta1, 1 - beta2. The last
        two because float32 loses digits of them.
    """
    beta1, beta2 = betas
    corrections = (1 / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step))
    return (rate, beta1, beta2, eps, *corrections, 1 - beta1, 1 - beta2)


@torch.no_grad()
def adam_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    scalars: Tensor,
    set_grads_to_zero: bool = False,
) -> None:
    """Take one step of Adam (Kingma and Ba 2015; torch.optim.Adam without weight decay) on n tensors, in place.

    On CUDA one launch for up to 64 tensors, which can be captured in a CUDA graph.

    Args:
        params, grads, exp_avgs, exp_avg_sqs: n contiguous tensors each, of equal shapes; float32, on CPU also float64.
        scalars: [n, 8] of the same dtype on the same device, a line of `adam_scalars` for each.
        set_grads_to_zero: clear the gradients on the way.

    Raises:
        TypeError: moments of another dtype than their parameters, such as compact ones (see `compact_adam`).
        TypeError, ValueError: a tensor of the wrong shape, dtype or device (on CUDA).
        NativeBuildError: the CUDA operators cannot be compiled.
    """
    if not params:
        return
    for p, m, v in zip(params, exp_avgs, exp_avg_sqs, strict=True):
        if m.dtype != p.dtype or v.dtype != p.dtype:
            raise TypeError(
                f"adam_step: a parameter is {p.dtype}, its moments are {m.dtype} and {v.dtype}. Compact moments are "
                "for splat_update and splat_flush, which round them as they must be: keep these as the parameter is."
            )
    lists = [[t.detach() for t in tensors] for tensors in (params, grads, exp_avgs, exp_avg_sqs)]
    op: Any = torch.ops.ns_multigpu.adam_step if kernels_serve(params[0]) else adam_step_torch
    op(*lists, scalars, set_grads_to_zero)


@torch.no_grad()
def adam_step_torch(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    scalars: Tensor,
    set_grads_to_zero: bool,
    firsts: Sequence[Tensor] | None = None,
) -> None:
    """Compute `adam_step` with torch's operators, on any device. Does not wait for the device.

    Args:
        firsts: gradients that first moments get; None for `grads`.
    """
    for line, p, first, g, m, v in zip(scalars, params, firsts or grads, grads, exp_avgs, exp_avg_sqs, strict=True):
        rate, _, beta2, eps, correction1, correction2, rest1, rest2 = line.unbind()
        m.lerp_(first, rest1)
        v.mul_(beta2).add_(g * g * rest2)
        p.sub_(rate * correction1 * (m / (v.sqrt() * correction2 + eps)))
        if set_grads_to_zero:
            g.zero_()


def mean_step(log_scales: Tensor, whole: float) -> Tensor:
    """Return the part [N, 1] of Adam's step that means take: the middle of their scales divided by `whole`, at most 1.

    Args:
        log_scales: [N, 3], natural logarithms, world units.
        whole: the scale from which on steps are whole, world units; 0 for all, and [] is returned.
    """
    if whole <= 0:
        return log_scales.new_ones(())
    x, y, z = log_scales.detach().unbind(-1)
    middle = torch.maximum(torch.minimum(x, y), torch.minimum(torch.maximum(x, y), z))
    return (middle.exp() / whole).clamp(max=1.0)[:, None]


@torch.no_grad()
def shorten_step(optimizer: torch.optim.Optimizer, part: Tensor) -> None:
    """Scale the next step of an Adam with one parameter by `part`; see `splat_update`'s `whole_step_scale`.

    Args:
        optimizer: its parameter [N, ...] has a gradient; a state is made where there is none.
        part: [N, 1], the part of the gradient that the first moment gets.

    Raises:
        TypeError: the optimizer has no first moment.
    """
    (group,) = optimizer.param_groups
    (param,) = group["params"]
    if "betas" not in group:
        raise TypeError(f"{type(optimizer).__name__} has no first moment, by which steps are shortened: use Adam.")
    _make_state(optimizer.state[param], param)
    beta1, _ = group["betas"]
    optimizer.state[param]["exp_avg"].add_((part - 1) * param.grad, alpha=(1 - beta1) / beta1)


class FusedAdam(torch.optim.Adam):
    """`torch.optim.Adam` with the step in one launch: the same options, the same state_dict, and either loads the
    other's. Groups with options that the kernel does not know (weight decay, amsgrad, maximize, capturable,
    differentiable, torch's own fused) are stepped by torch's code.

    Attributes:
        moment_dtype: in which moments are kept; None for the parameters'. See `cuda_ext.ops.optim.compact_adam`.
    """

    moment_dtype: torch.dtype | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See `torch.optim.Adam.step`."""
        if not is_plain(self):
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _step_together([self])
        return loss


def fused_step(optimizers: Sequence[torch.optim.Optimizer], set_grads_to_zero: bool = False) -> None:
    """Step all optimizers: those that are `FusedAdam` with one launch per device, others separately.

    Parameters without a gradient, and empty ones, are left out, as torch does.

    Args:
        optimizers: any; one with step hooks is stepped by itself, so that its hooks run.
        set_grads_to_zero: clear the gradients of what is stepped together on the way.
    """
    together: list[FusedAdam] = []
    for optimizer in optimizers:
        hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        if isinstance(optimizer, FusedAdam) and not hooked and is_plain(optimizer):
            together.append(optimizer)
        else:
            optimizer.step()
    _step_together(together, set_grads_to_zero)


class AdamStep:
    """Parameters, moments and counters of several optimizers whose steps a kernel takes, as in a CUDA graph.

    `count` counts a step and returns its numbers, which the kernel reads on the device. It must be rebuilt when
    densification has replaced parameters or moments, as the graph is.

    Attributes:
        params, exp_avgs, exp_avg_sqs: what is stepped, in the order of the optimizers, on one device.

    Args:
        optimizers: of `FusedAdam`s; all their parameters take part.

    Raises:
        ValueError: options that the kernel does not know, several devices, or nothing to step.
    """

    def __init__(self, optimizers: Sequence[FusedAdam]) -> None:
        if not all(is_plain(optimizer) for optimizer in optimizers):
            raise ValueError("AdamStep knows no weight decay, amsgrad, maximize, capturable, differentiable or fused.")
        entries = [entry for o in optimizers for entry in _entries(o, with_grads=False)]
        self._optimizers = list(optimizers)
        self._groups = [group for group, _, _ in entries]
        self._states = [state for _, _, state in entries]
        self.params = [param for _, param, _ in entries]
        self.exp_avgs = [state["exp_avg"] for state in self._states]
        self.exp_avg_sqs = [state["exp_avg_sq"] for state in self._states]
        if len({(p.device, p.dtype) for p in self.params}) != 1:
            raise ValueError("AdamStep needs parameters, all on one device and of one dtype.")
        # All counters in one tensor, of which each state has its own as a view: one addition, and one look.
        self._counters = torch.tensor([float(state["step"]) for state in self._states])
        self._counts = self._counters.numpy()  # the same memory: quicker to count in
        for state, counter in zip(self._states, self._counters, strict=True):
            state["step"] = counter

    def count(self) -> list[tuple[float, ...]]:
        """Count a step and return its `adam_scalars`, a line for each parameter; rates and betas are read from the
        optimizers now."""
        for optimizer in self._optimizers:
            optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue] - what schedulers look for
        self._counts += 1
        lines: list[tuple[float, ...]] = []
        known: dict[Any, tuple[float, ...]] = {}  # lines that differ in their rates alone
        for group, step in zip(self._groups, self._counts.tolist(), strict=True):
            key = (group["betas"], group["eps"], step)
            if key not in known:
                known[key] = adam_scalars(0.0, *key)
            lines.append((float(group["lr"]), *known[key][1:]))
        return lines

    def is_current(self) -> bool:
        """Return whether its optimizers still hold these moments and not replacements."""
        kept = zip(self._states, self.exp_avgs, self.exp_avg_sqs, strict=True)
        return all(state["exp_avg"] is m and state["exp_avg_sq"] is v for state, m, v in kept)

    def place_moments(self, place: int, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """Make these the moments of parameter number `place`, in its optimizer too; they have the values already."""
        self.exp_avgs[place] = self._states[place]["exp_avg"] = exp_avg
        self.exp_avg_sqs[place] = self._states[place]["exp_avg_sq"] = exp_avg_sq


_rings: dict[tuple[torch.device, int], ScalarRing] = {}


def _ring(device: torch.device) -> ScalarRing:
    """Return the ring of a device's current stream."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _rings.setdefault((device, stream), ScalarRing(device, SCALARS, what="Adam's scalars"))


def is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the kernels know all options of an Adam: they know no weight decay, amsgrad or maximize."""
    options = ("weight_decay", "amsgrad", "maximize", "capturable", "differentiable", "fused")
    return not any(group.get(option) for group in optimizer.param_groups for option in options)


def _entries(optimizer: FusedAdam, with_grads: bool) -> Iterator[tuple[dict[str, Any], Tensor, dict[str, Any]]]:
    """Yield group, parameter and state of all parameters that take part in a step. Creates missing states."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if with_grads and (param.numel() == 0 or param.grad is None):
                continue
            state = optimizer.state[param]
            _make_state(state, param, optimizer.moment_dtype)
            yield group, param, state


def _make_state(state: dict[str, Any], param: Tensor, dtype: torch.dtype | None = None) -> None:
    """Initialise an empty state with a step of 0 and moments of 0."""
    if len(state) == 0:
        state["step"] = torch.tensor(0.0)  # on the host: it is read there
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.contiguous_format)


def _next_line(group: dict[str, Any], state: dict[str, Any]) -> tuple[float, ...]:
    step = state["step"]
    if step.device.type != "cpu":  # from a checkpoint of torch's fused Adam
        step = state["step"] = step.cpu()
    step += 1
    return adam_scalars(float(group["lr"]), group["betas"], group["eps"], step.item())


@torch.no_grad()
def _step_together(optimizers: Sequence[FusedAdam], set_grads_to_zero: bool = False) -> None:
    entries = [entry for optimizer in optimizers for entry in _entries(optimizer, with_grads=True)]
    for device, dtype in dict.fromkeys((param.device, param.dtype) for _, param, _ in entries):
        some = [entry for entry in entries if (entry[1].device, entry[1].dtype) == (device, dtype)]
        for _, param, _ in some:
            if not param.is_contiguous() or not param.grad.is_contiguous():  # pyright: ignore
                raise ValueError("FusedAdam needs contiguous parameters and gradients; torch.optim.Adam takes others.")
        if device.type == "multigpu":
            _step_shards(some)
            continue
        scalars = _ring(device).upload([_next_line(group, state) for group, _, state in some], dtype)
        params = [param for _, param, _ in some]
        grads = [param.grad for param in params if param.grad is not None]
        states = [state for _, _, state in some]
        moments = ([s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states])
        adam_step(params, grads, *moments, scalars, set_grads_to_zero)
    for optimizer in optimizers:
        optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue] - what schedulers look for


def _step_shards(entries: Sequence[tuple[dict[str, Any], Tensor, dict[str, Any]]]) -> None:
    """Step parameters of the aggregate device by torch's fused Adam, of which each GPU updates its shard."""
    for group, param, state in entries:
        rate, beta1, beta2, eps, *_ = _next_line(group, state)
        step = torch.full((), float(state["step"]), device=param.device)  # a copy would wait for the device
        moments, grads = ([state["exp_avg"]], [state["exp_avg_sq"]]), [g for g in (param.grad,) if g is not None]
        torch._fused_adam_(
            [param], grads, *moments, [], [step], lr=rate, beta1=beta1, beta2=beta2, weight_decay=0.0, eps=eps,
            amsgrad=False, maximize=False,
        )  # fmt: skip


LIBRARY.impl("adam_step", adam_step_torch, "CPU")
