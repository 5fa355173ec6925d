"""Positions along the Z-order (Morton) curve."""

from torch import Tensor

MOST_BITS = 20
"""Bits an axis: three times as many fit into an int64 and leave two more."""


def interleaved(places: Tensor) -> Tensor:
    """Interleave the low `MOST_BITS` bits of the three int64s of each row of `places` [..., 3]; the first one's bit is
    the lowest (Morton code)."""
    x, y, z = _spread(places).unbind(-1)
    return x | y << 1 | z << 2


def _spread(x: Tensor) -> Tensor:
    """Insert two zeros between each bit and the next."""
    for shift, mask in (
        (32, 0x001F00000000FFFF),
        (16, 0x001F0000FF0000FF),
        (8, 0x100F00F00F00F00F),
        (4, 0x10C30C30C30C30C3),
        (2, 0x1249249249249249),
    ):
        x = (x | (x << shift)) & mask
    return x
