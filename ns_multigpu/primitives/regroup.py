"""Growing and pruning in one pass: every tensor of the model is gathered once, whatever happened to its points.

The rules, the random numbers and the order of the points are those of gsplat's `DefaultStrategy`, which reallocates
every parameter and moment three times (duplicate, split, remove) and waits for the device at each. Here all decisions
are made first, one small tensor of counts is read back, and an index says where each new point comes from. A child's
fate can be decided before it exists: it has its parent's opacity and radius, and 1 / 1.6 of its scales.

Optionally the points are brought into the order of their Morton codes on the same way, so that points near each other
in space are near each other in memory.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from gsplat.strategy import DefaultStrategy
from gsplat.utils import normalized_quat_to_rotmat
from torch import Tensor

SHRINK = 1.6
"""A split's two children have their parent's scales divided by this (Kerbl et al. 2023, section 5.2)."""

_MORTON_BITS = 21  # an axis: three of them fill 63 bits of an int64


@dataclass(frozen=True)
class Regrouping:
    """Where T new points come from.

    Attributes:
        source: [T] int64, the old point that each new one is a copy of.
        fresh: [F] int64, the new points that are not what they were: their moments start from zero.
        children: [2 C] int64, the new points among `fresh` that came out of a split: first halves, then second halves.
        offsets: [2 C, 3] how far each child lies from its parent.
        duplicated, split, pruned: how many points; `pruned` counts new ones too.
    """

    source: Tensor
    fresh: Tensor
    children: Tensor
    offsets: Tensor
    duplicated: int
    split: int
    pruned: int


@torch.no_grad()
def grow_and_prune(
    rules: DefaultStrategy,
    params: MutableMapping[str, Any],
    optimizers: Mapping[str, torch.optim.Optimizer],
    state: dict[str, Any],
    image: int,
    *,
    morton: bool = False,
) -> tuple[int, int, int]:
    """Does what `DefaultStrategy._grow_gs` and `_prune_gs` do, one after the other. Waits for the device once.

    Draws from the default generator of the points' device, as gsplat does: the same numbers in the same order.

    Args:
        rules: the thresholds.
        params: `means` [N, 3], `scales` [N, 3] (log), `quats` [N, 4], `opacities` [N, 1] or [N] (logits), any others
            with a line for each point. Replaced by new `Parameter`s.
        optimizers: by parameter; may lack some. They go on with the new parameters.
        state: `grad2d`, `count` and, where the rules ask for it, `radii`, [N] each; `scene_scale`. Tensors follow.
        image: the clock, which some rules look at.
        morton: bring the points into Morton order as well.

    Returns:
        how many points were duplicated, split and pruned.
    """
    regrouping = plan(rules, params, state, image, morton=morton)
    if regrouping is None:
        return 0, 0, 0
    count = len(params["means"])
    for name, value in list(params.items()):
        replace_parameter(optimizers.get(name), params, name, _values(rules, name, value, regrouping), regrouping)
    for name, value in state.items():
        if isinstance(value, Tensor) and len(value) == count:
            state[name] = value[regrouping.source]
    return regrouping.duplicated, regrouping.split, regrouping.pruned


@torch.no_grad()
def plan(
    rules: DefaultStrategy, params: Mapping[str, Tensor], state: Mapping[str, Any], image: int, *, morton: bool = False
) -> Regrouping | None:
    """Decides what becomes of every point; None if all stay as and where they are. See `grow_and_prune`."""
    scales, logits = params["scales"].detach(), params["opacities"].detach()
    largest = scales.exp().amax(dim=-1)
    steep = state["grad2d"] / state["count"].clamp_min(1) > rules.grow_grad2d
    small = largest <= rules.grow_scale3d * state["scene_scale"]
    duplicate, split = steep & small, steep & ~small
    if image < rules.refine_scale2d_stop_iter:
        split = split | (state["radii"] > rules.grow_scale2d)
    stays = ~_pruned(rules, logits, largest, state, image)
    child_largest = _child_scales(scales).exp().amax(dim=-1)
    born = split & ~_pruned(rules, _child_logits(rules, logits), child_largest, state, image)
    kept, copied = stays & ~split, stays & duplicate

    masks = (kept, copied, born, split, duplicate)
    n_kept, n_copied, n_born, n_split, n_duplicate = torch.stack([mask.sum() for mask in masks]).tolist()
    count, total = len(scales), n_kept + n_copied + 2 * n_born
    if n_duplicate == n_split == 0 and total == count and not morton:
        return None
    parents = compact(born, n_born)
    source = torch.cat([compact(kept, n_kept), compact(copied, n_copied), parents, parents])
    offsets = scales.new_zeros(0, 3)
    if n_split > 0:
        # A number for every split, pruned or not: the draw must not depend on what is pruned.
        drawn = torch.randn(2, n_split, 3, device=scales.device)
        rank = (split.cumsum(0) - 1)[parents]
        rotations = normalized_quat_to_rotmat(torch.nn.functional.normalize(params["quats"].detach()[parents], dim=-1))
        along = scales[parents].exp() * drawn[:, rank]
        offsets = torch.einsum("nij,bnj->bni", rotations, along).reshape(-1, 3).to(scales.dtype)
    place = torch.arange(total, device=source.device)
    if morton:
        means = params["means"].detach()[source]
        means[n_kept + n_copied :] += offsets
        order = morton_order(means)
        source = source[order]
        place = torch.empty_like(order).scatter_(0, order, place)
    return Regrouping(
        source,
        fresh=place[n_kept:],
        children=place[n_kept + n_copied :],
        offsets=offsets,
        duplicated=n_duplicate,
        split=n_split,
        pruned=count + n_duplicate + n_split - total,
    )


def replace_parameter(
    optimizer: torch.optim.Optimizer | None,
    params: MutableMapping[str, Any],
    name: str,
    value: Tensor,
    regrouping: Regrouping,
) -> None:
    """Puts `value` in place of the parameter `name`, in its optimizer too, whose moments follow."""
    old = params[name]
    new = torch.nn.Parameter(value, requires_grad=old.requires_grad)
    params[name] = new
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]
    if old not in optimizer.state:
        return
    state = optimizer.state.pop(old)
    for key, moment in state.items():
        if torch.is_tensor(moment) and moment.shape == old.shape:
            state[key] = moment[regrouping.source].index_fill_(0, regrouping.fresh, 0)
    optimizer.state[new] = state


def compact(mask: Tensor, count: int) -> Tensor:
    """The indices of the `count` true elements of `mask` [N], [count] int64, without asking the device for `count`."""
    # What is not wanted goes to one more place at the end, which is cut off.
    place = torch.where(mask, mask.cumsum(0) - 1, count)
    numbers = torch.arange(len(mask), device=mask.device)
    return numbers.new_empty(count + 1).scatter_(0, place, numbers)[:count]


def morton_codes(means: Tensor) -> Tensor:
    """The Morton codes of positions [N, 3], [N] int64: 21 bits an axis of a cube around all of them, interleaved."""
    if len(means) == 0:
        return torch.empty(0, dtype=torch.int64, device=means.device)
    positions = means.detach().double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    low = positions.amin(dim=0)
    side = (positions.amax(dim=0) - low).amax().clamp_min(1e-30)
    cells = (1 << _MORTON_BITS) - 1
    code = torch.zeros(len(means), dtype=torch.int64, device=means.device)
    for axis in range(3):
        cell = ((positions[:, axis] - low[axis]) / side * cells).long().clamp_(0, cells)
        code |= _spread(cell) << axis
    return code


def morton_order(means: Tensor) -> Tensor:
    """The permutation [N] int64 that brings positions [N, 3] into the order of their Morton codes; ties stay."""
    return torch.sort(morton_codes(means), stable=True).indices


def _spread(x: Tensor) -> Tensor:
    """The 21 lowest bits of int64s, two zeros between each and the next."""
    for shift, mask in (
        (32, 0x001F00000000FFFF),
        (16, 0x001F0000FF0000FF),
        (8, 0x100F00F00F00F00F),
        (4, 0x10C30C30C30C30C3),
        (2, 0x1249249249249249),
    ):
        x = (x | (x << shift)) & mask
    return x


def _pruned(rules: DefaultStrategy, logits: Tensor, largest: Tensor, state: Mapping[str, Any], image: int) -> Tensor:
    """Which points go: too faint, or, once opacities have been reset, too big. [N] bool."""
    gone = logits.flatten().sigmoid() < rules.prune_opa
    if image > rules.reset_every:
        gone = gone | (largest > rules.prune_scale3d * state["scene_scale"])
        if image < rules.refine_scale2d_stop_iter:
            gone = gone | (state["radii"] > rules.prune_scale2d)
    return gone


def _child_scales(scales: Tensor) -> Tensor:
    return torch.log(scales.exp() / SHRINK)


def _child_logits(rules: DefaultStrategy, logits: Tensor) -> Tensor:
    """A child's opacity: its parent's, or such that two of them look like it (Bulò et al. 2024, arXiv:2404.06109)."""
    return torch.logit(1.0 - torch.sqrt(1.0 - logits.sigmoid())) if rules.revised_opacity else logits


def _values(rules: DefaultStrategy, name: str, value: Tensor, regrouping: Regrouping) -> Tensor:
    """A parameter's values for the new points."""
    new = value.detach()[regrouping.source]
    children = regrouping.children
    if name == "means":
        new[children] += regrouping.offsets
    elif name == "scales":
        new[children] = _child_scales(new[children])
    elif name == "opacities":
        new[children] = _child_logits(rules, new[children])
    return new
