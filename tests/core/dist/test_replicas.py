"""The checksum of replicas finds what differs, and says where."""

import pytest
import torch

from ns_multigpu.core.dist import replicas
from ns_multigpu.core.dist.replicas import ReplicaDivergedError, assert_identical, checksum
from ns_multigpu.core.dist.world import World
from tests.lib.ranks import run_ranks


def test_checksum_notices_bits_swaps_and_moves() -> None:
    x = torch.randn(1000, 3)
    same = checksum(x)
    assert torch.equal(same, checksum(x.clone()))
    changed = x.clone()
    changed[500, 1] = torch.nextafter(changed[500, 1], torch.tensor(9.0))
    swapped = x.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    for other in (changed, swapped, x.roll(1, 0), -x):
        assert not torch.equal(same, checksum(other))
    assert checksum(torch.zeros(0)).item() == 0
    assert checksum(torch.tensor([True, False])).item() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bfloat16, torch.float64, torch.bool])
def test_checksum_is_the_weighted_sum_of_all_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In integers of 64 bits, as written out here, however the sum is cut; and it notices what is moved far."""
    monkeypatch.setattr(replicas, "_WEIGHTS", 101)
    monkeypatch.setattr(replicas, "_AT_ONCE", 3 * 101)
    g = torch.Generator().manual_seed(1)
    for length in (1, 100, 101, 102, 302, 303, 304, 606, 1000):
        x = torch.randint(-(2**31), 2**31, (length,), generator=g).to(torch.int32)
        x = x > 0 if dtype == torch.bool else x if dtype == torch.int32 else x.to(dtype)
        kind = torch.int32 if dtype in (torch.float32, torch.int32) else torch.uint8
        bits = x.view(kind).to(torch.int64)
        weights = torch.arange(len(bits)) % 101 * 2 + 1
        assert checksum(x).item() == (bits * weights).sum().item()
    if dtype != torch.bool:
        assert checksum(x.roll(304)).item() != checksum(x).item()
        assert checksum(torch.cat([x, x[:0], x[-1:]])).item() != checksum(x).item()


def _compare(world: World, harm: str) -> str:
    tensors = {"means": torch.arange(12.0).reshape(4, 3), "opacities": torch.ones(4)}
    if world.rank == 1:
        if harm == "value":
            tensors["means"][2, 1] += 1e-6
        elif harm == "count":
            tensors["opacities"] = torch.ones(5)
        elif harm == "shape":
            tensors["means"] = tensors["means"].reshape(3, 4)
        elif harm == "name":
            tensors["extra"] = torch.ones(1)
        elif harm == "other name":
            tensors["scales"] = tensors.pop("opacities")
    try:
        assert_identical(tensors, world, step=70)
    except ReplicaDivergedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("none", []),
        ("value", ["step 70", "means", "[1]"]),
        ("count", ["step 70", "opacities", "5"]),
        ("shape", ["step 70", "means"]),
        ("name", ["step 70", "extra"]),
        ("other name", ["step 70", "opacities", "scales"]),
    ],
)
def test_every_rank_stops_and_names_the_difference(harm: str, words: list[str]) -> None:
    for message in run_ranks(_compare, 2, harm):
        assert bool(message) == bool(words)
        assert all(word in message for word in words), message
