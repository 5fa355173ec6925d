"""Kernels of a refinement are loaded onto the GPU while a run starts, with points of their own."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_ext.ops.optim.adam import FusedAdam
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.blocks import warmup
from ns_multigpu.plugin.blocks.warmup import warm_up
from ns_multigpu.plugin.model.densifiers import make_densifier
from ns_multigpu.plugin.model.options import SplatModelConfig
from ns_multigpu.primitives.densify import densifier
from ns_multigpu.primitives.gaussians.schema import SCHEMA

CPU = torch.device("cpu")
SHAPES = {one.name: one.sized(3) for one in SCHEMA}


def model_of(points: int, device: str = "cpu", **options: Any) -> Any:
    g = torch.Generator().manual_seed(0)
    params = {name: torch.randn(points, *shape, generator=g).to(device) for name, shape in SHAPES.items()}
    config = SplatModelConfig(**options)
    return SimpleNamespace(config=config, gauss_params=torch.nn.ParameterDict(params))


def copied(model: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.gauss_params.items()}


@pytest.mark.parametrize("points", [0, 7, 500])
@pytest.mark.parametrize("state", ["full", "compact"])
def test_points_are_split_duplicated_pruned_and_ordered(
    points: int, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made, orders = model_of(points, optimizer_state=state, morton_order=True), list[Any](), set[Any]()
    before, usual, grow = copied(model), make_densifier, densifier.grow_and_prune

    def kept(*args: Any, **kwargs: Any) -> Any:
        made.append(usual(*args, **kwargs))
        return made[-1]

    def grown(*args: Any, order: Any, **kwargs: Any) -> Any:
        orders.add(order)
        return grow(*args, order=order, **kwargs)

    monkeypatch.setattr(warmup, "make_densifier", kept)
    monkeypatch.setattr(densifier, "grow_and_prune", grown)
    resets = list[float]()
    monkeypatch.setattr(densifier, "reset_opa", lambda **given: resets.append(given["value"]))
    warmup._refine(model, CPU)
    assert all(made[0].changes[name] > 0 for name in ("duplicated", "split", "pruned"))
    assert orders == {"by parent", "morton"} and len(resets) == 1
    assert all(torch.equal(value, before[name]) for name, value in model.gauss_params.items()), "the model stays"


def test_cpu_needs_no_warm_up() -> None:
    before = threading.active_count()
    warm_up(SimpleNamespace(), World.single())()
    assert threading.active_count() == before


def test_failure_of_the_warm_up_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(warmup, "_on_device", fails)
    wait = warm_up(SimpleNamespace(), SimpleNamespace(device=torch.device("cuda:0")))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no such kernel"):
        wait()


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"densifier": "mcmc"}, {"optimizer_state": "compact"}])
def test_gpu_warm_up_overlaps_the_run(options: dict[str, Any]) -> None:
    model = model_of(1000, "cuda", **options)
    before = copied(model)
    wait = warm_up(model, World.single("cuda:0"))
    weight = torch.nn.Parameter(torch.ones(1000, device="cuda"))
    adam = FusedAdam([weight], lr=0.1)
    for _ in range(20):
        weight.grad = weight.detach().clone()
        adam.step()
    wait()
    assert all(torch.equal(value, before[name]) for name, value in model.gauss_params.items())
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
