"""Runs of `benchmarks.captures.recipes`, their order, and the stored results."""

import inspect
import json
import os
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from benchmarks.captures import recipe_run, recipes
from benchmarks.captures.recipes import Job, Runs, arguments, folders_of, jobs_of, table, variants, words_of


def options(tmp_path: Path, *words: str) -> Any:
    (tmp_path / "fox").mkdir(exist_ok=True)
    return arguments(["--json", str(tmp_path / "out.json"), "--output", str(tmp_path / "logs"), *words])


def test_variants_build_on_each_other_and_follow_the_length(tmp_path: Path) -> None:
    known = variants("# a remark\nfew = mcmc --pipeline.model.max-gs-num 9\n\nlate = few --pipeline.model.x @0.5\n")
    assert known["few"] == [*(known["mcmc"] or []), "--pipeline.model.max-gs-num", "9"]
    words = words_of(Job("fox", "late", (7000,), 3), known["late"], Path("fox"), Path("out"), options(tmp_path))
    assert " ".join(words).endswith("--pipeline.model.max-gs-num 9 --pipeline.model.x 3500 " + " ".join(words[-11:]))
    assert words[words.index("--max-num-images") + 1] == "7000"
    assert words[words.index("--pipeline.datamanager.train-cameras-sampling-seed") + 1] == "3"
    for line in ("few mcmc", "few = unknown --x 1", "few =", "few = splatfacto --x 1"):
        with pytest.raises(SystemExit, match="--variants"):
            variants(line)


def test_splatfacto_is_one_run_of_all_lengths(tmp_path: Path) -> None:
    given = options(tmp_path, "--captures", "fox", "--recipes", "splatfacto", "ours", "--images", "9", "5")
    jobs = jobs_of(given, variants(""))
    assert jobs == [Job("fox", "splatfacto", (5, 9), 42), Job("fox", "ours", (5,), 42), Job("fox", "ours", (9,), 42)]
    words = " ".join(words_of(jobs[0], None, Path("fox"), Path("out"), given))
    assert words.startswith("--images 9 --seed 42 --output out --also-at 5 -- colmap --data fox")
    words = " ".join(words_of(Job("fox", "gsplat-2dgs", (7000,), 42), None, Path("fox"), Path("out"), given))
    assert words.startswith("--operators gsplat-2dgs --normal-loss 0.05 --normal-loss-start 3500 --options=")


def test_plan_lists_the_runs(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    plan.write_text("# first\nfox | ours mcmc | 7 | 1 2\naerial-3 | best | 9 | 1\nfox | ours | 7 | 1\n")
    given = options(tmp_path, "--captures", f"fox={tmp_path / 'fox'}", "--plan", str(plan), "--cities", str(tmp_path))
    jobs = jobs_of(given, variants(""))
    assert [(job.capture, job.recipe, job.seed) for job in jobs] == [
        ("fox", "ours", 1), ("fox", "mcmc", 1), ("fox", "ours", 2), ("fox", "mcmc", 2), ("aerial-3", "best", 1),
    ]  # fmt: skip
    folders, cities = folders_of(given, jobs)
    assert folders == {"fox": tmp_path / "fox", "aerial-3": tmp_path / "aerial-3"} and cities == ["aerial-3"]
    plan.write_text("fox | unknown | 7 | 1")
    with pytest.raises(SystemExit, match="unknown"):
        jobs_of(given, variants(""))
    plan.write_text("fox | ours | 7")
    with pytest.raises(SystemExit, match="CAPTURES"):
        jobs_of(given, variants(""))


def test_few_views(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    plan.write_text("fox~0.2 fox | ours | 7 | 1\n")
    given = options(tmp_path, "--captures", str(tmp_path / "fox"), "--plan", str(plan))
    few, all_ = jobs_of(given, variants(""))
    assert folders_of(given, [few, all_])[0] == {"fox": tmp_path / "fox"}
    assert few.rows() == [("fox~0.2", "ours", 7, 1)]
    for job, held_out in (
        (few, "--eval-mode fraction --train-split-fraction 0.2"),
        (all_, "interval --eval-interval 8"),
    ):
        assert " ".join(words_of(job, [], tmp_path / "fox", Path("out"), given)).endswith(held_out)


class _Calls:
    """Replacement of processes: each run takes the given seconds and writes a result."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.called, self.now, self.cut = seconds, list[str](), 0.0, False
        self.given, self.gpus = list[tuple[Any, ...]](), list[str | None]()

    def __call__(self, runs: Runs, function: str, *given: Any, gpu: str | None = None) -> float | None:
        self.called.append(function)
        self.gpus.append(gpu)
        if "city" in function:
            self.given.append(given)
            return self.seconds
        words, _, output, *_ = given
        self.given.append(given)
        self.now += self.seconds
        if "fails" in words:
            return None
        found = {"psnr": 20.0, "ssim": 0.5, "gaussians": 7, "train_seconds": 1.0, "peak_mib": 2.0}
        if self.cut:
            (output.parent / "looks.json").write_text(json.dumps([found | {"images": 5, "psnr": 18.0}]))
            return None
        looks = [found | {"images": 5, "psnr": 19.0}] if function == "train_splatfacto" else []
        output.write_text(json.dumps(found | ({"looks": looks} if looks else {})))
        return self.seconds


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> _Calls:
    stand_in = _Calls(10.0)
    monkeypatch.setattr(Runs, "call", lambda self, *given, gpu=None: stand_in(self, *given, gpu=gpu))
    monkeypatch.setattr(Runs, "left", lambda self: self.options.seconds - stand_in.now)
    monkeypatch.setattr(recipes.forkserver, "set_forkserver_preload", lambda _: None)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return stand_in


def test_existing_results_are_not_run_again(tmp_path: Path, calls: _Calls) -> None:
    words = ("--captures", str(tmp_path / "fox"), "--recipes", "splatfacto", "ours", "--images", "5", "9")
    runs = Runs(options(tmp_path, *words))
    runs.go()
    assert calls.called == ["train_splatfacto", "train_ours", "train_ours"]
    kept = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [(r["capture"], r["recipe"], r["images"], r["psnr"]) for r in kept] == [
        ("fox", "splatfacto", 5, 19.0), ("fox", "splatfacto", 9, 20.0), ("fox", "ours", 5, 20.0),
        ("fox", "ours", 9, 20.0),
    ]  # fmt: skip
    assert all(r["alone"] and r["wall_s"] == 10.0 for r in kept)
    again = Runs(options(tmp_path, *words, "--seeds", "42", "43"))
    again.go()
    assert len(calls.called) == 6, "the new seed alone"
    assert len(again.results) == 8


def test_a_run_that_is_cut_off_leaves_its_scores(tmp_path: Path, calls: _Calls) -> None:
    words = ("--captures", str(tmp_path / "fox"), "--recipes", "splatfacto", "--images", "5", "9")
    calls.cut = True
    Runs(options(tmp_path, *words)).go()
    calls.cut = False
    runs = Runs(options(tmp_path, *words))
    runs.go()
    assert [(r["images"], r["psnr"], r["wall_s"]) for r in runs.results] == [(5, 18.0, None), (9, 20.0, 10.0)]


def test_a_run_that_fails_leaves_the_others(tmp_path: Path, calls: _Calls) -> None:
    (tmp_path / "v").write_text("bad = ours fails\n")
    words = ("--captures", str(tmp_path / "fox"), "--recipes", "bad", "ours", "--variants", str(tmp_path / "v"))
    runs = Runs(options(tmp_path, *words))
    runs.go()
    assert [r["recipe"] for r in runs.results] == ["ours"]


def test_a_city_with_a_number_of_views_is_drawn_from_splats(tmp_path: Path, calls: _Calls) -> None:
    words = ("--captures", "aerial-4-1600", "--recipes", "ours", "--cities", str(tmp_path), "--gpus", "5")
    Runs(options(tmp_path, *words)).go()
    assert calls.called == ["make_splat_city", "train_ours"] and calls.gpus == ["5", "5"]
    bound = inspect.signature(recipe_run.make_splat_city).bind(*calls.given[0]).arguments
    assert (bound["kind"], bound["seed"], bound["views"]) == ("aerial", 4, 1600)


def test_each_gpu_has_as_many_runs_at_once(tmp_path: Path, calls: _Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them begin before any ends."""
    begun = Barrier(4, timeout=20)
    monkeypatch.setattr(Runs, "one", lambda self, job, gpu: (begun.wait(), calls.gpus.append(gpu)))
    words = ("--captures", str(tmp_path / "fox"), "--recipes", "ours", "--seeds", *"1234", "--gpus", "0", "7")
    Runs(options(tmp_path, *words, "--at-once", "2")).go()
    assert sorted(map(str, calls.gpus)) == ["0", "0", "7", "7"]


def test_a_process_sees_its_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Any]()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "all")
    monkeypatch.setattr(recipe_run, "begin", lambda log: seen.append((log, os.environ["CUDA_VISIBLE_DEVICES"])))
    for gpu in (None, "3"):
        recipes._call(gpu, "begin", "log")
    assert seen == [("log", "all"), ("log", "3")]


def test_table_has_times_of_exclusive_runs_only() -> None:
    row = {"capture": "fox", "recipe": "best", "images": 7, "ssim": 0.5, "gaussians": 9, "peak_mib": 3.0}
    rows = [
        row | {"psnr": 30.0, "cc_psnr": 31.5, "train_seconds": 8.0, "alone": True},
        row | {"psnr": 31.0, "train_seconds": 99.0, "alone": False},
    ]
    cells = [list(column.cells) for column in table(rows).columns]
    assert [cell[0] for cell in cells] == ["fox", "7", "best", "2", "30.50 ±0.50", "31.50", "0.5000", "9", "3", "8.0"]
