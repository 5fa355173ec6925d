"""Adam whose moments are kept as bfloat16: 4 bytes of state a parameter instead of 8.

The optimizer holds moments and counts steps; the fused steps of `fused.py` and `lazy_adam.py` take them,
and round what they write as it must be (see `splat_update`). Nothing else may: torch's operators would round to the
nearest, at which a moving average of beta2 = 0.999 stands still.
"""

from collections.abc import Callable
from typing import Any

import torch

from cuda_ext.ops.optim.adam import FusedAdam
from cuda_ext.reference.compact import COMPACT, is_compact

__all__ = ["COMPACT", "CompactAdam", "is_compact"]

_MOMENTS = ("exp_avg", "exp_avg_sq")


class CompactAdam(FusedAdam):
    """`FusedAdam` with compact moments, which takes no step by itself: `AdamStep` counts, `splat_update` steps.

    It loads what `torch.optim.Adam` and `FusedAdam` saved, its moments rounded to the nearest bfloat16, once; what it
    saves they load as well, exactly.
    """

    moment_dtype = COMPACT

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Raise an error: only fused steps update these moments.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "CompactAdam takes no steps of its own: its moments are bfloat16, which only fused steps (splat_update) "
            "round as they must be. Use FusedAdam or torch.optim.Adam where steps are not fused."
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `torch.optim.Adam.load_state_dict`, which would make moments float32, as the parameters are."""
        moments: dict[Any, dict[str, torch.Tensor]] = {}
        rest: dict[Any, dict[str, Any]] = {}
        for number, entry in state_dict["state"].items():
            moments[number] = {name: entry[name] for name in _MOMENTS if name in entry}
            rest[number] = {name: value for name, value in entry.items() if name not in _MOMENTS}
        super().load_state_dict({**state_dict, "state": rest})
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            for name, moment in moments.pop(number, {}).items():
                self.state[param][name] = moment.to(param.device, COMPACT)
