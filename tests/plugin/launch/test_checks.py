"""Each kind of bad input is refused with a message that names it and its remedy; good input passes."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch import checks
from ns_multigpu.plugin.launch.ranks import Ranks
from ns_multigpu.plugin.splats.pipeline import DistributedPipelineConfig
from strategies import STRATEGIES

FOUR = Ranks(rank=5, size=8, local_rank=1, local_size=4, machines=2)


NAN = float("nan")

ACCEPTED: list[tuple[Callable[..., None], list[tuple[Any, ...]]]] = [
    (
        checks.check_devices,
        [("cuda", 4, None, 4), ("cuda", 1, FOUR, 4), ("cuda", 4, FOUR, 8), ("cpu", 7, None, 0), ("cpu", 4, FOUR, 0)],
    ),
    (checks.check_machines, [(1, 0, 4, "auto", None, []), (1, 0, 4, "auto", FOUR, []), (2, 0, 4, "auto", FOUR, [])]),
    (checks.check_lengths, [(None, 1), (1, 1), (30000, 30000)]),
    (checks.check_retries, [(0.0,), (60.0,)]),
    (checks.check_strategy, [(name, STRATEGIES) for name in STRATEGIES]),
    (checks.check_views, [(4, 4)]),
    (checks.check_views_per_rank, [(1,)]),
    (checks.check_no_accumulation, [({"means": 1},)]),
    (checks.check_rates_at_end, [(1.0, 0.5), (0.03, 0.0)]),
    (checks.check_operators, [("cpu", None), ("cuda", None)]),
]


@pytest.mark.parametrize(("check", "given"), ACCEPTED, ids=[check.__name__ for check, _ in ACCEPTED])
def test_good_input_passes(check: Callable[..., None], given: list[tuple[Any, ...]]) -> None:
    for values in given:
        check(*values)


NOTHING = "nothing to train.*a run that is resumed counts"
OTHER_NAMES = r"The strategies are: batch, locality, pixel, single, tile\.$"
NO_COMPILER = "No C++ compiler. Install one."


@pytest.mark.parametrize(
    ("check", "given", "said"),
    [
        (
            checks.check_devices, ("cuda", 4, None, 2),
            r"--machine.num-devices 4 asks for 4 CUDA devices, and torch sees 2 .*num-devices 2",
        ),
        (
            checks.check_devices, ("cuda", 1, None, 0),
            "torch sees none on this machine. Add --machine.device-type cpu",
        ),
        (
            checks.check_devices, ("cuda", 4, FOUR, 3),
            "torchrun --nproc-per-node 4 asks for 4 CUDA devices.*--nproc-per-node 3",
        ),
        (
            checks.check_devices, ("cpu", 2, FOUR, 0),
            "--machine.num-devices 2 disagrees with the launcher, which has started 4",
        ),
        (checks.check_devices, ("cpu", 0, None, 0), "--machine.num-devices 0: at least one"),
        (checks.check_devices, ("cpu", -1, FOUR, 0), "--machine.num-devices -1: at least one"),
        (checks.check_devices, ("mps", 1, None, 0), "device-type mps is not supported. Choose"),
        (
            checks.check_machines, (3, 0, 4, "auto", FOUR, []),
            "num-machines 3 disagrees with the launcher, which spans 2",
        ),
        (checks.check_machines, (0, 0, 4, "auto", None, []), "num-machines 0"),
        (checks.check_lengths, (0, 9), f"--max-num-images 0: .*{NOTHING}"),
        (checks.check_lengths, (-1, 9), f"--max-num-images -1: .*{NOTHING}"),
        (checks.check_lengths, (None, 0), f"--max-num-iterations 0: .*{NOTHING}"),
        (checks.check_lengths, (9, -5), f"--max-num-iterations -5: .*{NOTHING}"),
        (checks.check_retries, (-0.5,), "--save-retry-seconds -0.5: .* 0 to try once"),
        (checks.check_retries, (NAN,), "--save-retry-seconds nan: .* 0 to try once"),
        (checks.check_strategy, ("bacth", STRATEGIES), rf"no strategy 'bacth'. Did you mean 'batch'\? {OTHER_NAMES}"),
        (checks.check_strategy, ("xyzzy", STRATEGIES), rf"no strategy 'xyzzy'. {OTHER_NAMES}"),
        (checks.check_views, (3, 4), "has 3 training views for 4 workers.*--machine.num-devices 3 or fewer"),
        (checks.check_views_per_rank, (0,), "--pipeline.views-per-rank 0: at least one"),
        (checks.check_no_accumulation, ({"means": 1, "quats": 4},), "asked for quats.*--pipeline.views-per-rank N"),
        *(
            (checks.check_rates_at_end, (part, 0.5), f"--rates-at-end {part}: .*Give a number above 0")
            for part in (0.0, -0.1, 1.5, NAN)
        ),
        *(
            (checks.check_rates_at_end, (0.1, start), f"--rates-fall-from {start}: .*Give a number from 0")
            for start in (-0.1, 1.0, NAN)
        ),
        (
            checks.check_operators, ("cuda", "No nvcc. Install one."),
            "training on CUDA needs cannot be used. No nvcc. Install one",
        ),
        (
            checks.check_operators, ("cpu", NO_COMPILER),
            re.escape(f"training on CPU needs cannot be used. {NO_COMPILER}"),
        ),
    ],
)  # fmt: skip
def test_bad_input_is_refused(check: Callable[..., None], given: tuple[Any, ...], said: str) -> None:
    with pytest.raises(InputError, match=said):
        check(*given)


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


def test_more_workers_than_cores() -> None:
    for workers in (1, 2):
        assert checks.crowd(workers, 2, None) == checks.crowd(workers, 2, 10**12) == ""
    for memory in (None, 10**12):
        assert checks.crowd(3, 2, memory) == (
            "Note: 3 workers share 2 processor cores, and will be slower than 2 would be (--machine.num-devices 2)."
        )


def test_more_workers_than_memory_holds() -> None:
    with pytest.raises(
        InputError, match=r"num-devices 99: .* 59\.4 GB of memory, and 16\.0 GB are free.*num-devices 2\."
    ):
        checks.crowd(99, 2, 16 * 10**9)
    for memory in (0, 10**9):  # fewer than the cores
        with pytest.raises(
            InputError, match=r"num-devices 2: .* 1\.2 GB of memory.*Use fewer: --machine.num-devices 1\."
        ):
            checks.crowd(2, 2, memory)
    assert checks.crowd(26, 2, 16 * 10**9).startswith("Note: 26 workers share 2")
    with pytest.raises(InputError):
        checks.crowd(27, 2, 16 * 10**9)
    assert checks.crowd(1, 2, 10**6) == "", "one worker is what there would be otherwise, too"


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
