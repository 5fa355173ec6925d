"""Selective Adam: only points that a view of the step's batch draws take its step (Mallick et al. 2024, "Taming 3DGS").

The parameters and moments of all others stay as they are, to the bit. A point is drawn if it has a row in a view of the
batch, whichever rank renders that: what is before it does not matter, so its gradient may be zero. With B views a step,
one in which it is drawn is enough for the whole step.

Bias corrections count the model's steps, as dense Adam's do, and not those that a point has taken. gsplat's
SelectiveAdam leaves corrections out; with betas of 0.9 and 0.999 a step is the same to a hundredth after 4000 of them.
"""

from cuda_ext.ops.lazy_adam import LazyAdam


def check_lazy(selective: bool, lazy: LazyAdam | None) -> None:
    """Whether there are steps to put off where some are asked for.

    Raises:
        ValueError: there are none, for the step is selective.
    """
    if selective and lazy is not None:
        raise ValueError("A selective step puts nothing off: points that are not drawn take none. Leave lazy out.")
