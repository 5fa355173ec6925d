"""`ns-multigpu plan`: the line that concludes, its exit status, its tables, and input that is wrong."""

import re

import pytest

from ns_multigpu.cli import main
from ns_multigpu.planning.quantities import gib


def test_the_command_prints_every_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--points", "400M", "--image", "3840x2160", "--gpus", "4", "--gpu", "h200"])
    out = capsys.readouterr().out
    assert "400,000,000 Gaussians" in out and "139.0 GiB (NVIDIA H200)" in out and "garden" in out
    assert out.startswith("use splatfacto-tile: fits in 126 of 139 GiB, about ")
    lines = {line[:30].strip(): line[30:].split() for line in out.splitlines() if line.startswith("  ")}
    assert lines["fits"] == ["NO", "NO", "yes", "yes"]
    assert lines["parameters"][0] == gib(400e6 * 236) and lines["parameters"][2] == gib(100e6 * 236)
    times = {line.split("  ")[1]: line for line in out[out.index("Time a step") :].splitlines() if line[:2] == "  "}
    for part in ("cull + project", "sort", "raster", "loss", "backward", "exchange", "update", "step"):
        assert len(re.findall(r"[\d,]+\.\d\d", times[part])) == 4
    assert "batch gives every GPU a view: 4 a step" in out


def test_the_command_plans_a_compact_state(capsys: pytest.CaptureFixture[str]) -> None:
    main([
        "plan", "--points", "1000M", "--image", "3840x2160", "--gpus", "4", "--gpu", "h200", "--strategy", "tile",
        "--visible-fraction", "0.003", "--no-densify", "--optimizer-state", "compact",
    ])  # fmt: skip
    out = capsys.readouterr().out
    lines = {line[:30].strip(): line[30:].split() for line in out.splitlines() if line.startswith("  ")}
    assert lines["Adam's moments"] == [gib(250e6 * 236)] and lines["fits"] == ["yes"]
    assert "Compact moments: the time is that of full ones" in out


def test_command_uses_scene_statistics(capsys: pytest.CaptureFixture[str]) -> None:
    main([
        "plan", "--points", "8M", "--image", "1920x1080", "--gpu-memory", "24", "--strategy", "single",
        "--visible-fraction", "0.1", "--intersections-per-splat", "4", "--images", "100",
    ])  # fmt: skip
    out = capsys.readouterr().out
    assert "24.00 GiB (as given)" in out and "10.0%" in out and "4.0 tiles" in out and "not given" not in out
    assert "tile" not in out.split("Memory a GPU")[1].splitlines()[0]
    assert re.search(rf"training images\s+{gib(3 * 100 * 1920 * 1080)}\n", out)


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, int]:
    """Return the output of `ns-multigpu plan` for 1080p images, and its exit status."""
    status = 0
    try:
        main(["plan", "--image", "1920x1080", *arguments])
    except SystemExit as ended:
        status = int(ended.code or 0)
    return capsys.readouterr().out, status


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        (["--points", "1M", "--gpu", "h200"], "use splatfacto-batch: fits in "),
        (["--points", "1M", "--gpus", "4", "--gpu", "h100"], "use splatfacto-batch: fits in "),
        (["--points", "200M", "--gpus", "4", "--gpu", "h200"], "use splatfacto-tile: fits in "),
        (
            ["--points", "20M", "--gpus", "4", "--machines", "4", "--views-per-step", "4", "--between-gbit", "10",
             "--strategy", "pixel"],
            "use splatfacto-pixel: fits in ",
        ),
        (["--points", "2M", "--gpus", "2", "--machines", "2", "--gpu", "h200", "--between-gbit", "0.5"],
         "use splatfacto-batch on one GPU (--machine.num-devices 1): fits in "),
    ],
)  # fmt: skip
def test_first_line_names_the_method(arguments: list[str], first: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, status = plan(capsys, *arguments)
    assert out.startswith(first) and status == 0
    line = out.splitlines()[0]
    strategy = "single" if "one GPU" in first else first.split(":")[0].removeprefix("use splatfacto-")
    titles = next(row for row in out.splitlines() if row.startswith("Memory a GPU")).split()[4:]
    column = titles.index(strategy)
    needed, speed = (
        float(next(row for row in out.splitlines() if row.startswith(f"  {name}")).replace(",", "").split()[column + 3])
        for name in ("needed at most", "images a second")
    )
    assert line == f"{line.split(':')[0]}: fits in {needed:.0f} of {line.split()[-5]} GiB, about {speed:,.0f} images/s"


def test_exit_status_is_nonzero_if_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    out, status = plan(capsys, "--points", "400M", "--gpus", "2", "--gpu", "h100")
    assert status == 1 and "Memory a GPU" in out, "the tables are there all the same"
    most = max(int(text.replace(",", "")) for text in re.findall(r"most Gaussians that fit +(.*)", out)[0].split())
    first = out.splitlines()[0]
    assert first.startswith("nothing fits: splatfacto-pixel needs the least, ") and f"holds {most:,} Gaussians" in first
    fits, status = plan(capsys, "--points", str(most), "--gpus", "2", "--gpu", "h100")
    assert status == 0 and fits.startswith("use splatfacto-pixel: fits in ")


def test_without_times_the_strategy_that_needs_the_least_memory_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    out, status = plan(capsys, "--points", "8M", "--gpus", "4", "--gpu", "h200", "--no-fused")
    assert status == 0 and "images/s" not in out
    needed = next(row for row in out.splitlines() if row.startswith("  needed at most")).split()[-4:]
    assert out.startswith(f"use splatfacto-pixel: fits in {min(map(float, needed)):.0f} of 139 GiB\n")


def test_prediction_depends_on_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = (plan(capsys, "--points", "8M", "--gpu", kind)[0] for kind in ("h100", "h200"))
    assert "79.00 GiB (NVIDIA H100)" in slow and "(rates of NVIDIA H100)" in slow
    speeds = [float(re.findall(r"images a second +([\d.]+)", out)[0]) for out in (slow, fast)]
    assert speeds[1] == pytest.approx(1.14 * speeds[0], rel=1e-2)


def test_a_strategy_that_cannot_run_is_not_named(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = plan(capsys, "--points", "2000M", "--gpus", "40", "--gpu", "h200", "--visible-fraction", "0.01")
    assert "exchanged between 32 GPUs of a machine at most" in out and out.startswith("use splatfacto-pixel: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--points", "lots", "--image", "1920x1080"], "no number of points"),
        (["--points", "8M", "--image", "1080p"], "WIDTHxHEIGHT"),
        (["--points", "8M", "--image", "1920x1080", "--gpus", "0"], "at least 1"),
        (["--points", "8M", "--image", "1920x1080", "--sh-degree", "4"], "0 to 3"),
        (["--points", "8M", "--image", "1920x1080", "--visible-fraction", "1.5"], "visible-fraction"),
        (["--points", "8M", "--image", "1920x1080", "--intersections-per-splat", "0"], "intersections-per-splat"),
        (["--points", "8M", "--image", "1920x1080", "--gpu-memory", "-1"], "gpu-memory"),
        (["--points", "8M", "--image", "1920x1080", "--no-fused", "--optimizer-state", "compact"], "for fused steps"),
    ],
)
def test_command_names_the_error(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    assert ended.value.code == 1
    assert said in capsys.readouterr().err
