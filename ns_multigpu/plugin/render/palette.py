"""A colour for each rank: machines differ in hue, the ranks of a machine in lightness."""

from colorsys import hls_to_rgb

Color = tuple[float, float, float]
"""Red, green and blue, each above 0 and below 1."""

_HUES = (212.0, 24.0, 140.0, 285.0, 350.0, 182.0, 48.0, 320.0)
"""Degrees; neighbours in the list are far apart."""
_NINTH, _NEXT = 326.0, 137.508
"""Degrees: where the hues beyond those begin, and from one to the next, the golden angle. So up to 32 machines are 3
degrees apart at least."""
_LIGHT = (0.36, 0.72)


def machine_color(machine: int) -> Color:
    """Return the colour of a machine as a whole."""
    return _color(_hue(machine), 0.5)


def rank_colors(machines: int, per_machine: int) -> list[Color]:
    """Return a colour for each rank, machine by machine. With one machine the ranks differ in hue."""
    if machines == 1:
        return [machine_color(rank) for rank in range(per_machine)]
    low, high = _LIGHT
    if per_machine == 1:
        return [machine_color(machine) for machine in range(machines)]
    steps = [low + (high - low) * k / (per_machine - 1) for k in range(per_machine)]
    return [_color(_hue(machine), light) for machine in range(machines) for light in steps]


def _hue(number: int) -> float:
    if number < len(_HUES):
        return _HUES[number]
    return (_NINTH + _NEXT * (number - len(_HUES))) % 360.0


def _color(hue: float, light: float) -> Color:
    return hls_to_rgb(hue / 360.0, light, 0.72)
