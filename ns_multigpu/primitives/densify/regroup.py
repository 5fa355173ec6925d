"""Growing and pruning in one pass: every tensor of the model is gathered once.

The rules, random numbers and point order are those of gsplat's `DefaultStrategy`. gsplat reallocates every parameter
and moment three times (duplicate, split, remove) and waits for the device at each. Here all decisions are made first,
one small tensor of counts is read back, and an index map gives the source of each new point. A child's fate can be
decided before it exists: it has its parent's opacity and radius, and 1 / 1.6 of its scales.

Optionally the points are sorted in the order of `morton` in the same pass, so that spatial neighbours are near each
other in memory. Alternatively, new points replace their old ones in the order.

On some 100,000 points the device finishes an operator before the host launches the next. So few operators are fast.
"""

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from gsplat.strategy import DefaultStrategy
from torch import Tensor

import cuda_ext
from ns_multigpu.primitives.densify.gathering import Gathering, gather_points, zeros_there
from ns_multigpu.primitives.densify.index_map import IndexMap, Regrouping
from ns_multigpu.primitives.deterministic import logit, sigmoid
from ns_multigpu.primitives.morton import interleaved_order

SHRINK = 1.6
"""A split's two children have their parent's scales divided by this (Kerbl et al. 2023, section 5.2)."""


class SplitRule:
    """Split rule: the children of a split, here those of 3D Gaussians. Other primitives may have more than two.

    Attributes:
        draws: normal random numbers per child.
        num_children: number of children.
        clones: True if small points with steep gradients are copied instead of split.
        shrunk: log-size parameters that are divided by `SHRINK` for children.
    """

    draws: ClassVar[int] = 3
    num_children: ClassVar[int] = 2
    clones: ClassVar[bool] = True
    shrunk: ClassVar[Collection[str]] = ("scales",)

    def sizes(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the sizes of points for size rules, [N] world units."""
        return params["scales"].exp().amax(dim=-1)

    def child_sizes(self, sizes: Tensor) -> Tensor:
        """Return the sizes of children from their parents' sizes."""
        return _child_scales(sizes).exp()

    def child_opacities(self, opacities: Tensor) -> Tensor:
        """Return the opacities of children from their parents' opacities."""
        return opacities

    def offsets(self, params: Mapping[str, Tensor], drawn: Tensor) -> Tensor:
        """Return offsets of children from their parents [C]: [births, C, 3 or more], spatial ones first.

        Args:
            params: of the parents, scalar and vector ones. drawn: [births, C, draws] normal numbers.
        """
        along = params["scales"].exp()
        if along.shape[1] == 2:  # flat: its children lie in its plane
            along = torch.nn.functional.pad(along, (0, 1))
        return cuda_ext.turn(params["quats"], along * drawn)

    def move(self, name: str, rows: Tensor, offsets: Tensor) -> None:
        """Add the offsets to a parameter's rows [births C, ...] of children, in place."""
        if name == "means":
            rows += offsets[:, :3]

    def moved(self) -> Collection[str]:
        """Return the parameters that `move` changes."""
        return ("means",)


GAUSSIAN_SPLIT = SplitRule()


@dataclass(frozen=True)
class Fates:
    """Fates of N points in a refinement, and their counts.

    Attributes:
        masks: [5 + births, N] bool, by point. 0: kept and not split. 1: copied, with a copy that is kept. 2 and one
            more for each further child: split into kept children. The last three, before pruning of new points:
            split; copied; kept if nothing were split.
        n_kept, n_copied, n_born, n_split, n_duplicate, n_unpruned: counts of masks 0, 1, 2 and the last three.
    """

    masks: Tensor
    n_kept: int
    n_copied: int
    n_born: int
    n_split: int
    n_duplicate: int
    n_unpruned: int

    @staticmethod
    def of(masks: Tensor, counts: Sequence[int]) -> "Fates":
        """Create fates from masks [5 + births, N] and their counts."""
        kept, copied, born, *_, split, duplicate, unpruned = counts
        return Fates(masks, kept, copied, born, split, duplicate, unpruned)

    @property
    def num_children(self) -> int:
        """Number of children of a split."""
        return self.masks.shape[0] - 5

    @property
    def split(self) -> Tensor:
        """Mask [N] of split points, whether or not the children are kept."""
        return self.masks[-3]

    @property
    def now(self) -> int:
        """Number of points N before the refinement."""
        return self.masks.shape[1]

    @property
    def total(self) -> int:
        """Number of points after the refinement."""
        return self.n_kept + self.n_copied + self.num_children * self.n_born

    @property
    def pruned(self) -> int:
        """Number of pruned points, including new ones."""
        return self.now + self.n_duplicate + (self.num_children - 1) * self.n_split - self.total

    def without_growth(self) -> "Fates":
        """Return the fates with pruning only."""
        masks = torch.zeros_like(self.masks)
        masks[0] = masks[-1] = self.masks[-1]
        return Fates(masks, self.n_unpruned, 0, 0, 0, 0, self.n_unpruned)

    def listed(self) -> tuple[Tensor, Tensor]:
        """Return the new points in the order of an `IndexMap`, followed by the `n_split` points that are split.

        Returns:
            [T + n_split] int64, the category of each: 0 kept, 1 copy, 2 first half and so on; then that of those split.
            [T + n_split] int64, the old point.
        """
        masks = self.masks[:-2]
        try:
            found = torch.nonzero_static(masks, size=self.total + self.n_split)
        except NotImplementedError:  # older torch has none for GPUs: there the device is asked after all
            found = masks.nonzero()
        categories, points = found.t().contiguous().unbind()
        return categories, points


@dataclass(frozen=True)
class Decided:
    """Fates of points on the device, before the host has read their counts.

    Attributes:
        masks: as `Fates.masks`. sums: of each mask, [K] int64.
    """

    masks: Tensor
    sums: Tensor

    @staticmethod
    def of(
        rules: DefaultStrategy, params: Mapping[str, Tensor], state: Mapping[str, Any], image: int,
        split_rule: SplitRule = GAUSSIAN_SPLIT,
    ) -> "Decided":  # fmt: skip
        """See `decide`; does not wait for the device."""
        masks = _masks(rules, params, state, image, split_rule)
        return Decided(masks, masks.sum(dim=1))


@torch.no_grad()
def grow_and_prune(
    rules: DefaultStrategy,
    params: MutableMapping[str, Any],
    optimizers: Mapping[str, torch.optim.Optimizer],
    state: dict[str, Any],
    image: int,
    *,
    order: Literal["as listed", "by parent", "morton"] = "as listed",
    cap: Callable[[Fates], Fates] | None = None,
    generator: torch.Generator | None = None,
    spent: Collection[str] = (),
    split_rule: SplitRule = GAUSSIAN_SPLIT,
    decided: Decided | None = None,
    ready: Gathering | None = None,
) -> tuple[int, int, int]:
    """Do what `DefaultStrategy._grow_gs` and `_prune_gs` do, in sequence. Waits for the device once.

    Draws the same numbers in the same order as gsplat does.

    Args:
        rules: the thresholds.
        params: `means` [N, 3], `scales` [N, 3], or [N, 2] of flat points (log), `quats` [N, 4], `opacities` [N, 1] or
            [N] (logits), any others with a line for each point. See `gather_points`.
        optimizers: by parameter; may lack some. They go on with the new parameters.
        state: `grad2d`, `count` and, where the rules ask for it, `radii`, [N] each; `scene_scale`. Tensors follow.
        image: the clock, which some rules look at.
        order: of the new points: kept ones first; or each where the one stood that it comes from; or that of `morton`.
        cap: may take growth out of what has been decided.
        generator: what to draw from, of the points' device; None for the device's default generator, as gsplat.
        spent: those of `state` that restart from zero instead.
        split_rule: what the halves of a split are.
        decided: what becomes of the points, where that has been found out. ready: see `gather_points`.

    Returns:
        how many points were duplicated, split and pruned.
    """
    decided = decided or Decided.of(rules, params, state, image, split_rule)
    fates = Fates.of(decided.masks, decided.sums.tolist())
    del decided
    if cap is not None:
        fates = cap(fates)
    sums = {name: value for name, value in state.items() if isinstance(value, Tensor) and len(value) == fates.now}
    if fates.n_duplicate == fates.n_split == 0 and fates.total == fates.now and order != "morton":
        for name in sums.keys() & spent:
            sums[name].zero_()
        return 0, 0, 0
    drawn = None
    if fates.n_split:
        # A number for every split, pruned or not: the draw must not depend on what is pruned.
        drawn = torch.randn(
            split_rule.num_children, fates.n_split, split_rule.draws, device=params["means"].device, generator=generator
        )
    index_map = regroup(params, fates, drawn, split_rule)
    regrouping = index_map
    if order != "as listed":
        by = interleaved_order(index_map.positions(params["means"])) if order == "morton" else index_map.source_order()
        regrouping = index_map.ordered(by)
    gather_points(
        params,
        optimizers,
        regrouping,
        lambda name, rows: edit_children(rules, name, rows, regrouping, split_rule),
        ready,
    )
    for name, value in sums.items():
        follows = name not in spent
        state[name] = value.index_select(0, regrouping.source) if follows else zeros_there(value, fates.total)
    return fates.n_duplicate, fates.n_split, fates.pruned


@torch.no_grad()
def decide(
    rules: DefaultStrategy, params: Mapping[str, Tensor], state: Mapping[str, Any], image: int,
    split_rule: SplitRule = GAUSSIAN_SPLIT, read: Callable[[Tensor], list[int]] = Tensor.tolist,
) -> Fates:  # fmt: skip
    """Decide the fate of every point independently. Waits for the device. See `grow_and_prune`.

    Args:
        read: reads numbers [K] int64 back to the host.
    """
    decided = Decided.of(rules, params, state, image, split_rule)
    return Fates.of(decided.masks, read(decided.sums))


@torch.no_grad()
def _masks(
    rules: DefaultStrategy, params: Mapping[str, Tensor], state: Mapping[str, Any], image: int, split_rule: SplitRule
) -> Tensor:
    """Return the masks of `Fates.masks`."""
    largest = split_rule.sizes(params)
    opacities = sigmoid(params["opacities"].flatten())
    steep = state["grad2d"] / state["count"].clamp_min(1) > rules.grow_grad2d
    small = largest <= rules.grow_scale3d * state["scene_scale"]
    duplicate = steep & small if split_rule.clones else torch.zeros_like(steep)
    # Of masks, a > b is true where a is and b is not.
    split = steep > duplicate
    if image < rules.refine_scale2d_stop_iter:
        split = split | (state["radii"] > rules.grow_scale2d)
    gone = opacities < rules.prune_opa
    of_children = sigmoid(_child_logits(opacities)) if rules.revised_opacity else split_rule.child_opacities(opacities)
    child_gone = gone if of_children is opacities else of_children < rules.prune_opa
    if image > rules.reset_every:
        if image < rules.refine_scale2d_stop_iter:
            wide = state["radii"] > rules.prune_scale2d
            gone, child_gone = gone | wide, child_gone | wide
        too_large = rules.prune_scale3d * state["scene_scale"]
        gone, child_gone = gone | (largest > too_large), child_gone | (split_rule.child_sizes(largest) > too_large)
    unpruned, born = ~gone, split > child_gone
    return torch.stack(
        [unpruned > split, unpruned & duplicate, *[born] * split_rule.num_children, split, duplicate, unpruned]
    )


@torch.no_grad()
def regroup(
    params: Mapping[str, Tensor], fates: Fates, drawn: Tensor | None, split_rule: SplitRule = GAUSSIAN_SPLIT
) -> IndexMap:
    """Return the index map of the new points: those kept, then copies, then first halves of splits, second halves and
    so on. Each group is ordered by parent.

    Args:
        params: see `grow_and_prune`.
        fates: the points'.
        drawn: [births, n_split, draws] normal numbers for the halves of each split; None if there is none.
        split_rule: see `grow_and_prune`.
    """
    means = params["means"]
    source, split = fates.listed()[1].split([fates.total, fates.n_split])
    if drawn is None or fates.n_born == 0:
        return IndexMap(source, fates.n_kept, means.new_empty(0, max(split_rule.draws, 3)))
    parents = source[fates.total - fates.n_born :]
    numbers = drawn.index_select(1, torch.searchsorted(split, parents))
    flat = [name for name, param in params.items() if param.dim() == 2]
    of_parents = dict(zip(flat, cuda_ext.take_rows([params[name] for name in flat], parents), strict=True))
    offsets = split_rule.offsets(of_parents, numbers).flatten(0, 1)
    return IndexMap(source, fates.n_kept, offsets.to(means.dtype))


def edit_children(
    rules: DefaultStrategy,
    name: str,
    rows: Tensor,
    regrouping: Regrouping | IndexMap,
    split_rule: SplitRule = GAUSSIAN_SPLIT,
) -> None:
    """Edit the children's rows of a parameter's rows [T, ...], still copies of their parents', in place."""
    faded = ("opacities",) if rules.revised_opacity else ()
    if name not in (*split_rule.moved(), *split_rule.shrunk, *faded) or len(regrouping.offsets) == 0:
        return
    chosen = rows[regrouping.children]  # of a slice the rows themselves, of an index a copy
    if name in split_rule.shrunk:
        _child_scales(chosen.exp(), out=chosen)
    elif name in faded:
        _child_logits(sigmoid(chosen), out=chosen)
    else:
        split_rule.move(name, chosen, regrouping.offsets)
    if isinstance(regrouping, Regrouping):
        rows[regrouping.children] = chosen


def _child_scales(sizes: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a child's log scales from its parent's scales."""
    return torch.log(sizes / SHRINK, out=out)


def _child_logits(opacities: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a child's logits from its parent's sigmoids, for `revised_opacity`: two children look like their parent
    (Bulò et al. 2024, arXiv:2404.06109)."""
    return logit(1.0 - torch.sqrt(1.0 - opacities), out=out)
