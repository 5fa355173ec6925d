"""Every obstacle to fused steps is named; a block ends where something is to be done."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nerfstudio.utils.misc import step_check

import cuda_ext
from cuda_ext.ops.optim.adam import FusedAdam
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.schema import names
from ns_multigpu.plugin.blocks.fused_noise import StepNoise
from ns_multigpu.plugin.blocks.fused_options import check_requests, fuses, next_stop, obstacle
from ns_multigpu.plugin.blocks.training import Training
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.primitives.convexes.functions import Convexes
from ns_multigpu.primitives.densify.densifier import ReplicatedDensifier
from ns_multigpu.primitives.densify.mcmc import McmcDensifier
from ns_multigpu.primitives.gaussians.functions import Gaussians
from ns_multigpu.primitives.gaussians.schema import ORDER
from ns_multigpu.primitives.registry import PRIMITIVES
from strategies import STRATEGIES

GPU = World(0, 1, 0, 1, torch.device("cuda", 0))


def make_run(fused_steps: str = "always") -> SimpleNamespace:
    """Return a run without any obstacle, as far as `obstacle` looks at it."""
    options = SimpleNamespace(
        primitive="3dgs",
        optimizer_state="full",
        camera_optimizer=SimpleNamespace(mode="off"),
        use_bilateral_grid=False,
        sh_degree=3,
        use_scale_regularization=False,
    )
    densifier = object.__new__(ReplicatedDensifier)
    model = SimpleNamespace(
        config=options, densifier=densifier, means=torch.zeros(4, 3), primitive=Gaussians, exposures=None
    )
    strategy = STRATEGIES["batch"](World.single())
    params = {name: torch.nn.Parameter(torch.zeros(2)) for name in ORDER}
    optimizers = SimpleNamespace(
        optimizers={name: FusedAdam([param]) for name, param in params.items()},
        config={name: {"optimizer": SimpleNamespace(max_norm=None)} for name in ORDER},
    )
    return SimpleNamespace(
        config=SimpleNamespace(fused_steps=fused_steps),
        pipeline=SimpleNamespace(model=model, strategy=strategy, batch_size=4),
        optimizers=optimizers,
    )


def asked(run: SimpleNamespace, world: World | None = None) -> tuple[bool, str]:
    return fuses(run.config, run.pipeline, run.optimizers, world or World.single())


def _many_views(run: SimpleNamespace) -> None:
    run.pipeline.batch_size = 129


def _other_optimizer(run: SimpleNamespace) -> None:
    run.optimizers.optimizers["quats"] = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])


def _no_optimizer(run: SimpleNamespace) -> None:
    del run.optimizers.optimizers["features_rest"]


def _one_decays(run: SimpleNamespace) -> None:
    run.optimizers.optimizers["quats"].param_groups[0]["weight_decay"] = 0.1


def _one_clipped(run: SimpleNamespace) -> None:
    run.optimizers.config["scales"]["optimizer"].max_norm = 1.0


def _exposures_decay(run: SimpleNamespace) -> None:
    run.pipeline.model.exposures = torch.nn.Parameter(torch.zeros(2))
    run.optimizers.optimizers["exposures"] = FusedAdam([run.pipeline.model.exposures], weight_decay=0.1)
    run.optimizers.config["exposures"] = {"optimizer": SimpleNamespace(max_norm=None)}


def _correct_poses(run: SimpleNamespace, **options: Any) -> None:
    run.pipeline.model.config.camera_optimizer.mode = "SO3xR3"
    run.optimizers.optimizers["camera_opt"] = FusedAdam([torch.nn.Parameter(torch.zeros(3, 6))], **options)
    run.optimizers.config["camera_opt"] = {"optimizer": SimpleNamespace(max_norm=None)}


def _needles_of_surfels(run: SimpleNamespace) -> None:
    options = run.pipeline.model.config
    options.use_scale_regularization = True
    assert obstacle(run.config, run.pipeline, run.optimizers) is None, "3D Gaussians have kernels for it"
    options.primitive = "2dgs"


def _one_device(run: SimpleNamespace, *, observed: Sequence[str] = (), sky_loss: float = 0.0) -> None:
    run.pipeline.model.means = SimpleNamespace(device=SimpleNamespace(type="multigpu"))
    run.pipeline.observed, run.pipeline.model.config.sky_loss = (), 0.0
    assert obstacle(run.config, run.pipeline, run.optimizers) is None
    run.pipeline.observed, run.pipeline.model.config.sky_loss = observed, sky_loss


_OF_MAPS = "on one device of all GPUs they have no losses of depth, of normals and of the sky"

OBSTACLES: list[tuple[Callable[[SimpleNamespace], None], str]] = [
    (partial(_correct_poses, weight_decay=0.1), "an optimizer has weight decay"),
    (_needles_of_surfels, r"scales of 2D Gaussians \(2dgs\) are regularised"),
    (partial(_one_device, observed=["normals"]), _OF_MAPS),
    (partial(_one_device, sky_loss=0.1), _OF_MAPS),
    (_many_views, "there are more than 128 views a step"),
    (_other_optimizer, "an optimizer is not Adam"),
    (_no_optimizer, "an optimizer is not Adam"),
    (_one_decays, "an optimizer has weight decay"),
    (_exposures_decay, "an optimizer has weight decay"),
    (_one_clipped, "gradients are clipped"),
]


@pytest.mark.parametrize(("change", "reason"), OBSTACLES, ids=[reason for _, reason in OBSTACLES])
def test_every_obstacle_names_itself(change: Callable[[SimpleNamespace], None], reason: str) -> None:
    run = make_run()
    assert obstacle(run.config, run.pipeline, run.optimizers) is None
    change(run)
    assert re.fullmatch(reason, str(obstacle(run.config, run.pipeline, run.optimizers)))
    remedy = "Change that, or use --fused-steps auto"
    with pytest.raises(InputError, match=f"^--fused-steps always: .*for {reason}. {remedy}.$"):
        asked(run)
    run.config.fused_steps = "never"
    assert asked(run)[0] is False


def test_compact_optimizer_state_is_refused_wherever_steps_are_not_fused() -> None:
    cases = [
        ("never", World.single(), "--fused-steps never"),
        ("never", GPU, "--fused-steps never"),
        ("auto", World.single(), "on a CPU they are only with --fused-steps always"),
        ("auto", GPU, "NS_MULTIGPU_OPS=reference switches our kernels off"),
    ]
    for fused_steps, world, reason in cases:
        run = make_run(fused_steps)
        run.pipeline.model.config.optimizer_state = "compact"
        refusal = pytest.raises(InputError, match=f"optimizer-state compact: .*steps are not fused: {reason}")
        with cuda_ext.use_reference(), refusal:
            asked(run, world)
    run = make_run("always")
    run.pipeline.model.config.optimizer_state = "compact"
    assert asked(run) == (True, "Steps are fused.")


def test_requested_options_are_applied() -> None:
    assert asked(make_run("always")) == (True, "Steps are fused.")
    assert asked(make_run("never")) == (False, "Steps are not fused: --fused-steps never.")
    assert asked(make_run("auto")) == (False, ""), "no gain on a CPU"


def test_without_compiled_operators_they_are_not() -> None:
    with cuda_ext.use_reference():
        with pytest.raises(InputError, match=r"always: steps cannot be fused, for this CPU has no compiled operators"):
            asked(make_run("always"))
        assert asked(make_run("auto")) == (False, "")


def test_rows_that_cross_the_wire_whole() -> None:
    """Of convexes: what is asked for is named, and without it steps are fused."""
    run = make_run()
    run.pipeline.model.primitive, run.pipeline.model.config.primitive = Convexes, "convex"
    run.optimizers.optimizers = {
        name: FusedAdam([torch.nn.Parameter(torch.zeros(2))]) for name in names(PRIMITIVES["convex"].schema)
    }
    run.optimizers.config = {name: {"optimizer": SimpleNamespace(max_norm=None)} for name in run.optimizers.optimizers}
    run.pipeline.config = SimpleNamespace(wire="half")
    reason = "rows of 3D convexes (convex) cross the wire whole, and --pipeline.wire half is asked for"
    assert obstacle(run.config, run.pipeline, run.optimizers) == reason
    run.pipeline.config.wire = "full"
    assert asked(run) == (True, "Steps are fused.")


def test_on_a_gpu_they_are_fused_where_nothing_forbids_it() -> None:
    run = make_run("auto")
    assert asked(run, GPU) == (True, "Steps are fused.")
    with cuda_ext.use_reference():
        expected = (False, "Steps are not fused: NS_MULTIGPU_OPS=reference switches our kernels off.")
        assert asked(run, GPU) == expected
    _one_clipped(run)
    assert asked(run, GPU) == (False, "Steps are not fused: gradients are clipped.")


def make_training(run: SimpleNamespace) -> Training:
    """Return a run's training on a GPU, of 1000 points, which has not yet chosen whether steps are deferred."""
    run.pipeline.model.total_points = 1000
    training = object.__new__(Training)
    training._world, training._model, training._all_gpus = GPU, run.pipeline.model, None
    training._noise, training._needles = StepNoise(run.pipeline, run.optimizers), None
    training._wants_lazy, training._key = False, "made"
    return training


@pytest.mark.parametrize("noise_lr", [None, 0.0, 5e5])
def test_steps_are_deferred_unless_noise_moves_all_points(noise_lr: float | None) -> None:
    """Steps on a GPU that draw little of the model are deferred: with default densification, and MCMC without noise."""
    run = make_run()
    if noise_lr is not None:
        run.pipeline.model.densifier = McmcDensifier(noise_lr=noise_lr)
    training = make_training(run)
    training._rows_drawn = 10
    training._choose_lazy()
    assert (training._wants_lazy, training._key) == ((False, "made") if noise_lr else (True, None))


def test_views_that_draw_more_and_less_do_not_change_the_choice() -> None:
    """Each change captures new graphs, so steps stay deferred until they draw half of the model."""
    training = make_training(make_run())
    chosen: list[bool] = []
    for training._rows_drawn in (400, 340, 400, 480, 500, 400, 360, 340):
        training._choose_lazy()
        chosen.append(training._wants_lazy)
    assert chosen == [False, True, True, True, False, False, False, True]


def _acts(config: Any, step: int, evaluates: bool) -> bool:
    """Return whether the trainer has anything to do after a step: what it asks, in its words and nerfstudio's."""
    periods = [config.steps_per_save, config.steps_per_checksum]
    if evaluates:
        periods += [config.steps_per_eval_batch, config.steps_per_eval_image, config.steps_per_eval_all_images]
    looks = config.steps_per_numeric_check > 0 and step % config.steps_per_numeric_check == 0
    logs = step_check(step, config.logging.steps_per_log, run_at_zero=True)
    return looks or logs or any(step_check(step, period) for period in periods)


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize(
    ("log", "save", "checksum", "batch", "image", "all_images", "numeric"),
    [
        (10, 2000, 500, 500, 100, 1000, 50),
        (7, 11, 13, 5, 17, 3, 4),
        (1, 10, 10, 10, 10, 10, 10),
        (100, 90, 0, 0, 0, 0, 0),
        (100, 95, 0, 0, 0, 35, 0),
        (1000, 1000, 1000, 1000, 1000, 1000, 33),
        (1000, 1000, 1000, 1000, 1000, 1000, 1),
    ],
)
def test_blocks_end_where_the_trainer_acts(
    log: int, save: int, checksum: int, batch: int, image: int, all_images: int, numeric: int, evaluates: bool
) -> None:
    config = SimpleNamespace(
        logging=SimpleNamespace(steps_per_log=log),
        steps_per_save=save,
        steps_per_checksum=checksum,
        steps_per_eval_batch=batch,
        steps_per_eval_image=image,
        steps_per_eval_all_images=all_images,
        steps_per_numeric_check=numeric,
    )
    steps = 230
    for first in range(steps):
        last = next(step for step in range(first, steps) if step == steps - 1 or _acts(config, step, evaluates))
        assert next_stop(config, first, steps, evaluates=evaluates) == last + 1, first


def test_a_run_that_logs_nothing_has_blocks_to_its_end() -> None:
    config = SimpleNamespace(
        logging=SimpleNamespace(steps_per_log=0), steps_per_save=0, steps_per_checksum=0, steps_per_numeric_check=0
    )
    assert next_stop(config, 0, 77, evaluates=False) == next_stop(config, 40, 77, evaluates=False) == 77


@pytest.mark.parametrize(
    ("name", "value"),
    [("transport", "peer"), ("tile_lists", "sort")],
)
def test_options_of_sharded_fused_steps_are_refused_without_them(name: str, value: object) -> None:
    run = make_run()
    usual = {"tile_lists": "gather", "transport": "collective", "wire": "full"}
    run.pipeline.config = SimpleNamespace(**usual)
    flag = f"--pipeline.{name.replace('_', '-')} {value}"
    for fused, sharded, why in ((True, False, "the strategy is batch"), (False, True, "these are not fused")):
        run.pipeline.model.sharded = sharded
        setattr(run.pipeline.config, name, usual[name])
        check_requests(run.pipeline, fused=fused)
        setattr(run.pipeline.config, name, value)
        with pytest.raises(InputError, match=f"^{flag}: .* and {why}"):
            check_requests(run.pipeline, fused=fused)
    run.pipeline.model.sharded = True
    check_requests(run.pipeline, fused=True)


def test_half_a_wire_is_for_shards_fused_or_not() -> None:
    run = make_run()
    run.pipeline.config = SimpleNamespace(tile_lists="gather", transport="collective", wire="half")
    for fused in (True, False):
        run.pipeline.model.sharded = True
        check_requests(run.pipeline, fused=fused)
        run.pipeline.model.sharded = False
        with pytest.raises(InputError, match=r"^--pipeline\.wire half: .* the strategy is batch"):
            check_requests(run.pipeline, fused=fused)
    run.pipeline.model.sharded, run.pipeline.strategy = True, STRATEGIES["pixel"](World.single())
    for fused in (True, False):
        with pytest.raises(InputError, match=r"^--pipeline\.wire half: .*Use --pipeline\.pixel\.wire half"):
            check_requests(run.pipeline, fused=fused)


def test_half_wire_is_refused_without_exchange() -> None:
    run = make_run()
    run.pipeline.model.sharded = True
    run.pipeline.config = SimpleNamespace(transport="auto", tile_lists="gather", wire="half")
    check_requests(run.pipeline, fused=True)
    run.pipeline.config.transport = "peer"
    with pytest.raises(InputError, match=r"^--pipeline\.wire half: .*--pipeline\.transport peer .* Leave out one"):
        check_requests(run.pipeline, fused=True)


@pytest.mark.parametrize("leg", ["rows", "pixels", "gradients"])
def test_strategy_with_other_legs_uses_autograd_steps(leg: str) -> None:
    """It would silently train as one that it only resembles."""
    run = make_run()
    of_tile = STRATEGIES["tile"](World.single())
    derived = type("Other", (type(getattr(of_tile, leg)),), {})
    other = object.__new__(derived)
    run.pipeline.strategy = replace(of_tile, name="other", **{leg: other})
    reason = f"Other has no operators that exchange {leg} in fused steps"
    with pytest.raises(InputError, match=f"^--fused-steps always: .*for {reason}. Change that"):
        asked(run)
    assert obstacle(run.config, run.pipeline, run.optimizers) == reason
