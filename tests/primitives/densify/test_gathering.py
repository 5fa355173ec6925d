"""New points where the old ones lay: the same values as in new tensors, and the same objects as before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ns_multigpu.primitives.densify import gathering
from ns_multigpu.primitives.densify.densifier import ReplicatedDensifier
from ns_multigpu.primitives.densify.gathering import Gathering, gather_points, zeros_there
from ns_multigpu.primitives.densify.index_map import IndexMap
from tests.primitives.densify.test_densifier import COUNT, RULES, model, rows_of

STATE = ("grad2d", "count", "radii")


def with_spare(x: Tensor, rows: int) -> Tensor:
    """Return the same values at the front of memory for so many rows."""
    made = torch.full((rows, *x.shape[1:]), 77.0)
    made[: len(x)] = x
    return made[: len(x)]


def add_spare_storage(params: Any, optimizers: Any, rows: int) -> dict[str, Tensor]:
    """Move a model into storage for `rows` points, and return its tensors."""
    tensors: dict[str, Tensor] = {}
    for name, param in params.items():
        state = optimizers[name].state[param]
        param.data = with_spare(param.detach(), rows)
        tensors[name] = param
        for key in ("exp_avg", "exp_avg_sq"):
            tensors[f"{name} {key}"] = state[key] = with_spare(state[key], rows)
    return tensors


def values(params: Any, optimizers: Any, state: Any) -> dict[str, Tensor]:
    moments = {
        f"{name} {key}": optimizers[name].state[p][key]
        for name, p in params.items()
        for key in ("exp_avg", "exp_avg_sq")
    }
    found = {**dict(params.items()), **moments, **{name: state[name] for name in STATE}}
    return {name: value.detach().clone() for name, value in found.items()}


def refined(
    rows: int | None, ahead: bool = False, between: Callable[[Any, Any], None] = lambda *_: None
) -> tuple[dict[str, Tensor], bool]:
    """Refine points with storage for `rows`, or without. Return the result, and whether all objects and addresses are
    unchanged."""
    params: Any = None
    params, optimizers = model()
    densifier = ReplicatedDensifier(**RULES, seed=7)
    state = densifier.initialize_state()
    densifier.count(params, state, rows_of(0, COUNT))
    before = add_spare_storage(params, optimizers, rows) if rows else {}
    if rows:
        state.update({name: with_spare(state[name], rows) for name in STATE})
    sums = {name: state[name].data_ptr() for name in STATE}
    places = {name: x.data_ptr() for name, x in before.items()}
    if ahead:
        densifier.refine_ahead(params, optimizers, state, 16, 1, torch.tensor(True))
        between(params, optimizers)
    densifier.refine_when_due(params, optimizers, state, 16, 1)
    assert all(p.grad is None for p in params.values())
    now = dict(params.items())
    now |= {
        f"{name} {key}": optimizers[name].state[p][key]
        for name, p in params.items()
        for key in ("exp_avg", "exp_avg_sq")
    }
    stayed = bool(before) and all(now[name] is x and x.data_ptr() == places[name] for name, x in before.items())
    assert not stayed or all(state[name].data_ptr() == place for name, place in sums.items())
    assert all(optimizers[name].param_groups[0]["params"] == [p] for name, p in params.items())
    return values(params, optimizers, state), stayed


@pytest.mark.parametrize("ahead", [False, True])
def test_refinement_within_storage_keeps_addresses_and_values(ahead: bool) -> None:
    expected, _ = refined(None)
    assert len(expected["means"]) > COUNT, "it grows"
    enough, stayed = refined(len(expected["means"]), ahead)
    assert stayed
    too_little, moved = refined(len(expected["means"]) - 1, ahead)
    assert not moved
    for found in (enough, too_little):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_refinement_is_found_ahead_within_storage() -> None:
    for rows in (None, 2 * COUNT):
        params: Any = None
        params, optimizers = model()
        if rows:
            add_spare_storage(params, optimizers, rows)
        densifier = ReplicatedDensifier(**RULES)
        densifier.refine_ahead(params, optimizers, densifier.initialize_state(), 16, 1, torch.tensor(True))
        assert densifier._ahead is not None
        assert (densifier._ahead[2] is not None) == bool(rows)


def test_decision_for_another_image_is_discarded() -> None:
    outcomes: list[dict[str, Tensor]] = []
    params: Any = None
    for earlier in (False, True):
        params, optimizers = model()
        densifier = ReplicatedDensifier(**RULES, seed=7)
        state = densifier.initialize_state()
        if earlier:
            densifier.refine_ahead(params, optimizers, state, 40, 1, torch.tensor(True))
            assert densifier._ahead is not None
        densifier.count(params, state, rows_of(0, COUNT))
        densifier.refine_when_due(params, optimizers, state, 16, 1)
        outcomes.append(values(params, optimizers, state))
    assert all(torch.equal(outcomes[1][name], value) for name, value in outcomes[0].items())


def test_exceeded_storage_is_freed_with_its_contents() -> None:
    """A model that is pruned would else keep the memory of what it was."""
    params: Any = None
    params, optimizers = model()
    before = dict(params.items())
    gather_points(params, optimizers, IndexMap(torch.arange(30), 30, torch.empty(0, 3)))
    for name, param in params.items():
        assert param is not before[name]
        assert param.untyped_storage().nbytes() == param.nbytes


def test_index_map_found_ahead_is_not_used_for_other_tensors() -> None:
    """Parameters were replaced or moved in memory in between."""

    def replaced(params: Any, optimizers: Any) -> None:
        for name, old in list(params.items()):
            params[name] = new = torch.nn.Parameter(old.detach().clone())
            optimizers[name].param_groups[0]["params"] = [new]
            optimizers[name].state[new] = optimizers[name].state.pop(old)

    def moved(params: Any, optimizers: Any) -> None:
        add_spare_storage(params, optimizers, 4 * COUNT)

    def other_moments(params: Any, optimizers: Any) -> None:
        state = optimizers["quats"].state[params["quats"]]
        state["exp_avg"] = with_spare(state["exp_avg"], 4 * COUNT)

    expected, _ = refined(None)
    for between in (replaced, moved, other_moments):
        found, _ = refined(4 * COUNT, True, between)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_no_search_ahead_for_large_or_full_models(monkeypatch: pytest.MonkeyPatch) -> None:
    params: Any = None
    params, optimizers = model()
    assert Gathering.of(params, optimizers) is None, "no spare storage"
    add_spare_storage(params, optimizers, 2 * COUNT)
    found = Gathering.of(params, optimizers)
    assert found is not None and found.serves(params, optimizers, 2 * COUNT)
    assert not found.serves(params, optimizers, 2 * COUNT + 1)
    more: Any = {**dict(params.items()), "more": torch.nn.Parameter(torch.zeros(COUNT))}
    assert not found.serves(more, optimizers, COUNT), "one more parameter"
    alone = Gathering.of(params, {})
    assert alone is not None and alone.serves(params, {}, COUNT)
    other: Any = {**dict(params.items()), "quats": torch.nn.Parameter(params["quats"].data)}
    assert not alone.serves(other, {}, COUNT), "another object, in the same place"
    params["quats"].data = with_spare(params["quats"].detach(), 2 * COUNT)
    assert not found.serves(params, optimizers, COUNT), "the same object, in another place"
    state = optimizers["scales"].state[params["scales"]]
    state["exp_avg"] = state["exp_avg"].clone()
    assert Gathering.of(params, optimizers) is None, "one has none"
    add_spare_storage(params, optimizers, 2 * COUNT)
    monkeypatch.setattr(gathering, "_TOGETHER", COUNT - 1)
    assert Gathering.of(params, optimizers) is None, "large"


def test_zeros_are_allocated_in_spare_storage() -> None:
    x = with_spare(torch.ones(5), 8)
    here = zeros_there(x, 7)
    assert here.data_ptr() == x.data_ptr()
    assert torch.equal(here, torch.zeros(7))
    assert torch.equal(zeros_there(x, 9), torch.zeros(9))
    plain = torch.ones(5)
    assert zeros_there(plain, 4).data_ptr() != plain.data_ptr(), "its memory is to go"
    behind = with_spare(torch.ones(8), 16)[2:]
    assert zeros_there(behind, 6).data_ptr() != behind.data_ptr(), "not at the front of its memory"
