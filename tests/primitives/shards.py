"""Models cut into shards for tests, and put together again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ns_multigpu.core.assign.placement import Placement, Sharded
from ns_multigpu.core.assign.shard_index import ShardIndex
from ns_multigpu.core.dist.world import World

Model = tuple[torch.nn.ParameterDict, dict[str, torch.optim.Optimizer]]
SHAPES = {"means": (3,), "scales": (3,), "quats": (4,), "opacities": (1,), "features_dc": (3,), "rest": (15, 3)}


def whole_model(count: int) -> dict[str, Tensor]:
    """Random points in a few clusters."""
    g = torch.Generator().manual_seed(0)
    values = {name: torch.randn(count, *shape, generator=g) for name, shape in SHAPES.items()}
    values["means"] = torch.randn(7, 3, generator=g)[torch.randint(7, (count,), generator=g)] + 0.2 * values["means"]
    values["scales"] -= 1.0
    return values


def shard(values: dict[str, Tensor], bounds: Sequence[int], rank: int, places: Tensor | None = None) -> Model:
    """Return a rank's rows, of its range or at its places, under Adams that have taken no step."""
    some = slice(bounds[rank], bounds[rank + 1]) if places is None else places
    params = torch.nn.ParameterDict({n: torch.nn.Parameter(v[some].clone()) for n, v in values.items()})
    return params, {name: torch.optim.Adam([param], lr=0.01) for name, param in params.items()}


def shard_index_of(placement: Placement | None, case: str, values: dict[str, Tensor], world: World) -> ShardIndex:
    """Return a rank's initial shard: that of the placement, or the case's ranges."""
    if placement is None or case.startswith("a rank owns"):
        return ShardIndex(placement or Sharded())
    shares = placement.shares(len(values["means"]), lambda: values["means"], world.size)
    places = shares[world.rank]
    assert isinstance(places, Tensor)
    return ShardIndex(placement, places)


def take_step(model: Model, first: int, count: int, step: int, case: str, places: Tensor | None = None) -> None:
    """A step of every Adam that has rows to step, with gradients that follow from a row's number in the whole model:
    those from `first` on, or `places`."""
    params, optimizers = model
    for name, param in params.items():
        g = torch.Generator().manual_seed(1000 + step)
        if len(param) > 0:
            drawn = torch.randn(count, *param.shape[1:], generator=g)
            some = slice(first, first + len(param)) if places is None else places.cpu()
            param.grad = drawn[some].to(param.device)
            optimizers[name].step()
            param.grad = None
    if case == "few places":  # dozens of points in each, on several ranks
        params["means"].data.mul_(1.5).round_().div_(1.5)


def bounds_of(case: str, count: int, world: World) -> list[int]:
    """Return [ranks + 1] which rows the ranks start with."""
    even = [rank * count // world.size for rank in range(world.size + 1)]
    if case == "a rank owns nothing" and world.size > 1:
        even[1] = 0
    if case == "a rank owns all":
        even = [0 if rank < world.size else count for rank in range(world.size + 1)]
    return even


def lines(model: Model) -> dict[str, Tensor]:
    """Return all that a point has: parameters and moments; and the number of steps of each optimizer."""
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
    """Return the whole model of what `lines` gave on each rank."""
    whole: dict[str, Tensor] = {}
    for name in outcomes[0]:
        parts = [outcome[name] for outcome in outcomes]
        if name.endswith(".step"):
            assert all(torch.equal(part, parts[0]) for part in parts), name
            whole[name] = parts[0]
        else:
            whole[name] = torch.cat(parts)
    return whole


def by_place(outcomes: Sequence[dict[str, Tensor]], places: Sequence[Tensor]) -> dict[str, Tensor]:
    """As `together`, in the order of the whole model: no place is empty or taken twice."""
    whole, where = together(outcomes), torch.cat(list(places)).cpu()
    assert all(bool((some.diff() > 0).all()) for some in places), "an owner keeps its points in ascending places"
    order = torch.sort(where).indices
    assert torch.equal(where[order], torch.arange(len(where)))
    return {name: value if name.endswith(".step") else value[order] for name, value in whole.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    """The same bits."""
    assert sorted(found) == sorted(expected), what
    for name, value in expected.items():
        assert found[name].shape == value.shape, (what, name, found[name].shape, value.shape)
        assert torch.equal(found[name], value), (what, name, float((found[name] - value).abs().max()))
