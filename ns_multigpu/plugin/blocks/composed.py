"""Which fused step does what a strategy's pieces say. A strategy of other pieces takes ordinary steps."""

from ns_multigpu.core.assignment import AllViewsHere, DealtViews, TileRanges
from ns_multigpu.core.exchange import Nothing, SummedGradients
from ns_multigpu.core.placement import AllHere, Replicated, Sharded
from ns_multigpu.core.splat_exchange import ExchangedSplats
from ns_multigpu.core.strategy import Strategy
from ns_multigpu.plugin.blocks.fused_training import FusedTraining
from ns_multigpu.plugin.blocks.tile_training import TileTraining

_TRAININGS: dict[tuple[type, type, type], type[FusedTraining]] = {
    (AllHere, AllViewsHere, Nothing): FusedTraining,
    (Replicated, DealtViews, SummedGradients): FusedTraining,
    (Sharded, TileRanges, ExchangedSplats): TileTraining,
}


def training_of(strategy: Strategy) -> type[FusedTraining] | None:
    """What takes a strategy's fused steps; None if nothing does.

    The pieces' own types count: a class derived from one of them may do something else.
    """
    return _TRAININGS.get((type(strategy.placement), type(strategy.assignment), type(strategy.exchange)))
