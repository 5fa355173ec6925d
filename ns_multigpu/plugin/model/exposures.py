"""Exposure gains of a model, three for each training view, and their presence (`--pipeline.model.exposure`)."""

from typing import Any, Literal

import torch

from ns_multigpu.core.schema import POSITION
from ns_multigpu.plugin.faults.errors import InputError

Choice = Literal["off", "gain", "auto"]

GROUP = "exposures"
"""The name of a model's gains, also of their optimizer."""


def add(model: Any) -> None:
    """Set a model's gains to 1, replacing existing ones."""
    gains = torch.ones(model.num_train_data, 3, device=model.gauss_params[POSITION].device)
    model.register_parameter(GROUP, torch.nn.Parameter(gains))


def expect(model: Any, state: dict[str, Any], *, looks: bool) -> None:
    """Prepare a model for a checkpoint with or without gains. A model that resumes training is already prepared.

    Args:
        state: the checkpoint's.
        looks: whether the model is only looked at. Then it is measured with corrected colours, too: held-out
            photographs may have exposures of their own. Not in training: 2 megapixels take 2.5 s on two cores.

    Raises:
        InputError: training cannot resume from a checkpoint with the affine maps of earlier versions.
    """
    name = f"_model.{GROUP}"
    saved = name in state
    model.config.color_corrected_metrics |= saved and looks
    if saved and state[name].dim() == 3:  # what is shown has no map
        if not looks:
            raise InputError(
                "The checkpoint has an affine map of colours for each view, and this version trains gains: train again "
                "with --pipeline.model.exposure gain, or look at the run with ns-viewer, ns-eval or ns-render."
            )
        del state[name]
        saved = False
    if saved and model.exposures is None:
        add(model)
    elif not saved and model.exposures is not None:
        model.register_parameter(GROUP, None)
