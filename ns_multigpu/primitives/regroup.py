"""Growing and pruning in one pass: every tensor of the model is gathered once, whatever happened to its points.

The rules, the random numbers and the order of the points are those of gsplat's `DefaultStrategy`, which reallocates
every parameter and moment three times (duplicate, split, remove) and waits for the device at each. Here all decisions
are made first, one small tensor of counts is read back, and an index says where each new point comes from. A child's
fate can be decided before it exists: it has its parent's opacity and radius, and 1 / 1.6 of its scales.

Optionally the points are brought into the order of `morton` on the same way, so that points near each other in space
are near each other in memory.
"""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from gsplat.strategy import DefaultStrategy
from torch import Tensor

from ns_multigpu.primitives.morton import dealt_order
from ns_multigpu.primitives.steady import logit, rotate, rotations, sigmoid

SHRINK = 1.6
"""A split's two children have their parent's scales divided by this (Kerbl et al. 2023, section 5.2)."""


@dataclass(frozen=True)
class Regrouping:
    """Where T new points come from.

    Attributes:
        source: [T] int64, the old point that each new one is a copy of.
        fresh: [F] int64, the new points that are not what they were: their moments start from zero.
        children: [2 C] int64, the new points among `fresh` that came out of a split: first halves, then second halves.
        offsets: [2 C, 3] how far each child lies from its parent.
    """

    source: Tensor
    fresh: Tensor
    children: Tensor
    offsets: Tensor

    def ordered(self, order: Tensor) -> "Regrouping":
        """The same new points in another order: the k-th becomes the one that was at `order[k]`, [T] int64."""
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return Regrouping(self.source[order], place[self.fresh], place[self.children], self.offsets)

    def positions(self, means: Tensor) -> Tensor:
        """The new points' means, [T, 3], from the old ones'."""
        new = means.detach()[self.source]
        new[self.children] += self.offsets
        return new


@dataclass(frozen=True)
class Fates:
    """What becomes of each of N points: masks [N] bool, and how many of each.

    Attributes:
        kept: stays, not split. copied: a copy of it stays beside it. born: split, into halves that stay.
        split: is split, whatever becomes of the halves. duplicate: is copied, whatever becomes of the copy.
        stays: would be kept if nothing were split.
        n_kept, n_copied, n_born, n_split, n_duplicate, n_stays: their numbers.
    """

    kept: Tensor
    copied: Tensor
    born: Tensor
    split: Tensor
    duplicate: Tensor
    stays: Tensor
    n_kept: int
    n_copied: int
    n_born: int
    n_split: int
    n_duplicate: int
    n_stays: int

    @property
    def total(self) -> int:
        """How many points there will be."""
        return self.n_kept + self.n_copied + 2 * self.n_born

    @property
    def pruned(self) -> int:
        """How many go, new ones included."""
        return len(self.kept) + self.n_duplicate + self.n_split - self.total

    def without_growth(self) -> "Fates":
        """What becomes of the points if they are pruned only."""
        none = torch.zeros_like(self.stays)
        return Fates(self.stays, none, none, none, none, self.stays, self.n_stays, 0, 0, 0, 0, self.n_stays)

    def categories(self) -> Tensor:
        """[T] int64, in the order in which `regroup` lists the new points: 0 kept, 1 copy, 2 first, 3 second half."""
        numbers = torch.arange(4, device=self.kept.device)
        times = torch.tensor([self.n_kept, self.n_copied, self.n_born, self.n_born], device=self.kept.device)
        return numbers.repeat_interleave(times, output_size=self.total)


@torch.no_grad()
def grow_and_prune(
    rules: DefaultStrategy,
    params: MutableMapping[str, Any],
    optimizers: Mapping[str, torch.optim.Optimizer],
    state: dict[str, Any],
    image: int,
    *,
    morton: bool = False,
    cap: Callable[[Fates], Fates] | None = None,
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
        morton: bring the points into the order of `morton` as well.
        cap: may take growth out of what has been decided.

    Returns:
        how many points were duplicated, split and pruned.
    """
    fates = decide(rules, params, state, image)
    if cap is not None:
        fates = cap(fates)
    count = len(params["means"])
    if fates.n_duplicate == fates.n_split == 0 and fates.total == count and not morton:
        return 0, 0, 0
    # A number for every split, pruned or not: the draw must not depend on what is pruned.
    drawn = torch.randn(2, fates.n_split, 3, device=params["means"].device) if fates.n_split else None
    regrouping = regroup(params, fates, drawn)
    if morton:
        regrouping = regrouping.ordered(dealt_order(regrouping.positions(params["means"])))
    for name in list(params):
        value = params[name].detach()[regrouping.source]
        edit_children(rules, name, value, regrouping)
        replace_parameter(optimizers.get(name), params, name, value, regrouping)
    for name, value in state.items():
        if isinstance(value, Tensor) and len(value) == count:
            state[name] = value[regrouping.source]
    return fates.n_duplicate, fates.n_split, fates.pruned


@torch.no_grad()
def decide(rules: DefaultStrategy, params: Mapping[str, Tensor], state: Mapping[str, Any], image: int) -> Fates:
    """Decides what becomes of every point, each by itself. Waits for the device. See `grow_and_prune`."""
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
    masks = (stays & ~split, stays & duplicate, born, split, duplicate, stays)
    return Fates(*masks, *torch.stack([mask.sum() for mask in masks]).tolist())


@torch.no_grad()
def regroup(params: Mapping[str, Tensor], fates: Fates, drawn: Tensor | None) -> Regrouping:
    """The new points: those kept, then copies, then first halves of splits, then second halves, each by parent.

    Args:
        params: see `grow_and_prune`.
        fates: the points'.
        drawn: [2, n_split, 3] normal numbers for the two halves of each split; None if there is none.
    """
    scales = params["scales"].detach()
    parents = compact(fates.born, fates.n_born)
    kept, copied = compact(fates.kept, fates.n_kept), compact(fates.copied, fates.n_copied)
    offsets = scales.new_zeros(0, 3)
    if drawn is not None:
        number = (fates.split.cumsum(0) - 1)[parents]
        along = scales[parents].exp() * drawn[:, number]
        offsets = rotate(rotations(params["quats"].detach()[parents]), along).reshape(-1, 3).to(scales.dtype)
    place = torch.arange(fates.total, device=parents.device)
    fresh, children = place[fates.n_kept :], place[fates.n_kept + fates.n_copied :]
    return Regrouping(torch.cat([kept, copied, parents, parents]), fresh, children, offsets)


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


def edit_children(rules: DefaultStrategy, name: str, rows: Tensor, regrouping: Regrouping) -> None:
    """Makes children of a parameter's rows [T, ...] that are still their parents', in place."""
    children = regrouping.children
    if name == "means":
        rows[children] += regrouping.offsets
    elif name == "scales":
        rows[children] = _child_scales(rows[children])
    elif name == "opacities":
        rows[children] = _child_logits(rules, rows[children])


def compact(mask: Tensor, count: int) -> Tensor:
    """The indices of the `count` true elements of `mask` [N], [count] int64, without asking the device for `count`."""
    # What is not wanted goes to one more place at the end, which is cut off.
    place = torch.where(mask, mask.cumsum(0) - 1, count)
    numbers = torch.arange(len(mask), device=mask.device)
    return numbers.new_empty(count + 1).scatter_(0, place, numbers)[:count]


def _pruned(rules: DefaultStrategy, logits: Tensor, largest: Tensor, state: Mapping[str, Any], image: int) -> Tensor:
    """Which points go: too faint, or, once opacities have been reset, too big. [N] bool."""
    gone = sigmoid(logits.flatten()) < rules.prune_opa
    if image > rules.reset_every:
        gone = gone | (largest > rules.prune_scale3d * state["scene_scale"])
        if image < rules.refine_scale2d_stop_iter:
            gone = gone | (state["radii"] > rules.prune_scale2d)
    return gone


def _child_scales(scales: Tensor) -> Tensor:
    return torch.log(scales.exp() / SHRINK)


def _child_logits(rules: DefaultStrategy, logits: Tensor) -> Tensor:
    """A child's opacity: its parent's, or such that two of them look like it (Bulò et al. 2024, arXiv:2404.06109)."""
    return logit(1.0 - torch.sqrt(1.0 - sigmoid(logits))) if rules.revised_opacity else logits
