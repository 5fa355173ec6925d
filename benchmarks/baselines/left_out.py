"""Train `splatfacto-locality` with a part of Gaian's scheme left out (its figure 13 and table 4).

    torchrun ... -m benchmarks.baselines.left_out PART splatfacto-locality ...

`python -m benchmarks.scaling.two_machines locality --left-out PART ...` measures such runs.
"""

import argparse
import sys
import zlib
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.baselines.placements import assigner, partitioned, random_assignment
from ns_multigpu.locality import patches, placing

PARTS = ("placement", "assignment", "hierarchy", "patches", "all")
"""Parts of the scheme. Without placement and assignment these are random; without patches views are drawn whole. "all"
is how gsplat distributes: random placement, and whole views at random."""
_FLAT = ("--pipeline.locality.relays", "False")
_WHOLE = ("--pipeline.locality.patches", "1")


def ablate(part: str) -> list[str]:
    """Replace one of `PARTS` of the scheme in this process; return further options of ns-train."""
    if part in ("placement", "all"):
        placing.partition = partial(partitioned, across="random", within="random")  # type: ignore[assignment]
    if part in ("assignment", "all"):
        patches.Assigner = _AtRandom  # type: ignore[assignment, misc]
    if part == "hierarchy":
        placing.partition = partial(partitioned, hierarchical=False)  # type: ignore[assignment]
        patches.Assigner = partial(assigner, hierarchical=False)  # type: ignore[assignment, misc]
    return [*(_FLAT if part in ("hierarchy", "all") else ()), *(_WHOLE if part in ("patches", "all") else ())]


class _AtRandom:
    """Assigner without locality: the same on every rank, because needs are its seed."""

    def __init__(self, machines: int, per_machine: int) -> None:
        self.machines, self.per_machine = machines, per_machine

    def assign(self, needed: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return a random rank for each patch, [P] int64, equally many for each rank."""
        generator = np.random.default_rng(zlib.crc32(np.ascontiguousarray(needed).tobytes()))
        return random_assignment(len(needed), needed.shape[1], generator)


def main() -> None:
    """Leave out the part that is the first argument, and run ns-train with the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("method", help="splatfacto-locality")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="further words of ns-train")
    given = parser.parse_args()
    sys.argv = ["ns-train", given.method, *ablate(given.part), *given.words]
    from nerfstudio.scripts.train import entrypoint  # imports all methods: not for `ablate` alone

    entrypoint()


if __name__ == "__main__":
    main()
