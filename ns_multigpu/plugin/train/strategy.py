"""The strategy that a run's options ask for."""

from typing import Any

from ns_multigpu.core.strategy import Strategy
from ns_multigpu.core.travelling_rows import RowsTravel
from ns_multigpu.core.world import World
from ns_multigpu.plugin.faults.errors import InputError
from strategies import STRATEGIES


def strategy_of(config: Any, world: World) -> Strategy:
    """The strategy of a run, with its options if it has any.

    Raises:
        InputError: an option is out of range.
    """
    make, options = STRATEGIES[config.strategy], config.options
    if options is not None and (problem := options.problem()):
        raise InputError(f"--pipeline.{config.strategy}.{problem}.")
    try:
        strategy = make(world) if options is None else make(world, options)
    except ValueError as error:  # what does not fit these ranks
        raise InputError(str(error)) from error
    if config.stages < 1:
        raise InputError(f"--pipeline.stages {config.stages}: a step has 1 stage at least.")
    travels = isinstance(strategy.rows, RowsTravel) and strategy.pixels.whole  # not in cells, beside pixels
    if config.stages > 1 and not travels:
        raise InputError(
            f"--pipeline.stages {config.stages}: that is for splatfacto-tile and splatfacto-locality, and the strategy "
            f"is {strategy.name}. Leave it out."
        )
    if isinstance(strategy.rows, RowsTravel) and travels:
        strategy.rows.stages = config.stages
        strategy.rows.half = config.wire == "half"
    return strategy
