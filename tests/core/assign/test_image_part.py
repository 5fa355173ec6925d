"""A rectangle of an image knows where it lies, and is cut without a copy."""

import pytest
import torch

from ns_multigpu.core.assign.image_part import ImagePart, Rectangle, area, contains, is_empty


def _image() -> dict[str, torch.Tensor]:
    return {"image": torch.arange(6 * 8 * 3).view(6, 8, 3), "mask": torch.arange(48).view(6, 8, 1) % 3 == 0}


def test_rectangle_of_part_equals_rectangle_of_image() -> None:
    data = _image()
    whole = ImagePart.whole(data)
    assert whole.rectangle == (0, 0, 8, 6)
    band = ImagePart((0, 2, 8, 5), {name: value[2:5] for name, value in data.items()})
    for part in (whole, band):
        cut = part.under((1, 3, 6, 5))
        assert cut.rectangle == (1, 3, 6, 5)
        for name, value in data.items():
            assert torch.equal(cut.data[name], value[3:5, 1:6])
            assert cut.data[name].untyped_storage().data_ptr() == value.untyped_storage().data_ptr(), "no copy"
        again = cut.under((2, 4, 4, 5))
        assert torch.equal(again.data["image"], data["image"][4:5, 2:4])
    assert whole.under((0, 0, 8, 6)) is whole


def test_empty_rectangle_has_no_part() -> None:
    for rectangle in ((9, 9, 9, 9), (3, 2, 3, 5), (2, 3, 5, 3)):
        assert is_empty(rectangle) and area(rectangle) == 0
        part = ImagePart.whole(_image()).under(rectangle)
        assert part.rectangle == rectangle
        assert part.data["image"].shape == (0, 0, 3) and part.data["mask"].shape == (0, 0, 1)


@pytest.mark.parametrize("beyond", [(1, 2, 6, 5), (2, 1, 6, 5), (2, 2, 7, 5), (2, 2, 6, 6)])
def test_rectangle_outside_of_the_part_is_refused(beyond: Rectangle) -> None:
    part = ImagePart.whole(_image()).under((2, 2, 6, 5))
    assert contains(part.rectangle, (2, 2, 6, 5)) and not contains(part.rectangle, beyond)
    with pytest.raises(ValueError, match=r"is asked for, and \(2, 2, 6, 5\) is here"):
        part.under(beyond)
