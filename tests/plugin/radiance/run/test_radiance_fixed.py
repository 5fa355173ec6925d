"""Training steps of fixed shapes: they are the steps that there are, and launch the same whatever their rays are."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nerfstudio.cameras.camera_optimizers import CameraOptimizerConfig
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.field_components.encodings import SHEncoding
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
)

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.transport import launched
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.process_world import set_world
from ns_multigpu.plugin.radiance.field import shape_buckets
from ns_multigpu.plugin.radiance.run import fast_steps
from ns_multigpu.plugin.radiance.run.fast_steps import FastSteps, make_capturable
from ns_multigpu.plugin.radiance.run.step_graphs import GraphsByKind
from ns_multigpu.plugin.run.trainer import DistributedTrainer
from ns_multigpu.radiance.exchange import sum_gradients
from ns_multigpu.radiance.slots import Slots
from tests.lib.radiance_scene import model, moved_cameras, rays, truth
from tests.lib.ranks import run_ranks
from tests.lib.reconstruction import add_model
from tests.lib.recorded import RecordedPool
from tests.lib.training_run import write_capture
from tests.plugin.radiance.run.test_radiance_run import configured


@pytest.fixture(scope="module")
def observed_capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small capture with COLMAP's points."""
    folder = tmp_path_factory.mktemp("observed") / "tiny"
    write_capture(folder, wide=False)
    add_model(folder)
    return folder


def _step(world: World, cells: int, step: int, fixed: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Return the results of a training step, with fixed shapes or without."""
    ours = model(world, cells, **options)
    assert ours.fixed is not None
    if not fixed:
        ours.fixed = None
    moved_cameras(ours)
    batch = truth(4 if "background_color" in options else 3)
    ours.sampling.since_update = 1
    ours.begin_step(step)
    outputs = ours(rays(2.0).to(world.device))
    losses = ours.get_loss_dict(outputs, batch, ours.get_metrics_dict(outputs, batch))
    functools.reduce(torch.add, losses.values()).backward()
    sum_gradients(summed := ours.summed_parameters(), world)
    if ours.proposal_networks is not None:  # zeros in the place of no gradient would be a step of Adam's
        held = {id(p) for p in summed}
        assert {id(p) in held for p in ours.proposal_networks.parameters()} == {ours.sampling.learns}
    figures = ours.figures
    assert figures is not None
    return {
        "pixels": {name: outputs[name].detach().cpu() for name in ("rgb", "accumulation", "expected_depth")},
        "losses": {name: value.detach().cpu() for name, value in losses.items()},
        "gradients": {name: p.grad.cpu() for name, p in ours.named_parameters() if p.grad is not None},
        "figures": (len(figures.segments), figures.samples, figures.rays, float(figures.outside)),
    }


@pytest.mark.parametrize(
    ("cells", "step", "options"),
    [
        (1, 3, {}),
        (4, 3, {"disable_scene_contraction": True}),
        (3, 700, {"proposal_warmup": 5, "use_gradient_scaling": True}),  # proposals do not learn in it
        (3, 2000, {"background_color": "random", "use_single_jitter": False}),
        (4, 3, {"samples_per": "segment"}),
        (2, 3, {"background_color": "sky"}),
        (2, 3, {"background_color": "mean"}),
        (3, 3, {"depth_loss": 0.3}),
        (3, 3, {"proposals": "shared", "background_color": "last_sample"}),
        (3, 3, {"proposals": "shared", "density": "cell"}),
        (3, 700, {"proposals": "shared", "proposal_warmup": 5, "use_single_jitter": False}),
        (3, 2000, {"samples_per": "segment", "use_single_jitter": False}),
        (2, 3, {"background_color": "white", "proposal_initial_sampler": "uniform", "use_same_proposal_network": True}),
    ],
)
def test_a_step_of_fixed_shapes_is_the_step(cells: int, step: int, options: dict[str, Any]) -> None:
    fixed, packed = (_step(World.single(), cells, step, which, options) for which in (True, False))
    assert fixed["figures"] == packed["figures"]
    assert (packed["figures"][3] > 0) == ("disable_scene_contraction" in options), "some rays miss a box"
    assert any("proposal_networks" in name for name in packed["gradients"]) == (step == 3)
    for part in ("pixels", "losses"):
        for name, value in packed[part].items():
            torch.testing.assert_close(fixed[part][name], value, rtol=1e-5, atol=1e-7, msg=name)
    for name, value in packed["gradients"].items():
        scale = float(value.abs().max())
        torch.testing.assert_close(fixed["gradients"][name], value, rtol=1e-3, atol=1e-5 * scale + 1e-12, msg=name)
    for name in fixed["gradients"].keys() - packed["gradients"].keys():
        assert not fixed["gradients"][name].any(), f"{name}: of a cell that no ray meets"


def test_a_ray_that_misses_a_cell_teaches_it_nothing() -> None:
    """Even where the field is infinite there."""
    ours = model(World.single(), 2)
    assert ours.partition is not None
    (split,) = ours.partition.tree.splits
    bundle = rays()
    bundle.origins = torch.zeros_like(bundle.origins)
    bundle.origins[:, split.axis] = split.plane - 0.5  # all rays begin below, and end there
    bundle.directions[:, split.axis] = -bundle.directions[:, split.axis].abs()
    with torch.no_grad():
        for name, param in ours.cells["1"].named_parameters():
            if name.endswith("layers.1.bias"):
                param.fill_(200.0)
    ours.begin_step(3)
    outputs = ours(bundle)
    losses = ours.get_loss_dict(outputs, truth(), None)
    functools.reduce(torch.add, losses.values()).backward()
    assert ours.figures is not None and ours.figures.samples == 48 * 8
    for name, param in ours.named_parameters():
        if param.grad is not None:
            assert bool(param.grad.isfinite().all()), name
            assert not name.startswith("cells.1.") or not param.grad.any(), name


# ---- what a graph would hold ----


class _Captured(TorchDispatchMode):
    """Refuses what no CUDA graph can hold: what waits for the device, takes something from the host, or has a shape
    that follows from values; and random numbers, which would be the same each time."""

    REFUSED = (
        "nonzero", "_local_scalar_dense", "masked_select", "unique", "_unique2", "item", "is_nonzero", "equal",
        "repeat_interleave", "rand", "randn", "randint", "uniform_", "normal_", "bernoulli_", "random_", "lift_fresh",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, values = func.overloadpacket.__name__, [*args, *(kwargs or {}).values()]
        flat = [x for value in values for x in (value if isinstance(value, (list, tuple)) else [value])]
        picked = name.startswith("index") and any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in flat)
        if name in self.REFUSED or picked:
            raise AssertionError(f"a CUDA graph cannot hold {func}")
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def _as_a_kernel(composed_op: Any) -> Any:
    """It is one operator there."""

    def kernel(*args: Any) -> Any:
        with _disable_current_modes():
            return composed_op(*args)

    return kernel


@contextmanager
def _trainer(capture: Path, out: Path, world: World | None = None, **options: Any) -> Iterator[DistributedTrainer]:
    """A trainer, ready for its first step."""
    world = world or World.single()
    torch.manual_seed(3)
    config = configured(capture, out, **{"steps": 100, **options})
    config.machine.device_type = world.device.type
    World.from_env = staticmethod(lambda *_, **__: world)  # type: ignore[method-assign]
    config.get_base_dir().mkdir(parents=True, exist_ok=True)
    trainer = DistributedTrainer(config)
    try:
        trainer.setup()
        trainer.guards.numbers.prepare(trainer.optimizers.optimizers)
        yield trainer
    finally:
        set_world(None)


def _fast(trainer: DistributedTrainer, **options: Any) -> FastSteps:
    """Return the step runner of GPUs, without a graph unless one is given."""
    step_inputs = trainer.pipeline.datamanager.step_inputs()
    assert step_inputs is not None
    guard, what = trainer.guards.numbers, {"skips": False, "mixed": False, "graphs": None, **options}
    return FastSteps(trainer.pipeline, trainer.optimizers, trainer.world, guard, step_inputs=step_inputs, **what)


@pytest.mark.parametrize(
    "options",
    [
        {"background_color": "last_sample", "samples_per": "segment"},
        {"background_color": "random", "samples_per": "segment"},
        {"background_color": "white", "samples_per": "segment"},
        {"background_color": "auto", "samples_per": "segment"},
        {"background_color": "sky", "samples_per": "ray"},
        {"background_color": "last_sample", "samples_per": "ray"},
        {"depth_loss": 0.3},
    ],
)
def test_a_step_waits_for_nothing_and_launches_the_same(
    observed_capture: Path, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a GPU.
    monkeypatch.setattr(fast_steps, "finite_flags", lambda tensors: list(torch._foreach_norm(list(tensors), torch.inf)))
    # It writes numbers into a tensor, which takes a tensor of the host on CPUs alone.
    monkeypatch.setattr(SHEncoding, "pytorch_fwd", _as_a_kernel(SHEncoding.pytorch_fwd))
    with _trainer(observed_capture, tmp_path, **options) as trainer:
        make_capturable(trainer.optimizers.optimizers)
        fast = _fast(trainer, skips=True)
        given: list[list[str]] = []
        for step in (12, 13, 14):
            trainer.pipeline.model.sampling.since_update = 0
            trainer.pipeline.model.begin_step(step)
            if step == 12:  # constants are sent once
                fast.take(step)
                continue
            fast._step_inputs.send(step)
            fixed = trainer.pipeline.model.fixed
            assert fixed is not None
            fixed.numbers(rays := fast._step_inputs.kind[0])
            with _Captured() as seen:
                slots, counts = launched(fast.clip())
                launched(fast.compute(slots, tuple((rays,) * len(row) for row in counts)))
            given.append(seen.seen)
        assert given[0] == given[1] and len(given[0]) > 300


def test_the_watch_over_a_step_sees() -> None:
    mask = torch.tensor([True, False, True])
    for wait in (
        lambda: mask.nonzero(), lambda: torch.ones(3)[mask], lambda: mask.sum().item(), lambda: torch.rand(2),
        lambda: bool(mask.any()), lambda: torch.tensor(3.0, device="cpu"), lambda: torch.ones(3).masked_select(mask),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match="cannot hold"), _Captured():
            wait()


STEPS = 30


def _train_variants(
    world: World, capture: Path, out: Path, *, recorded: bool = False, **options: Any
) -> list[dict[str, torch.Tensor]]:
    """Return the models of two trainers after some steps: one with the inputs and steps of GPUs, and one without.

    Args:
        recorded: whether the former's steps are recorded and replayed, as by a graph.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shape_buckets, "WARM_UP_STEPS", 4)
        return _train_both(world, capture, out, recorded, options)


def _train_both(
    world: World, capture: Path, out: Path, recorded: bool, options: dict[str, Any]
) -> list[dict[str, torch.Tensor]]:
    ends: list[dict[str, torch.Tensor]] = []
    for name in ("fast", "plain"):
        with _trainer(capture, out / f"{name}-{world.size}", world, **options) as trainer:
            config = trainer.config
            config.fused_steps = "never" if name == "plain" else "auto"
            trainer.pipeline.model.config.proposal_warmup, trainer.pipeline.model.config.proposal_update_every = 3, 2
            fast = world.device.type == "cpu" and name == "fast"
            trainer.objective.begin(0)
            if fast:
                graphs = (
                    GraphsByKind(world.device, trainer.pipeline.timer, lambda: None, print, RecordedPool())
                    if recorded
                    else None
                )
                trainer.objective.fast = _fast(trainer, graphs=graphs)
            losses: list[float] = []
            for step in range(STEPS):
                trainer.pipeline.train()
                trainer.step = step
                trainer.pipeline.model.begin_step(step)
                losses.append(float(trainer.train_iteration(step)[0]))
                trainer.pipeline.model._end_step(step)
                trainer._look_for_nan(now=False)
            assert (trainer.objective.fast is not None) == (name == "fast")
            if (recorded or world.device.type == "cuda") and name == "fast":
                graphs = None if trainer.objective.fast is None else trainer.objective.fast._graphs
                assert graphs is not None
                keys = [kind for (kind, _), _ in graphs._captured]
                steps = {kind[2] for kind in keys if kind[0] == "step"}
                assert steps == {True, False}, "one that learns proposals, one that does not"
            found = {n: p.detach().cpu().clone() for n, p in trainer.pipeline.model.named_parameters()}
            ends.append({**found, "losses": torch.tensor(losses)})
    return ends


def _compare(ends: list[dict[str, torch.Tensor]]) -> None:
    fast, plain = ends
    assert fast.keys() == plain.keys()
    torch.testing.assert_close(fast["losses"], plain["losses"], rtol=5e-3, atol=1e-5)
    assert len(plain["losses"].unique()) == STEPS
    for name, value in plain.items():
        torch.testing.assert_close(fast[name], value, rtol=2e-2, atol=5e-3, msg=name)


def _train_recorded(world: World, *args: Any, **options: Any) -> list[dict[str, torch.Tensor]]:
    with pytest.MonkeyPatch.context() as patched:
        norms = lambda tensors: list(torch._foreach_norm(list(tensors), torch.inf))  # noqa: E731
        patched.setattr(fast_steps, "finite_flags", norms)
        return _train_variants(world, *args, recorded=True, **options)


@pytest.mark.parametrize("options", [{"samples_per": "ray"}, {"density": "cell"}, {"depth_loss": 0.3}])
def test_recorded_steps_are_the_steps(observed_capture: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    for ends in run_ranks(partial(_train_recorded, **options), 2, observed_capture, tmp_path):
        _compare(ends)


def test_rank_without_rays_takes_its_step(capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Else what keeps poses near where they were has a gradient on rank 0.
    with _trainer(capture, tmp_path, camera_optimizer=CameraOptimizerConfig(mode="off")) as trainer:
        spread = trainer.pipeline.model.spread
        found = spread.slots

        def missed(bundle: RayBundle) -> Slots:
            slots = found(bundle)
            none, rays = torch.zeros_like(slots.live), len(bundle)
            order = torch.full_like(slots.order, len(slots.live) * rays)
            return Slots(slots.near, slots.far, none, order, torch.zeros_like(slots.counts))

        monkeypatch.setattr(spread, "slots", missed)
        before = {name: p.detach().clone() for name, p in trainer.pipeline.model.own_parameters().items()}
        trainer.pipeline.model.begin_step(0)
        losses, _ = _fast(trainer).take(0)
        assert bool(losses["rgb_loss"] > 0)
        assert all(torch.equal(p, before[name]) for name, p in trainer.pipeline.model.own_parameters().items())


def test_fed_steps_are_the_steps(capture: Path, tmp_path: Path) -> None:
    for ends in run_ranks(_train_variants, 2, capture, tmp_path):
        _compare(ends)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {"samples_per": "segment"}),
        (2, {"samples_per": "segment"}),
        (2, {"samples_per": "ray"}),
        (2, {"density": "cell"}),
        (1, {"depth_loss": 0.3}),
        (2, {"depth_loss": 0.3}),
    ],
)
def test_captured_steps_are_the_steps(
    observed_capture: Path, tmp_path: Path, ranks: int, options: dict[str, Any]
) -> None:
    for ends in run_ranks(partial(_train_variants, **options), ranks, observed_capture, tmp_path, device="cuda"):
        _compare(ends)


def test_steps_without_fixed_shapes_are_reported(
    capture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with _trainer(capture, tmp_path / "a", sampling="occupancy") as trainer:
        assert trainer.pipeline.model.fixed is None
        trainer.config.fused_steps = "always"
        with pytest.raises(InputError, match=r"steps cannot be captured, for --pipeline\.model\.sampling occupancy"):
            trainer.objective.begin(0)
    with _trainer(capture, tmp_path / "b") as trainer:
        assert trainer.pipeline.model.fixed is not None
        trainer.config.fused_steps = "never"
        trainer.objective.begin(0)
        assert trainer.pipeline.model.fixed is None
        assert "taken as they come: --fused-steps never" in capsys.readouterr().out


def test_products_of_networks_are_tf32_on_gpus(capture: Path, tmp_path: Path) -> None:
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, False
    try:
        with _trainer(capture, tmp_path) as trainer:
            trainer.objective.begin(0)
        assert matmul.allow_tf32
    finally:
        matmul.allow_tf32 = before


@pytest.mark.parametrize("number", [1.0, float("nan"), float("inf")])
def test_a_step_with_a_gradient_that_is_not_finite_is_left_out(number: float) -> None:
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    adam = torch.optim.Adam([param], fused=True)
    steps = FastSteps.__new__(FastSteps)
    steps._world, steps._optimizers = World.single(), SimpleNamespace(optimizers={"fields": adam})  # type: ignore[assignment]
    launched(steps._skip_nonfinite(torch.tensor([0.5, number])))
    adam.step()
    assert bool((param == 1).all()) == (number != 1.0)
