"""Densification statistics that autograd steps count after the backward pass: gsplat's, and ours.

All have splatfacto's options, and take a step after which nothing is refined.
"""

from typing import Any, Literal

from torch import Tensor

from ns_multigpu.core.types import Splats, View
from ns_multigpu.primitives.densify.densifier import ReplicatedDensifier, densification_info

_OPTIONS: dict[str, Any] = {"refine_scale2d_stop_iter": 4000}
_STEP = 1


class GsplatCounts:
    """gsplat's `DefaultStrategy`.

    Args:
        absgrad: count absolute gradients, which gsplat does not have in its distributed mode.
        packed: as `rasterization` was called.
        key: whose gradient counts: of 2D Gaussians that is "gradient_2dgs".
    """

    def __init__(self, absgrad: bool, packed: bool, key: Literal["means2d", "gradient_2dgs"] = "means2d") -> None:
        from gsplat.strategy import DefaultStrategy

        self._strategy, self._packed = DefaultStrategy(absgrad=absgrad, key_for_gradient=key, **_OPTIONS), packed
        self._state = self._strategy.initialize_state(scene_scale=1.0)
        self._info: Any = None

    def meet(self, info: Any) -> None:
        """Keep the `info` of `rasterization` before the backward pass."""
        self._strategy.step_pre_backward({}, {}, self._state, _STEP, info)
        self._info = info

    def add(self, means: Tensor) -> None:
        """Add to the statistics after the backward pass."""
        self._strategy.step_post_backward({"means": means}, {}, self._state, _STEP, self._info, self._packed)


class OurCounts:
    """`ReplicatedDensifier`, for our operators one by one."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._densifier = ReplicatedDensifier(absgrad=True, **_OPTIONS)
        self._state: Any = self._densifier.initialize_state(scene_scale=1.0)
        self._splats: Splats

    def meet(self, splats: Splats) -> None:
        """Keep the splats before the backward pass."""
        self._splats = splats

    def add(self, means: Tensor) -> None:
        """Add to the statistics after the backward pass."""
        info = densification_info(self._splats, [self._view])
        self._densifier.step_post_backward({"means": means}, {}, self._state, _STEP, info)
