"""`ns-multigpu plan`: recommended strategy, memory per GPU and time per step, before GPUs are rented."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ns_multigpu.planning import rates
from ns_multigpu.planning.memory import Memory, memory, most_points
from ns_multigpu.planning.pace import StepTime, StepTraffic, pace, traffic
from ns_multigpu.planning.quantities import gib, parse_count, parse_size
from ns_multigpu.planning.simulated import GPUS as SIMULATED_GPUS
from ns_multigpu.planning.simulated import SCENES, SOURCE, Simulated, simulated
from ns_multigpu.planning.work import (
    CAPACITY_FACTOR,
    PATCHES,
    SCENE,
    STRATEGIES,
    VISIBLE,
    Workload,
    batch_of,
    in_sight,
    share,
)

_KEPT = 0.1
"""Fraction of a GPU's memory that training images may take (`plugin.capture.device_images`)."""
_MOST_INTERSECTIONS = 2**31 - 1
MOST_RANKS, MOST_OWNERS = 32, 128
"""Largest number of ranks that a rank sends rows to, and of owners of the rows it renders (`cuda_ext.ops.exchange`)."""


def plan(
    points: str,
    image: str,
    gpus: int = 1,
    views_per_step: int = 1,
    sh_degree: int = 3,
    gpu: Literal["auto", "h200", "h100"] = "auto",
    gpu_memory: float | None = None,
    strategy: Literal["all", "single", "batch", "tile", "locality", "pixel"] = "all",
    images: int = 0,
    visible_fraction: float | None = None,
    intersections_per_splat: float | None = None,
    transport: Literal["peer", "collective"] = "peer",
    densify: bool = True,
    fused: bool = True,
    optimizer_state: Literal["full", "compact"] = "full",
    machines: int = 1,
    between_gbit: float = 25.0,
    scene: Literal["auto", "aerial", "street", "street-far-plane", "street-visible"] = "auto",
) -> None:
    """Print the recommended strategy, then the memory per GPU and the time per step of each strategy.

    The exit status is 1 if no strategy fits.

    Args:
        points: Gaussians of the full model: 8000000, 400M, 1.5B.
        image: Size of the training images: 3840x2160.
        gpus: Number of GPUs, on all machines together.
        views_per_step: Views per step, on all GPUs; batch rounds it up to full views on every GPU.
        sh_degree: Degree of the harmonics, 0 to 3.
        gpu: GPU model, which sets memory and speed. auto: this machine's, or an H200 if there is none; other models use
            their own memory with an H200's speed.
        gpu_memory: Memory of a GPU in GiB, instead of the model's.
        strategy: Strategy to plan. "all" omits locality on one machine, and pixel on one GPU.
        images: Number of training images; they are kept on the GPUs if they take at most a tenth of the memory.
        visible_fraction: Fraction of the Gaussians that a view shows; by default the measured scene's.
        intersections_per_splat: Tiles of 16x16 pixels that a visible Gaussian overlaps; by default the measured
            scene's.
        transport: Exchange of rows in a machine by tile and locality: through peer memory (NVLink), or by collectives.
        densify: Include the memory of densification, which grows and prunes the model.
        fused: Plan fused steps (see docs/internals/kernels.md). Unfused steps have no measured time; their memory is
            an upper bound.
        optimizer_state: Adam's moments as float32, or as bfloat16 (--pipeline.model.optimizer-state). Compact steps
            have no measured time: the time is that of full ones.
        machines: Number of machines, with equally many GPUs each.
        between_gbit: Gbit/s that a machine receives from the others, while it sends as much.
        scene: Simulated scene that gives locality's savings; by default the one with the most similar visible fraction.
    """
    if intersections_per_splat is not None and not intersections_per_splat > 0:
        raise ValueError(f"intersections-per-splat is {intersections_per_splat}: give more than 0")
    if gpu_memory is not None and not gpu_memory > 0:
        raise ValueError(f"gpu-memory is {gpu_memory} GiB: give more than 0")
    if not between_gbit > 0:
        raise ValueError(f"between-gbit is {between_gbit}: give more than 0")
    if images < 0:
        raise ValueError(f"images is {images}: give how many there are")
    width, height = parse_size(image)
    workload = Workload(
        parse_count(points), width, height, views_per_step, gpus, sh_degree,
        VISIBLE if visible_fraction is None else visible_fraction, intersections_per_splat or 0.0, fused,
        compact=optimizer_state == "compact", machines=machines, scene=scene,
    )  # fmt: skip
    kind = _kind(gpu, gpu_memory)
    kept = 3.0 * images * workload.pixels
    kept = kept if kept <= _KEPT * kind.memory else 0.0
    worth = [name for name in STRATEGIES if {"locality": machines, "pixel": gpus}.get(name, 2) > 1]
    chosen = worth if strategy == "all" else [strategy]
    plans = {
        name: Planned(
            memory(name, workload, kind.memory, kept),
            most_points(name, workload, kind.memory, densify=densify, images=kept),
            pace(name, workload, transport=transport, gbit=between_gbit, gpu=kind) if fused else None,
            _unsupported_reason(name, workload),
        )
        for name in chosen
    }  # fmt: skip
    text, fits = conclusion(plans, workload, densify=densify)
    print(text)
    print(_heading(workload, kind, assumed=visible_fraction is None or intersections_per_splat is None))
    print(_memory_table(plans, densify=densify))
    if machines > 1:
        print(_traffic_table({name: traffic(name, workload) for name in chosen}, workload))
    if fused:
        paces = {name: one.pace for name, one in plans.items() if one.pace is not None}
        print(_time_table(paces, transport, between_gbit if machines > 1 else None, kind))
    for note in _notes(workload, chosen, images, kept):
        print(note)
    if not fits:
        raise SystemExit(1)


@dataclass(frozen=True)
class Planned:
    """Figures of one strategy.

    Attributes:
        memory: of one GPU.
        most: points of the largest model that fits.
        pace: None if steps are not fused.
        unsupported_reason: reason why the strategy cannot run; None if it can.
    """

    memory: Memory
    most: int
    pace: StepTime | None
    unsupported_reason: str | None


def conclusion(plans: dict[str, Planned], workload: Workload, *, densify: bool) -> tuple[str, bool]:
    """Return the line that recommends a strategy, and True if any strategy fits.

    It recommends the fitting strategy with the most images per second; without times, the one that needs the least
    memory.
    """
    usable = {name: one for name, one in plans.items() if one.unsupported_reason is None}
    fitting = {name: one for name, one in usable.items() if one.memory.headroom(densify=densify) >= 0}
    if not fitting:
        if not usable:
            reasons = (f"{name}: {one.unsupported_reason}" for name, one in plans.items())
            return f"nothing fits: {'; '.join(reasons)}.", False
        name = min(usable, key=lambda n: -usable[n].memory.headroom(densify=densify))
        one = usable[name].memory
        needed = one.available - one.headroom(densify=densify)
        return (
            f"nothing fits: {_method(name, workload)} needs the least, {gib(needed)} of "
            f"{gib(one.available)} GiB a GPU, and holds {usable[name].most:,} Gaussians at most. Use fewer "
            "Gaussians, more GPUs, smaller images or --optimizer-state compact."
        ), False
    name = max(fitting, key=lambda n: _merit(fitting[n], densify=densify))
    one, speed = fitting[name].memory, fitting[name].pace
    needed = one.available - one.headroom(densify=densify)
    text = f"use {_method(name, workload)}: fits in {_whole_gib(needed)} of {_whole_gib(one.available)} GiB"
    return text + (f", about {speed.images_per_second:,.0f} images/s" if speed is not None else ""), True


def _merit(one: Planned, *, densify: bool) -> tuple[float, float]:
    return (one.pace.images_per_second if one.pace is not None else 0.0, one.memory.headroom(densify=densify))


def _method(strategy: str, workload: Workload) -> str:
    if strategy != "single":
        return f"splatfacto-{strategy}"
    return "splatfacto-batch" + (" on one GPU (--machine.num-devices 1)" if workload.gpus > 1 else "")


def _whole_gib(size: float) -> str:
    return f"{size / 2**30:,.0f}" if size >= 2**31 else gib(size)


def _kind(gpu: str, given: float | None) -> rates.Gpu:
    """Return the GPU model, with `given` GiB of memory if that is not None."""
    kind = rates.GPUS["h200" if gpu == "auto" else gpu]
    if gpu == "auto":
        import torch

        if torch.cuda.is_available():
            found = torch.cuda.get_device_properties(0)
            alike = next((one for one in rates.GPUS.values() if found.name.startswith(one.name)), kind)
            kind = rates.Gpu(found.name, found.total_memory, alike.slowness)
    return kind if given is None else replace(kind, name="as given", memory=int(given * 2**30))


def _heading(workload: Workload, kind: rates.Gpu, *, assumed: bool) -> str:
    text = (
        f"{workload.points:,} Gaussians (harmonics of degree {workload.sh_degree}), {workload.views} view(s) a step of "
        f"{workload.width}x{workload.height}, {workload.gpus} GPU(s){_of_machines(workload)} of {gib(kind.memory)} GiB "
        f"({kind.name})\n"
        f"A view shows {workload.visible:.1%} of the Gaussians, and each meets {workload.tiles:.1f} tiles"
    )
    if assumed:
        text += f";\n  not given, so taken from {SCENE}.\n  Your scene's: --visible-fraction, --intersections-per-splat"
    return text + "."


def _of_machines(workload: Workload) -> str:
    return "" if workload.machines == 1 else f" on {workload.machines} machines"


def _memory_table(plans: dict[str, Planned], *, densify: bool) -> str:
    needs = [one.memory for one in plans.values()]

    def line(name: str, cell: Callable[[Memory], float]) -> list[str]:
        return [name, *(gib(cell(found)) for found in needs)]

    lines = [
        ["Memory a GPU, GiB", *plans],
        line("  parameters", lambda r: r.parameters),
        line("  Adam's moments", lambda r: r.moments),
        line("  statistics", lambda r: r.statistics),
        *([line("  placement", lambda r: r.placement)] if any(r.placement for r in needs) else []),
        *([line("  gradients", lambda r: r.gradients)] if any(r.gradients for r in needs) else []),
        line("  training images", lambda r: r.images),
        line("  step: rows", lambda r: r.rows),
        line("  step: intersections", lambda r: r.intersections),
        line("  step: pixels", lambda r: r.pixels),
        line("  step: exchange", lambda r: r.exchange),
        *([line("  densifying (instead of step)", lambda r: r.refining)] if densify else []),
        line("  reserve", lambda r: r.reserve),
        line("  needed at most", lambda r: r.available - r.headroom(densify=densify)),
        line("  headroom", lambda r: r.headroom(densify=densify)),
        ["  fits", *("yes" if r.headroom(densify=densify) >= 0 else "NO" for r in needs)],
        ["  most Gaussians that fit", *(f"{one.most:,}" for one in plans.values())],
    ]
    return "\n" + _aligned(lines)


def _traffic_table(traffic_by_strategy: dict[str, StepTraffic], workload: Workload) -> str:
    """Return the table of traffic between machines by strategy, with the balance of `locality`."""
    lines = [
        ["Traffic a step, MiB, there and back", *traffic_by_strategy],
        [
            "  into a machine, from the others",
            *(f"{found.between / 2**20:,.1f}" for found in traffic_by_strategy.values()),
        ],
        ["  into a GPU, from its machine", *(f"{found.inside / 2**20:,.1f}" for found in traffic_by_strategy.values())],
    ]
    if "locality" in traffic_by_strategy:
        level = simulated(workload.scene, workload.machines)
        rows: list[tuple[str, Callable[[Simulated], float]]] = [
            ("sends", lambda x: x.sends), ("receives", lambda x: x.receives), ("draws", lambda x: x.draws),
            ("holds", lambda x: x.holds),
        ]  # fmt: skip
        lines.append(["Busiest GPU / mean", *("" for _ in traffic_by_strategy)])
        for name, of in rows:
            cells = [f"{of(level) if strategy == 'locality' else 1:.2f}" for strategy in traffic_by_strategy]
            lines.append([f"  {name}", *cells])
    return "\n" + _aligned(lines)


def _time_table(paces: dict[str, StepTime], transport: str, gbit: float | None, kind: rates.Gpu) -> str:
    whose = next((one.name for one in rates.GPUS.values() if one.slowness == kind.slowness), rates.GPUS["h200"].name)
    lines = [[f"Time a step, ms (rates of {whose})", *paces]]
    between = {} if gbit is None else {"between": f"between machines, {gbit:g} Gbit/s"}
    titles = {
        "project": "cull + project", "sort": "sort", "raster": "raster", "loss": "loss", "backward": "backward",
        "exchange": "exchange", **between, "update": "update", "step": "step",
    }  # fmt: skip
    lines += [[f"  {title}", *(f"{getattr(p, part):,.2f}" for p in paces.values())] for part, title in titles.items()]
    lines.append(["  views a step", *(str(p.views) for p in paces.values())])
    lines.append(["  images a second", *(f"{p.images_per_second:,.1f}" for p in paces.values())])
    sources = [rates.PROJECT, rates.PROJECT_LAZY, rates.LOSS, rates.PEER if transport == "peer" else rates.COLLECTIVE]
    named = ", ".join(dict.fromkeys(rate.source for rate in sources))
    return "\n" + _aligned(lines) + f"\n  Rates: {named}"


def _notes(workload: Workload, chosen: Sequence[str], images: int, kept: float) -> list[str]:
    notes = []
    if "single" in chosen and workload.gpus > 1:
        notes.append("single uses one GPU.")
    if "batch" in chosen and batch_of("batch", workload) != workload.views:
        notes.append(f"batch gives every GPU a view: {batch_of('batch', workload)} a step.")
    if workload.machines > 1:
        notes.append(
            "Between machines a link carries what it is said to, without a wait; GPUs of a machine share it. Nothing "
            "was measured over a network."
        )
        if "tile" in chosen:
            notes.append(f"tile draws its bands wherever: {1 - 1 / workload.machines:.0%} of the rows cross.")
    if "locality" in chosen and workload.machines > 1:
        notes += _on_locality(workload)
    if {"tile", "locality"} & set(chosen) and (problem := _too_many(workload)):
        notes.append(f"tile and locality: {problem}, as it is now.")
    if "pixel" in chosen and workload.gpus > 1:
        notes.append(
            f"pixel: as if every view showed each GPU's cell alike, in {in_sight(workload.gpus):.0%} of its pixels. "
            "That is of the streets of a simulated city (benchmarks/results/pixel-sim.md). Where views show fewer "
            "cells, less crosses."
        )
    if workload.compact:
        notes.append("Compact moments: the time is that of full ones, whose update moves half as many bytes again.")
    if images and not kept:
        notes.append("The training images take more than a tenth of a GPU and stay on the host.")
    for name in chosen:
        if _uncountable(name, workload):
            notes.append(f"{name}: more intersections on a GPU than it can count (2^31); spread the step further.")
    return ["", *(f"- {note}" for note in notes)] if notes else []


def _uncountable(strategy: str, workload: Workload) -> bool:
    return CAPACITY_FACTOR * share(strategy, workload).intersections > _MOST_INTERSECTIONS


def _unsupported_reason(strategy: str, workload: Workload) -> str | None:
    """Return the reason why a strategy cannot run; None if it can."""
    if _uncountable(strategy, workload):
        return "more intersections on a GPU than it can count (2^31)"
    return _too_many(workload) if strategy in ("tile", "locality") else None


def _too_many(workload: Workload) -> str | None:
    """Return the reason why rows cannot be exchanged between so many GPUs; None if they can."""
    if workload.gpus > MOST_OWNERS:
        return f"rows are exchanged between {MOST_OWNERS} GPUs at most"
    if workload.per_machine > MOST_RANKS:
        return f"rows are exchanged between {MOST_RANKS} GPUs of a machine at most"
    return None


def _on_locality(workload: Workload) -> list[str]:
    """Return notes on the source of the figures of `locality`, and on deviations from the planned run."""
    scene, level = SCENES[workload.scene], simulated(workload.scene, workload.machines)
    known = list(scene.lines)
    notes = [
        f"locality saves {level.between:.1%} of what would cross if points and patches were anywhere, as simulated in "
        f"{SOURCE} ({scene.title}: a view shows {scene.visible:.1%}; {SIMULATED_GPUS} GPUs a machine, {PATCHES**2} "
        f"patches a view). The table has the busiest GPU, {max(level.sends, level.receives):.2f} times the mean. Other "
        "scenes: --scene."
    ]
    if workload.machines > known[-1]:
        notes.append(f"locality: {known[-1]} machines are the most that were simulated; more save less.")
    elif workload.machines not in known:
        notes.append(f"locality: {workload.machines} machines were not simulated; the figures lie between neighbours'.")
    if workload.views < level.views:
        notes.append(
            f"locality: simulated with {level.views:.0f} views a step, not {workload.views}. Fewer views save less: "
            "every GPU draws equally many patches, wherever these have their points."
        )
    if not 1 / 3 < workload.visible / scene.visible < 3:
        notes.append(
            f"locality: a view here shows {workload.visible:.1%} of the points, and there {scene.visible:.1%}."
        )
    return notes


def _aligned(lines: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in lines
    )
