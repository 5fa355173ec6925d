"""Output of a run: lines where there is no terminal, and a warning when training makes it worse."""

import math
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import nerfstudio.configs.base_config  # noqa: F401  # the writer and it import each other, and it must be first
import pytest
from nerfstudio.configs.base_config import LocalWriterConfig
from nerfstudio.utils import writer
from nerfstudio.utils.writer import EventName

from ns_multigpu.plugin.run import terminal
from ns_multigpu.plugin.run.terminal import (
    FAR_BELOW,
    ProgressTable,
    PsnrWatch,
    TerminalLog,
    duration,
    line,
    numbers_of,
    print_metrics,
    print_summary,
)
from ns_multigpu.plugin.run.trainer import DistributedTrainer

NUMBERS = {
    "Train Loss": 0.123456, "Step": {"images_per_s": 97.23, "gaussians": 54275.0, "memory_gib": 3.21, "step_ms": 8.1},
    "Eval Images Metrics": {"psnr": 23.456, "ssim": 0.9}, EventName.ETA.value: 3725.0,
}  # fmt: skip


def test_line_has_the_progress() -> None:
    begin = "step 12,000 of 30,000 (40 %)"
    assert line(12000, 30000, numbers_of(NUMBERS)) == (
        f"{begin}, loss 0.1235, 97.2 images/s, 54,275 Gaussians, 3.2 GiB memory, 23.46 dB on held-out views, "
        "1 h 2 min left"
    )
    assert line(12000, 30000, {}) == begin
    assert line(0, 0, {}) == "step 0 of 0 (0 %)"


def test_all_views_count_more_than_one() -> None:
    both = {**NUMBERS, "Eval Images Metrics Dict (all images)": {"psnr": 25.0}, "Step": {"images_per_s": 12345.6}}
    assert numbers_of(both) == {
        "Loss": "0.1235", "Images/s": "12,346", "Test PSNR": "25.00 dB", "Left": "1 h 2 min"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (60, "1 min 0 s"),
        (3599.4, "59 min 59 s"),
        (3600, "1 h 0 min"),
        (90000, "25 h 0 min"),
    ],
)
def test_durations_are_readable(seconds: float, said: str) -> None:
    assert duration(seconds) == said


class Log:
    """nerfstudio's writer, with our log in it and a clock that a test moves."""

    def __init__(self, **options: Any) -> None:
        self.now = 1000.0
        self.log = TerminalLog(LocalWriterConfig(enable=True, **options), banner_messages=["Viewer at: URL"])

    def write(self, step: int, **events: Any) -> None:
        """Write events out as nerfstudio's trainer does, which writes nothing if there are none."""
        image = {"name": "Eval Images/img", "event": None, "write_type": writer.EventType.IMAGE, "step": step}
        writer.EVENT_STORAGE[:] = [image] + [
            {"name": name, "event": value, "write_type": writer.EventType.SCALAR, "step": step}
            for name, value in events.items()
        ]
        self.log.write_stats_log(step)

    def step(self, step: int, **more: Any) -> None:
        """Write a step in two parts, as the trainer does: times and evaluations first, the loss once it is known."""
        self.write(step, **{EventName.ITER_TRAIN_TIME.value: 0.01, **more})
        self.write(step, **{name: NUMBERS[name] for name in ("Train Loss", "Step")})


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    monkeypatch.setattr(writer, "EVENT_STORAGE", [])
    monkeypatch.setattr(writer, "EVENT_WRITERS", ["TensorBoard's"])
    monkeypatch.setattr(writer, "GLOBAL_BUFFER", {"steps_per_log": 10, "max_iter": 1000, "step": 0})
    made = Log()
    monkeypatch.setattr(terminal.time, "monotonic", lambda: made.now)
    yield made


def test_without_a_terminal_a_line_every_few_seconds(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(0, 200, 10):
        log.step(step)
        log.now += 1.25
    lines = capsys.readouterr().out.splitlines()
    assert [int(one.split()[1]) for one in lines] == [0, 40, 80, 120, 160]
    assert all(one.endswith("loss 0.1235, 97.2 images/s, 54,275 Gaussians, 3.2 GiB memory") for one in lines)


def test_an_evaluation_stands_in_the_next_line(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    log.step(10)
    log.step(20, **{"Eval Images Metrics": {"psnr": 20.0}})
    log.write(25, **{"Eval Images Metrics": {"psnr": 21.0}})  # it logs every ten steps
    log.now += 6.0
    log.write(27, **{EventName.ITER_TRAIN_TIME.value: 0.01})
    log.step(30)
    log.now += 6.0
    log.step(40)
    log.step(999)
    lines = capsys.readouterr().out.splitlines()
    assert [one.split()[1] for one in lines] == ["10", "30", "40", "999"], "the last step is always there"
    assert ["21.00 dB on held-out views" in one for one in lines] == [False, True, False, False]


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)


def test_on_a_terminal_each_row_stands_once_below_its_header(
    log: Log, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_terminal(monkeypatch)
    for step in range(0, 120, 10):
        log.step(step, **{EventName.ETA.value: 7.0}, **({"Eval Images Metrics": {"psnr": 20.0}} if step == 20 else {}))
        log.now += 1.0
    header = "Step                Loss  Images/s   Gaussians     Memory  Test PSNR        Left"
    rows = [
        f"{f'{step} ({step / 10:.0f} %)':<16}  0.1235      97.2      54,275    3.2 GiB" for step in range(0, 120, 10)
    ]
    rows = [row + f"{'20.00 dB' if place == 2 else '':>11}{'7 s':>12}" for place, row in enumerate(rows)]
    assert len(header) == 80, "it fits an ordinary terminal"
    assert capsys.readouterr().out.splitlines() == ["Viewer at: URL", header, *rows[:10], header, *rows[10:]]


@pytest.mark.parametrize("evaluates", [True, False])
def test_the_table_has_the_columns_of_the_run(evaluates: bool) -> None:
    table = ProgressTable(rows=0, evaluates=evaluates)
    first = table.row(0, 20, {"Loss": "0.1", "Left": "1 s"})
    assert first.splitlines()[0].split() == ["Step", "Loss", *(["Test", "PSNR"] if evaluates else []), "Left"]
    assert all(len(table.row(step, 20, {"Loss": "0.1"}).splitlines()) == 1 for step in range(1, 20))


def test_nerfstudios_option_hides_columns(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    without_columns = Log(stats_to_track=(EventName.ETA,))
    without_columns.step(10, **{"Eval Images Metrics": {"psnr": 20.0}, EventName.ETA.value: 5.0})
    said = capsys.readouterr().out
    assert "5 s left" in said and "dB" not in said


def test_metrics_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {"psnr": 24.306, "psnr_std": 1.25, "ssim": 0.8123, "ssim_std": math.nan, "fps": 12.34, "num_rays": 5.0}
    print_metrics(metrics, 8)
    rows = [[word for word in one.split() if word.isprintable() and word[0].isalnum()] for one in said(capsys)]
    assert ["8", "held-out", "views"] in rows and ["PSNR", "24.31", "dB", "1.25", "dB"] in rows
    assert ["SSIM", "0.8123"] in rows and ["LPIPS", "not", "measured"] in rows and ["Images/s", "12.3"] in rows
    print_metrics({**metrics, "lpips": 0.25, "lpips_std": 0.125, "cc_psnr": 26.0}, 8)
    text = " ".join(said(capsys))
    assert "0.2500" in text and "0.1250" in text and "26.00 dB" in text and "not measured" not in text


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_viewers_without_evaluations_are_no_matter_for_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    """nerfstudio prints one, although the run summary evaluates."""
    names = ("viewer", "viewer_legacy", "tensorboard", "wandb", "comet")
    enabled: Any = {f"is_{name}_enabled": lambda name=name: name == "viewer" for name in names}
    trainer: Any = SimpleNamespace(config=SimpleNamespace(**enabled))
    DistributedTrainer._check_viewer_warnings(trainer)
    assert capsys.readouterr().out == ""


def watched(patience: int, *evaluations: tuple[int, float]) -> tuple[PsnrWatch, list[tuple[int, str]]]:
    """Return a watch that has seen so many logs of each PSNR, and what it said at which log."""
    watch, said, step = PsnrWatch(patience), list[tuple[int, str]](), 0
    for count, psnr in evaluations:
        for _ in range(count):
            if warning := watch.look(psnr, 10 * step):
                said.append((step, warning))
            step += 1
    return watch, said


def test_quality_collapse_is_reported_once() -> None:
    watch, said = watched(20, (30, 25.0), (200, 12.0))
    assert len(said) == 1 and watch.fallen
    step, warning = said[0]
    assert 30 + 20 <= step < 30 + 20 + 20, "its mean over ten logs fell soon, and was far below for twenty"
    assert "was 25.0 dB at step" in warning and "--batch-scaling" in warning and "Ctrl-C" in warning
    assert watch.best[0] == pytest.approx(25.0) and watch.now == pytest.approx(12.0, abs=0.1)


def test_small_or_short_drops_are_not_reported() -> None:
    """A reset of opacities, a noisy start, and noise."""
    for evaluations in (
        ((100, 25.0), (500, 25.0 - FAR_BELOW + 0.1)),
        ((100, 25.0), (15, 8.0), (100, 25.0)),
        ((3, 40.0), (500, 20.0)),
        ((500, 10.0), (500, 25.0)),
    ):
        _, said = watched(20, *evaluations)
        assert said == [], evaluations


def test_drop_just_beyond_the_limit_is_reported() -> None:
    watch, said = watched(20, (100, 25.0), (500, 25.0 - FAR_BELOW - 0.2))
    assert len(said) == 1 and watch.fallen


def test_the_box_and_its_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.CONSOLE, "_width", 60)
    command = "ns-viewer --load-config '/my runs/" + "fox/" * 20 + "config.yml'"
    print_summary([("PSNR", "[red]27[/red] dB"), ("Gaussians", "1,234")], [("Look at it", command)])
    said = capsys.readouterr().out
    assert "Training finished" in said and "[red]27[/red] dB" in said, "what stands in brackets is no markup"
    assert f"Look at it:\n  {command}\n" in said, "one line, to be copied"
