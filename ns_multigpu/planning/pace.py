"""Time of a step, by part, from the measured rates."""

from dataclasses import asdict, dataclass

from ns_multigpu.planning import rates
from ns_multigpu.planning.work import Course, batch_of, ranks_used, share


@dataclass(frozen=True)
class Pace:
    """Milliseconds of one step; parts follow one another.

    Attributes:
        project: culling, projection, colours. sort: intersection with tiles, sorts. raster, loss, backward: see
            `rates`. exchange: what crosses the wire. update: gradients to parameters, Adam.
        views: of the step.
    """

    project: float
    sort: float
    raster: float
    loss: float
    backward: float
    exchange: float
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


def pace(strategy: str, course: Course, *, lazy: bool | None = None, transport: str = "peer") -> Pace:
    """The time of a step of `strategy`.

    Args:
        lazy: steps of points that are not drawn are put off within a block; None: where fused training does.
        transport: of `tile`: "peer" or "collective".
    """
    one, ranks = share(strategy, course), ranks_used(strategy, course)
    crossing = 0.0
    if ranks > 1:
        if strategy == "tile":  # there, and back
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
        update=update,
        views=batch_of(strategy, course),
    )
