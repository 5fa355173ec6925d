"""Points keep their place while their number changes, and what fused steps make of them does not depend on that."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from cuda_ext.ops.optim.adam import AdamStep, FusedAdam
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.transports import OwnRows
from ns_multigpu.core.step.step import Step
from ns_multigpu.core.step.step_settings import StepSettings
from ns_multigpu.core.types import Patch, View
from ns_multigpu.plugin.blocks import point_storage
from ns_multigpu.plugin.blocks.graphs import GraphPool, StepGraphs
from ns_multigpu.plugin.blocks.point_storage import PointStorage
from ns_multigpu.plugin.blocks.timing import StepTimer
from ns_multigpu.plugin.checkpoint.storage import save_file
from ns_multigpu.primitives.densify.gathering import gather_points, zeros_there
from ns_multigpu.primitives.densify.index_map import IndexMap
from ns_multigpu.primitives.gaussians.kernels import GaussianKernels
from ns_multigpu.primitives.gaussians.schema import ORDER, SCHEMA
from strategies import STRATEGIES
from tests.lib.recorded import RecordedPool

SHAPES = {one.name: one.sized(1) for one in SCHEMA}


class Model:
    """Parameters, optimizers and running sums of `count` points."""

    def __init__(self, count: int, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(0)
        self.device = device
        self.params: dict[str, Any] = {
            name: torch.nn.Parameter((0.3 * torch.randn(count, *shape, generator=generator)).to(device))
            for name, shape in SHAPES.items()
        }
        self.params["means"].data[:, 2] += 3.0
        self.params["scales"].data -= 2.0
        # So large an eps that a step grows with its gradient: rounding turns no step around where there is hardly any.
        self.optimizers = [FusedAdam([self.params[name]], lr=1e-2, eps=1e-3) for name in ORDER]
        self.state: dict[str, Any] = {"grad2d": None, "count": None, "scene_scale": 1.0}
        self.sums(count)

    def sums(self, count: int) -> None:
        self.state |= {name: torch.zeros(count, device=self.device) for name in ("grad2d", "count")}

    def held(self, points: PointStorage, most: int | None = None) -> tuple[bool, AdamStep]:
        adam = AdamStep(self.optimizers)
        return points.hold(self.params, adam, self.state, most), adam

    def take(self, kept: Tensor) -> None:
        """A refinement: each tensor is replaced by some of its rows."""
        for name, optimizer in zip(ORDER, self.optimizers, strict=True):
            old = self.params[name]
            new = torch.nn.Parameter(old.detach()[kept])
            optimizer.param_groups[0]["params"] = [new]
            state = optimizer.state.pop(old)
            optimizer.state[new] = {k: v if v.dim() == 0 else v[kept] for k, v in state.items()}
            self.params[name] = new
        self.sums(len(kept))

    def take_in_place(self, kept: Tensor) -> None:
        """Refine within the spare storage of points."""
        gather_points(
            self.params, dict(zip(ORDER, self.optimizers, strict=True)), IndexMap(kept, len(kept), torch.empty(0, 3))
        )
        self.state |= {name: zeros_there(self.state[name], len(kept)) for name in ("grad2d", "count")}

    def values(self) -> dict[str, Tensor]:
        moments = {
            f"{name} {key}": optimizer.state[self.params[name]][key]
            for name, optimizer in zip(ORDER, self.optimizers, strict=True)
            for key in ("exp_avg", "exp_avg_sq")
            if key in optimizer.state[self.params[name]]
        }
        sums = {name: self.state[name] for name in ("grad2d", "count")}
        return {k: v.detach().clone() for k, v in {**self.params, **moments, **sums}.items()}


VIEW = View(torch.eye(4), torch.tensor([[30.0, 0, 16], [0, 30.0, 12], [0, 0, 1]]), 32, 24)


def a_step(points: PointStorage) -> Step:
    settings = StepSettings(
        VIEW.width, VIEW.height, views=1, ssim_lambda=0.2, rows=4096, segment=1024, intersections=1 << 16
    )
    world = World.single(points.params["means"].device)
    kernels = GaussianKernels(degree=1, absgrad=True)
    rows = OwnRows(world, kernels, settings.rows, settings.segment, settings.words())
    single = STRATEGIES["single"](world)
    step = Step(kernels, points.params, points.moments, points.statistics, settings, single, rows)
    step.viewmats[0], step.Ks[0] = VIEW.viewmat, VIEW.K
    return step


def train(spare: bool, device: str = "cpu", *, graphs: bool = False) -> tuple[dict[str, Tensor], list[bool]]:
    """Step with refinements between them, in graphs or not; and whether each time the step of before could stay."""
    return _train(spare, device, graphs)[:2]


def _train(spare: bool, device: str, captured: bool) -> tuple[dict[str, Tensor], list[bool], int]:
    """As `train`; and how often a step was begun, to be launched or captured."""
    with pytest.MonkeyPatch.context() as patch:
        if not spare:
            patch.setattr(point_storage, "MOST_SPARED", 0)
        return _steps(device, captured)


def _steps(device: str, captured: bool) -> tuple[dict[str, Tensor], list[bool], int]:
    model, points, world = Model(200, device), PointStorage(), World.single(torch.device(device))
    pool = (GraphPool(world.device) if device == "cuda" else RecordedPool()) if captured else None
    graphs = StepGraphs(StepTimer(world.device), lambda: None, pool)
    plan, targets = Plan.of([[Patch.whole(0, VIEW)]]), [torch.full((24, 32, 3), 0.5, device=device)]
    begun: list[int] = []

    def parts(step: Step) -> Any:
        begun.append(1)
        return step.parts(plan, targets)

    step: Any = None
    stayed: list[bool] = []
    for count in (200, 180, 240, 230, 2000, 90):
        if step is not None:
            model.take(torch.arange(count, device=device) % len(model.params["means"]))
        same, adam = model.held(points)
        stayed.append(same)
        if not same:
            graphs.forget()
            step = a_step(points)
        for _ in range(3):
            step.scalars.copy_(torch.tensor(adam.count()))
            graphs.take(plan, lambda step=step: parts(step))
            assert step.status().done == 1
    return model.values(), stayed, len(begun)


def test_run_is_bitwise_the_same_with_and_without_spare_storage() -> None:
    """Runs are equal bit for bit, also with moments of removed points in the spare storage."""
    with_spare, stayed = train(spare=True)
    without, never = train(spare=False)
    assert stayed == [False, True, True, True, False, False]
    assert never == [False] * 6
    assert with_spare.keys() == without.keys()
    for name, value in with_spare.items():
        assert torch.equal(value, without[name]), name
    assert with_spare["grad2d"].sum() > 0


def test_a_refinement_in_place_leaves_the_step_and_its_adam() -> None:
    """The run is the same bit for bit without copying back: all tensors are as `hold` leaves them."""
    model, points = Model(200), PointStorage()
    plan, targets = Plan.of([[Patch.whole(0, VIEW)]]), [torch.full((24, 32, 3), 0.5)]
    graphs = StepGraphs(StepTimer(torch.device("cpu")), lambda: None, None)
    step: Any = None
    adam: Any = None
    stayed: list[bool] = []
    for count in (200, 180, 240, 230, 2000, 90):
        if step is not None:
            model.take_in_place(torch.arange(count) % len(model.params["means"]))
        stayed.append(step is not None and points.follows(model.params, adam, model.state, count))
        if not stayed[-1]:
            _, adam = model.held(points)
            step = a_step(points)
        assert points.params["means"][count:].isnan().all() and points.params["means"][:count].isfinite().all()
        assert all(param is there for param, there in zip(model.params.values(), adam.params, strict=True))
        for _ in range(3):
            step.scalars.copy_(torch.tensor(adam.count()))
            graphs.take(plan, lambda step=step: step.parts(plan, targets))
    assert stayed == [False, True, True, True, False, False]
    expected, _ = train(spare=True)
    for name, value in model.values().items():
        assert torch.equal(value, expected[name]), name


def test_moved_tensors_are_detected() -> None:
    def moment(model: Model) -> None:
        state = model.optimizers[1].state[model.params["quats"]]
        state["exp_avg_sq"] = state["exp_avg_sq"].clone()

    def parameter(model: Model) -> None:
        model.take(torch.arange(200))

    def another_object(model: Model) -> None:
        model.params["scales"] = torch.nn.Parameter(model.params["scales"].data)

    def statistics(model: Model) -> None:
        model.sums(200)

    def other_statistics(model: Model) -> None:
        model.state["radii"] = torch.zeros(200)

    def lengths(model: Model) -> None:
        model.params["scales"].data = model.params["scales"].data[:150]

    for change in (moment, parameter, another_object, statistics, other_statistics, lengths):
        model, points = Model(200), PointStorage()
        _, adam = model.held(points)
        assert points.follows(model.params, adam, model.state, 200)
        assert not points.follows(model.params, adam, model.state, 2000), "the longest shard exceeds its storage"
        change(model)
        assert not points.follows(model.params, adam, model.state, 200), change.__name__


def test_graphs_that_are_recorded_outlast_refinements() -> None:
    """Bit for bit what steps do that are launched."""
    expected, _ = train(spare=False)
    for spare, steps in ((True, 3), (False, 6)):
        found, _, begun = _train(spare, "cpu", True)
        assert begun == 2 * steps, "each step that was made was launched once, and captured once"
        for name, value in found.items():
            assert torch.equal(value, expected[name]), name


@pytest.mark.gpu
def test_graphs_outlast_refinements() -> None:
    """On a GPU the graph that was captured before a refinement does what one does that was captured after it."""
    with_spare, stayed = train(spare=True, device="cuda", graphs=True)
    without, _ = train(spare=False, device="cuda", graphs=True)
    assert stayed == [False, True, True, True, False, False]
    for name, value in with_spare.items():  # the kernels add in an order of their own
        assert torch.allclose(value, without[name], rtol=1e-3, atol=1e-3 * float(without[name].abs().max())), name
    start = Model(200, "cuda").values()["means"][:90]
    assert (with_spare["means"] - start).abs().max() > 1e-2


def test_large_models_get_no_spare_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(point_storage, "MOST_SPARED", 100)
    model, points = Model(90), PointStorage()
    model.held(points)
    assert points.keeps(90)
    assert not points.keeps(101)
    model.take(torch.arange(120) % 90)
    points.forget()
    assert not points.keeps(90)
    assert model.held(points)[0] is False
    assert points.rows == 120
    assert all(points.params[name].data_ptr() == model.params[name].data_ptr() for name in ORDER)


def test_growth_beyond_storage_never_doubles_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exceeded storage is freed first, and then each tensor after its values were copied."""
    model, points = Model(200), PointStorage()
    AdamStep(model.optimizers)
    model.held(points)
    too_small = [StorageWeakRef(x.untyped_storage()) for x in points._all()]
    model.take(torch.arange(500) % 200)
    before, adam = model.values(), AdamStep(model.optimizers)
    each = [
        StorageWeakRef(x.untyped_storage())
        for place, name in enumerate(ORDER)
        for x in (model.params[name], adam.exp_avgs[place], adam.exp_avg_sqs[place])
    ]
    gone: list[int] = []
    with_spare = point_storage._with_capacity

    def counted(x: Tensor, rows: int) -> Tensor:
        assert all(one.expired() for one in too_small)
        gone.append(sum(one.expired() for one in each))
        return with_spare(x, rows)

    monkeypatch.setattr(point_storage, "_with_capacity", counted)
    assert not points.has_capacity(500)
    points.hold(model.params, adam, model.state)
    assert gone[: len(each)] == list(range(len(each)))
    assert points.has_capacity(500) and not points.has_capacity(points.rows + 1) and not points.has_capacity(10)
    assert all(torch.equal(value, before[name]) for name, value in model.values().items())


def test_storage_is_limited_by_the_cap() -> None:
    assert [point_storage.capacity_for(count, 1000) for count in (100, 490, 790, 1000, 1001)] == [
        256,
        1024,
        1024,
        1024,
        1024,
    ]
    assert point_storage.capacity_for(2000, 1000) == 2048, "a model may begin with more than its cap"
    model, points = Model(190), PointStorage(cap=200)
    model.held(points)
    assert points.rows == 256
    model.take(torch.arange(200) % 190)
    assert model.held(points)[0] is True


def test_ranks_with_unequal_shards_rebuild_steps_together() -> None:
    """All ranks have the storage of the longest shard, and check that it suffices for the longest."""
    shards, storages = [Model(50), Model(200)], [PointStorage(), PointStorage()]
    for counts, stays in (
        ((50, 200), False),
        ((90, 230), True),
        ((10, 240), True),
        ((60, 449), False),
        ((1, 451), True),
    ):
        for model, count in zip(shards, counts, strict=True):
            if count != len(model.params["means"]):
                model.take(torch.arange(count) % len(model.params["means"]))
        answers = [model.held(points, max(counts))[0] for model, points in zip(shards, storages, strict=True)]
        assert answers == [stays] * 2, counts
        assert {points.rows for points in storages} == {point_storage.capacity_for(200 if max(counts) < 449 else 449)}
        for model, points, count in zip(shards, storages, counts, strict=True):
            assert len(model.params["means"]) == count
            assert points.params["means"][count:].isnan().all() and points.params["means"][:count].isfinite().all()


def test_other_sums_or_other_moments_are_another_step() -> None:
    model, points = Model(50), PointStorage()
    model.held(points)
    model.state["radii"] = torch.zeros(50)
    assert model.held(points)[0] is False
    assert model.held(points)[0] is True
    for optimizer in model.optimizers:
        for state in optimizer.state.values():
            state["exp_avg"], state["exp_avg_sq"] = state["exp_avg"].bfloat16(), state["exp_avg_sq"].bfloat16()
    assert model.held(points)[0] is False
    assert points.moments["means"][0].dtype == torch.bfloat16


def test_checkpoint_contains_no_spare_storage(tmp_path: Path) -> None:
    whole = torch.full((1000, 3), torch.nan)
    whole[:10] = 1.0
    save_file(tmp_path / "a", {"means": whole[:10], "more": {"opacities": [whole[:10, 0]]}, "step": 3})
    loaded = torch.load(tmp_path / "a", weights_only=True)
    assert torch.equal(loaded["means"], torch.ones(10, 3))
    assert loaded["means"].untyped_storage().nbytes() == 120
    assert loaded["more"]["opacities"][0].untyped_storage().nbytes() == 40
    assert loaded["step"] == 3
