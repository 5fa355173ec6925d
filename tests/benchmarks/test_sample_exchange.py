"""`benchmarks.scaling.sample_exchange`: both exchanges compute the same, and what each sends."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.scaling.sample_exchange import EXCHANGES, FAMILY, SAMPLES, main, make_batch, step
from ns_multigpu.core.dist.world import World
from tests.lib.ranks import DEVICES, run_ranks

RAYS = 50


def both(world: World, cells: int) -> dict[str, Any]:
    """Return each exchange's integrals, gradients at own samples and bytes, and the batch's sizes."""
    batch = make_batch(world, RAYS, cells, torch.float64)
    found: dict[str, Any] = {"segments held": batch.segments.begins, "samples held": batch.held}
    for way in EXCHANGES:
        before = world.traffic.sent
        loss, whole = step(batch, way, world)
        assert batch.fields.grad is not None
        integrals = {name: value.detach().cpu() for name, value in whole.items()} | {"loss": loss.detach().cpu()}
        found[way] = integrals, batch.fields.grad.cpu(), world.traffic.sent - before
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cells", [2, 5])
def test_both_give_the_same_pixels_and_gradients(cells: int, device: str) -> None:
    ranks = run_ranks(both, 2, cells, device=device)
    for found in ranks:
        (segments, slopes, _), (samples, others, _) = found["segments"], found["samples"]
        assert segments.keys() == samples.keys() == {*(one.name for one in FAMILY.members), "loss"}
        for name, value in segments.items():
            torch.testing.assert_close(value, samples[name], rtol=1e-9, atol=1e-12)
            assert torch.equal(value, ranks[0]["segments"][0][name])
        torch.testing.assert_close(slopes, others, rtol=1e-9, atol=1e-15)
        assert (slopes != 0).any(0).all() and len(slopes) > RAYS


def test_each_sends_what_it_is_named_after() -> None:
    for found in run_ranks(both, 2, 2):
        begins, held = found["segments held"], found["samples held"]
        assert RAYS * SAMPLES <= sum(held) < RAYS * (SAMPLES + 2)
        assert found["segments"][2] == 8 * FAMILY.width * max(begins[1], begins[2] - begins[1])
        assert found["samples"][2] == 8 * 6 * max(held)


def test_command(tmp_path: Path, capsys: Any) -> None:
    words = ["--device", "cpu", "--rays", "40", "--cells", "2", "--gbit", "none", "--steps", "2"]
    assert main([*words, "--json", str(tmp_path / "out.json")]) == 0
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [one["way"] for one in runs] == list(EXCHANGES) and runs[0]["bytes"] * 4 < runs[1]["bytes"]
    assert all(0 < one["exchange_ms"] < one["step_ms"] for one in runs)
    assert "own links" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cells", "1"), "--ranks 2, --cells 1: need 2 ranks or more, a cell for each"),
        (("--steps", "0"), "--rays 4096, --steps 0: need 1 or more"),
    ],
)
def test_bad_input_is_named(words: tuple[str, ...], said: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", *words])
    assert said in capsys.readouterr().err
