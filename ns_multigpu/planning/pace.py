"""Time of a step, by part, from measured rates; and traffic between GPUs and between machines."""

from dataclasses import asdict, dataclass

from ns_multigpu.planning import rates
from ns_multigpu.planning.work import Workload, batch_of, ranks_used, share

BYTES_OF_GBIT = 125_000
"""Bytes per millisecond of 1 Gbit/s."""
RELAYED = {"tile": 0.0, "locality": 0.058}
"""Fraction of the traffic between machines that is saved by sending a row once per machine and forwarding it there. For
`locality` it was measured with two ranks per machine (benchmarks/results/two-machines.md); more ranks share more. For
`tile` it is assumed to be 0, since bands of one machine rarely share a row.
"""


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of one step; its parts run one after another.

    Attributes:
        project: culling, projection, colours.
        sort: intersection with tiles, sorts.
        raster, loss, backward: see `rates`.
        exchange: traffic between the GPUs of a machine; with `pixel` compositing, too.
        between: traffic between machines.
        update: gradients to parameters, Adam.
        host: the least time in which the host launches a step.
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
    host: float
    views: int

    @property
    def step(self) -> float:
        """Time of the step on the GPUs."""
        return sum(value for name, value in asdict(self).items() if name not in ("host", "views"))

    @property
    def images_per_second(self) -> float:
        """Training images per second: a step takes the GPUs' time, or the host's if that is longer."""
        return 1e3 * self.views / max(self.step, self.host)


@dataclass(frozen=True)
class StepTraffic:
    """Bytes of one step on several machines, forward and backward, padding to capacities included.

    Attributes:
        inside: received by a GPU from others of its machine; of the busiest.
        between: received by a machine from the others; of the busiest.
    """

    inside: float
    between: float


def traffic(strategy: str, workload: Workload) -> StepTraffic:
    """Return the traffic of a step of `strategy` on several machines.

    A machine receives the rows that `batch` gathers once and forwards them to all of its GPUs. A row of `tile` and
    `locality` is sent to one GPU of a machine that needs it, which keeps or forwards it. Pixels of `pixel` are sent to
    each GPU that owns them.
    """
    if ranks_used(strategy, workload) == 1:
        return StepTraffic(0.0, 0.0)
    one = share(strategy, workload)
    between = one.traffic_padded * one.between
    if strategy == "batch":
        return StepTraffic(one.traffic_padded, between)
    inside = one.traffic_padded - between
    if workload.machines == 1 or workload.per_machine == 1 or strategy not in RELAYED:
        return StepTraffic(inside, between * workload.per_machine)
    forwarded = between * (workload.per_machine - 1) / workload.per_machine
    return StepTraffic(inside + forwarded, between * workload.per_machine * (1 - RELAYED[strategy]))


def pace(
    strategy: str,
    workload: Workload,
    *,
    lazy: bool | None = None,
    transport: str = "peer",
    gbit: float = 25.0,
    gpu: rates.Gpu = rates.GPUS["h200"],
) -> StepTime:
    """Return the time of a step of `strategy`.

    Args:
        lazy: True if Adam's steps of points that are not rendered are deferred within a block; None: as fused training.
        transport: of `batch`, `tile` and `locality` inside a machine: "peer" or "collective". `pixel` uses collectives.
        gbit: Gbit/s that a machine receives from others, while it sends as much.
        gpu: the GPU model.
    """
    one, ranks = share(strategy, workload), ranks_used(strategy, workload)
    exchange_ms = between = 0.0
    peers = transport == "peer" and strategy != "pixel"
    if ranks > 1 and workload.machines > 1:
        size = traffic(strategy, workload)
        peers = peers and strategy in RELAYED
        if workload.per_machine > 1:
            exchange_ms = (rates.PEER if peers else rates.COLLECTIVE).ms(size.inside)
        elif not peers:
            exchange_ms = rates.COLLECTIVE.fixed
        between = size.between / (rates.NETWORK * gbit * BYTES_OF_GBIT)
    elif ranks > 1:
        exchange_ms = rates.PEER.ms(one.traffic) if peers else rates.COLLECTIVE.ms(one.traffic_padded)
    if one.layers:
        exchange_ms += rates.COMPOSITE.ms(pixels=one.layers + one.pixels)
    if one.updated < rates.LAZY_BELOW * one.points if lazy is None else lazy:
        project = rates.PROJECT_LAZY.ms(points=one.points, rows=one.rows)
        update = rates.UPDATE_LAZY.ms(rows=one.touched) + rates.FLUSH.ms(points=one.points) / rates.BLOCK
    else:
        project = rates.PROJECT.ms(points=one.points, rows=one.rows)
        update = rates.UPDATE.ms(points=one.points, rows=one.touched)
    drawn = {"rows": one.drawn, "intersections": one.intersections, "pixels": one.pixels}
    kernels = {
        "project": project, "sort": rates.SORT.ms(**drawn), "raster": rates.RASTER.ms(**drawn),
        "loss": rates.LOSS.ms(**drawn), "backward": rates.BACKWARD.ms(**drawn), "update": update,
    }  # fmt: skip
    return StepTime(
        **{name: gpu.slowness * ms for name, ms in kernels.items()},
        exchange=exchange_ms,
        between=between,
        host=rates.HOST if ranks == 1 else rates.HOST_OF_MANY,
        views=batch_of(strategy, workload),
    )
