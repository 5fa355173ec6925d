"""Number of Gaussians chosen for a capture."""

from ns_multigpu.primitives.densify.cap import (
    FULL_SEEDS,
    LEAST_PER_SEED,
    LONG,
    PER_SEED,
    PIXELS_EACH,
    PIXELS_WITHOUT_SEEDS,
    SHORT,
    ChosenCap,
    chosen_cap,
    per_seed,
)

MANY = 10**9


def test_cap_depends_on_seed_points() -> None:
    for each in (PER_SEED[0], 11):
        found = chosen_cap(1000, 1000, MANY, each)
        assert found.points == each * 1000 and f"{each} for each of 1,000 seed points" in found.why
    assert chosen_cap(1000, 1000, MANY) == chosen_cap(1000, 1000, MANY, PER_SEED[0])


def test_a_long_run_has_more_for_each() -> None:
    middle = (SHORT + LONG) // 2
    assert [per_seed(n) for n in (1, SHORT, middle, LONG, 10 * LONG)] == [9, 9, 11, 13, 13]


def test_many_seed_points_count_for_less() -> None:
    for further in (0, 500):
        found = chosen_cap(1000, FULL_SEEDS + further, MANY, 13)
        assert found.points == 13 * FULL_SEEDS + LEAST_PER_SEED * further
        assert found.why.startswith(f"13 for each of {FULL_SEEDS:,} seed points")
        assert (f", {LEAST_PER_SEED} for each of 500 more" in found.why) == (further == 500)


def test_few_pixels_allow_fewer() -> None:
    found = chosen_cap(1000, 1000, 5500 * PIXELS_EACH)
    assert found.points == 5500 and f"one for {PIXELS_EACH} pixels" in found.why


def test_few_views_allow_growth() -> None:
    found = chosen_cap(1000, 1000, 1500 * PIXELS_EACH)
    assert found.points == LEAST_PER_SEED * 1000 > 1500 and "few pixels" in found.why


def test_without_seeds_pixels_decide() -> None:
    found = chosen_cap(500, 0, 2000 * PIXELS_WITHOUT_SEEDS)
    assert found.points == 2000 and "no seed points" in found.why


def test_never_fewer_than_there_are() -> None:
    for seeds in (0, 5_000):
        found = chosen_cap(50_000, seeds, 10_000)
        assert found.points == 50_000 and "begins with" in found.why


def test_memory_may_allow_fewer_points() -> None:
    chosen = ChosenCap(1000, "why")
    assert chosen.within(None, 10) == chosen.within(1000, 10) == chosen
    assert chosen.within(700, 10).points == 700 and "memory" in chosen.within(700, 10).why
    assert ChosenCap(900, "why").within(700, 900).why == "why", "it is not memory that decides"
    assert chosen.within(700, 900).points == 900, "what there is stays"
