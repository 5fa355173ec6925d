"""Rendered images of a radiance field whose cells are sharded over ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from nerfstudio.data.scene_box import OrientedBox

from ns_multigpu.core.image_points import pixel_rays
from ns_multigpu.core.types import Patch, Pixels, View
from ns_multigpu.plugin.model.cameras import view_from_camera
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

    def view_of(self, request: RenderRequest) -> View:
        """See `Pictures.view_of`."""
        assert request.camera is not None
        camera = request.camera.to(self._model.device)
        return view_from_camera(camera, camera.camera_to_worlds.reshape(-1, 3, 4)[0], -1)

    def surface(self, request: RenderRequest, roots: Sequence[int], *, median: bool) -> Pixels | None:
        """See `Pictures.surface`. Colours include the background; depths along rays become those of splats."""
        outputs, view = self.draw(request, roots), self.view_of(request)
        if outputs is None:
            return None
        columns, rows = (torch.arange(size, device=view.K.device) + 0.5 for size in (view.width, view.height))
        length = pixel_rays(view.K, columns, rows).norm(dim=2, keepdim=True)
        alpha, depth = outputs["accumulation"], outputs["depth" if median else "expected_depth"] / length
        return Pixels(Patch.whole(0, view), outputs["rgb"] * alpha, alpha, depth)

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
