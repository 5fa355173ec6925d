"""One gather does what gsplat's duplicate, split and remove do in turn: the same points, moments and order."""

from typing import Any

import pytest
import torch
from gsplat.strategy import DefaultStrategy
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ns_multigpu.primitives.densify.regroup import Fates, grow_and_prune
from ns_multigpu.primitives.morton import interleaved_order

COUNT = 400
RULES: dict[str, Any] = {
    "prune_opa": 0.2, "grow_grad2d": 0.5, "grow_scale3d": 0.4, "grow_scale2d": 0.8, "prune_scale3d": 0.9,
    "prune_scale2d": 0.9, "refine_scale2d_stop_iter": 300, "reset_every": 100,
}  # fmt: skip
Model = tuple[torch.nn.ParameterDict, dict[str, torch.optim.Optimizer], dict[str, Any]]


def model(seed: int = 0) -> Model:
    """Random points under Adams that have taken a step, and statistics that call for all that can happen."""
    g = torch.Generator().manual_seed(seed)
    shapes = {"means": (3,), "scales": (3,), "quats": (4,), "opacities": (1,), "features_dc": (3,), "rest": (15, 3)}
    params = torch.nn.ParameterDict(
        {n: torch.nn.Parameter(torch.randn(COUNT, *s, generator=g)) for n, s in shapes.items()}
    )
    params["scales"].data = 0.6 * params["scales"].data - 1.2
    optimizers: dict[str, torch.optim.Optimizer] = {
        n: torch.optim.Adam([p], lr=0.01) for n, p in params.items() if n != "rest"
    }
    for name, optimizer in optimizers.items():
        params[name].grad = torch.randn(params[name].shape, generator=g)
        optimizer.step()
    state = {
        "grad2d": 4 * torch.rand(COUNT, generator=g), "count": torch.randint(0, 6, (COUNT,), generator=g).float(),
        "radii": torch.rand(COUNT, generator=g), "scene_scale": 1.1,
    }  # fmt: skip
    return params, optimizers, state


def by_gsplat(rules: DefaultStrategy, model: Model, image: int) -> tuple[int, int, int]:
    params, optimizers, state = model
    with_rest = {**optimizers, "rest": torch.optim.Adam([params["rest"]])}  # gsplat wants one for each
    grown = rules._grow_gs(params, with_rest, state, image)
    return (*grown, rules._prune_gs(params, with_rest, state, image))


def lines(model: Model) -> dict[str, Tensor]:
    """Return all that a point has: parameters, moments and statistics."""
    params, optimizers, state = model
    found = {name: value.detach() for name, value in params.items()}
    for name, optimizer in optimizers.items():
        (group,) = optimizer.param_groups
        assert group["params"][0] is params[name] and list(optimizer.state) == [params[name]]
        assert optimizer.state[params[name]]["step"] == 1
        found |= {f"{name}.{key}": optimizer.state[params[name]][key] for key in ("exp_avg", "exp_avg_sq")}
    return found | {name: value for name, value in state.items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("revised", [False, True])
@pytest.mark.parametrize("image", [50, 200, 400])  # before a reset; with all rules; without those on radii
def test_same_as_gsplat(image: int, revised: bool) -> None:
    rules = DefaultStrategy(**RULES, revised_opacity=revised)
    expected, found = model(), model()
    torch.manual_seed(3)
    counts = by_gsplat(rules, expected, image)
    after = torch.rand(1)
    torch.manual_seed(3)
    assert grow_and_prune(rules, *found, image) == counts and min(counts) > 10
    assert torch.equal(torch.rand(1), after)  # neither drew more than the other
    ours = lines(found)
    for name, value in lines(expected).items():
        torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        if name not in ("means", "scales", "opacities"):  # what is only copied
            assert torch.equal(ours[name], value), name


def test_a_point_both_duplicated_and_split_leaves_three() -> None:
    params, optimizers, state = model()
    rules = DefaultStrategy(**(RULES | {"prune_opa": 0.0, "prune_scale3d": 1e9, "prune_scale2d": 1e9}))
    state["grad2d"].zero_()
    state["radii"].zero_()
    params["scales"].data[7] = -5.0
    state["grad2d"][7], state["count"][7], state["radii"][7] = 9.0, 1.0, 0.85
    assert grow_and_prune(rules, params, optimizers, state, 50) == (1, 1, 0)
    assert len(params["means"]) == COUNT + 2
    same = (params["features_dc"] == params["features_dc"][COUNT - 1]).all(-1)
    assert same.nonzero().flatten().tolist() == [COUNT - 1, COUNT, COUNT + 1]


def test_nothing_to_do_changes_nothing() -> None:
    params, optimizers, state = model()
    before = dict(params.items())
    rules = DefaultStrategy(grow_grad2d=1e9, prune_opa=0.0, reset_every=1000)
    assert grow_and_prune(rules, params, optimizers, state, 50) == (0, 0, 0)
    assert all(params[name] is value for name, value in before.items())


def test_all_can_be_pruned() -> None:
    params, optimizers, state = model()
    rules = DefaultStrategy(**(RULES | {"prune_opa": 1.1}))
    assert grow_and_prune(rules, params, optimizers, state, 50)[2] > COUNT
    assert all(len(value) == 0 for value in params.values())


def test_the_order_keeps_the_points() -> None:
    rules = DefaultStrategy(**RULES)
    plain, ordered = model(), model()
    for each, by in ((plain, "as listed"), (ordered, "morton")):
        torch.manual_seed(3)
        grow_and_prune(rules, *each, 200, order=by)
    order = interleaved_order(plain[0]["means"])
    assert not torch.equal(order, torch.arange(len(order)))
    theirs = lines(ordered)
    for name, value in lines(plain).items():
        assert torch.equal(theirs[name], value[order]), name


def test_children_stand_next_to_their_parents() -> None:
    """SplitRule, in their order, where the whole stood; a copy behind what it is a copy of."""
    rules = DefaultStrategy(**RULES)
    plain, reordered = model(), model()
    for each, by in ((plain, "as listed"), (reordered, "by parent")):
        each[0]["number"] = torch.nn.Parameter(torch.arange(float(COUNT)))
        torch.manual_seed(3)
        done = grow_and_prune(rules, *each, 200, order=by)
        assert min(done) > 0
    numbers = plain[0]["number"].detach()
    assert not torch.equal(numbers, numbers.sort().values)
    order = numbers.sort(stable=True).indices
    theirs = lines(reordered)
    for name, value in lines(plain).items():
        assert torch.equal(theirs[name], value[order]), name
    assert torch.equal(reordered[0]["number"].detach(), numbers[order])


def test_optimizers_keep_their_state() -> None:
    params, optimizers, state = model()
    torch.manual_seed(3)
    grow_and_prune(DefaultStrategy(**RULES), params, optimizers, state, 200)
    before = params["means"].detach().clone()
    params["means"].grad = torch.ones_like(params["means"])
    optimizers["means"].step()
    assert (params["means"] != before).all()


def test_counters_restart_after_refinement() -> None:
    for rules in (DefaultStrategy(**RULES), DefaultStrategy(grow_grad2d=1e9, prune_opa=0.0, reset_every=1000)):
        params, optimizers, state = model()
        state["number"] = torch.arange(COUNT)
        grow_and_prune(rules, params, optimizers, state, 200, spent=("grad2d", "radii", "no such"))
        assert {len(value) for value in state.values() if isinstance(value, Tensor)} == {len(params["means"])}
        assert state.keys() == {"grad2d", "count", "radii", "scene_scale", "number"}
        assert not state["grad2d"].any() and not state["radii"].any()
        assert torch.equal(state["count"], model()[2]["count"][state["number"]])


def test_draws_from_a_generator_what_the_default_one_draws() -> None:
    first, second = model(), model()
    torch.manual_seed(11)
    grow_and_prune(DefaultStrategy(**RULES), *first, 200)
    before = torch.get_rng_state()
    grow_and_prune(DefaultStrategy(**RULES), *second, 200, generator=torch.Generator().manual_seed(11))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first[0]["means"], second[0]["means"])


@pytest.mark.parametrize("older", [False, True])
def test_listed(older: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise NotImplementedError

    if older:
        monkeypatch.setattr(torch, "nonzero_static", missing)
    mask = torch.rand(7, 100, generator=torch.Generator().manual_seed(0)) > 0.6
    for masks in (mask, torch.ones_like(mask), torch.zeros_like(mask), mask[:, :0]):
        masks[3] = masks[2]
        kept, copied, born, _, *others = masks.sum(dim=1).tolist()
        categories, points = Fates(masks, kept, copied, born, *others).listed()
        expected = [torch.where(one)[0] for one in masks[:5]]
        assert torch.equal(points, torch.cat(expected)) and points.is_contiguous()
        assert categories.tolist() == [k for k, one in enumerate(expected) for _ in one]


class Counted(TorchDispatchMode):
    """Counts the operators that a GPU would have to do something for."""

    VIEWS = ("view", "slice", "select", "split", "split_with_sizes", "unbind", "unsqueeze", "detach", "diagonal", "t")
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ not in self.VIEWS
        return func(*args, **(kwargs or {}))


def test_few_operators() -> None:
    """Their number is what a refinement takes: it was 170."""
    counted, refined = Counted(), model()
    with counted:
        assert min(grow_and_prune(DefaultStrategy(**RULES), *refined, 400, spent=("grad2d", "count", "radii"))) > 10
    assert counted.count <= 80
