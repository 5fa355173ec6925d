"""The most points that a model may have, and what a densifier does about it."""


def allowed_growth(total_now: int, total_after: int, cap: int | None) -> bool:
    """Whether a refinement may grow the model; if not, it only prunes.

    All or nothing: which points would have come first depends on their order, which differs between ranks and
    strategies; this depends on two sums alone, and so is the same for any spread of the points.

    Args:
        total_now, total_after: points of the whole model, over all ranks, before the refinement and after it.
        cap: the most there may be; None for any number. A model that has more already may still shrink.
    """
    return cap is None or total_after <= max(cap, total_now)
