"""The quality that a run ends with is the one that ns-eval finds, on any number of ranks."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.render.evaluation import spread
from tests.lib.ranks import run_ranks
from tests.lib.rendering import make_pipeline, write_capture

HELD_OUT, RANKS, STRATEGIES = 5, (1, 2), ("batch", "tile")
MOST = (HELD_OUT, 3, 1)
BOUNDS = {1: (0, 90), 2: (0, 50, 90)}
CAPTURE_OPTIONS = ({}, {"alpha": True, "masks": True})


def _looked_at(world: World, captures: list[Path]) -> dict[Any, Any]:
    """Return a rank's metrics by capture, strategy and number of views; and by view those of ns-eval."""
    found: dict[Any, Any] = {}
    for number, capture in enumerate(captures):
        for strategy in STRATEGIES:
            pipeline = make_pipeline(world, capture, strategy, bounds=BOUNDS[world.size], background_color="white")
            pipeline.model.lpips.missing = True
            pipeline.train()
            for most in (*MOST, 100):
                found[number, strategy, most] = pipeline.held_out_quality(most)
            assert pipeline.training and pipeline.model.training
            found[number, strategy, "ns-eval"] = pipeline.get_average_eval_image_metrics()
        if world.size == 1:
            pipeline = make_pipeline(world, capture, "single", background_color="white")
            model = pipeline.model.eval()
            model.lpips.missing = True
            for index, (camera, image) in enumerate(pipeline.datamanager.fixed_indices_eval_dataloader):
                metrics, _ = model.get_image_metrics_and_images(model.get_outputs_for_camera(camera), image)
                found[number, index] = (metrics["psnr"], metrics["ssim"])
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[Any, Any]]]:
    folder = tmp_path_factory.mktemp("captures")
    captures = [write_capture(folder / str(number), HELD_OUT, **kind) for number, kind in enumerate(CAPTURE_OPTIONS)]
    return {size: run_ranks(_looked_at, size, captures) for size in RANKS}


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("number", range(len(CAPTURE_OPTIONS)))
def test_it_is_the_mean_of_ns_evals(
    found: dict[int, list[dict[Any, Any]]], number: int, strategy: str, size: int
) -> None:
    rows = [found[1][0][number, index] for index in range(HELD_OUT)]
    assert len({round(psnr, 3) for psnr, _ in rows}) == HELD_OUT, "each view has a number of its own"
    for rank in found[size]:
        for most in MOST:
            quality, chosen = rank[number, strategy, most], [rows[index] for index in spread(HELD_OUT, most)]
            assert (quality.views, quality.total) == (most, HELD_OUT)
            psnr, ssim = (sum(column) / len(chosen) for column in zip(*chosen, strict=True))
            assert quality.psnr == pytest.approx(psnr, abs=1e-4) and quality.ssim == pytest.approx(ssim, abs=1e-5)
        evaluated = rank[number, strategy, "ns-eval"]
        assert rank[number, strategy, 100] == rank[number, strategy, HELD_OUT]
        assert rank[number, strategy, 100].psnr == pytest.approx(evaluated["psnr"], abs=1e-5)
        assert rank[number, strategy, 100].ssim == pytest.approx(evaluated["ssim"], abs=1e-6)


def test_views_are_evenly_spread() -> None:
    assert spread(5, 3) == [0, 1, 3] and spread(3, 16) == [0, 1, 2] and spread(0, 4) == []
    chosen = spread(1000, 16)
    assert len(set(chosen)) == 16 and {b - a for a, b in pairwise(chosen)} == {62, 63}


def test_psnr_is_torchmetrics() -> None:
    import torch
    from torchmetrics.image import PeakSignalNoiseRatio

    from ns_multigpu.plugin.model.metrics import psnr

    first, second = torch.rand(1, 3, 20, 30), torch.rand(1, 3, 20, 30)
    torch.testing.assert_close(psnr(first, second), PeakSignalNoiseRatio(data_range=1.0)(second, first))
    assert psnr(first, first) == torch.inf
