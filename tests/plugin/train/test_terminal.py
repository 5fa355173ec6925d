"""Output of a run: lines where there is no terminal, and a warning when training makes it worse."""

import math
import sys
from collections.abc import Iterator

import nerfstudio.configs.base_config  # noqa: F401  # the writer and it import each other, and it must be first
import pytest
from nerfstudio.configs.base_config import LocalWriterConfig
from nerfstudio.utils import writer
from nerfstudio.utils.writer import EventName

from ns_multigpu.plugin.train import terminal
from ns_multigpu.plugin.train.terminal import FAR_BELOW, PsnrWatch, TerminalLog, duration, line, print_summary

LATEST = {
    EventName.ITER_TRAIN_TIME.value: 0.01234, "Train Loss": 0.123456,
    EventName.CURR_TEST_PSNR.value: 23.456, EventName.ETA.value: 3725.0,
}  # fmt: skip


def test_line_has_the_progress() -> None:
    begin, end = "step 12,000 of 30,000 (40 %)", "1 h 2 min left"
    assert line(12000, 30000, LATEST) == (f"{begin}, 12.3 ms a step, loss 0.1235, 23.46 dB on a held-out view, {end}")
    assert line(12000, 30000, {}) == begin
    assert line(0, 0, {}) == "step 0 of 0 (0 %)"


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

    def __init__(self) -> None:
        self.now = 1000.0
        self.log = TerminalLog(LocalWriterConfig(enable=True), banner_messages=[])

    def step(self, step: int, **more: float) -> None:
        """Do the work of nerfstudio's trainer after a step."""
        writer.GLOBAL_BUFFER["step"] = step
        writer.EVENT_STORAGE.clear()
        values = {EventName.ITER_TRAIN_TIME.value: 0.01, **more}
        writer.EVENT_STORAGE += [
            {"name": name, "event": value, "write_type": writer.EventType.SCALAR, "step": step}
            for name, value in values.items()
        ]
        self.log.write_stats_log(step)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    monkeypatch.setattr(writer, "EVENT_STORAGE", [])
    monkeypatch.setattr(writer, "GLOBAL_BUFFER", {"steps_per_log": 10, "max_iter": 1000, "step": 0})
    made = Log()
    monkeypatch.setattr(terminal.time, "monotonic", lambda: made.now)
    yield made


def test_without_a_terminal_a_line_every_few_seconds(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(200):
        log.step(step)
        log.now += 0.125
    lines = capsys.readouterr().out.splitlines()
    assert [int(one.split()[1]) for one in lines] == [0, 40, 80, 120, 160]
    assert lines[1].startswith("step 40 of 1,000 (4 %), ")
    assert all(one.endswith("10 ms a step") for one in lines), "no table, and nothing is drawn over"


def test_evaluation_is_printed_at_once(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    log.step(10)
    log.step(20)
    log.step(30, **{EventName.CURR_TEST_PSNR.value: 20.0})
    log.step(35, **{EventName.CURR_TEST_PSNR.value: 21.0})  # it logs every ten steps
    log.now += 4.0
    log.step(40)
    lines = capsys.readouterr().out.splitlines()
    assert [one.split()[1] for one in lines] == ["10", "30"] and "20.00 dB on a held-out view" in lines[1]


def test_terminal_shows_the_table_of_nerfstudio(
    log: Log, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(writer.LocalWriter, "write_stats_log", lambda _, step: drawn.append(step))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    log.step(10)
    assert drawn == [10] and capsys.readouterr().out == ""


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


def test_watch_is_silent_before_the_first_log() -> None:
    watch = PsnrWatch()
    assert watch.now is None and not watch.fallen and math.isinf(watch.best[0])


def test_the_box_and_its_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.CONSOLE, "_width", 60)
    command = "ns-viewer --load-config '/my runs/" + "fox/" * 20 + "config.yml'"
    print_summary([("PSNR", "[red]27[/red] dB"), ("Gaussians", "1,234")], [("Look at it", command)])
    said = capsys.readouterr().out
    assert "Training finished" in said and "[red]27[/red] dB" in said, "what stands in brackets is no markup"
    assert f"Look at it:\n  {command}\n" in said, "one line, to be copied"
