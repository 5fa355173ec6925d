"""Densification of replicated Gaussians: the same decision on every rank, from the statistics of all ranks.

The rules are gsplat's `DefaultStrategy`. The clock counts images instead of steps. Statistics are summed over ranks.
Random numbers are keyed by (seed, image) instead of drawn from each rank's own generator.
"""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from gsplat.strategy import DefaultStrategy
from gsplat.strategy.ops import reset_opa
from torch import Tensor

from ns_multigpu.core.dist.collectives import max_in_place, sum_in_place
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.random import keyed_generator
from ns_multigpu.core.types import Splats, View
from ns_multigpu.primitives.densify.cap import allowed_growth
from ns_multigpu.primitives.densify.gathering import Gathering
from ns_multigpu.primitives.densify.regroup import GAUSSIAN_SPLIT, Decided, Fates, SplitRule, grow_and_prune
from ns_multigpu.primitives.gaussians.functions import screen_radii


def dues(period: int, first: int, count: int) -> range:
    """Return the multiples of `period` among the `count` images from `first` on."""
    return range(-(-first // period) * period, first + count, period)


def due(period: int, first: int, count: int) -> int | None:
    """Return the last of `dues`; None if there is none."""
    return max(dues(period, first, count), default=None)


@dataclass
class ReplicatedDensifier(DefaultStrategy):
    """Adaptive density control (Kerbl et al. 2023, section 5) for replicas.

    All of DefaultStrategy's periods and limits count images. `info` is what `densification_info` returns.

    Attributes:
        world: the ranks whose statistics are summed.
        seed: the run's seed.
        morton: sort the points in the order of `morton` at every `order_every`-th refinement; at the others, new points
            replace their old ones in the order.
        cap: maximum number of points of the whole model, None for no limit; beyond it refinements only prune.
        held_back: called each time that happens, with the number of points that there would have been.
        split_rule: the split rule.
        changes: numbers of points that refinements have `duplicated`, `split` and `pruned`; cleared by the logger.
    """

    kind: ClassVar[str] = "ReplicatedDensifier"

    world: World = field(default_factory=World.single)
    seed: int = 0
    morton: bool = False
    order_every: int = 10
    cap: int | None = None
    held_back: Callable[[int], None] | None = None
    split_rule: SplitRule = GAUSSIAN_SPLIT
    changes: dict[str, int] = field(default_factory=dict, init=False, compare=False)
    _ahead: tuple[int, Decided, Gathering | None] | None = field(default=None, init=False, compare=False, repr=False)

    def step_post_backward(
        self,
        params: Any,
        optimizers: dict[str, torch.optim.Optimizer],
        state: dict[str, Any],
        step: int,
        info: Mapping[str, Any],
        packed: bool = True,
    ) -> None:
        """Add this step's gradients to the statistics and refine if due.

        Args:
            step: images seen before this step.
            info: see `densification_info`.
        """
        if not self.counts(step):
            return
        self.count(params, state, info)
        self.refine_when_due(params, optimizers, state, step, info["n_cameras"])

    def counts(self, images: int) -> bool:
        """See `Densifier`: until refining stops."""
        return images < self.refine_stop_iter

    def after_step(
        self, params: Any, optimizers: dict[str, torch.optim.Optimizer], state: dict[str, Any], step: int, images: int,
        rate: float, info: Callable[[], Mapping[str, Any]],
    ) -> None:  # fmt: skip
        """See `Densifier`."""
        if self.counts(step):
            self.step_post_backward(params, optimizers, state, step, info())

    @property
    def noisy(self) -> bool:
        """See `Densifier`."""
        return False

    def move(self, params: Any, step: int, images: int, rate: float, taken: Tensor | None = None) -> None:
        """See `Densifier`: nothing."""

    def limit(self, cap: int | None, held_back: Callable[[int], None]) -> int | None:
        """See `Densifier`."""
        self.cap, self.held_back = cap, held_back
        return cap

    def due_after(self, step: int, images: int) -> bool:
        """Return True if a refinement or a reset follows a step of `images` images from number `step` on."""
        images = self._before_stop(step, images)
        return due(self.refine_every, step, images) is not None or due(self.reset_every, step, images) is not None

    def replaces(self, params: Any, step: int, images: int) -> bool:
        """See `Densifier`: True if any refinement is due, because its result depends on statistics."""
        return self.due_after(step, images)

    @torch.no_grad()
    def refine_ahead(
        self, params: Any, optimizers: dict[str, torch.optim.Optimizer], state: dict[str, Any], step: int, images: int,
        taken: Tensor,
    ) -> bool:  # fmt: skip
        """See `Densifier`: the number of points must be read back, so that only decisions and tensors are prepared
        here."""
        image = self._refines(step, images)
        self._ahead = None
        if image is not None:
            self._ahead = image, self._decided(params, state, image), Gathering.of(params, optimizers)
        return False

    def refine_when_due(
        self, params: Any, optimizers: dict[str, torch.optim.Optimizer], state: dict[str, Any], step: int, images: int
    ) -> None:
        """Refine and reset opacities, if due after a step whose statistics have been counted."""
        image = self._refines(step, images)
        if image is not None:
            self._refine(params, optimizers, state, image)
        if due(self.reset_every, step, self._before_stop(step, images)) is not None:
            reset_opa(params=params, optimizers=optimizers, state=state, value=self.prune_opa * 2.0)

    def _refines(self, step: int, images: int) -> int | None:
        """Return the image after which a refinement is due in this step; None if there is none."""
        image = due(self.refine_every, step, self._before_stop(step, images))
        if image is None or image <= self.refine_start_iter:
            return None
        return image if image % self.reset_every >= self.pause_refine_after_reset else None

    def _orders(self, image: int) -> bool:
        """Return True if the refinement after that image sorts the points."""
        return image % (self.order_every * self.refine_every) == 0

    def _before_stop(self, step: int, images: int) -> int:
        """Return the number of images from number `step` on before refining stops. Later refinements and opacity resets
        are not due."""
        return max(0, min(images, self.refine_stop_iter - step))

    def _decided(self, params: Any, state: dict[str, Any], image: int) -> Decided:
        """Decide each point's fate from the statistics of all ranks."""
        # On copies: the last counted step may have to be retried.
        sums = {name: value.clone() for name, value in self.statistics(params, state).items()}
        for name, value in sums.items():
            (max_in_place if name == "radii" else sum_in_place)(value, self.world)
        return Decided.of(self, params, {**state, **sums}, image, self.split_rule)

    def _refine(self, params: Any, optimizers: Any, state: dict[str, Any], image: int) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] != image:
            ahead = image, self._decided(params, state, image), None
        done = grow_and_prune(
            self,
            params,
            optimizers,
            state,
            image,
            order="as listed" if not self.morton else "morton" if self._orders(image) else "by parent",
            cap=self._alone_within_cap,
            # Alike on every rank, whatever else a rank draws.
            generator=keyed_generator(self.seed, "densify", image, device=state["grad2d"].device),
            spent=("grad2d", "count", "radii"),
            split_rule=self.split_rule,
            decided=ahead[1],
            ready=ahead[2],
        )
        self._note_changes(*done)

    def _note_changes(self, duplicated: int, split: int, pruned: int) -> None:
        """Count the changes of a refinement to the whole model."""
        for name, count in (("duplicated", duplicated), ("split", split), ("pruned", pruned)):
            self.changes[name] = self.changes.get(name, 0) + count

    def within_cap(self, fates: Fates, total_now: int, total_after: int) -> Fates:
        """Return the fates of this rank's points, without growth if the whole model would exceed the cap.

        Args:
            total_now, total_after: points of the whole model, over all ranks, before and after the refinement.
        """
        if allowed_growth(total_now, total_after, self.cap):
            return fates
        if self.held_back is not None:
            self.held_back(total_after)
        return fates.without_growth()

    def _alone_within_cap(self, fates: Fates) -> Fates:
        return self.within_cap(fates, fates.now, fates.total)

    def statistics(self, params: Any, state: dict[str, Any]) -> dict[str, Tensor]:
        """Return the running sums in `state` by name, [N] each, and create missing ones."""
        names = ("grad2d", "count", *(("radii",) if self.refine_scale2d_stop_iter > 0 else ()))
        for name in names:
            if not isinstance(state.get(name), Tensor):
                state[name] = params["means"].new_zeros(len(params["means"]))
        return {name: state[name] for name in names}

    @torch.no_grad()
    def count(self, params: MutableMapping[str, Tensor], state: dict[str, Any], info: Mapping[str, Any]) -> None:
        """Add this rank's rows to the running statistics; `info` has the rows of its own points."""
        self.statistics(params, state)
        add_gradients(state, info)
        if self.refine_scale2d_stop_iter > 0:
            state["radii"].scatter_reduce_(0, info["ids"], info["radii"], "amax")


def add_gradients(state: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
    """Add the gradients of a step's rows to the sums `grad2d`, and the number of these rows to `count`, [N] each.

    Args:
        info: see `densification_info`.
    """
    ids, gradients = info["ids"], info["gradients"]
    visible = info["visible"].to(gradients.dtype)
    state["grad2d"].index_add_(0, ids, gradients * visible)
    state["count"].index_add_(0, ids, visible)


@torch.no_grad()
def densification_info(
    splats: Splats, views: list[View], radii_of: Callable[[Splats], Tensor] = screen_radii
) -> dict[str, Any]:
    """Return a step's densification statistics by row, after backward has filled the probe's gradient.

    Gradients are scaled to those of one view's own loss, in units of half an image: the step's loss is the mean over
    views.

    Args:
        radii_of: radii in pixels of splats, [M]; 3D Gaussians' by default.

    Returns:
        `n_cameras`; `ids` [M] int64; `gradients` [M] norms, 0 for splats that are not drawn; `visible` [M] 1 if the
        square of 3 sigma touches the view, as gsplat 1.4.0 counts, drawn or not, else 0; `radii` [M] fractions of
        the image's longer side.
    """
    ids = splats.hits.point_ids.long()
    place = splats.hits.view_ids.long()
    device = ids.device
    like = {"device": device, "dtype": splats.rows["means2d"].dtype}
    half = torch.tensor([[v.width / 2.0, v.height / 2.0] for v in views], **like)
    longest = torch.tensor([float(max(v.width, v.height)) for v in views], **like)
    probe = splats.probe
    gradient = torch.zeros(len(splats), 2, **like)
    if probe is not None and probe.grad is not None:
        gradient = probe.grad
    radii = splats.rows["radii"][:, 0]
    return {
        "n_cameras": len(views),
        "ids": ids,
        "gradients": torch.where(radii > 0, (gradient * half[place] * len(views)).norm(dim=-1), 0.0),
        "visible": (radii != 0).float(),
        "radii": radii_of(splats) / longest[place],
    }
