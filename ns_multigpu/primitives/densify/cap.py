"""Cap on a model's number of points: its choice for a capture, and its effect on densification."""

from dataclasses import dataclass

PER_SEED = (9, 13)
"""Gaussians for each seed point, in a short run and in a long one: there are more of these where there is more to see.
A long run has the time to fit more: 13 gain up to 0.2 dB there (benchmarks/results/recipes.md)."""
SHORT, LONG = 7_000, 15_000
"""Images of such runs. Between them it is in proportion."""
FULL_SEEDS = 30_000
"""Seed points that count so. Beyond them the scene is known more densely, and each stands for less of it."""
LEAST_PER_SEED = 4
"""Gaussians for each seed point beyond `FULL_SEEDS`; and for each at least where pixels are few: a model that cannot
grow loses more than one that fits its views too well."""
PIXELS_EACH = 50
"""Pixels of training views for each Gaussian, at least: with fewer, Gaussians fit the views rather than the scene."""
PIXELS_WITHOUT_SEEDS = 600
"""The same where no seed point says how much there is to see."""


@dataclass(frozen=True)
class ChosenCap:
    """Number of Gaussians for a capture, and a clause with the reason."""

    points: int
    why: str

    def within(self, fits: int | None, now: int) -> "ChosenCap":
        """Return this cap, limited to the number that fits memory.

        Args:
            fits: number that fits; None for no limit. now: current number, which is always allowed.
        """
        if fits is None or self.points <= max(fits, now):
            return self
        return ChosenCap(max(fits, now), f"{self.why}, but no more fit in memory")


def per_seed(images: int) -> int:
    """Return the number of Gaussians for each seed point in a run over this many images."""
    part = (images - SHORT) / (LONG - SHORT)
    return round(PER_SEED[0] + (PER_SEED[1] - PER_SEED[0]) * min(max(part, 0.0), 1.0))


def chosen_cap(start: int, seeds: int, pixels: int, each: int = PER_SEED[0]) -> ChosenCap:
    """Return the number of Gaussians for a capture.

    Args:
        start: initial number of Gaussians. seeds: seed points of the capture; 0 for none.
        pixels: of all training views.
        each: Gaussians for each of the first `FULL_SEEDS` seed points.
    """
    if seeds == 0:
        why = f"one for {PIXELS_WITHOUT_SEEDS} pixels of the training views, for there are no seed points"
        return _at_least(start, pixels // PIXELS_WITHOUT_SEEDS, why)
    full, further = min(seeds, FULL_SEEDS), max(seeds - FULL_SEEDS, 0)
    by_seeds, least = each * full + LEAST_PER_SEED * further, LEAST_PER_SEED * seeds
    by_pixels = pixels // PIXELS_EACH
    if by_seeds <= by_pixels:
        and_further = f", {LEAST_PER_SEED} for each of {further:,} more" if further else ""
        return _at_least(start, by_seeds, f"{each} for each of {full:,} seed points{and_further}")
    if least <= by_pixels:
        return _at_least(start, by_pixels, f"one for {PIXELS_EACH} pixels of the training views")
    return _at_least(start, least, f"{LEAST_PER_SEED} for each of {seeds:,} seed points, for there are few pixels")


def _at_least(start: int, points: int, why: str) -> ChosenCap:
    return ChosenCap(points, why) if points >= start else ChosenCap(start, "as many as training begins with")


def allowed_growth(total_now: int, total_after: int, cap: int | None) -> bool:
    """Return True if a refinement may grow the model; otherwise it only prunes.

    Growth is all or nothing, because a partial choice would depend on the points' order, which differs between ranks
    and strategies. Two sums give the same decision for any sharding.

    Args:
        total_now, total_after: points of the whole model, over all ranks, before and after the refinement.
        cap: maximum number; None for no limit. A model above it may still shrink.
    """
    return cap is None or total_after <= max(cap, total_now)
