"""Plans over several machines, against cases that were computed by hand and the figures that they are taken from."""

import re
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest
import torch

from cuda_ext.ops.exchange import row_exchange, row_wire
from ns_multigpu.cli import main
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import SSIM_HALO, View
from ns_multigpu.locality import placing
from ns_multigpu.locality.options import LocalityOptions
from ns_multigpu.locality.patches import LocalPatches
from ns_multigpu.locality.rules import Access
from ns_multigpu.planning import command, rates, simulated
from ns_multigpu.planning.memory import MOST_SAMPLED, memory, most_points
from ns_multigpu.planning.pace import pace, traffic
from ns_multigpu.planning.work import HALO, PATCHES, Workload, share

ROOT = Path(__file__).parents[2]
GIB = 2**30
RUN = Workload(1_000_000, 800, 800, views=16, gpus=8, visible=0.01, tiles=4.0, machines=2, scene="aerial")
"""A million points on two machines of four GPUs; each of 16 views shows 10,000: 20,000 rows a GPU."""


def test_figures_are_the_tables() -> None:
    text = (ROOT / simulated.SOURCE).read_text("utf8")
    table = re.findall(
        r"^\| (\w+, [\w ]+) \| (\d+) \((\d+)\) \| (\d+) \| \*\*([-\d.]+)\*\* \|(.*)\|$", text, re.MULTILINE
    )
    assert len(table) == 21
    fewest: dict[tuple[str, int], tuple[float, ...]] = {}
    for title, ranks, machines, views, between, rest in table:
        assert int(ranks) == simulated.GPUS * int(machines)
        in_all, sends, receives, draws, holds, *_ = (float(cell) for cell in rest.split("|"))
        line = (float(between) / 100, in_all / 100, sends, receives, draws, holds, float(views))
        fewest.setdefault((title, int(machines)), line)
    ours = {
        (scene.title, machines): line for scene in simulated.SCENES.values() for machines, line in scene.lines.items()
    }
    assert len(ours) == len(fewest) == 20
    for key, line in ours.items():
        found = (line.between, line.in_all, line.sends, line.receives, line.draws, line.holds, line.views)
        assert found == pytest.approx(fewest[key]), key
    for name, part in (("aerial", 0.93), ("street", 20.9), ("street-far-plane", 0.37), ("street-visible", 2.94)):
        assert f"{part} %" in text and simulated.SCENES[name].visible == pytest.approx(part / 100)


def test_unsimulated_machines_are_interpolated() -> None:
    """On the line over the logarithm of their number."""
    near = simulated.simulated("street-visible", 4), simulated.simulated("street-visible", 2)
    three = simulated.simulated("street-visible", 3)
    part = 0.5849625007211562  # log2(3) - 1
    assert three.between == pytest.approx(near[1].between + part * (near[0].between - near[1].between))
    assert simulated.simulated("aerial", 100) == simulated.simulated("aerial", 32)
    alone = simulated.simulated("street", 1)
    assert (alone.between, alone.in_all, alone.draws) == (0.0, 0.0, 1.0)
    for visible, name in ((0.22, "street"), (0.01, "aerial"), (0.03, "street-visible"), (0.001, "street-far-plane")):
        assert simulated.nearest_scene(visible) == name == Workload(1, 16, 16, visible=visible).scene


def test_constants_are_those_of_the_code() -> None:
    assert (LocalityOptions().patches, SSIM_HALO) == (PATCHES, HALO)
    assert MOST_SAMPLED == placing.MOST_SAMPLED
    assert (command.MOST_RANKS, command.MOST_OWNERS) == (row_exchange.MOST_RANKS, row_wire.MOST_SEGMENTS)


def test_bytes_of_tile_between_machines() -> None:
    """Of 20,000 rows of a GPU, drawn uncut, half come from the other machine: 48 bytes there, 44 back. 3/8 come from
    the other three GPUs of its own. Of what has crossed these three forward three quarters."""
    found = traffic("tile", RUN)
    assert found.between == pytest.approx(4 * 20_000 * 0.5 * 92)
    assert found.inside == pytest.approx(20_000 * (3 / 8 + 0.5 * 3 / 4) * 92)


def test_bytes_of_locality_between_machines() -> None:
    """88.3 % less than half of all rows cross, and 2.8 % less than seven eighths leave their GPU; the busiest has 1.23
    times the mean."""
    found, rows = traffic("locality", RUN), 1.23 * 20_000 * 92
    between_machines = 0.5 * 0.117  # of what would go to each GPU that needs it; relays save 5.8 % of it
    assert found.between == pytest.approx(4 * rows * between_machines * (1 - 0.058))
    assert found.inside == pytest.approx(rows * (7 / 8 * 0.972 - between_machines + 3 / 4 * between_machines))
    assert found.between < 0.15 * traffic("tile", RUN).between
    # Machines of one GPU have no inside; two GPUs deal half of what stays.
    apart = replace(RUN, gpus=2)
    assert traffic("locality", apart).inside == 0.0
    assert traffic("locality", apart).between == pytest.approx(4 * rows * 0.5 * 0.117)
    stays = 7 / 8 * 0.972 - 0.5 * 0.117
    assert traffic("locality", replace(RUN, gpus=4)).inside == pytest.approx(
        2 * rows * (stays * 0.5 / 0.75 + between_machines * 0.5)
    )


def test_bytes_of_batch_and_single_between_machines() -> None:
    """batch: a GPU gathers 20,000 rows of each other one; a machine takes those of the other four in once."""
    one = share("batch", RUN)
    assert one.rows == 20_000
    each = one.traffic_padded / 7
    found = traffic("batch", RUN)
    assert found.between == pytest.approx(4 * each) and found.inside == pytest.approx(7 * each)
    assert traffic("single", RUN).between == traffic("single", RUN).inside == 0.0


def test_time_follows_from_the_link() -> None:
    """25 Gbit/s are 3,125,000 bytes a millisecond, of which a step uses nine tenths."""
    for name in ("batch", "tile", "locality"):
        slow, fast = (pace(name, RUN, gbit=gbit) for gbit in (25.0, 250.0))
        between_machines = traffic(name, RUN)
        assert slow.between == pytest.approx(between_machines.between / (0.9 * 3_125_000)) and slow.between > 0
        assert fast.between == pytest.approx(slow.between / 10)
        collective = pace(name, RUN, transport="collective").exchange
        assert collective == pytest.approx(rates.COLLECTIVE.ms(between_machines.inside))
        through = (rates.COLLECTIVE if name == "batch" else rates.PEER).ms(between_machines.inside)
        assert slow.exchange == fast.exchange == pytest.approx(through)
        assert slow.step - fast.step == pytest.approx(0.9 * slow.between)
    assert pace("single", RUN).between == 0.0
    for name in ("batch", "tile", "locality"):
        assert pace(name, replace(RUN, machines=1)).between == 0.0
    assert pace("locality", RUN).step < pace("tile", RUN).step


def test_a_share_of_locality() -> None:
    """200 x 200 pixels a patch and 5 around it, 32 patches a GPU; the busiest draws 1.13 times the mean."""
    one = share("locality", RUN)
    assert one.points == ceil(125_000 * 1.04) and one.views == 16
    assert one.pixels == 32 * 210 * 210
    assert one.drawn == pytest.approx(20_000 * 1.05**2 * 1.13) and one.intersections == pytest.approx(4 * one.drawn)
    assert one.rows == one.updated == pytest.approx(20_000 * 1.23)
    alone, single = share("locality", Workload(1000, 800, 600)), share("single", Workload(1000, 800, 600))
    assert (alone.points, alone.drawn, alone.pixels) == (single.points, single.drawn, single.pixels)
    assert (alone.traffic, alone.traffic_padded, alone.between) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(("ranks", "machines", "views"), [(8, 2, 16), (8, 2, 1), (6, 3, 1), (4, 4, 3), (2, 1, 1)])
def test_pixels_are_those_that_patches_take_at_most(ranks: int, machines: int, views: int) -> None:
    """Of sides that whole tiles cut evenly."""
    world = replace(World.single(), size=ranks, local_size=ranks // machines)
    options = LocalityOptions()
    patches = LocalPatches(world, replace(options, plans="at-once"), Access(options.patches**2, ranks))
    width, height = 64 * 5, 64 * 3
    view = View(torch.eye(4), torch.eye(3), width, height)
    most = patches.most_pixels(views, view.width, view.height, ranks, SSIM_HALO)
    run = Workload(1000, width, height, views=views, gpus=ranks, machines=machines, visible=0.01)
    assert share("locality", run).pixels == most


def test_memory_of_locality_is_tiles_and_its_placements() -> None:
    level = replace(RUN, machines=1)  # of one machine nothing is uneven
    tile, locality = memory("tile", level, 40 * GIB), memory("locality", level, 40 * GIB)
    assert locality.placement == 8 * 125_000 and tile.placement == 0.0
    assert (locality.parameters, locality.moments) == (tile.parameters, tile.moments)
    assert locality.model - tile.model == locality.placement
    uneven = memory("locality", RUN, 40 * GIB)
    assert uneven.parameters == pytest.approx(1.04 * tile.parameters) and uneven.placement == 8 * 130_000
    # A large model's sample is looked at on one GPU; of a small share that is more than growing takes.
    many = replace(RUN, points=8_000_000, gpus=64, machines=1)
    assert memory("locality", many, 40 * GIB).refining == 132 * MOST_SAMPLED > memory("tile", many, 40 * GIB).refining
    assert 0 < most_points("locality", RUN, 40 * GIB, densify=True) < most_points("tile", RUN, 40 * GIB, densify=True)


def planned(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    main(["plan", "--points", "100M", "--image", "1920x1080", "--gpu", "h200", *more])
    return capsys.readouterr().out


def test_the_command_compares_strategies_over_machines(capsys: pytest.CaptureFixture[str]) -> None:
    text = planned(
        capsys, "--gpus", "16", "--machines", "4", "--views-per-step", "16", "--visible-fraction", "0.01",
        "--between-gbit", "100",
    )  # fmt: skip
    assert "16 GPU(s) on 4 machines" in text
    between_machines = next(line for line in text.splitlines() if line.startswith("  into a machine"))
    single, batch, tile, locality, pixel = (float(cell.replace(",", "")) for cell in between_machines.split()[-5:])
    run = Workload(100_000_000, 1920, 1080, views=16, gpus=16, machines=4, visible=0.01)
    assert single == 0.0 and batch > tile
    assert tile == pytest.approx(traffic("tile", run).between / 2**20, abs=0.1)
    assert locality == pytest.approx(traffic("locality", run).between / 2**20, abs=0.1)
    line = next(line for line in text.splitlines() if line.startswith("  between machines, 100 Gbit/s"))
    assert float(line.split()[-2]) == pytest.approx(pace("locality", run, gbit=100).between, abs=0.01)
    assert re.search(r"^  draws +1\.00 +1\.00 +1\.00 +1\.29 +1\.00$", text, re.MULTILINE)
    assert "saves 85.8% " in text and simulated.SOURCE in text and "aerial, frustum" in text
    assert "tile draws its bands wherever: 75% of the rows cross." in text
    assert pixel == pytest.approx(traffic("pixel", run).between / 2**20, abs=0.1)
    assert "in 15% of its pixels" in text
    assert "simulated with" not in text, "as many views as there"


def test_command_reports_unsimulated_values(capsys: pytest.CaptureFixture[str]) -> None:
    text = planned(capsys, "--gpus", "36", "--machines", "3", "--strategy", "locality", "--scene", "aerial")
    assert "simulated with 16 views a step, not 1. Fewer views save less" in text
    assert "3 machines were not simulated" in text and "rows are exchanged" not in text, "12 + 3 are few enough"
    assert "a view here shows 21.9% of the points, and there 0.9%" in text
    assert "32 machines are the most" in planned(capsys, "--gpus", "64", "--machines", "64")
    for gpus, machines, words in (
        (33, 1, "rows are exchanged between 32 GPUs of a machine at most"),
        (136, 8, "rows are exchanged between 128 GPUs at most"), (99, 3, "between 32 GPUs of a machine at most"),
    ):  # fmt: skip
        assert words in planned(capsys, "--gpus", str(gpus), "--machines", str(machines))
    for machines in (16, 32, 128):
        assert "exchanged between" not in planned(capsys, "--gpus", "128", "--machines", str(machines))


def test_one_machine_is_planned_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    text = planned(capsys, "--gpus", "4")
    assert "locality" not in text and "between machines" not in text and "Traffic" not in text
    assert "locality" in planned(capsys, "--gpus", "4", "--strategy", "locality")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--gpus", "6", "--machines", "4"], "6 GPUs on 4 machines: gpus counts those of all machines"),
        (["--machines", "0"], "1 GPUs on 0 machines"),
        (["--between-gbit", "0"], "between-gbit is 0.0: give more than 0"),
    ],
)
def test_nonsense_is_refused(more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--points", "1M", "--image", "640x480", "--gpu", "h200", *more])
    assert said in capsys.readouterr().err
    with pytest.raises(ValueError, match="scene is 'moon'"):
        Workload(1, 16, 16, scene="moon")
