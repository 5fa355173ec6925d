"""Rendered images of a radiance field whose cells are sharded over ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from nerfstudio.data.scene_box import OrientedBox

from ns_multigpu.plugin.render.service import Outputs, RenderRequest


class FieldPictures:
    """Drawer of one field with all ranks; see `render.service.Drawer`. Created on every rank.

    Args:
        model: a `NerfactoXLModel`.
    """

    names = ("rgb", "rgba", "depth", "accumulation", "expected_depth")
    shows_owners = False
    interruptible = True
    draws_panoramas = True

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def shared(self) -> bool:
        """True if there are several ranks: each renders the ray segments in its cells."""
        return self._model.world.size > 1

    def alone(self) -> "FieldPictures":
        """Return a drawer for this rank alone: itself, because its field is not sharded."""
        return self

    @torch.no_grad()
    def draw(self, request: RenderRequest, roots: Sequence[int]) -> Outputs | None:
        """See `Drawer.draw`."""
        model, training, crop = self._model, self._model.training, request.crop
        model.eval()
        try:
            if request.camera is None:
                assert request.rays is not None
                outputs = model.get_outputs(request.rays.to(model.device))
            else:
                if crop is not None:
                    crop = OrientedBox(R=crop.R.to(model.device), T=crop.T.to(model.device), S=crop.S.to(model.device))
                outputs = model.get_outputs_for_camera(request.camera.to(model.device), obb_box=crop)
        finally:
            model.train(training)
        return outputs if model.world.rank in roots else None
