"""The sort over ranks against torch's own of everything together."""

from itertools import pairwise

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.random import keyed_generator
from ns_multigpu.core.sort.merge_sort import merge_levels, merge_runs, merge_sort
from tests.lib.ranks import run_ranks

Pairs = tuple[torch.Tensor, torch.Tensor]


def keys_of(case: str, size: int, most: int = 60) -> list[torch.Tensor]:
    """Return the initial keys of each rank, up to about `most`."""
    g = keyed_generator("shards", case, size)
    counts = [int(torch.randint(most // 3, most, (1,), generator=g)) for _ in range(size)]
    if case == "one rank has all":
        counts = [most if rank == size // 2 else 0 for rank in range(size)]
    elif case == "some have none":
        counts = [0 if rank % 2 == 0 else most // 2 for rank in range(size)]
    elif case == "very uneven":
        counts = [min(most, 5**rank) for rank in range(size)]
    elif case == "fewer than ranks":
        counts = [1 if rank == size - 1 else 0 for rank in range(size)]
    elif case == "nothing":
        counts = [0] * size
    span = {"equal keys": 1, "few keys": 3, "large keys": 2**62}.get(case, 10 * most)
    result: list[torch.Tensor] = []
    for rank, count in enumerate(counts):
        keys = torch.randint(-(span // 2), span - span // 2, (count,), generator=g)
        if case == "large keys" and count > 1:
            keys[0], keys[-1] = torch.iinfo(torch.int64).max, torch.iinfo(torch.int64).min
        if case == "already sorted":
            keys = 100 * rank + torch.arange(count)
        elif case == "reversed":
            keys = -100 * rank - torch.arange(count)
        result.append(keys.int() if case == "int32" else keys)
    return result


def shards(case: str, size: int) -> list[Pairs]:
    """Return the initial pairs of each rank: keys, and values that encode their origin."""
    parts = enumerate(keys_of(case, size))
    return [(keys, torch.stack([torch.full((len(keys),), rank), torch.arange(len(keys))], 1)) for rank, keys in parts]


CASES = (
    "random",
    "one rank has all",
    "some have none",
    "very uneven",
    "fewer than ranks",
    "nothing",
    "equal keys",
    "few keys",
    "large keys",
    "int32",
    "already sorted",
    "reversed",
)


def sort_all(world: World) -> dict[str, tuple[Pairs, int]]:
    """Each case's outcome on this rank, and the bytes that it sent."""
    out: dict[str, tuple[Pairs, int]] = {}
    for case in CASES:
        keys, values = shards(case, world.size)[world.rank]
        world.traffic.since(case)
        out[case] = merge_sort(keys, values, world), world.traffic.since(case)
    return out


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_equals_torch_sort(size: int) -> None:
    outcomes = run_ranks(sort_all, size)
    for case in CASES:
        whole = shards(case, size)
        keys, order = torch.sort(torch.cat([k for k, _ in whole]), stable=True)
        values = torch.cat([v for _, v in whole])[order]
        parts = [outcome[case][0] for outcome in outcomes]
        assert torch.equal(torch.cat([k for k, _ in parts]), keys), case
        assert torch.equal(torch.cat([v for _, v in parts]), values), case
        assert parts[0][0].dtype == whole[0][0].dtype and parts[0][1].shape[1:] == (2,)
        lengths = [len(k) for k, _ in parts]
        assert max(lengths) - min(lengths) <= 1, (case, lengths)
        # At each level an element moves once at most: to the rank that merges it.
        row_bytes = keys.element_size() + 16
        sent = sum(outcome[case][1] for outcome in outcomes)
        assert sent <= len(keys) * row_bytes * (size - 1).bit_length(), case
        if case == "already sorted" and size > 1:
            assert sent < len(keys) * row_bytes, "what is in place should mostly stay there"


@pytest.mark.parametrize("size", range(1, 10))
def test_levels(size: int) -> None:
    levels = merge_levels([7 * rank % 5 for rank in range(size)])
    assert len(levels) == (size - 1).bit_length()
    for merges in levels:
        assert all(merge.left.end == merge.right.first for merge in merges)
        assert all(a.right.end <= b.left.first for a, b in pairwise(merges))
    if levels:
        (last,) = levels[-1]
        assert (last.result.first, last.result.end) == (0, size)
        assert last.result.length == sum(7 * rank % 5 for rank in range(size))


@pytest.mark.parametrize("left", [0, 1, 5, 9])
def test_merge_of_two_runs_is_stable(left: int) -> None:
    keys = torch.cat([torch.tensor([1, 1, 2, 4, 4, 4, 7, 9, 9])[:left], torch.tensor([0, 1, 4, 4, 9])])
    merged, values = merge_runs(keys, torch.arange(len(keys)), left)
    wanted = torch.sort(keys, stable=True)
    assert torch.equal(merged, wanted.values) and torch.equal(values, wanted.indices)


def test_refusals() -> None:
    world = World.single()
    with pytest.raises(TypeError, match=r"must be integers, not torch\.float32"):
        merge_sort(torch.zeros(3), torch.zeros(3), world)
    with pytest.raises(ValueError, match=r"keys \[3\] and values \[2\] are no pairs"):
        merge_sort(torch.zeros(3, dtype=torch.int64), torch.zeros(2), world)
