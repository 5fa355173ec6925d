"""A real browser looks at two workers that train: it sees the model, its camera is followed, and steps go on."""

import json
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import CameraType
from nerfstudio.viewer.utils import CameraState, get_camera
from PIL import Image

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.blocks.training import Training
from ns_multigpu.plugin.render.viewer import PageRenderer
from tests.lib import browser, training_run
from tests.lib.processes import free_port
from tests.lib.ranks import run_ranks
from tests.lib.rendering import make_pipeline

SOAK = float(os.environ.get("NS_MULTIGPU_SOAK_SECONDS", "10"))
"""Seconds during which three browsers move their cameras."""
SEEN = (slice(10, -70), slice(70, -10))
"""Of a page's scene what nothing covers: rows and columns."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.PROGRAM is None, reason="there is no Chromium: apt install chromium"),
]


def _train(world: World, folder: Path, port: int) -> list[int]:
    """Train with a viewer, without changing the model, until there is a file `stop`, and return the lengths of
    blocks."""
    lengths, usual_run, usual_render = list[int](), Training.run, PageRenderer._render_img

    def take(self: Any, steps: range, **more: Any) -> Any:
        lengths.append(len(steps))
        time.sleep(0.02)  # two cores are for the browser, too
        return usual_run(self, steps, **more)

    def render(self: Any, state: CameraState) -> Any:
        outputs = usual_render(self, state)
        details = {"c2w": state.c2w.tolist(), "fov": state.fov, "aspect": state.aspect, "step": self.viewer.step}
        np.savez(folder / "new.npz", image=outputs["rgb"].numpy(), details=json.dumps(details))
        (folder / "new.npz").replace(folder / "last.npz")  # at once, so that a camera always has its own picture
        return outputs

    Training.run, PageRenderer._render_img = take, render  # type: ignore[method-assign]

    def begin(trainer: Any) -> None:
        trainer.pipeline.model.gauss_params["scales"].data -= 1.5  # so that there is something to see
        trainer.pipeline.model.gauss_params["opacities"].data += 3.0
        params = {name: value.detach() for name, value in trainer.pipeline.model.gauss_params.items()}
        torch.save(params, folder / f"points-{world.rank}.pt")
        usual = trainer.may_go_on

        def go_on(step: int) -> bool:
            trainer.stop_training |= world.is_main and (folder / "stop").exists()
            if world.is_main:
                (folder / "next").write_text(str(step))
                (folder / "next").replace(folder / "step")
            return usual(step)

        trainer.may_go_on = go_on

    still = {f"optimizers.{name}.optimizer.lr": 0.0 for name in ("features_dc", "features_rest", "opacities", "scales")}
    options = {
        **still, "optimizers.quats.optimizer.lr": 0.0, "optimizers.means.optimizer.lr": 0.0,
        "optimizers.means.scheduler": None, "pipeline.model.warmup_length": 10**9, "pipeline.model.refine_every": 10**6,
        "pipeline.model.cull_alpha_thresh": 0.45,  # to twice which opacities are reset at the start
        "pipeline.model.num_downscales": 0,
        "fused_steps": "always", "vis": "viewer", "viewer.websocket_port": port, "viewer.max_num_display_images": 0,
        "viewer.quit_on_train_completion": True, "pipeline.strategy": "tile", "steps_per_checksum": 0,
        "logging.steps_per_log": 10**6, "steps_per_numeric_check": 10**6,
    }  # fmt: skip
    training_run.follow(world, folder / "tiny", folder / "runs", options, 10**7, 1, double=False, ready=begin)
    return lengths


class Run:
    """Two workers that train while this process runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        training_run.write_capture(folder / "tiny", wide=False)
        self.port = free_port()
        self.lengths: list[list[int]] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.lengths = run_ranks(_train, 2, self.folder, self.port, seconds=120)
        except BaseException as error:
            self._error = error

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def step(self) -> int:
        """Return the step that is about to be taken; -1 before the first."""
        self.look()
        try:
            return int((self.folder / "step").read_text())
        except OSError:
            return -1

    def look(self) -> None:
        """Return whether it still trains."""
        if self._error is not None:
            raise self._error

    def until(self, true: Any, seconds: float = 60.0) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if true():
                return True
            self.look()
            time.sleep(0.1)
        return False

    def last(self) -> tuple[CameraState, np.ndarray[Any, Any], int]:
        """Of the last picture sent to a page the camera, the colours, and the step."""
        with np.load(self.folder / "last.npz") as file:
            image, details = file["image"], json.loads(str(file["details"]))
        c2w = torch.tensor(details["c2w"])
        return CameraState(details["fov"], details["aspect"], c2w, CameraType.PERSPECTIVE), image, details["step"]

    def stop(self) -> list[list[int]]:
        (self.folder / "stop").touch()
        self._thread.join(90)
        assert not self._thread.is_alive(), "a rank hangs"
        self.look()
        return self.lengths


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    (made.folder / "stop").touch()


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """Return a process with all points, once the run has begun."""

    def load(run: Run) -> Any:
        pipeline = make_pipeline(World.single(), run.folder / "tiny", "single")
        parts = [torch.load(run.folder / f"points-{rank}.pt") for rank in range(2)]
        for name in parts[0]:
            pipeline.model.gauss_params[name] = torch.nn.Parameter(torch.cat([part[name] for part in parts]))
        pipeline.eval()
        pipeline.model.set_background(torch.tensor([38.0, 42.0, 55.0]) / 255)
        return pipeline.model

    return load


def _seen(page: browser.Page, folder: Path) -> np.ndarray[Any, Any]:
    """Return the page's image of the scene; empty while it loads."""
    boxes = page.run("[...document.querySelectorAll('canvas')].map(c => c.getBoundingClientRect())"
                     ".map(b => [b.left, b.top, b.right, b.bottom])")  # fmt: skip
    page.screenshot(folder / "page.png")
    largest = max(boxes or [[0, 0, 0, 0]], key=lambda box: (box[2] - box[0]) * (box[3] - box[1]))
    left, top, right, bottom = (round(edge) for edge in largest)
    return np.asarray(Image.open(folder / "page.png").convert("RGB"), dtype=float)[top:bottom, left:right]


def _expected(model: Any, state: CameraState, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return model.get_outputs_for_camera(get_camera(state, shape[0], shape[1]))["rgb"].numpy()


def _distance(page: np.ndarray[Any, Any], image: np.ndarray[Any, Any]) -> float:
    """Return the mean difference of a page's free part and a picture stretched to its size, of 255."""
    height = page.shape[0]
    width = round(height * image.shape[1] / image.shape[0])  # the panel stands on the rest of it
    page = page[:, :width]
    if height < 100 or width < 100:
        return float("inf")
    picture = Image.fromarray((image * 255).astype(np.uint8)).resize((width, height), Image.Resampling.BILINEAR)
    return float(np.abs(page[SEEN] - np.asarray(picture, dtype=float)[SEEN]).mean())


def _spread(page: np.ndarray[Any, Any]) -> float:
    return float(page[:, :440][SEEN].std()) if min(page.shape[:2]) > 100 else 0.0


def test_a_page_shows_the_model_and_follows_the_camera(run: Run, model: Any, tmp_path: Path) -> None:
    assert run.until(lambda: run.step() > 2, 180), "training did not begin"
    whole = model(run)
    with browser.Browser() as chromium:
        page = chromium.open(run.url)
        views: list[tuple[CameraState, np.ndarray[Any, Any]]] = []
        for turn in range(3):
            before = run.step()
            if turn:
                page.drag(steps=8, left=200, top=200, by=20)
            assert run.until((tmp_path / "last.npz").exists)

            found: list[Any] = []

            def shows(found: list[Any] = found) -> bool:
                state, image, _ = run.last()
                expected = _expected(whole, state, image.shape)
                assert np.abs(image - expected).max() < 2e-3, "what is sent is not the model's own picture"
                seen = _seen(page, tmp_path)
                found[:] = [seen.shape, float(expected.std()), _distance(seen, expected)]
                moved = not views or not torch.allclose(views[-1][0].c2w, state.c2w, atol=0.05)
                return moved and expected.std() > 0.03 and found[2] < 4.0

            assert run.until(shows), f"the page does not show what the model looks like, turn {turn}: {found}"
            views.append((run.last()[0], _seen(page, tmp_path)))
            if turn == 0:
                parser: Any = training_run.TinyDataParserConfig(data=tmp_path / "tiny").setup()
                first_view = parser.get_dataparser_outputs("train").cameras[0].camera_to_worlds
                assert torch.allclose(views[0][0].c2w, first_view.to(views[0][0].c2w), atol=0.01), "not the first view"
            assert run.until(lambda before=before: run.step() > before + 10), "steps go on"
        assert not torch.allclose(views[0][0].c2w, views[1][0].c2w, atol=0.05)
        first, second = (seen[:, :440][SEEN] for _, seen in views[:2])
        assert np.abs(first - second).mean() > 4.0, "the camera moved and the picture did not"
    lengths = run.stop()
    assert lengths[0] == lengths[1], "the ranks took other blocks"
    assert max(lengths[0]) > 8 and min(lengths[0][len(lengths[0]) // 2 :]) < 8, "blocks are short while a page is open"


def test_three_restless_browsers(run: Run, tmp_path: Path) -> None:
    """Random drags, wheels, reloads closed pages. Then a page still shows the scene, and all ranks stop together."""
    assert run.until(lambda: run.step() > 2, 180)
    pages: dict[int, browser.Page] = {}
    dice, end, first = random.Random(5), time.monotonic() + SOAK, run.step()
    with browser.Browser() as chromium:
        while time.monotonic() < end:
            who = dice.randrange(3)
            page = pages.get(who)
            if page is None:
                pages[who] = chromium.open(run.url)
            elif dice.random() < 0.15:
                pages.pop(who).close()
            elif dice.random() < 0.2:
                page.run("location.reload()")
            else:
                page.drag(
                    dice.randrange(1, 8), dice.randrange(50, 400), dice.randrange(50, 500), dice.randrange(-15, 15)
                )
            run.look()
            time.sleep(dice.random() * 0.2)
        for page in pages.values():
            page.close()
        middle = run.step()
        assert middle > first + 10, "training stood still"
        (tmp_path / "last.npz").unlink(missing_ok=True)
        page = chromium.open(run.url)
        assert run.until(lambda: (tmp_path / "last.npz").exists() and _spread(_seen(page, tmp_path)) > 4)
        assert run.until(lambda: run.step() > middle + 5)
    lengths = run.stop()
    assert lengths[0] == lengths[1]
