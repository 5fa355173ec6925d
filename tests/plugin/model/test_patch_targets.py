"""The target of a patch is the whole view's there, bit for bit, whether a part of the image came or all of it."""

import pytest
import torch
from nerfstudio.models.splatfacto import SplatfactoModel
from torch import Tensor

from ns_multigpu.core.assign.image_part import ImagePart
from ns_multigpu.core.types import Patch, View
from ns_multigpu.plugin.model.splat_model import SplatModel

HEIGHT, WIDTH = 22, 31


class _Model:
    """As much of a model as makes targets."""

    device = torch.device("cpu")
    get_gt_img, composite_with_background = SplatfactoModel.get_gt_img, SplatfactoModel.composite_with_background
    _downscale_if_required, _target = SplatModel._downscale_if_required, SplatModel._target

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def _get_downscale_factor(self) -> int:
        return self.factor

    def target(self, part: ImagePart, patch: Patch, view: View) -> tuple[Tensor, Tensor | None]:
        target, mask, sky = self._target(part, patch, view, torch.tensor([0.3, 0.7, 0.1]))  # type: ignore[misc]
        assert (sky is None) == (part.data.get("mask") is None or part.data["mask"].shape[2] == 1)
        return target, mask if sky is None else torch.cat([mask, sky], dim=2)


def _whole_then_cut(
    model: _Model, data: dict[str, Tensor], rectangle: tuple[int, int, int, int]
) -> tuple[Tensor, Tensor | None]:
    """As Splatfacto has it: the whole view's target, of which a patch is cut."""
    x0, y0, x1, y1 = rectangle
    target = model.composite_with_background(  # type: ignore[misc]
        model.get_gt_img(data["image"]), torch.tensor([0.3, 0.7, 0.1])  # type: ignore[misc]
    )  # fmt: skip
    if "mask" not in data:
        return target[y0:y1, x0:x1], None
    mask = model._downscale_if_required(data["mask"])[y0:y1, x0:x1]  # type: ignore[misc]
    return target[y0:y1, x0:x1] * mask[..., :1], mask


@pytest.mark.parametrize("factor", [1, 2, 4])
@pytest.mark.parametrize("masks", [0, 1, 2])
@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
@pytest.mark.parametrize("channels", [3, 4])
def test_a_part_serves_as_the_whole_image_does(channels: int, kind: torch.dtype, masks: int, factor: int) -> None:
    g = torch.Generator().manual_seed(channels)
    image = torch.rand(HEIGHT, WIDTH, channels, generator=g)
    data = {"image": image if kind == torch.float32 else (255 * image).to(torch.uint8)}
    if masks:
        data["mask"] = torch.rand(HEIGHT, WIDTH, masks, generator=g) > 0.4
    model, whole = _Model(factor), ImagePart.whole(data)
    view = View(torch.eye(4), torch.eye(3), WIDTH // factor, HEIGHT // factor)
    for patch in (Patch(0, 2, 1, 5, 4, 1), Patch(0, 0, 0, 7, 5, 2), Patch.whole(0, view), Patch(0, 3, 3, 3, 3, 2)):
        rectangle = patch.rendered(view)
        parts = (
            [whole] if factor > 1 else [whole, whole.under((0, rectangle[1], WIDTH, HEIGHT)), whole.under(rectangle)]
        )
        empty = rectangle[0] == rectangle[2]
        if empty:  # nothing has come, at any resolution
            parts.append(whole.under(rectangle))
        wanted, covered = _whole_then_cut(model, data, rectangle)
        for part in parts:
            target, mask = model.target(part, patch, view)
            x0, y0, x1, y1 = rectangle
            assert target.shape == (y1 - y0, x1 - x0, 3)
            floats = target if target.dtype.is_floating_point else target.float() / 255
            assert torch.equal(floats, wanted)
            assert (mask is None) == (covered is None) and (mask is None or torch.equal(mask, covered))  # type: ignore
            if factor == 1 and channels == 3 and not masks:
                assert target.dtype == kind
                assert empty or target.untyped_storage().data_ptr() == data["image"].untyped_storage().data_ptr()
