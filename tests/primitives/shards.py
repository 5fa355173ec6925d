"""Models cut into shards for tests, and put together again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ns_multigpu.core.world import World

Model = tuple[torch.nn.ParameterDict, dict[str, torch.optim.Optimizer]]
SHAPES = {"means": (3,), "scales": (3,), "quats": (4,), "opacities": (1,), "features_dc": (3,), "rest": (15, 3)}


def whole_model(count: int, seed: int = 0, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Random points in a few clusters."""
    g = torch.Generator().manual_seed(seed)
    values = {name: torch.randn(count, *shape, generator=g) for name, shape in SHAPES.items()}
    values["means"] = torch.randn(7, 3, generator=g)[torch.randint(7, (count,), generator=g)] + 0.2 * values["means"]
    values["scales"] -= 1.0
    return {name: value.to(device) for name, value in values.items()}


def shard(values: dict[str, Tensor], bounds: Sequence[int], rank: int) -> Model:
    """A rank's rows under Adams that have taken no step."""
    params = torch.nn.ParameterDict(
        {n: torch.nn.Parameter(v[bounds[rank] : bounds[rank + 1]].clone()) for n, v in values.items()}
    )
    return params, {name: torch.optim.Adam([param], lr=0.01) for name, param in params.items()}


def take_step(model: Model, first: int, count: int, step: int, case: str) -> None:
    """A step of every Adam that has rows to step, with gradients that follow from a row's number in the whole model."""
    params, optimizers = model
    for name, param in params.items():
        g = torch.Generator().manual_seed(1000 + step)
        if len(param) > 0:
            drawn = torch.randn(count, *param.shape[1:], generator=g)
            param.grad = drawn[first : first + len(param)].to(param.device)
            optimizers[name].step()
            param.grad = None
    if case == "few places":  # dozens of points in each, on several ranks
        params["means"].data.mul_(1.5).round_().div_(1.5)


def bounds_of(case: str, count: int, world: World) -> list[int]:
    """[ranks + 1] which rows the ranks start with."""
    even = [rank * count // world.size for rank in range(world.size + 1)]
    if case == "a rank owns nothing" and world.size > 1:
        even[1] = 0
    if case == "a rank owns all":
        even = [0 if rank < world.size else count for rank in range(world.size + 1)]
    return even


def lines(model: Model) -> dict[str, Tensor]:
    """All that a point has: parameters and moments; and the number of steps of each optimizer."""
    params, optimizers = model
    found = {name: value.detach().cpu() for name, value in params.items()}
    for name, optimizer in optimizers.items():
        (group,) = optimizer.param_groups
        assert group["params"][0] is params[name] and list(optimizer.state) in ([params[name]], [])
        state: dict[str, Any] = optimizer.state.get(params[name], {})
        found |= {f"{name}.{key}": state[key].cpu() for key in ("exp_avg", "exp_avg_sq") if key in state}
        found |= {f"{name}.step": state["step"].view(1).cpu()} if "step" in state else {}
    return found


def together(outcomes: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The whole model of what `lines` gave on each rank."""
    whole: dict[str, Tensor] = {}
    for name in outcomes[0]:
        parts = [outcome[name] for outcome in outcomes]
        if name.endswith(".step"):
            assert all(torch.equal(part, parts[0]) for part in parts), name
            whole[name] = parts[0]
        else:
            whole[name] = torch.cat(parts)
    return whole


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    """The same bits."""
    assert sorted(found) == sorted(expected), what
    for name, value in expected.items():
        assert found[name].shape == value.shape, (what, name, found[name].shape, value.shape)
        assert torch.equal(found[name], value), (what, name, float((found[name] - value).abs().max()))
