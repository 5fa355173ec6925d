"""Time of a step, by part, from the measured rates; and what crosses between GPUs and between machines."""

from dataclasses import asdict, dataclass

from ns_multigpu.planning import rates
from ns_multigpu.planning.work import Course, batch_of, ranks_used, share

BYTES_OF_GBIT = 125_000
"""Bytes a millisecond of 1 Gbit/s."""
RELAYED = {"tile": 0.0, "locality": 0.058}
"""The part of what would cross between machines that is saved where a row crosses once, and is handed on there. Of
`locality` measured with two ranks a machine (benchmarks/results/two-machines.md); more share more. Of `tile`, whose
bands rarely share a row on one machine and not on another, taken to be none."""


@dataclass(frozen=True)
class Pace:
    """Milliseconds of one step; parts follow one another.

    Attributes:
        project: culling, projection, colours. sort: intersection with tiles, sorts. raster, loss, backward: see
            `rates`. exchange: what crosses between the GPUs of a machine. between: what crosses between machines.
            update: gradients to parameters, Adam.
        views: of the step.
    """

    project: float
    sort: float
    raster: float
    loss: float
    backward: float
    exchange: float
    between: float
    update: float
    views: int

    @property
    def step(self) -> float:
        """The whole step."""
        return sum(value for name, value in asdict(self).items() if name != "views")

    @property
    def images_per_second(self) -> float:
        """Images that are seen in a second."""
        return 1e3 * self.views / self.step


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step over several machines, the way there and the way back, capacities included.

    Attributes:
        inside: into a GPU from others of its machine. between: into a machine from the others; both of the busiest.
    """

    inside: float
    between: float


def traffic(strategy: str, course: Course) -> Traffic:
    """What crosses in a step of `strategy` over several machines.

    A machine takes in what `batch` gathers once and passes it on to all of its GPUs. A row of `tile` and `locality`
    goes to one GPU of a machine that needs it, which hands it on: to itself, or to one of the others. Pixels of `pixel`
    go to each GPU that owns them.
    """
    if ranks_used(strategy, course) == 1:
        return Traffic(0.0, 0.0)
    one = share(strategy, course)
    between = one.traffic_padded * one.between
    if strategy == "batch":
        return Traffic(one.traffic_padded, between)
    inside = one.traffic_padded - between
    if course.machines == 1 or course.per_machine == 1 or strategy not in RELAYED:
        return Traffic(inside, between * course.per_machine)
    handed = between * (course.per_machine - 1) / course.per_machine
    return Traffic(inside + handed, between * course.per_machine * (1 - RELAYED[strategy]))


def pace(
    strategy: str, course: Course, *, lazy: bool | None = None, transport: str = "peer", gbit: float = 25.0
) -> Pace:
    """The time of a step of `strategy`.

    Args:
        lazy: steps of points that are not drawn are put off within a block; None: where fused training does.
        transport: of `tile` and `locality` inside a machine: "peer" or "collective". `pixel` has collectives alone.
        gbit: Gbit/s that a machine takes in from others, while it sends as much.
    """
    one, ranks = share(strategy, course), ranks_used(strategy, course)
    crossing = between = 0.0
    if ranks > 1 and course.machines > 1:
        size = traffic(strategy, course)
        peers = transport == "peer" and strategy in RELAYED
        if course.per_machine > 1:  # through peer memory there and back, with a wait each
            crossing = rates.PEER.ms(size.inside) + rates.PEER.fixed if peers else rates.COLLECTIVE.ms(size.inside)
        between = size.between / (gbit * BYTES_OF_GBIT)
    elif ranks > 1:
        if strategy in ("tile", "locality"):  # there, and back
            peers = transport == "peer"
            link, size = (rates.PEER, one.traffic) if peers else (rates.COLLECTIVE, one.traffic_padded)
            crossing = link.ms(size) + link.fixed
        else:
            crossing = rates.COLLECTIVE.ms(one.traffic_padded)
    projected = one.points * one.views
    if one.updated < rates.LAZY_BELOW * one.points if lazy is None else lazy:
        project = rates.PROJECT_LAZY.ms(points=projected)
        update = rates.UPDATE_LAZY.ms(rows=one.updated) + rates.FLUSH.ms(points=one.points) / rates.BLOCK
    else:
        project, update = rates.PROJECT.ms(points=projected), rates.UPDATE.ms(points=one.points)
    return Pace(
        project=project,
        sort=rates.SORT.ms(rows=one.drawn, intersections=one.intersections),
        raster=rates.RASTER.ms(rows=one.drawn, intersections=one.intersections),
        loss=rates.LOSS.ms(pixels=one.pixels),
        backward=rates.BACKWARD.ms(intersections=one.intersections, pixels=one.pixels),
        exchange=crossing,
        between=between,
        update=update,
        views=batch_of(strategy, course),
    )
