"""Collectives over the ranks of a world, without autograd. In a world of one rank each is the identity.

All accept empty tensors. Numbers of rows may differ by rank.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions  # pyright: ignore[reportPrivateImportUsage]

from ns_multigpu.core.dist.world import World


def exchange_counts(counts: Sequence[int], world: World) -> list[int]:
    """Exchange the numbers of rows: `counts[r]` is for rank r. Return the numbers from all ranks.

    Host integers over the control group: it waits for the other ranks, not for the device.

    Raises:
        ValueError: `counts` is not one number a rank.
    """
    if len(counts) != world.size:
        raise ValueError(f"exchange_counts: {len(counts)} counts for {world.size} ranks")
    if world.group is None:
        return list(counts)
    table = all_gather_ints(counts, world)
    return [row[world.rank] for row in table]


def exchange_rows(x: Tensor, send: Sequence[int], receive: Sequence[int], world: World) -> Tensor:
    """All-to-all of rows.

    Args:
        x: [sum(send), ...] rows, those for rank 0 first.
        send: rows for each rank.
        receive: rows from each rank (see `exchange_counts`).

    Returns:
        [sum(receive), ...] rows, those from rank 0 first. Trailing sizes of zero are allowed.

    Raises:
        ValueError: the counts do not fit `x` or the world.
    """
    if len(send) != world.size or len(receive) != world.size or sum(send) != x.shape[0]:
        raise ValueError(
            f"exchange_rows: {x.shape[0]} rows, counts {list(send)} out and {list(receive)} in, {world.size} ranks"
        )
    if world.group is None:
        return x
    out = x.new_empty((sum(receive), *x.shape[1:]))
    _count_parts(send, x.nbytes // max(x.shape[0], 1), world)
    dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=world.group)
    return out


def all_gather_rows(x: Tensor, world: World) -> tuple[Tensor, list[int]]:
    """Return all ranks' rows, rank 0's first, and the number of rows of each rank."""
    if world.group is None:
        return x, [x.shape[0]]
    counts = [row[0] for row in all_gather_ints([x.shape[0]], world)]
    copies = x.repeat(world.size, *([1] * (x.dim() - 1)))
    return exchange_rows(copies, [x.shape[0]] * world.size, counts, world), counts


def all_gather_ints(values: Sequence[int], world: World) -> list[list[int]]:
    """Return every rank's integers (equally many on each), over the control group. Row r is rank r's."""
    return cast(list[list[int]], _all_gather(torch.tensor(list(values), dtype=torch.int64), world))


def all_gather_ints_on_device(values: Sequence[int], world: World) -> list[list[int]]:
    """Return what `all_gather_ints` does, through the group for tensors: on GPUs by NCCL, which is faster.

    The host waits for the device. Use it only where all ranks wait for each other anyway.
    """
    if world.group is None:
        return [list(values)]
    return gather_on_device(on_device(values, world), world)


def gather_on_device(x: Tensor, world: World) -> list[list[int]]:
    """Return every rank's `x` [K] int64 (on its device) as lists. Row r is rank r's. The host waits once."""
    if world.group is None:
        return [x.tolist()]
    table = x.new_empty(world.size * len(x))
    if len(x):
        dist.all_gather_into_tensor(table, x.contiguous(), group=world.group)
    return cast(list[list[int]], table.view(world.size, len(x)).tolist())


def on_device(values: Sequence[int], world: World) -> Tensor:
    """Copy the host's integers to the rank's device, [K] int64, without waiting."""
    mine = torch.tensor(list(values), dtype=torch.int64)
    return mine if world.device.type == "cpu" else mine.pin_memory().to(world.device, non_blocking=True)


def sum_ints_on_device(x: Tensor, world: World) -> list[int]:
    """Return the sums over all ranks of `x` [K] int64 (on the rank's device). Overwrites `x`. See
    `all_gather_ints_on_device`."""
    return cast(list[int], add_up(x, world).tolist())


def add_up(x: Tensor, world: World) -> Tensor:
    """Sum `x` over all ranks in place and return it. For a few numbers, not points: its bytes are not counted."""
    if world.group is not None and x.numel():
        dist.all_reduce(x, group=world.group)
    return x


def all_gather_floats(values: Sequence[float], world: World) -> list[list[float]]:
    """Return every rank's floats as float64; otherwise like `all_gather_ints`."""
    return cast(list[list[float]], _all_gather(torch.tensor(list(values), dtype=torch.float64), world))


def _all_gather(mine: Tensor, world: World) -> list[Any]:
    if world.control is None:
        return [mine.tolist()]
    table = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(table, mine, group=world.control)
    return [row.tolist() for row in table]


def broadcast_object(value: Any, source: int, world: World) -> Any:
    """Return rank `source`'s picklable `value` on every rank, over the control group."""
    if world.control is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=source, group=world.control)
    return box[0]


def broadcast_int(value: int, world: World) -> int:
    """Return rank 0's integer on every rank, over the control group: cheap enough for every step."""
    if world.control is None:
        return value
    box = torch.tensor([value], dtype=torch.int64)
    dist.broadcast(box, 0, group=world.control)
    return int(box.item())


def max_int(value: int, world: World) -> int:
    """Return the largest of the ranks' integers on every rank, over the control group: cheap enough for every step."""
    if world.control is None:
        return value
    box = torch.tensor([value], dtype=torch.int64)
    dist.all_reduce(box, op=dist.ReduceOp.MAX, group=world.control)
    return int(box.item())


def all_gather_objects(value: Any, world: World) -> list[Any]:
    """Return every rank's picklable `value`, over the control group."""
    if world.control is None:
        return [value]
    boxes: list[Any] = [None] * world.size
    dist.all_gather_object(boxes, value, group=world.control)
    return boxes


def barrier(world: World) -> None:
    """Wait until every rank is here."""
    if world.control is not None:
        dist.barrier(group=world.control)


def sum_in_place(x: Tensor, world: World, *, async_op: bool = False) -> Any:
    """Sum `x` over all ranks into itself; with `async_op` return the work to wait for, or None."""
    if world.group is None or x.numel() == 0:
        return None
    _count_ring(2 * (world.size - 1) * x.nbytes // world.size, world)
    return cast(Any, dist.all_reduce(x, group=world.group, async_op=async_op))


def max_in_place(x: Tensor, world: World) -> None:
    """Replace `x` by its elementwise maximum over all ranks."""
    if world.group is not None and x.numel():
        _count_ring(2 * (world.size - 1) * x.nbytes // world.size, world)
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=world.group)


def all_gather_into(out: Tensor, x: Tensor, world: World) -> None:
    """Write every rank's `x` (same shape everywhere) into `out` [ranks, *x.shape], without waiting."""
    if world.members is not None:
        world.members.gather(out, x)
    elif world.group is None:
        out[0] = x
    if world.group is None or x.numel() == 0:
        return
    _count_ring((world.size - 1) * x.nbytes, world)
    dist.all_gather_into_tensor(out.view(-1, *x.shape[1:]), x, group=world.group)


def all_gather_together(outs: Sequence[Tensor], xs: Sequence[Tensor], world: World) -> None:
    """All-gather several tensors at once, without packing them into one. With NCCL this is one launch.

    Args:
        outs: written, each of any shape with as many numbers as its x has on all ranks, rank 0's first.
        xs: as many, of any types; each of one shape on all ranks.

    Raises:
        ValueError: an output does not fit its x in type, device or size, or either is not contiguous.
    """
    if len(outs) != len(xs):
        raise ValueError(f"all_gather_together: {len(outs)} outputs for {len(xs)} tensors")
    for i, (out, x) in enumerate(zip(outs, xs, strict=True)):
        # NCCL's way checks none of this: it would write past the end.
        fits = out.numel() == world.size * x.numel() and out.dtype == x.dtype and out.device == x.device
        if not fits or not (out.is_contiguous() and x.is_contiguous()):
            raise ValueError(
                f"all_gather_together: output {i} is {out.dtype} {list(out.shape)} on {out.device}, for {world.size} "
                f"of {x.dtype} {list(x.shape)} on {x.device}; both must be contiguous"
            )
    if world.group is None:
        for out, x in zip(outs, xs, strict=True):
            out.view(x.shape).copy_(x)
        return
    filled = [(out.view(-1), x.view(-1)) for out, x in zip(outs, xs, strict=True) if x.numel()]
    _count_ring((world.size - 1) * sum(x.nbytes for _, x in filled), world)
    if filled and dist.get_backend(world.group) == "nccl":
        # What torch's own `_coalescing_manager` calls, but that one is private, and forgets the options (torch 2.11),
        # without which NCCL runs on a stream of its own, with two events to wait for.
        options = AllgatherOptions()
        options.asyncOp = False
        written, sent = [out for out, _ in filled], [x for _, x in filled]
        work: Any = world.group.allgather_into_tensor_coalesced(written, sent, options)
        if work is not None:  # older torch: the current stream must wait explicitly
            work.wait()
        return
    for out, x in filled:
        dist.all_gather_into_tensor(out, x, group=world.group)


def all_to_all_into(out: Tensor, x: Tensor, world: World) -> None:
    """Send line r of `x` [ranks, ...] to rank r and receive into `out`, without waiting."""
    if world.group is None:
        out.copy_(x)
        return
    _count_parts([1] * world.size, x.nbytes // world.size, world)
    dist.all_to_all_single(out, x, group=world.group)


def all_to_all_parts(
    out: Tensor, x: Tensor, receive: Sequence[int], send: Sequence[int], world: World, *, async_op: bool = False
) -> Any:
    """All-to-all of parts that have a size of their own for each pair, without waiting. With `async_op`, it runs at the
    same time as what is enqueued next; return the work to wait for, or None.

    Args:
        out: [sum(receive)] written; contiguous, what came from rank 0 first. x: [sum(send)], that for rank 0 first.
        receive, send: numbers from, and for, each rank; what rank a sends to b is what b receives from a. A rank keeps
            what is its own: both are 0 for itself.

    Raises:
        ValueError: the sizes do not fit the tensors or the world, or a rank would send to itself.
    """
    own = len(send) == len(receive) == world.size and send[world.rank] == receive[world.rank] == 0
    if not own or x.shape != (sum(send),) or out.shape != (sum(receive),):
        raise ValueError(
            f"all_to_all_parts: {list(x.shape)} in parts {list(send)}, {list(out.shape)} in parts {list(receive)}, on "
            f"rank {world.rank} of {world.size}, which keeps its own."
        )
    if world.group is None:
        return None
    _count_parts(send, x.element_size(), world)
    return cast(
        Any, dist.all_to_all_single(out, x, list(receive), list(send), group=world.group, async_op=async_op)
    )


def all_to_all_segments(into: Sequence[Tensor], out: Sequence[Tensor], world: World) -> None:
    """All-to-all of segments of any shape and place, without waiting.

    Args:
        into, out: [ranks] segments from, and for, each rank; those of this rank are empty. What rank a sends to b has
            as many numbers as what b receives from a.
    """
    receive, send = ([one.numel() for one in segments] for segments in (into, out))
    sent = torch.cat([one.reshape(-1) for one in out])
    received = sent.new_empty(sum(receive))
    all_to_all_parts(received, sent, receive, send, world)
    for segment, values in zip(into, received.split(receive), strict=True):
        segment.copy_(values.view(segment.shape))


def _count_ring(count: int, world: World) -> None:
    """Count what this rank sends to its neighbour on a ring of all ranks."""
    off_machine = world.machine_of((world.rank + 1) % world.size) != world.machine
    world.traffic.add(count, count if off_machine else 0)


def _count_parts(send: Sequence[int], size: int, world: World) -> None:
    """Count parts of so many bytes each that this rank sends to the ranks; not what it keeps."""
    here = world.ranks_of(world.machine)
    inside = sum(send[here.start : here.stop])
    world.traffic.add(size * (sum(send) - send[world.rank]), size * (sum(send) - inside))
