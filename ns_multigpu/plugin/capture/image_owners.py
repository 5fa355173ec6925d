"""Assignment of images to ranks: a machine's views over its ranks, with equal bytes on each (Gaian, section 5)."""

import zlib
from array import array
from collections import defaultdict
from collections.abc import Sequence

from ns_multigpu.core.dist.collectives import all_gather_ints
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture.image_store import ImageShape, aligned


def image_owners_of(
    view_machines: Sequence[int],
    shapes: Sequence[ImageShape],
    machines: int,
    per_machine: int,
    budget: int | None = None,
) -> list[int]:
    """Return the rank that holds each view's image, given its preferred machine.

    A machine's images are assigned to its ranks largest first, each to the rank with the fewest bytes.

    With a budget, images that exceed their machine's budget are assigned to ranks of other machines with free budget,
    in the same way. Since the largest are assigned first, these are the smallest images. Their visibility on other
    machines is not considered. Images that fit nowhere stay with their machine and are decoded on demand.

    Args:
        view_machines: [V] preferred machine of each view.
        shapes: of the views' images.
        machines: number of machines.
        per_machine: ranks of each; machine m has the ranks from m * per_machine.
        budget: bytes that a rank may hold; None for no limit.

    Returns:
        [V] ranks, deterministic in the arguments.

    Raises:
        ValueError: no rank is given, the number of machines differs from the number of views, or a machine does not
            exist.
    """
    if machines < 1 or per_machine < 1:
        raise ValueError(
            f"image_owners_of: {machines} machine(s) of {per_machine} rank(s); at least one of each is needed"
        )
    if len(view_machines) != len(shapes):
        raise ValueError(f"image_owners_of: {len(view_machines)} machines for {len(shapes)} views")
    sizes = [aligned(shape.nbytes) for shape in shapes]
    wanted = [int(machine) for machine in view_machines]
    for view, machine in enumerate(wanted):
        if not 0 <= machine < machines:
            raise ValueError(f"image_owners_of: view {view} is assigned to machine {machine}, and there are {machines}")
    held = [0] * (machines * per_machine)
    owners = [-1] * len(sizes)

    def deal(views: Sequence[int], ranks_of: Sequence[range], limit: int | None) -> list[int]:
        """Assign each view to a rank of its range, largest first; return the views that exceed every rank's budget."""
        left: list[int] = []
        for view in sorted(views, key=lambda v: (-sizes[v], v)):
            rank = min(ranks_of[wanted[view]], key=lambda r: (held[r], r))
            if limit is not None and held[rank] + sizes[view] > limit:
                left.append(view)
                continue
            owners[view] = rank
            held[rank] += sizes[view]
        return left

    own = [range(m * per_machine, (m + 1) * per_machine) for m in range(machines)]
    left = deal(range(len(sizes)), own, budget)
    left = deal(left, [range(len(held))] * machines, budget)
    deal(left, own, None)
    return owners


def swapped_owners(
    owners: Sequence[int], view_machines: Sequence[int], shapes: Sequence[ImageShape], per_machine: int
) -> list[int]:
    """Return the owners after machines have swapped images that they prefer of each other.

    Two images of the same shape are swapped, so no rank needs more memory. Images without a counterpart stay.

    Args:
        owners: [V] rank that holds each view's image.
        view_machines: [V] preferred machine of each view.
        shapes: of the views' images.
        per_machine: ranks of each machine.
    """
    found = list(owners)
    waiting: defaultdict[tuple[int, int, ImageShape], list[int]] = defaultdict(list)  # by present and preferred machine
    for view, (rank, wanted, shape) in enumerate(zip(owners, view_machines, shapes, strict=True)):
        here = rank // per_machine
        if here == wanted:
            continue
        if others := waiting[wanted, here, shape]:
            other = others.pop()
            found[view], found[other] = found[other], found[view]
        else:
            waiting[here, wanted, shape].append(view)
    return found


def checked_owners(owners: Sequence[int] | None, views: int, label: str, world: World) -> list[int]:
    """Return the rank that holds each view: as given, or i % world size. Every rank calls it.

    Args:
        label: name of the images in the error.

    Raises:
        ValueError: on every rank, if homes are not one rank per view, or differ between ranks.
    """
    found = [view % world.size for view in range(views)] if owners is None else [int(home) for home in owners]
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
