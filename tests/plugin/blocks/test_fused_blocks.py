"""Between blocks of fused steps: what is written out and when, and how soon NaN is found."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nerfstudio.configs.base_config  # noqa: F401  # the writer and it import each other, and it must be first
import pytest
import torch
from nerfstudio.utils import writer
from nerfstudio.utils.writer import EventName

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.step.step import Step
from ns_multigpu.plugin.blocks.timing import Pace
from ns_multigpu.plugin.blocks.training import Training
from ns_multigpu.plugin.faults.numerics import NumericGuard
from ns_multigpu.plugin.faults.signals import NonFiniteError
from ns_multigpu.plugin.model.splat_model import SplatModel
from ns_multigpu.plugin.run import progress, terminal
from ns_multigpu.plugin.run.trainer import DistributedTrainer
from ns_multigpu.primitives.densify.densifier import ReplicatedDensifier
from ns_multigpu.primitives.gaussians.functions import Gaussians
from ns_multigpu.primitives.gaussians.schema import ORDER
from tests.lib.training_run import follow, write_capture

STEPS = 60
PIXELS = 28 * 24
TIME, ETA, RAYS = (name.value for name in (EventName.ITER_TRAIN_TIME, EventName.ETA, EventName.TRAIN_RAYS_PER_SEC))


class Events:
    """A writer of nerfstudio's that keeps what it is handed.

    Attributes:
        seen: step -> name -> value, in the order in which they came.
        trainer_steps: step -> the step after which the trainer handed it over.
    """

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, Any]] = defaultdict(dict)
        self.trainer_steps: dict[int, int] = {}
        self.trainer: Any = None

    def write_scalar(self, name: str, value: Any, step: int) -> None:
        self.seen[step][name] = value
        self.trainer_steps[step] = self.trainer.step

    def write_scalar_dict(self, name: str, values: dict[str, Any], step: int) -> None:
        self.write_scalar(name, values, step)

    def write_image(self, name: str, image: Any, step: int) -> None:
        self.write_scalar(name, image, step)

    def write_config(self, name: str, values: Any, step: int) -> None:
        pass


Run = Callable[..., tuple[DistributedTrainer, Events]]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Train in fused blocks, logging each 20 steps and looking for NaN each 8."""
    write_capture(tmp_path / "tiny", wide=False)
    events = Events()

    def train(
        options: dict[str, Any], ready: Callable[[DistributedTrainer], None] = lambda _: None
    ) -> tuple[DistributedTrainer, Events]:
        def begin(trainer: DistributedTrainer) -> None:
            events.trainer = trainer
            writer.EVENT_WRITERS.append(events)
            ready(trainer)

        usual = {
            "fused_steps": "always",
            "logging.steps_per_log": 20,
            "steps_per_numeric_check": 8,
            "steps_per_checksum": 0,
            "pipeline.model.num_downscales": 0,
            "pipeline.model.background_color": "black",
        }
        world, tiny = World.single(), tmp_path / "tiny"
        return follow(world, tiny, tmp_path / "runs", {**usual, **options}, STEPS, 1, double=False, ready=begin), events

    writer.EVENT_WRITERS.clear()
    writer.EVENT_STORAGE.clear()
    yield train
    writer.EVENT_WRITERS.clear()
    writer.EVENT_STORAGE.clear()


def test_blocks_that_log_write_and_no_others(run: Run, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    blocks: list[int] = []
    paces: dict[int, float] = {}
    usual = Pace.after

    def after(self: Pace, steps: int, seconds: float) -> float:
        blocks.append(steps)
        return paces.setdefault(sum(blocks) - 1, usual(self, steps, seconds + 0.01 * steps))

    monkeypatch.setattr(Pace, "after", after)
    monkeypatch.setattr(terminal, "_BETWEEN_LINES", 0.0)
    _, events = run({})
    assert len(blocks) > 7, "of which most do not log"
    logged = [0, 20, 40, STEPS - 1]
    assert sorted(events.seen) == [*logged, STEPS], "and its duration, which nerfstudio logs with the next step"
    ends = [sum(blocks[: k + 1]) - 1 for k in range(len(blocks))]
    behind = dict(zip(ends, [*ends[1:], ends[-1]], strict=True))
    assert all(events.trainer_steps[step] == behind[step] for step in logged), "while the device takes the next block"
    for step in logged:
        scalars = events.seen[step]
        assert next(iter(scalars)) == TIME, "the terminal goes by the first, and has its columns in this order"
        assert scalars[TIME] == paces[step] and scalars[ETA] == pytest.approx((STEPS - step) * paces[step])
        assert ("Train Loss" in scalars and "Step" in scalars) and (RAYS in scalars) == (step > 1)
        if step > 1:
            assert scalars[RAYS] == pytest.approx(PIXELS / paces[step])
    said = capsys.readouterr().out
    assert all(f"step {step} of {STEPS} ({100 * step / STEPS:.0f} %), " in said for step in (0, 20, 40))
    assert "(13 %)" not in said, "8 of 60: a block that does not log"


def test_checks_and_logs_run_while_the_device_is_busy(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """But a look that is for a checkpoint, which must not hold NaN; and what follows the last block."""
    busy, found = [False], list[tuple[str, int, bool]]()
    taken, status, look, write = Training.run, Step.status, NumericGuard.look, progress.write_step

    def run_block(self: Training, steps: range, **more: Any) -> Any:
        busy[0] = True
        return taken(self, steps, **more)

    def waits(self: Step) -> Any:
        busy[0] = False
        return status(self)

    def looks(self: NumericGuard, step: int, *given: Any, **more: Any) -> None:
        found.append(("look", self._noted[-1].steps[-1], busy[0]))
        look(self, step, *given, **more)

    def logs(step: int, *given: Any) -> None:
        found.append(("log", step, busy[0]))
        write(step, *given)

    monkeypatch.setattr(Training, "run", run_block)
    monkeypatch.setattr(Step, "status", waits)
    monkeypatch.setattr(NumericGuard, "look", looks)
    monkeypatch.setattr(progress, "write_step", logs)
    run({"steps_per_save": 24})
    expected = [("look", step, True) for step in (0, 8, 16, 32, 40, 56)] + [("log", step, True) for step in (0, 20, 40)]
    expected += [("look", step, False) for step in (24, 48, STEPS - 1)] + [("log", STEPS - 1, False)]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("waits", [False, True])
def test_no_refinement_is_prefetched_while_steps_are_deferred(
    run: Run, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Points that wait for a step are not what they will be."""
    asked: list[int] = []
    monkeypatch.setattr(ReplicatedDensifier, "refine_ahead", lambda *_: asked.append(1))
    if not waits:
        monkeypatch.setattr(Training, "_may_defer", lambda _: False)
    run({f"optimizers.{name}.optimizer.eps": 1e-15 for name in ORDER})
    assert bool(asked) == (not waits)


def test_evaluation_results_are_written_at_once(run: Run) -> None:
    _, events = run({"vis": "tensorboard", "steps_per_eval_image": 15})
    for step in (15, 30, 45):
        assert "Eval Images Metrics" in events.seen[step] and events.trainer_steps[step] == step
    assert TIME in events.seen[40] and TIME not in events.seen[48]


def test_early_scalars_are_written_with_the_first_block(run: Run, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """As in a run that is resumed. The first line is of the first logged loss, and has all numbers."""
    monkeypatch.setattr(terminal, "_BETWEEN_LINES", 0.0)
    _, events = run({}, lambda trainer: setattr(trainer, "_start_step", 9))
    assert sorted(events.seen)[0] == 16 and TIME in events.seen[16] and RAYS in events.seen[16]
    lines = [text for text in capsys.readouterr().out.splitlines() if text.startswith("step ")]
    assert lines[0].startswith(f"step 20 of {STEPS} (33 %), loss ") and "images/s, 60 Gaussians, " in lines[0]


def test_refinement_within_storage_keeps_the_step_and_adam(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are rebuilt if points have moved in memory or exceeded the storage."""
    made, after = list[object](), list[tuple[bool, bool, int]]()
    plain, refine = Training._made, Training.refine

    def counted(self: Training, *given: Any) -> Step:
        made.append(0)
        return plain(self, *given)

    def refined(self: Training, steps: range) -> None:
        adam, due = self._adam, self._refining.due(steps[-1])
        before = self._model.num_points
        refine(self, steps)
        if due and steps[-1] > 0:  # behind the very first, opacities are reset
            after.append((self._adam is adam, self._model.num_points <= self._points.rows, before))

    monkeypatch.setattr(Training, "_made", counted)
    monkeypatch.setattr(Training, "refine", refined)
    eager = {
        "pipeline.model.warmup_length": 4, "pipeline.model.refine_every": 8, "pipeline.model.densify_grad_thresh": 1e-5,
        "pipeline.model.stop_split_at": 1000, "pipeline.model.sh_degree_interval": 1000,
    }  # fmt: skip
    trainer, _ = run(eager)
    stayed = [adam for adam, fits, _ in after if fits]
    assert len(stayed) >= 3 and all(stayed), after
    assert len({points for _, _, points in after}) > 2, "the model changes"
    assert trainer.pipeline.model.num_points != after[0][2]
    assert len(made) < len(after), "steps are not rebuilt for each"


def test_a_refinement_that_fails_leaves_no_adam_of_before() -> None:
    """Its points may be others by then."""
    training: Any = object.__new__(Training)
    refining = SimpleNamespace(due=lambda _: True, replaces=lambda _: True, take=lambda _: 1 / 0)
    training._refining, training._points = refining, SimpleNamespace(keeps=lambda _: True)
    training._model, training._adam = SimpleNamespace(most_points=1), object()
    with pytest.raises(ZeroDivisionError):
        training.refine(range(1))
    assert training._adam is None


def test_viewer_gets_the_training_rate_after_each_block(
    run: Run,
) -> None:
    _, events = run(
        {"viewer.quit_on_train_completion": True}, lambda trainer: setattr(trainer, "viewer_state", object())
    )
    assert all(RAYS in events.seen[step] for step in range(8, STEPS, 8))


def test_run_that_ends_between_logs_writes_its_last_step(run: Run) -> None:
    trainer, _ = run({}, lambda trainer: setattr(trainer, "may_go_on", lambda step: step <= 30))
    assert trainer.step == writer.GLOBAL_BUFFER["step"] == 32


@pytest.mark.parametrize("what", ["loss", "parameter"])
def test_nan_is_named_at_the_next_check(run: Run, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, views, ends = Training.run, dict[int, int](), list[int]()

    def spoilt(self: Training, steps: range, **more: Any) -> Any:
        result = usual(self, steps, **more)
        ends.append(steps[-1])
        views.update(zip(steps, (shown[0] for shown in result.views), strict=True))
        if 19 in steps and what == "loss":
            result.reports[steps.index(19), 0] = torch.nan
        elif 19 in steps:
            self._model.gauss_params["scales"].data[3, 1] = torch.inf
        return result

    monkeypatch.setattr(Training, "run", spoilt)
    with pytest.raises(NonFiniteError) as caught:
        run({})
    text = str(caught.value)
    # Eight steps are looked at together. A parameter may be of the next eight, which are looked at before it is said.
    assert ends[-1] == (24 if what == "loss" else 32)
    if what == "loss":
        assert f"step 19: loss of view {views[19]} ({views[19]}.png)" in text
    else:
        assert "parameter gauss_params.scales: 1 row(s)" in text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"pipeline.model.stop_split_at": 24}, [True, False]),
        ({"pipeline.model.densifier": "mcmc"}, [False]),
        ({"pipeline.model.use_absgrad": False, "pipeline.model.stop_split_at": 24}, [False]),
    ],
)
@pytest.mark.parametrize("training", ["fused", "ordinary"])
def test_absgrad_is_computed_only_if_it_is_used(
    run: Run, monkeypatch: pytest.MonkeyPatch, training: str,
    options: dict[str, Any], expected: list[bool],
) -> None:  # fmt: skip
    computed: list[bool] = []
    kernels, primitive = Gaussians.kernels, SplatModel.primitive

    def fused(self: Gaussians, **wanted: Any) -> Any:
        computed.append(self.absgrad)
        return kernels(self, **wanted)

    def ordinary(self: SplatModel, *, depth: bool, counted: bool = True) -> Any:
        kind = primitive(self, depth=depth, counted=counted)
        if self.training and counted:
            computed.append(kind.absgrad)
        return kind

    if training == "fused":
        monkeypatch.setattr(Gaussians, "kernels", fused)
    else:
        monkeypatch.setattr(SplatModel, "primitive", ordinary)
    run({**options, "fused_steps": {"fused": "always", "ordinary": "never"}[training]})
    assert list(dict.fromkeys(computed)) == expected
