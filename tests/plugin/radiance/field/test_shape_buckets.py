"""Lines for segments: all of them fit, few are left over, and numbers of lines recur."""

import torch

from ns_multigpu.plugin.radiance.field.shape_buckets import WARM_UP_STEPS, KeptShapeBuckets, capacity_for


def test_buckets_fit_tightly() -> None:
    for count in (1, 7, 300, 5000, 8192):
        bucket = capacity_for(count, 8192)
        assert count <= bucket <= min(count + 1.5 * count**0.5 + 32, 8192)
    assert capacity_for(0, 8192) == 0
    assert capacity_for(48, 48) == 48 and capacity_for(1, 1) == 1


def test_buckets_of_random_rays_recur() -> None:
    g = torch.Generator().manual_seed(2)
    kept, seen = KeptShapeBuckets(8192), list[tuple[tuple[int, ...], ...]]()
    for step in range(1000):
        single = int((torch.rand(8192, generator=g) < 0.2).sum())
        double = int((torch.rand(8192, generator=g) < 0.6).sum())
        buckets = kept.of([[single, double]])
        assert single <= buckets[0][0] and double <= buckets[0][1]
        if step < WARM_UP_STEPS:
            assert buckets == ((single, double),)
        else:
            assert sum(buckets[0]) < 1.06 * 0.8 * 8192
            seen.append(buckets)
    assert len(set(seen)) <= 2 and seen.count(seen[0]) > 900


def test_rare_classes_add_few_buckets() -> None:
    g = torch.Generator().manual_seed(4)
    kept, seen = KeptShapeBuckets(2048), set[tuple[tuple[int, ...], ...]]()
    rare = torch.tensor([200.0, 5, 1, 0.5, 0.3, 0.2])
    for step in range(3000):
        counts = [torch.poisson(rare, generator=g).int().tolist() for _ in range(8)]
        buckets = kept.of(counts)
        assert all(
            n <= m for row, bucket in zip(counts, buckets, strict=True) for n, m in zip(row, bucket, strict=True)
        )
        if step >= WARM_UP_STEPS:
            seen.add(buckets)
    assert len(seen) <= 20, "each is a graph"


def _kept(*counts: int) -> KeptShapeBuckets:
    kept = KeptShapeBuckets(1000)
    for _ in range(WARM_UP_STEPS):
        kept.of([[count] for count in counts])
    return kept


def test_bucket_is_reused_unless_too_small_or_far_too_large() -> None:
    kept = _kept(400, 500)
    first = kept.of([[400], [500]])
    assert kept.of([[390], [510]]) == first
    assert kept.of([[100], [200]]) == ((capacity_for(100, 1000),), (capacity_for(200, 1000),)), "far too large"
    second = kept.of([[500], [400]])
    assert second[0][0] >= 500 and second != first, "too small for the first cell"
    assert kept.of([[399], [499]]) == first


def test_buckets_cover_the_largest_observed_counts() -> None:
    kept = KeptShapeBuckets(1000)
    for count in (400, 410, *[400] * WARM_UP_STEPS):
        buckets = kept.of([[count]])
    assert buckets == ((capacity_for(410, 1000),),)


def test_a_twelfth_more_than_is_needed_is_too_much() -> None:
    kept = _kept(400, 500)
    first = kept.of([[400], [500]])
    assert kept.of([[390], [490]]) == first
    assert sum(map(sum, kept.of([[365], [455]]))) < 0.95 * sum(map(sum, first))
