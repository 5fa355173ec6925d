"""Assignment of patches to ranks: the start exact, the search never worse, levels in their order."""

from itertools import permutations, product

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from benchmarks.baselines.placements import assigner, random_assignment
from cuda_ext.dispatch.load import use_reference
from cuda_ext.ops.exchange.assign_patches import assign_patches
from cuda_ext.reference.assign_patches import least_transport, objective
from ns_multigpu.locality.assign import Assigner, Volume, by_capacity

EVEN = (1.0, 1.0, 1.0, 1.0)


def needs(patches: int, ranks: int, seed: int) -> torch.Tensor:
    """Points that patches need from ranks, mostly from one or two."""
    generator = np.random.default_rng(seed)
    at = generator.random(patches) * ranks
    near = np.maximum(0.02, 1 - np.abs((at[:, None] - np.arange(ranks) + ranks / 2) % ranks - ranks / 2))
    return torch.from_numpy(
        np.round(near * generator.integers(500, 20000, (patches, 1)) * generator.random((patches, ranks)))
    )


def here(counts: torch.Tensor, ranks: torch.Tensor) -> float:
    return float(counts.gather(1, ranks[:, None]).sum())


def value(counts: torch.Tensor, ranks: torch.Tensor, weights: tuple[float, ...], power: int = 4) -> float:
    return objective(counts, counts.sum(1), counts.new_zeros(counts.shape[1]), ranks, weights, power)


def exhaustive(counts: torch.Tensor, weights: tuple[float, ...]) -> float:
    """Return the least objective of all assignments whose ranks differ by one patch at most."""
    patches, ranks = counts.shape
    least = patches // ranks
    fair = (
        c for c in product(range(ranks), repeat=patches) if all(least <= c.count(r) <= least + 1 for r in range(ranks))
    )
    return min(value(counts, torch.tensor(chosen), weights) for chosen in fair)


@pytest.mark.parametrize(
    ("patches", "ranks"), [(0, 3), (1, 4), (7, 1), (6, 3), (7, 3), (64, 4), (61, 8), (128, 32), (3, 8)]
)
def test_the_start_is_the_linear_sum_assignment(patches: int, ranks: int) -> None:
    for seed in range(5):
        counts = needs(patches, ranks, seed)
        ours = assign_patches(counts, most_swaps=0).ranks
        scipys = torch.tensor(least_transport(counts), dtype=torch.int64)
        assert here(counts, ours) == pytest.approx(here(counts, scipys))
        held = torch.bincount(ours, minlength=ranks)
        assert held.max() - held.min() <= 1 and held.sum() == patches
    if patches == 64:
        copies = np.repeat(counts.numpy(), patches // ranks, axis=1)
        rows, columns = linear_sum_assignment(copies, maximize=True)
        assert copies[rows, columns].sum() == pytest.approx(here(counts, ours))


@pytest.mark.parametrize(
    "weights", [EVEN, (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0), (0.0, 0.0, 0.0, 1.0), (1.0, 0.5, 0.5, 0.0)]
)
def test_the_search_is_near_the_best_of_all(weights: tuple[float, ...]) -> None:
    names = dict(zip(("alpha", "beta", "gamma", "delta"), weights, strict=True))
    off = []
    for seed in range(8):
        counts = needs(7, 3, seed)
        found = assign_patches(counts, **names)
        assert found.converged and found.after <= found.before + 1e-9
        assert found.after == pytest.approx(value(counts, found.ranks, weights))
        best = exhaustive(counts, weights)
        off.append((found.after - best) / float(counts.sum()))
    assert min(off) > -1e-9
    assert float(np.mean(off)) < 0.02 and max(off) < 0.06, off


@pytest.mark.parametrize("power", [2, 4, 8, 16])
def test_the_search_ends_where_the_reference_ends(power: int) -> None:
    """The reference tries every pair at every swap; a best pair that is remembered wrongly would show."""
    swaps = 0
    for seed in range(6):
        counts = needs(11, 4, seed)
        sent = torch.arange(4, dtype=torch.float64) * 2000
        totals = counts.sum(1) + 700
        arguments = {"alpha": 0.1, "beta": 1.0, "gamma": 0.8, "delta": 0.6, "power": power}
        ours = assign_patches(counts, totals, sent, **arguments)
        with use_reference():
            theirs = assign_patches(counts, totals, sent, **arguments)
        assert ours.before == pytest.approx(theirs.before)
        assert ours.after <= theirs.after * (1 + 1e-3) + 1e-6
        given = (0.1, 1.0, 0.8, 0.6)
        assert ours.after == pytest.approx(objective(counts, totals, sent, ours.ranks, given, power))
        swaps += ours.swaps
    assert swaps > 1


def test_no_swap_gains_at_the_end() -> None:
    counts = needs(40, 8, 1)
    found = assign_patches(counts, alpha=0.1)
    assert found.converged and found.swaps > 2
    weights = (0.1, 1.0, 1.0, 1.0)
    for i, j in permutations(range(40), 2):
        swapped = found.ranks.clone()
        swapped[i], swapped[j] = found.ranks[j], found.ranks[i]
        assert value(counts, swapped, weights) >= found.after - 1e-8 * abs(found.after)


def test_the_result_depends_on_no_thread() -> None:
    counts = needs(1600, 4, 2)  # enough for several threads: 160,000 pairs of patches for each two ranks
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(assign_patches(counts, alpha=0.2, most_swaps=30))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one.ranks, found[0].ranks) for one in found)
    assert found[0].swaps > 0


def test_budgets_end_the_search() -> None:
    counts = needs(200, 8, 3)
    whole, short = assign_patches(counts), assign_patches(counts, most_swaps=2)
    assert whole.converged and whole.swaps > 2
    assert (short.swaps, short.converged) == (2, False)
    assert whole.after < short.after < short.before
    assert assign_patches(counts, seconds=1e-9).swaps == 0


def test_machines_are_assigned_first() -> None:
    """A patch whose points are on all GPUs of one machine is drawn there, even if another machine's GPU has more."""
    generator = np.random.default_rng(4)
    owners = np.arange(64) % 4
    needed = generator.integers(0, 30, (64, 16)).astype(np.float64)
    for patch, home in enumerate(owners):
        needed[patch, 4 * home : 4 * home + 4] += generator.integers(200, 400, 4)
    chosen = Assigner(4, 4).assign(needed)
    assert np.array_equal(chosen // 4, owners)
    assert np.bincount(chosen, minlength=16).tolist() == [4] * 16
    volume = Volume.of(needed, chosen, 4)
    assert volume.received.max() / volume.received.mean() < 1.1
    flat = Volume.of(needed, assigner(4, 4, hierarchical=False).assign(needed), 4)
    assert volume.between <= flat.between


def test_search_counts_rows_sent_and_received_within_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows counted by the search within machines, over all patches, equal the rows that ranks send and receive."""
    needed, volumes = needs(24, 6, 7).numpy(), []

    def listening(counts: torch.Tensor, totals: torch.Tensor, sent: torch.Tensor, **rest: object) -> object:
        found = assign_patches(counts, totals, sent, **rest)  # type: ignore[arg-type]
        if counts.shape[1] == 3:
            here = counts.gather(1, found.ranks[:, None])[:, 0]
            back = torch.zeros(3, dtype=torch.float64).index_add(0, found.ranks, here)
            got = torch.zeros(3, dtype=torch.float64).index_add(0, found.ranks, totals - here)
            volumes.append((sent + counts.sum(0) - back, got))
        return found

    monkeypatch.setattr("ns_multigpu.locality.assign.assign_patches", listening)
    volume = Volume.of(needed, Assigner(2, 3).assign(needed), 3)
    assert np.allclose(torch.cat([one[0] for one in volumes]), volume.sent)
    assert np.allclose(torch.cat([one[1] for one in volumes]), volume.received)


@pytest.mark.parametrize("patches", [0, 1, 5, 61])
def test_numbers_that_do_not_divide(patches: int) -> None:
    needed = needs(patches, 12, 5).numpy()
    for plans in (Assigner(3, 4), Assigner(1, 12), Assigner(12, 1)):
        chosen = plans.assign(needed)
        held = np.bincount(chosen, minlength=12).reshape(plans.machines, -1)
        assert held.sum() == patches
        assert np.ptp(held.sum(1)) <= 1 and np.ptp(held, axis=1).max() <= 1


def test_work_is_balanced_within_a_patch_if_counts_allow() -> None:
    """One large patch among equal ones: who draws it draws one patch fewer."""
    needed = np.full((8, 3), 100.0)
    needed[2] = 190.0
    chosen = Assigner(1, 3).assign(needed)
    drawn = Volume.of(needed, chosen, 3).drawn
    assert np.ptp(drawn) <= needed.sum(1).max()
    assert np.bincount(chosen).tolist()[chosen[2]] == 2


def test_volume_is_what_is_sent() -> None:
    needed = np.array([[5.0, 3, 2, 0], [0, 1, 1, 8]])
    volume = Volume.of(needed, np.array([0, 3]), 2)
    assert volume.sent.tolist() == [0, 4, 3, 0]
    assert volume.received.tolist() == [5, 0, 0, 2]
    assert volume.drawn.tolist() == [10, 0, 0, 10]
    assert (volume.between, volume.total) == (3.0, 7.0)


def test_capacity_rule_prefers_the_owner_of_points() -> None:
    needed = needs(61, 8, 6).numpy()
    ruled, found = by_capacity(needed), Assigner(8, 1).assign(needed)
    held = np.bincount(ruled, minlength=8)
    assert np.ptp(held) <= 1
    random = random_assignment(61, 8, np.random.default_rng(0))
    totals = [Volume.of(needed, chosen, 1).total for chosen in (found, ruled, random)]
    assert totals[0] < 1.1 * totals[1] < 0.8 * totals[2]
    assert by_capacity(np.zeros((0, 3))).tolist() == []
