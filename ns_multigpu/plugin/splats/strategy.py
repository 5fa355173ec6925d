"""Construction of the strategy that a run's options name."""

from typing import Any

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.exchanged_rows import ExchangedRows
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.plugin.faults.errors import InputError
from strategies import STRATEGIES


def strategy_of(config: Any, world: World) -> Strategy:
    """Return the strategy of a run, with its options if it has any.

    Raises:
        InputError: an option is out of range.
    """
    make, options = STRATEGIES[config.strategy], config.options
    if options is not None and (problem := options.problem()):
        raise InputError(f"--pipeline.{config.strategy}.{problem}.")
    try:
        strategy = make(world) if options is None else make(world, options)
    except ValueError as error:  # it does not fit these ranks
        raise InputError(str(error)) from error
    is_exchanged = isinstance(strategy.rows, ExchangedRows) and strategy.pixels.whole  # without pixel exchange
    if isinstance(strategy.rows, ExchangedRows) and is_exchanged:
        strategy.rows.half = config.wire == "half"
    return strategy
