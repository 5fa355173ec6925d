"""The simulation of locality: what it counts, on a city of one block."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.baselines.left_out import PARTS, ablate
from benchmarks.scaling import two_machines
from benchmarks.scaling.locality_sim import Setting as Switches
from benchmarks.scaling.locality_sim import ablations, by_view, place, scaling, table
from benchmarks.scaling.locality_times import large_graph_seconds, plan_times
from benchmarks.scenes.seen_city import FACTORS, SeenCity, seen_city
from ns_multigpu.locality import patches, placing
from ns_multigpu.locality.options import LocalityOptions
from tests.locality.test_placing import alone, owners_of, placement, towns, views


@pytest.fixture(scope="module")
def city(tmp_path_factory: pytest.TempPathFactory) -> SeenCity:
    folder = tmp_path_factory.mktemp("seen")
    made = seen_city("street", 2, 80, 20_000, 32, cache=folder)
    again = seen_city("street", 2, 80, 20_000, 32, cache=folder)
    assert all((made.seen[key] != again.seen[key]).nnz == 0 for key in made.seen)
    return made


def test_patches_see_what_their_view_sees(city: SeenCity) -> None:
    for way in ("frustum", "near", "visible"):
        whole = city.seen[way, 1].toarray()
        for factor in FACTORS[1:]:
            parts = city.seen[way, factor].toarray().reshape(80, factor * factor, -1)
            assert (parts.max(1) <= whole).all() and (parts.sum(1) >= whole).all()
            assert parts.sum() < 1.6 * whole.sum(), "few points show in two patches"
    assert 0 < city.seen["visible", 1].sum() < 0.6 * city.seen["frustum", 1].sum(), "houses hide much of a street"
    assert city.seen["frustum", 1].max() <= 32


def test_locality_beats_chance(city: SeenCity) -> None:
    row = scaling(city, "visible", [8], 5)[0]
    assert row["less_between"] > 30
    assert row["draw"] < 1.6
    rows = {one["name"]: one for one in ablations(city, "visible", 8, 5)}
    assert abs(rows["whole images, all random"]["less_between"]) < 1e-6
    assert rows["ours"]["less_between"] > rows["random assignment"]["less_between"]
    assert rows["ours"]["less_between"] > rows["random placement"]["less_between"]
    assert rows["ours"]["view_mean"] < rows["within a machine: METIS"]["view_mean"]
    assert table("title", ("name",), list(rows.values())).row_count == len(rows)
    placed, _ = place(city, "frustum", 2, Switches())
    mean, tail = by_view(city, "frustum", placed)
    assert 1 <= mean <= tail <= 4


def test_times_are_reported(city: SeenCity, tmp_path: Path) -> None:
    large = large_graph_seconds(400, 30, 0.05, 2)
    assert large["groups"] == 400 and large["edges"] > 30 and large["most_points"] < 1.2
    times = plan_times(city, "visible", batch=4, machines=2, repeats=2)
    assert np.isfinite(times["with search"]["ms"])


@pytest.mark.parametrize("part", PARTS)
def test_one_part_is_left_out_of_a_run(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks on two machines, and two towns with views of their own: whole, each machine has one and draws it."""
    for module, name in ((placing, "partition"), (patches, "Assigner")):
        monkeypatch.setattr(module, name, getattr(module, name))  # to be restored
    words = ablate(part)
    assert ("--pipeline.locality.patches" in words) == (part in ("patches", "all"))
    assert ("--pipeline.locality.relays" in words) == (part in ("hierarchy", "all"))
    where, world, options = towns(), alone(4, 2), LocalityOptions(plans="at-once")
    made, access = placement(world, views(), plans="at-once")
    machines = owners_of(made, where, 4) // 2
    apart = len(set(machines[where[:, 0] < 0].tolist())) == 1
    drawn = patches.LocalPatches(world, options, access).assign(views()[:2], 4).drawn
    local = all(len({patch.view for of_rank in drawn[first : first + 2] for patch in of_rank}) == 1 for first in (0, 2))
    if part != "hierarchy":  # without it a town's ranks may be of one machine by chance
        assert apart == (part in ("assignment", "patches"))
    if part in ("assignment", "patches", "all"):
        assert local == (part == "patches")
    assert [len(of_rank) for of_rank in drawn] == [2 * options.patches**2 // 4] * 4, "equally many for each"


def test_only_locality_has_parts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(two_machines.sys, "argv", ["two_machines", "tile", "--left-out", "placement"])
    with pytest.raises(SystemExit):
        two_machines.main()
    assert "--left-out: only locality has these parts. Add locality to the strategies." in capsys.readouterr().err
