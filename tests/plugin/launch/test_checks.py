"""Each kind of bad input is refused with a message that names it and its remedy; good input passes."""

from pathlib import Path

import pytest

from ns_multigpu.plugin.faults.errors import InputError, WorkerFailed, show
from ns_multigpu.plugin.launch import checks
from ns_multigpu.plugin.launch.ranks import Ranks
from ns_multigpu.plugin.train.pipeline import DistributedPipelineConfig
from strategies import STRATEGIES

FOUR = Ranks(rank=5, size=8, local_rank=1, local_size=4, machines=2)


@pytest.mark.parametrize(
    ("device", "asked", "ranks", "gpus", "said"),
    [
        ("cuda", 4, None, 2, r"--machine.num-devices 4 asks for 4 CUDA devices, and torch sees 2 .*num-devices 2"),
        ("cuda", 1, None, 0, "torch sees none on this machine. Add --machine.device-type cpu"),
        ("cuda", 4, FOUR, 3, "torchrun --nproc-per-node 4 asks for 4 CUDA devices.*--nproc-per-node 3"),
        ("cpu", 2, FOUR, 0, "--machine.num-devices 2 disagrees with the launcher, which has started 4"),
        ("cpu", 0, None, 0, "--machine.num-devices 0: at least one"),
        ("cpu", -1, FOUR, 0, "--machine.num-devices -1: at least one"),
        ("mps", 1, None, 0, "device-type mps is not supported. Choose"),
    ],
)
def test_devices_refused(device: str, asked: int, ranks: Ranks | None, gpus: int, said: str) -> None:
    with pytest.raises(InputError, match=said):
        checks.check_devices(device, asked, ranks, gpus)


@pytest.mark.parametrize(
    ("device", "asked", "ranks", "gpus"),
    [("cuda", 4, None, 4), ("cuda", 1, FOUR, 4), ("cuda", 4, FOUR, 8), ("cpu", 7, None, 0), ("cpu", 4, FOUR, 0)],
)
def test_devices_accepted(device: str, asked: int, ranks: Ranks | None, gpus: int) -> None:
    checks.check_devices(device, asked, ranks, gpus)


def test_several_machines_get_the_torchrun_command() -> None:
    argv = ["splatfacto-batch", "--machine.num-machines", "2", "--machine.machine-rank=1", "--data", "my capture"]
    argv += ["--machine.dist_url", "tcp://hal:1234", "--machine.num-devices", "4"]
    with pytest.raises(InputError) as caught:
        checks.check_machines(2, 1, 4, "tcp://hal:1234", None, argv)
    assert str(caught.value).splitlines()[-1] == (
        "torchrun --nnodes 2 --node-rank 1 --nproc-per-node 4 --master-addr hal --master-port 1234 "
        "-m nerfstudio.scripts.train splatfacto-batch --data 'my capture' --machine.num-devices 4"
    )
    assert "--master-addr MASTER --master-port 29500" in checks.torchrun_command(argv, 4, 2, 0, "auto")


def test_machines_and_launcher() -> None:
    checks.check_machines(1, 0, 4, "auto", None, [])
    checks.check_machines(1, 0, 4, "auto", FOUR, [])
    checks.check_machines(2, 0, 4, "auto", FOUR, [])
    with pytest.raises(InputError, match="num-machines 3 disagrees with the launcher, which spans 2"):
        checks.check_machines(3, 0, 4, "auto", FOUR, [])
    with pytest.raises(InputError, match="num-machines 0"):
        checks.check_machines(0, 0, 4, "auto", None, [])


@pytest.mark.parametrize(
    ("fallback", "said"),
    [
        (False, r"file/run cannot be written: Not a directory.*--output-dir DIR"),
        (True, r"--save-fallback-dir \S+/file/run cannot be written: Not a directory"),
    ],
)
def test_folders(tmp_path: Path, fallback: bool, said: str) -> None:
    checks.check_folder(tmp_path / "new" / "run", fallback)
    assert list((tmp_path / "new" / "run").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=said):
        checks.check_folder(tmp_path / "file" / "run", fallback)


@pytest.mark.parametrize(("images", "steps"), [(None, 1), (1, 1), (30000, 30000)])
def test_lengths(images: int | None, steps: int) -> None:
    checks.check_lengths(images, steps)


@pytest.mark.parametrize(
    ("images", "steps", "said"),
    [
        (0, 9, "--max-num-images 0: "),
        (-1, 9, "--max-num-images -1: "),
        (None, 0, "--max-num-iterations 0: "),
        (9, -5, "--max-num-iterations -5: "),
    ],
)
def test_a_run_of_no_length(images: int | None, steps: int, said: str) -> None:
    with pytest.raises(InputError, match=f"{said}.*nothing to train.*a run that is resumed counts"):
        checks.check_lengths(images, steps)


def test_retries() -> None:
    checks.check_retries(0.0)
    checks.check_retries(60.0)
    for seconds in (-0.5, float("nan")):
        with pytest.raises(InputError, match=rf"--save-retry-seconds {seconds}: .* 0 to try once"):
            checks.check_retries(seconds)


def test_more_workers_than_cores() -> None:
    for workers in (1, 2):
        assert checks.crowd(workers, 2, None) == checks.crowd(workers, 2, 10**12) == ""
    for memory in (None, 10**12):
        assert checks.crowd(3, 2, memory) == (
            "Note: 3 workers share 2 processor cores, and will be slower than 2 would be (--machine.num-devices 2)."
        )


def test_more_workers_than_memory_holds() -> None:
    with pytest.raises(InputError, match=r"num-devices 99: .* 59 GB of memory, and 16 GB are free.*num-devices 2\."):
        checks.crowd(99, 2, 16 * 10**9)
    assert checks.crowd(26, 2, 16 * 10**9).startswith("Note: 26 workers share 2")
    with pytest.raises(InputError):
        checks.crowd(27, 2, 16 * 10**9)
    assert checks.crowd(1, 2, 10**6) == "", "one worker is what there would be otherwise, too"


def test_strategy() -> None:
    checks.check_strategy("batch", {"single": 1, "batch": 2})
    with pytest.raises(InputError, match=r"no strategy 'bacth'. Did you mean 'batch'\? .*are: batch, single"):
        checks.check_strategy("bacth", {"single": 1, "batch": 2})
    with pytest.raises(InputError, match=r"no strategy 'xyzzy'. The strategies are"):
        checks.check_strategy("xyzzy", ["single", "batch"])


def test_all_strategies_can_train() -> None:
    for name in STRATEGIES:
        checks.check_strategy(name, STRATEGIES)
    with pytest.raises(
        InputError, match=r"no strategy 'xyzzy'. The strategies are: batch, locality, pixel, single, tile\.$"
    ):
        checks.check_strategy("xyzzy", STRATEGIES)


@pytest.mark.parametrize("views", [{"views_per_step": 0}, {"views_per_rank": 0}])
def test_a_step_without_views_is_refused_before_it_is_counted_in(views: dict[str, int]) -> None:
    with pytest.raises(InputError, match="at least one view"):
        DistributedPipelineConfig(**views).batch(2)


def test_views_of_a_step() -> None:
    checks.check_views_per_step(None, 4, cuts_views=False)
    checks.check_views_per_step(8, 4, cuts_views=False)
    checks.check_views_per_step(1, 4, cuts_views=True)
    with pytest.raises(InputError, match=r"views-per-step 6: .* 4 workers need a multiple of 4. Give 8, or"):
        checks.check_views_per_step(6, 4, cuts_views=False)
    with pytest.raises(InputError, match=r"views-per-step 0: at least one"):
        checks.check_views_per_step(0, 4, cuts_views=True)


def test_views() -> None:
    checks.check_views(4, 4)
    with pytest.raises(InputError, match=r"has 3 training views for 4 workers.*--machine.num-devices 3 or fewer"):
        checks.check_views(3, 4)


def test_views_per_rank_and_accumulation() -> None:
    checks.check_views_per_rank(1)
    with pytest.raises(InputError, match=r"--pipeline.views-per-rank 0: at least one"):
        checks.check_views_per_rank(0)
    checks.check_no_accumulation({"means": 1})
    with pytest.raises(InputError, match=r"asked for quats.*--pipeline.views-per-rank N"):
        checks.check_no_accumulation({"means": 1, "quats": 4})


def test_rates_at_end() -> None:
    checks.check_rates_at_end(1.0, 0.5)
    checks.check_rates_at_end(0.03, 0.0)
    for part in (0.0, -0.1, 1.5, float("nan")):
        with pytest.raises(InputError, match=rf"--rates-at-end {part}: .*Give a number above 0"):
            checks.check_rates_at_end(part, 0.5)
    for start in (-0.1, 1.0, float("nan")):
        with pytest.raises(InputError, match=rf"--rates-fall-from {start}: .*Give a number from 0"):
            checks.check_rates_at_end(0.1, start)


def test_operators() -> None:
    checks.check_operators("cpu", None)
    checks.check_operators("cuda", None)
    with pytest.raises(InputError, match=r"training on CUDA needs cannot be built. No nvcc. Install one"):
        checks.check_operators("cuda", "No nvcc. Install one.")
    with pytest.raises(InputError, match=r"training on CPU needs cannot be built. No C\+\+ compiler. Install one"):
        checks.check_operators("cpu", "No C++ compiler. Install one.")


def test_errors_are_shown_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    show(InputError("Give [a] number."))
    assert "Give [a] number." in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "5")
    show(InputError("Give a number.\nOr two."))
    assert capsys.readouterr().err == "rank 5: Give a number.\n"
    show(WorkerFailed("Worker 0 failed", "Traceback of the worker"))
    said = capsys.readouterr().err
    assert said.index("Traceback of the worker") < said.index("Worker 0 failed")
