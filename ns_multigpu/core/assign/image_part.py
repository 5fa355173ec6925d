"""Rectangle of a view's image that a rank holds."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

Rectangle = tuple[int, int, int, int]
"""(x0, y0, x1, y1): columns [x0, x1), rows [y0, y1), in pixels."""


@dataclass(frozen=True)
class ImagePart:
    """A rectangle of an image.

    Attributes:
        rectangle: where it lies, in pixels of the image.
        data: by name, each [y1 - y0, x1 - x0, ...]: `image`, and what else there is of each pixel, such as `mask`.
    """

    rectangle: Rectangle
    data: Mapping[str, Tensor]

    @staticmethod
    def whole(data: Mapping[str, Tensor]) -> "ImagePart":
        """Return the part that contains an entire image."""
        height, width = data["image"].shape[:2]
        return ImagePart((0, 0, width, height), data)

    def under(self, rectangle: Rectangle) -> "ImagePart":
        """Return the part of this one within a smaller rectangle. Its tensors are views; nothing is copied.

        Raises:
            ValueError: the rectangle is not empty, and extends beyond this one.
        """
        if rectangle == self.rectangle:
            return self
        x0, y0, x1, y1 = rectangle
        left, top, _, _ = self.rectangle
        if is_empty(rectangle):
            return ImagePart(rectangle, {name: value[:0, :0] for name, value in self.data.items()})
        if not contains(self.rectangle, rectangle):
            raise ValueError(f"the rectangle {rectangle} of an image is asked for, and {self.rectangle} is here")
        rows, columns = slice(y0 - top, y1 - top), slice(x0 - left, x1 - left)
        return ImagePart(rectangle, {name: value[rows, columns] for name, value in self.data.items()})


def is_empty(rectangle: Rectangle) -> bool:
    """Return True if it has no pixel."""
    x0, y0, x1, y1 = rectangle
    return x0 >= x1 or y0 >= y1


def contains(outer: Rectangle, inner: Rectangle) -> bool:
    """Return True if `inner` lies in `outer`."""
    return outer[0] <= inner[0] and outer[1] <= inner[1] and inner[2] <= outer[2] and inner[3] <= outer[3]


def overlap(a: Rectangle, b: Rectangle) -> Rectangle | None:
    """Return what two rectangles share; None without a pixel."""
    both = max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])
    return None if is_empty(both) else both


def around_both(a: Rectangle, b: Rectangle) -> Rectangle:
    """Return the smallest rectangle that contains two."""
    return min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])


def area(rectangle: Rectangle) -> int:
    """Return the number of pixels of a rectangle; 0 if it is empty."""
    x0, y0, x1, y1 = rectangle
    return max(x1 - x0, 0) * max(y1 - y0, 0)
