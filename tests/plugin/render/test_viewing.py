"""Nerfstudio's render thread on rank 0, for a model that takes all ranks: in steps, in a pause, at the end."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nerfstudio.cameras.cameras import CameraType
from nerfstudio.viewer.render_state_machine import RenderAction, RenderStateMachine
from nerfstudio.viewer.utils import CameraState, get_camera

from ns_multigpu.core.dist.collectives import broadcast_object, sum_in_place
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.faults.guards import Guards
from ns_multigpu.plugin.faults.signals import MANY
from ns_multigpu.plugin.render import viewing
from ns_multigpu.plugin.render.viewer_throttle import LONGEST_WAIT, SHARE, WAIT, ViewerThrottle
from tests.lib.guarded_toy import GuardedConfig
from tests.lib.ranks import run_ranks
from tests.lib.rendering import make_pipeline

STATE = CameraState(
    fov=1.2, aspect=1.5, camera_type=CameraType.PERSPECTIVE,
    c2w=torch.tensor([[0.0, -0.24254, 0.97014, 2.0], [1.0, 0, 0, 0.1], [0, 0.97014, 0.24254, 0.5]]),
)  # fmt: skip


class Viewer:
    """The parts of nerfstudio's viewer that its render thread uses, with a camera that moves all the time."""

    def __init__(self, pipeline: Any) -> None:
        self.train_lock, self.pipeline = pipeline.renders.lock, pipeline
        self.ready, self.include_time, self.step = True, False, 0
        self.control_panel = SimpleNamespace(
            crop_viewport=False, background_color=(26, 51, 77), max_res=40, layer_depth=False, output_render="rgb"
        )
        self.render_tab_state = SimpleNamespace(preview_render=False)
        self.images: list[torch.Tensor] = []
        self.thread = RenderStateMachine(self, 1.0, None)  # type: ignore[arg-type]
        self.thread._send_output_to_viewer = self._send  # type: ignore[method-assign]
        self.thread.start()
        threading.Thread(target=self._move, daemon=True).start()

    def _send(self, outputs: Any, **_: Any) -> None:
        self.images.append(outputs[self.control_panel.output_render])

    def _move(self) -> None:
        while self.thread.is_alive():
            self.thread.action(RenderAction("move", STATE))
            time.sleep(0.004)

    def get_model(self) -> Any:
        return self.pipeline.model

    def get_camera_state(self, client: Any) -> CameraState:
        return STATE

    def training_complete(self) -> None:
        self.ready = True

    def then(self, count: int, action: Callable[[], None]) -> None:
        """Do `action`, from another thread, once so many more images have come."""
        goal = len(self.images) + count

        def wait() -> None:
            while len(self.images) < goal:
                time.sleep(0.002)
            action()

        threading.Thread(target=wait, daemon=True).start()


def _trainer(world: World, capture: Path, folder: Path) -> Any:
    pipeline = make_pipeline(world, capture, bounds=[rank * 90 // world.size for rank in range(world.size + 1)])
    viewer = Viewer(pipeline) if world.is_main else None
    guards = Guards(GuardedConfig(str(folder)), world, str, lambda: "")
    return SimpleNamespace(
        world=world, pipeline=pipeline, guards=guards, viewer_state=viewer, step=0, stop_training=False,
        training_state="training",
    )  # fmt: skip


def _steps(trainer: Any, first: int, last: int, seconds: float = 0.01) -> int:
    """Take steps that check that no viewer renders during them, and return their number."""
    model = trainer.pipeline.model
    for step in range(first, last):
        if not viewing.may_go_on(trainer, step):
            return step - first
        with trainer.pipeline.renders.lock:
            trainer.pipeline.train()
            sum_in_place(torch.ones(3), trainer.world)
            time.sleep(seconds)
            assert model.training, "a viewer's thread has changed the model in the middle of a step"
        trainer.step = step
    return last - first


def _steps_until(trainer: Any, first: int, enough: Callable[[], bool]) -> int:
    """Steps, on a busy machine as many as it takes, until rank 0 has enough; returns the step behind the last."""
    for step in range(first, first + 3000, 5):
        _steps(trainer, step, step + 5)
        if broadcast_object(enough() if trainer.world.is_main else None, 0, trainer.world):
            return step + 5
    raise AssertionError("a page was hardly drawn")


def _agree_ahead(world: World, folder: Path) -> list[bool]:
    """Return whether ranks agree on steps ahead, without a request, with the other rank's signal and with a page; and
    whether they then run."""
    guards = Guards(GuardedConfig(str(folder)), world, str, lambda: "")
    strides = ViewerThrottle()
    renders = SimpleNamespace(waiting=0, strides=strides)
    trainer = SimpleNamespace(
        world=world, guards=guards, stop_training=False, training_state="training", viewer_state=None,
        pipeline=SimpleNamespace(renders=renders),
    )  # fmt: skip
    found: list[bool] = []
    viewing.agree_ahead(trainer, 10)
    found += [guards.has_agreed(10), guards.has_agreed(11)]
    guards.may_go_on, usual = None, guards.may_go_on  # type: ignore[assignment, method-assign]
    found.append(not guards.has_agreed(10) or viewing.may_go_on(trainer, 10))  # no collective
    guards.may_go_on = usual  # type: ignore[method-assign]
    if world.is_main:
        trainer.viewer_state = SimpleNamespace(render_statemachines={0: None})
    viewing.agree_ahead(trainer, 20)
    found.append(guards.has_agreed(20))
    trainer.viewer_state = None
    viewing.agree_ahead(trainer, 30)
    if world.rank == world.size - 1:
        guards.signals.requested = int(signal.SIGTERM)
    viewing.agree_ahead(trainer, 40)
    found += [guards.has_agreed(30), guards.has_agreed(40), viewing.may_go_on(trainer, 40)]
    return found


def test_ranks_agree_on_steps_while_the_device_works(tmp_path: Path) -> None:
    assert run_ranks(_agree_ahead, 2, tmp_path) == [[True, False, True, False, False, False, False]] * 2
    assert _agree_ahead(World.single(), tmp_path) == [False, False, True, False, False, False, False], (
        "one rank: no wait"
    )


def _visit(world: World, capture: Path, folder: Path) -> dict[str, Any]:
    """Steps, a pause, steps, and a viewer that is kept open."""
    trainer = _trainer(world, capture, folder)
    viewer, renders, counts = trainer.viewer_state, trainer.pipeline.renders, list[int]()
    with contextlib.closing(renders):
        taken = first = _steps_until(trainer, 0, lambda: len(viewer.images) >= 3)
        if viewer is not None:
            counts.append(len(viewer.images))
            trainer.training_state = "paused"
            viewer.then(5, lambda: setattr(trainer, "training_state", "training"))
        start = time.monotonic()
        taken += _steps(trainer, first, first + 2)
        if viewer is not None:
            counts.append(len(viewer.images))
            trainer.training_state = "completed"
            viewer.then(5, lambda: setattr(trainer, "stop_training", True))
        viewing.keep_open(trainer)
        paused = time.monotonic() - start
        image = None
        if viewer is not None:
            counts.append(len(viewer.images))
            image = viewer.images[-1]
        height, width = broadcast_object(None if image is None else image.shape[:2], 0, world)
        trainer.pipeline.eval()
        again = renders.render(get_camera(STATE, height, width))
    ended, same = True, True
    if viewer is not None:
        viewer.thread.join(5)
        ended = not viewer.thread.is_alive()
        assert image is not None and again is not None
        same = torch.equal(image, again["rgb"]) and float(image.std()) > 0.02
    return {"taken": taken, "counts": counts, "ended": ended, "same": same, "paused": paused}


@pytest.mark.parametrize("size", [2, 3])
def test_a_visit(capture: Path, tmp_path: Path, size: int) -> None:
    results = run_ranks(_visit, size, capture, tmp_path)
    [taken] = {result["taken"] for result in results}
    in_steps, paused, completed = results[0]["counts"]
    assert 3 <= in_steps < taken, "at most one image a step"
    assert paused >= in_steps + 5 and completed >= paused + 5
    assert all(result["ended"] and result["same"] for result in results)
    assert results[0]["paused"] < 20


def test_pages_wait_until_pictures_are_due(capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = _trainer(World.single(), capture, tmp_path)
    renders, images = trainer.pipeline.renders, trainer.viewer_state.images
    with contextlib.closing(renders):
        monkeypatch.setattr(ViewerThrottle, "due", False)
        while not renders.waiting:
            time.sleep(0.01)
        assert _steps(trainer, 0, 5) == 5 and images == [] and renders.waiting
        trainer.training_state = "paused"  # nothing is slowed down then
        trainer.viewer_state.then(2, lambda: setattr(trainer, "training_state", "training"))
        _steps(trainer, 5, 6)
        assert len(images) >= 2
        before = len(images)
        monkeypatch.setattr(ViewerThrottle, "due", True)
        while len(images) == before:
            _steps(trainer, 6, 7)


STEP = 0.005
"""Seconds: so few that blocks are longer than a step on a busy machine, too."""


def _granted(world: World, capture: Path, folder: Path) -> list[int]:
    """Return the allowed number of steps without a page, with one open, and after it is closed."""
    trainer, pages = _trainer(world, capture, folder), dict[int, Any]()
    if trainer.viewer_state is not None:
        trainer.viewer_state.thread.running = False
        trainer.viewer_state = SimpleNamespace(render_statemachines=pages)
    found: list[int] = []
    with contextlib.closing(trainer.pipeline.renders):
        for step, there in enumerate([False] * 3 + [True] * 6 + [False]):
            pages.update({0: None}) if there else pages.clear()
            assert viewing.may_go_on(trainer, step)
            found.append(trainer.guards.granted)
            time.sleep(STEP)
    return found


def test_blocks_are_short_while_a_page_is_open(capture: Path, tmp_path: Path) -> None:
    first, second = run_ranks(_granted, 2, capture, tmp_path)
    assert first == second, "all ranks take as many steps"
    assert first[:3] == [MANY] * 3 and first[-1] == MANY
    assert all(1 <= steps <= LONGEST_WAIT / STEP for steps in first[3:-1]) and max(first[3:-1]) >= 2


def test_strides_fit_the_time_that_a_page_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    now, strides = [0.0], ViewerThrottle()
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert strides.steps == 1, "nothing is known yet"
    step = 0
    for seconds in (0.001, 0.001, 7.0, 0.001, 0.001):  # an evaluation in between
        strides.begins(step)
        now[0] += 10 * seconds
        step += 10
        strides.ended(step)
    assert strides.steps == pytest.approx(WAIT / 0.001, abs=1)
    for pictures, wait in ((0.008, 0.008 * (1 / SHARE - 1)), (0.05, LONGEST_WAIT), (0.0, 0.0)):
        strides.ended(step)
        now[0] += pictures
        strides.begins(step)
        assert strides.steps == pytest.approx(max(wait, WAIT) / 0.001, abs=1)
        assert strides.due == (wait == 0.0), "pictures take their share of the time, and no more"
        now[0] += wait + 1e-6
        assert strides.due
    for _ in range(5):
        strides.begins(step)
        now[0] += 1.0
        step += 1
        strides.ended(step)
    assert strides.steps == 1, "a step that takes longer is taken alone"


def _owners_seen(world: World, capture: Path, folder: Path) -> Any:
    """Return the ranks' renders while a page showed rgb, and then rank; its number of images; and the last one."""
    trainer = _trainer(world, capture, folder)
    viewer, renders, asked = trainer.viewer_state, trainer.pipeline.renders, list[bool]()
    render = renders._render
    renders._render = lambda request, roots: asked.append(request.owners) or render(request, roots)
    with contextlib.closing(renders):
        step = _steps_until(trainer, 0, lambda: len(asked) >= 3)
        before = list(asked)
        if viewer is not None:
            viewer.control_panel.output_render = "rank"
        _steps_until(trainer, step, lambda: asked[len(before) :].count(True) >= 2)
    if viewer is not None:
        viewer.thread.join(5)
    return before, asked[len(before) :], [] if viewer is None else viewer.images


def test_owner_page_costs_one_more_rendering(capture: Path, tmp_path: Path) -> None:
    results = run_ranks(_owners_seen, 2, capture, tmp_path)
    before, after, images = results[0]
    assert [result[:2] for result in results] == [(before, after)] * 2, "all ranks rendered the same"
    assert len(before) >= 3 and not any(before), "no request for owners"
    assert after.count(True) >= 2 and abs(after.count(True) - after.count(False)) <= 1
    assert len(images) >= len(before) + after.count(True) - 1
    assert not torch.allclose(images[0], images[-1], atol=0.05), "the last one shows owners"


def _broken_off(world: World, capture: Path, folder: Path, how: str) -> tuple[bool, int, str]:
    """Training ends while the viewer's thread waits: by an error in a step, in a rendering, or by a signal."""
    trainer = _trainer(world, capture, folder)
    said, taken = "", 0
    try:
        with contextlib.closing(trainer.pipeline.renders):
            taken = _steps(trainer, 0, 3)
            if how == "error in a rendering":
                trainer.pipeline.renders.pictures._gather = _fail
            if how == "signal" and world.rank == world.size - 1:
                trainer.guards.signals.requested = signal.SIGTERM
            if how == "error in a step":
                trainer.pipeline.renders.wait_until_wanted(1.0)
                raise ValueError("the step is broken")
            if how == "signal in the end":
                trainer.training_state = "completed"
                if world.rank == world.size - 1:
                    threading.Timer(0.3, lambda: setattr(trainer.guards.signals, "requested", signal.SIGINT)).start()
                viewing.keep_open(trainer)
            else:
                taken += _steps(trainer, 3, 500)
    except ValueError as error:
        said = str(error)
    if trainer.viewer_state is None:
        return True, taken, said
    trainer.viewer_state.thread.join(5)
    return not trainer.viewer_state.thread.is_alive(), taken, said


def _fail(*_: Any) -> None:
    raise ValueError("the rendering is broken")


@pytest.mark.parametrize("how", ["error in a step", "error in a rendering", "signal", "signal in the end"])
def test_no_thread_waits_for_training_that_has_ended(capture: Path, tmp_path: Path, how: str) -> None:
    for ended, taken, said in run_ranks(_broken_off, 2, capture, tmp_path, how):
        assert ended
        assert (said == "" and taken == 3) if "signal" in how else "is broken" in said
