"""Which rank holds which image: the views of a machine over its ranks, as many bytes on each (Gaian, section 5)."""

import zlib
from array import array
from collections.abc import Sequence

from ns_multigpu.core.dist.collectives import all_gather_ints
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture.image_store import ImageShape, aligned


def homes_of(
    view_machines: Sequence[int],
    shapes: Sequence[ImageShape],
    machines: int,
    per_machine: int,
    budget: int | None = None,
) -> list[int]:
    """The rank that holds each view's image, given the machine that should.

    The images of a machine are dealt to its ranks, the largest first, each to the rank that has the fewest bytes.

    With a budget, images that their machine has no room for go to ranks of other machines that have room. They are
    dealt in the same way. The largest have been dealt first, so it is the smallest images that leave a machine; what
    other machines see of them is not looked at. Images for which no machine has room stay with their own, and are
    decoded when they are needed.

    Args:
        view_machines: [V] the machine whose ranks are to hold each view, where they have room.
        shapes: of the views' images.
        machines: how many.
        per_machine: ranks of each; those of machine m are m * per_machine and following.
        budget: bytes that a rank may hold; None for no limit.

    Returns:
        [V] ranks. The same wherever the arguments are.

    Raises:
        ValueError: there is no rank, there is not one machine a view, or a machine does not exist.
    """
    if machines < 1 or per_machine < 1:
        raise ValueError(f"homes_of: {machines} machine(s) of {per_machine} rank(s); at least one of each is needed")
    if len(view_machines) != len(shapes):
        raise ValueError(f"homes_of: {len(view_machines)} machines for {len(shapes)} views")
    sizes = [aligned(shape.nbytes) for shape in shapes]
    wanted = [int(machine) for machine in view_machines]
    for view, machine in enumerate(wanted):
        if not 0 <= machine < machines:
            raise ValueError(f"homes_of: view {view} is to be held by machine {machine} of {machines}")
    held = [0] * (machines * per_machine)
    homes = [-1] * len(sizes)

    def deal(views: Sequence[int], ranks_of: Sequence[range], limit: int | None) -> list[int]:
        """Gives each view a rank of its range, the largest first; returns those that no rank has room for."""
        left: list[int] = []
        for view in sorted(views, key=lambda v: (-sizes[v], v)):
            rank = min(ranks_of[wanted[view]], key=lambda r: (held[r], r))
            if limit is not None and held[rank] + sizes[view] > limit:
                left.append(view)
                continue
            homes[view] = rank
            held[rank] += sizes[view]
        return left

    own = [range(m * per_machine, (m + 1) * per_machine) for m in range(machines)]
    left = deal(range(len(sizes)), own, budget)
    left = deal(left, [range(len(held))] * machines, budget)
    deal(left, own, None)
    return homes


def checked_homes(homes: Sequence[int] | None, views: int, label: str, world: World) -> list[int]:
    """The rank that holds each of so many views: as given, or i % world size. Every rank calls it.

    Args:
        label: what the error calls the images.

    Raises:
        ValueError: on every rank, that homes are not one rank a view, or not the same on all ranks.
    """
    found = [view % world.size for view in range(views)] if homes is None else [int(home) for home in homes]
    tables = all_gather_ints([len(found), zlib.crc32(array("q", found).tobytes())], world)
    if any(table != tables[0] for table in tables):
        raise ValueError(f"the homes of the {label} images differ between ranks: all ranks must be given the same")
    if len(found) != views:
        raise ValueError(
            f"the homes of the {label} images must be one rank for each of {views} views, not {len(found)}"
        )
    for view, home in enumerate(found):
        if not 0 <= home < world.size:
            raise ValueError(f"the home of {label} view {view} is rank {home}, of {world.size} ranks")
    return found
