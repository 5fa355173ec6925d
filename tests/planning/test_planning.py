"""The planner against what is there: buffers of a real step, the allocator's peaks, kernels that were timed."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange.replicated_rows import OwnRows, ReplicatedRows
from ns_multigpu.core.exchange.transports import CollectiveRows, PeerRows
from ns_multigpu.core.step.step import Step
from ns_multigpu.core.step.step_settings import StepSettings, padded, with_halos
from ns_multigpu.core.types import View
from ns_multigpu.planning import rates
from ns_multigpu.planning.memory import STATISTICS, checkpoint_bytes, memory, most_points, step_buffers
from ns_multigpu.planning.pace import pace
from ns_multigpu.planning.quantities import gib, parse_count, parse_size
from ns_multigpu.planning.work import (
    CAPACITY_FACTOR,
    CROSSES,
    GRADIENT_BYTES,
    IN_SIGHT,
    STRATEGIES,
    VISIBLE,
    WIRE_BYTES,
    Share,
    Workload,
    batch_of,
    in_sight,
    share,
    usual_tiles,
)
from ns_multigpu.primitives.gaussians.init import initial_gaussians
from ns_multigpu.primitives.gaussians.kernels import GaussianKernels
from ns_multigpu.primitives.gaussians.schema import ORDER
from strategies.single import single

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
GIB = 2**30


def scenes(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / name).read_text("utf8"))["scenes"]


@pytest.mark.parametrize(
    ("text", "count"),
    [("400M", 400_000_000), ("1.5B", 1_500_000_000), ("8000000", 8_000_000), ("8_000_000", 8_000_000),
     ("250k", 250_000), ("2g", 2_000_000_000), (" 0.1m ", 100_000), ("4e6", 4_000_000), ("2.5e7", 25_000_000),
     ("1E+6", 1_000_000), ("2500e-1", 250), ("1e12", 10**12), ("8,000,000", 8_000_000)],
)  # fmt: skip
def test_counts_accept_suffixes(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "text",
    ["", "many", "-4M", "4X", "0", "1.5", "0.0001k", "M", "4 0 0", "4e6M", "1.5e0", "1e-3", "-1", "nan", "inf", "1e13",
     "1e999", "1001B", "e6"],
)  # fmt: skip
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"number of points|whole number|fit no machine"):
        parse_count(text)


def test_sizes() -> None:
    assert parse_size("3840x2160") == parse_size(" 3840 X 2160 ") == (3840, 2160)
    for text in ("3840", "3840x", "x2160", "4x4", "3840*2160", "0x0"):
        with pytest.raises(ValueError, match=r"size of an image|too small"):
            parse_size(text)
    assert [gib(x * GIB) for x in (0, 1.234, 123.456)] == ["0.00", "1.23", "123.5"]


@pytest.mark.parametrize("degree", [0, 1, 3])
def test_parameters_and_moments_are_exact(degree: int) -> None:
    points = 1000
    params = initial_gaussians(None, sh_degree=degree, count=points, extent=1.0, generator=torch.Generator())
    held = sum(tensor.nbytes for tensor in params.values())
    found = memory("single", Workload(points, 640, 480, sh_degree=degree), GIB)
    assert found.parameters == held and found.moments == 2 * held
    assert memory("tile", Workload(4 * points, 640, 480, gpus=4, sh_degree=degree), GIB).parameters == held


def test_a_compact_state_takes_half_the_moments() -> None:
    """Of 720 bytes a Gaussian, with densification's statistics, 484 are left; in a checkpoint, too."""
    full, compact = (
        memory("tile", Workload(4_000_000, 640, 480, gpus=4, compact=compact), GIB) for compact in (False, True)
    )
    assert compact.moments == full.moments / 2 == 4 * 59 * 1_000_000 and compact.parameters == full.parameters
    held = compact.parameters + compact.moments + STATISTICS * 1_000_000
    assert held == 484 * 1_000_000
    for kept, bytes_a_point in ((False, 720), (True, 484)):
        assert checkpoint_bytes(Workload(1000, 640, 480, gpus=4, compact=kept)) == 1000 * bytes_a_point
    assert checkpoint_bytes(Workload(1000, 640, 480, sh_degree=0)) == 1000 * (3 * 4 * 14 + 12)
    assert full.refining - compact.refining == 2 * 45 * 1_000_000
    run = Workload(1, 3840, 2160, gpus=4)
    fits = [most_points("tile", replace(run, compact=c), 139 * GIB, densify=False) for c in (False, True)]
    assert fits[1] > 1.2 * fits[0]


KERNELS = GaussianKernels(3, absgrad=True)


@pytest.mark.parametrize(("rows", "views"), [(2048, 1), (8192, 1), (4096, 3)])
def test_buffers_of_a_step_are_those_of_the_model(rows: int, views: int) -> None:
    """Compare the memory of a step on a CPU. The model also counts buffers of kernels: 48 bytes a row of the
    rasterizer's state, the rows of the previous step, and temporaries of the loss."""
    width, height = 64, 48
    params = initial_gaussians(None, sh_degree=3, count=300, extent=1.0, generator=torch.Generator().manual_seed(1))
    moments = {name: (torch.zeros_like(params[name]), torch.zeros_like(params[name])) for name in ORDER}
    settings = StepSettings(width, height, views, 0.2, rows, 0, 16384)
    strategy, transport = single(World.single()), OwnRows(World.single(), KERNELS, rows, 0, settings.words())
    step = Step(KERNELS, params, moments, {}, settings, strategy, transport)
    step.viewmats.copy_(torch.eye(4))
    step.viewmats[:, 2, 3] = 4.0
    step.Ks.copy_(torch.tensor([[width, 0, width / 2], [0, width, height / 2], [0, 0, 1.0]]))
    targets = [torch.zeros(height, width, 3, dtype=torch.uint8) for _ in range(views)]
    batch = [View(step.viewmats[v], step.Ks[v], width, height, v) for v in range(views)]
    step.take(with_halos(strategy.plan(batch), batch), targets)
    splats = KERNELS.project(step._model, step._cameras(range(views), step.views()), rows)
    of_rows = [transport._table, transport._here, transport._slots, *(t for t in splats if len(t) == rows)]
    one = Share(300, views, rows, 0.0, rows, 16384, 64 * 48 * views, rows, 0.0, 0.0)
    found = step_buffers(one, 1, capacity=1.0)
    assert sum(t.nbytes for t in of_rows) == pytest.approx(found["rows"] - rows * (48 + 56), rel=0.2)
    by_pixel = sum(image.nbytes for image in [*targets, *step.rgb])
    assert by_pixel == 64 * 48 * views * 15 and by_pixel < found["pixels"]


def test_replica_exchange_buffers_are_counted() -> None:
    """The buffers of a rank of two, without a second rank: they are made before anybody is met."""
    world = World.single()
    there = World(0, 2, 0, 2, world.device, object(), object(), object())  # type: ignore[arg-type]
    rows = 4096
    replicas = (through := ReplicatedRows(there, KERNELS, rows, 0, 4))._replicas
    held = sum(t.nbytes for t in (through._messages, *replicas.everyone, replicas._bright))  # type: ignore[attr-defined]
    held += 4 * rows  # the view ids that leave
    one = Share(300, 1, rows, 0.0, rows, 4096, 64 * 48, 2 * rows, 0.0, 0.0)
    assert step_buffers(one, 2, capacity=1.0)["exchange"] == pytest.approx(held, rel=0.01)


@pytest.mark.parametrize("transport", ["collective", "peer"])
def test_row_exchange_buffers_are_counted(transport: str) -> None:
    """The buffers of a rank that draws few of its own rows. Peer memory takes a quarter less than is counted."""
    rows, ranks = 4096, 8
    if transport == "peer":
        through = PeerRows(World.single(), KERNELS, rows * ranks, rows * ranks, 100)
        held = through._buffer.local.nbytes
    else:
        world = replace(World.single(), size=ranks)
        own = tuple(tuple(0 if a == b else rows * ranks // (ranks - 1) for b in range(ranks)) for a in range(ranks))
        through = CollectiveRows(world, KERNELS, rows * ranks, own, 100)
        held = through._wire.nbytes + through.records.nbytes + through._slots.nbytes + through._owners.nbytes
    one = Share(300, 1, 0, rows * ranks, rows, 4096, 64 * 48, rows, 0.0, 0.0)
    planned = step_buffers(one, 1, capacity=1.0)["exchange"]
    assert planned == pytest.approx(held * (1.32 if transport == "peer" else 1.0), rel=0.02)


def test_row_bytes_of_collectives_are_counted() -> None:
    wire = replace(KERNELS, absgrad=True).wire(half=False, slots=False)
    assert (4 * wire.row_words, 4 * wire.gradient_words) == (WIRE_BYTES, GRADIENT_BYTES)
    one = share("tile", Workload(4_000_000, 1920, 1080, views=4, gpus=4))
    assert one.traffic_padded == pytest.approx(3 * (WIRE_BYTES + GRADIENT_BYTES) * one.drawn / 4)


def test_memory_of_the_measured_scenes() -> None:
    """Within 2 % of the allocator's peak beyond parameters and moments, on an H200."""
    for scene in scenes("data/kernels/train-step-h200.json"):
        rows, intersections = scene["capacities"]["rows"], scene["capacities"]["intersections"]
        pixels = scene["width"] * scene["height"]
        one = Share(scene["points"], 1, rows, 0.0, rows, intersections, pixels, rows, 0.0, 0.0)
        found = sum(step_buffers(one, 1, capacity=1.0).values())
        assert found == pytest.approx(scene["lines"]["step, ours"]["peak_bytes"], rel=0.02), scene["name"]


def test_capacities_equal_those_of_training() -> None:
    assert padded(4_000_000) == pytest.approx(CAPACITY_FACTOR * 4_000_000, rel=1e-3)


def test_defaults_are_the_measured_scenes() -> None:
    small, large = (s["counts"] for s in scenes("data/kernels/rasterizer-h200.json")[2:])
    assert pytest.approx(small["kept"] / small["points"]) == VISIBLE
    assert usual_tiles(1920 * 1080) == pytest.approx(small["intersections"] / small["kept"])
    assert usual_tiles(3840 * 2160) == pytest.approx(large["intersections"] / large["kept"])


@pytest.mark.parametrize(
    ("file", "line", "rate"),
    [
        ("data/kernels/rasterizer-h200.json", "  splat_forward", rates.PROJECT),
        ("data/kernels/rasterizer-h200.json", "  intersect_capacity", rates.SORT),
        ("data/kernels/rasterizer-h200.json", "  rasterize", rates.RASTER),
        ("data/kernels/rasterizer-h200.json", "  backward, pixel: into, absgrad", rates.BACKWARD),
        ("data/kernels/train-step-h200.json", "  splat_update: from rows, with Adam", rates.UPDATE),
        ("data/kernels/train-step-h200.json", "  lazy: splat_forward", rates.PROJECT_LAZY),
    ],
)
def test_rates_are_those_that_were_measured(file: str, line: str, rate: rates.Rate) -> None:
    assert (RESULTS.parents[1] / rate.source).is_file()
    for scene in scenes(file):
        n = scene["counts"]
        found = rate.ms(n["points"], n["kept"], n["intersections"], n["pixels"])
        assert found == pytest.approx(scene["lines"][line]["ms"], rel=0.38), scene["name"]


def test_the_losss_rate_is_that_of_whole_views_on_one_gpu() -> None:
    measured = json.loads((RESULTS / "data/scaling/tile-h200-x2-graphs.json").read_text())["results"]
    found = [r for r in measured if r["kind"] == "tile" and r["gpus"] == 1]
    assert {r["name"] for r in found} == {"8M 4K", "8M 1080p"}
    for r in found:
        pixels = {"8M 4K": 3840 * 2160, "8M 1080p": 1920 * 1080}[r["name"]]
        assert rates.LOSS.ms(pixels=pixels) == pytest.approx(r["parts"]["slowest_ms"]["loss"], rel=0.06)


def test_rates_of_lazy_steps_and_links_are_in_their_files() -> None:
    for scene in scenes("data/kernels/train-step-h200.json")[1:]:  # in the smallest, launches are all of it
        n, lines = scene["counts"], scene["lines"]
        tolerance = 0.01 if scene["name"] != "garden-5" else 0.2  # which has few points a view in a group of 32
        assert rates.UPDATE_LAZY.ms(rows=n["kept"]) == pytest.approx(
            lines["  lazy: splat_update"]["ms"], rel=tolerance + 0.03
        )
        assert rates.FLUSH.ms(points=n["points"]) == pytest.approx(lines["  lazy: splat_flush"]["ms"], rel=0.03)
    assert rates.BLOCK == 50
    links = (RESULTS.parents[1] / rates.COLLECTIVE.source).read_text("utf8")
    assert "292 GB/s" in links and rates.COLLECTIVE.bytes_per_ms == 292e6


@pytest.mark.parametrize("scene", [2, 3])
def test_dense_step_time_equals_the_measurement(scene: int) -> None:
    """The sum of the parts, for the scene that the defaults are of; absolute gradients are in it alone."""
    measured = scenes("data/kernels/train-step-h200.json")[scene]
    run = Workload(measured["points"], measured["width"], measured["height"])
    found = pace("single", run, lazy=False).step
    assert found == pytest.approx(measured["lines"]["step, ours, graph"]["ms"], rel=0.12)


def test_shares_of_the_strategies() -> None:
    run = Workload(4_000_000, 1920, 1080, views=2, gpus=4)
    single, batch, tile = (share(name, run) for name in ("single", "batch", "tile"))
    assert (single.points, batch.points, tile.points) == (4_000_000, 4_000_000, 1_000_000)
    assert (single.views, batch.views, tile.views) == (2, 1, 2)
    assert (batch_of("single", run), batch_of("batch", run), batch_of("tile", run)) == (2, 4, 2)
    assert single.pixels == 2 * 1920 * 1080 and batch.pixels == 1920 * 1080
    assert 1920 * 1080 / 2 < tile.pixels < 1.2 * 1920 * 1080 / 2, "half a view, and its halo"
    assert single.traffic == 0 and batch.traffic == pytest.approx(3 * 76 * batch.rows)
    assert batch.traffic_padded == pytest.approx(3 * CAPACITY_FACTOR * 92 * batch.rows)
    assert batch.updated == 4 * batch.rows
    whole = share("tile", Workload(4_000_000, 1920, 1080, views=4, gpus=4))
    assert whole.pixels == 1920 * 1080, "no view is cut: no halo"
    alone = share("tile", Workload(4_000_000, 1920, 1080))
    assert alone.traffic == 0 and alone.drawn == share("single", Workload(4_000_000, 1920, 1080)).drawn


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("densify", [True, False])
def test_the_largest_model_is_the_largest(strategy: str, densify: bool) -> None:
    run = Workload(1, 1280, 720, views=2, gpus=2)
    most = most_points(strategy, run, 40 * GIB, densify=densify)
    assert memory(strategy, run.with_points(most), 40 * GIB).headroom(densify=densify) >= 0
    assert memory(strategy, run.with_points(most + 1), 40 * GIB).headroom(densify=densify) < 0
    assert most_points(strategy, run, 1 * GIB, densify=densify) == 0, "less than is set aside"
    assert most_points(strategy, run, 80 * GIB, densify=densify) > 2 * most


def test_shards_hold_more_and_gradients_less() -> None:
    run = Workload(1, 1280, 720, views=4, gpus=4)
    sizes = {name: most_points(name, run, 40 * GIB, densify=True) for name in STRATEGIES}
    assert sizes["tile"] > 2.5 * sizes["single"]
    unfused = Workload(1, 1280, 720, views=4, gpus=4, fused=False)
    assert most_points("single", unfused, 40 * GIB, densify=True) < sizes["single"]


def test_exchanged_pixels_are_independent_of_the_model() -> None:
    small, large = (
        share("pixel", Workload(points, 1920, 1080, views=4, gpus=4)) for points in (1_000_000, 400_000_000)
    )
    seen = IN_SIGHT[4]
    every = 16 * 0.75 * (4 * seen + 4 * seen) * 1920 * 1080  # if owners drew no more of their pixels than others do
    assert small.traffic == large.traffic == pytest.approx(CROSSES[4] * every)
    assert large.rows == 400 * small.rows and large.received_rows == 0
    assert small.layers == pytest.approx(4 * seen * 1920 * 1080)
    cut = share("pixel", Workload(1_000_000, 1920, 1080, views=1, gpus=4))
    assert cut.layers == pytest.approx(seen * 1920 * (1080 + 4 * 20)), "with halos"
    alone = Workload(1_000_000, 1920, 1080)
    assert share("pixel", alone) == share("tile", alone)
    run = Workload(400_000_000, 1920, 1080, views=4, gpus=4)
    assert pace("pixel", run).exchange < pace("tile", run, transport="collective").exchange
    assert memory("pixel", run, 40 * GIB).exchange < memory("tile", run, 40 * GIB).exchange


def test_visible_share_equals_the_simulated_one() -> None:
    rows = json.loads((RESULTS / "data/pixel/pixel-street.json").read_text())["rows"]
    assert {row["gpus"]: pytest.approx(row["in sight"], abs=5e-4) for row in rows} | {1: 1.0} == IN_SIGHT
    assert all(in_sight(gpus) == pytest.approx(part) for gpus, part in IN_SIGHT.items())
    assert IN_SIGHT[8] < in_sight(6) < IN_SIGHT[4] and 0.05 < in_sight(32) < IN_SIGHT[16]


def test_command_lines_print_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("points", type=parse_count)
    with pytest.raises(SystemExit):
        parser.parse_args(["0"])
    assert "'0' is not a whole number of points, 1 or more" in capsys.readouterr().err
