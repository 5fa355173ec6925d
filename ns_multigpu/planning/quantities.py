"""Parsing and formatting of quantities: 400M, 1.5B, 3840x2160, 12.3 GiB."""

import re
from argparse import ArgumentTypeError

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}
_COUNT = re.compile(r"(\d[\d_,]*(?:\.\d+)?|\.\d+)(?:(e[+-]?\d+)|\s*([kmbg]?))", re.IGNORECASE)
_MOST = 10**12
"""Largest number of points; beyond any machine."""
_SIZE = re.compile(r"\s*(\d+)\s*[xX]\s*(\d+)\s*")


class QuantityError(ValueError, ArgumentTypeError):
    """Text that is no such quantity. Parsers of command lines print its message."""


def parse_count(text: str) -> int:
    """Parse 400M, 1.5B, 250k, 8000000, 8_000_000 or 8e6 as an integer.

    Raises:
        QuantityError: the text is none of these, or not a whole number from 1 to 10^12.
    """
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise QuantityError(f"{text!r} is no number of points: write 8000000, 8e6, 250k, 400M or 1.5B")
    number, exponent, suffix = match.groups()
    value = float(number.replace("_", "").replace(",", "") + (exponent or "")) * _SUFFIXES[(suffix or "").lower()]
    if not value <= _MOST:
        raise QuantityError(f"{text!r}: that many points fit no machine; give {_MOST:.0e} at most")
    count = round(value)
    if count < 1 or abs(value - count) > 1e-6 * count:
        raise QuantityError(f"{text!r} is not a whole number of points, 1 or more")
    return count


def parse_size(text: str) -> tuple[int, int]:
    """Parse 3840x2160 as (width, height).

    Raises:
        QuantityError: the text is no such size, or a side is below the 11 pixels of the loss's window.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise QuantityError(f"{text!r} is no size of an image: write WIDTHxHEIGHT, such as 3840x2160")
    width, height = int(match[1]), int(match[2])
    if min(width, height) < 11:
        raise QuantityError(f"images of {width}x{height} are too small: SSIM has a window of 11 pixels")
    return width, height


def gib(size: float) -> str:
    """Format bytes in GiB, with two decimals below 100 and one above."""
    value = size / 2**30
    return f"{value:,.2f}" if abs(value) < 100 else f"{value:,.1f}"
