"""End of a block of fused steps: behind the last step before something about them changes."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.blocks.signatures import Signatures
from ns_multigpu.plugin.blocks.training import MOST_STEPS, Training
from ns_multigpu.plugin.model.densifiers import make_densifier
from ns_multigpu.plugin.model.options import SplatModelConfig
from ns_multigpu.plugin.model.splat_model import SplatModel

STEPS = 700


def training_of(batch: int, **options: Any) -> Any:
    config = SplatModelConfig(**options)
    densifier = make_densifier(config, 40, World.single(), seed=0)
    model = SimpleNamespace(config=config, densifier=densifier, counts=densifier.counts)
    model.degree = partial(SplatModel.degree, model)
    pipeline = SimpleNamespace(model=model, batch_size=batch)
    return SimpleNamespace(_pipeline=pipeline, _model=model, _signature=Signatures(pipeline))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sh_degree_interval": 37, "resolution_schedule": 110, "refine_every": 23, "warmup_length": 0},
        {"densifier": "mcmc", "refine_every": 64, "warmup_length": 100, "stop_split_at": 900},
        {"primitive": "2dgs", "stop_split_at": 10},
    ],
    ids=["usual", "many changes", "mcmc", "flat"],
)
@pytest.mark.parametrize("batch", [1, 2, 7, 64])
def test_block_continues_until_an_event(batch: int, options: dict[str, Any]) -> None:
    training = training_of(batch, **options)
    fresh, densifier = Signatures(training._pipeline), training._model.densifier
    first, limits = 0, [1, 30, 41, 100, 333, STEPS]
    while first < STEPS:
        limit = next(limit for limit in limits if limit > first)
        block = Training.block(training, first, limit)
        last = first  # one step after the other
        while last + 1 < min(limit, first + MOST_STEPS):
            if densifier.due_after(last * batch, batch) or fresh(last + 1) != fresh(first):
                break
            last += 1
        assert block == range(first, last + 1)
        assert all(training._signature(step) == fresh(step) for step in (*block, block.stop))
        first = block.stop
