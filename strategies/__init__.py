"""The strategies, by name. To add one: write its file, add its line.

Each is a function from a world, and from options where the strategy has any, to a `Strategy` for it.
"""

from collections.abc import Callable

from ns_multigpu.core.strategy import Strategy
from strategies.batch import batch
from strategies.locality import locality
from strategies.pixel import pixel
from strategies.single import single
from strategies.tile import tile

STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "single": single,
    "batch": batch,
    "tile": tile,
    "locality": locality,
    "pixel": pixel,
}
