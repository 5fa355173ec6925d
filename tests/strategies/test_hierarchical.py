"""Bytes between machines, with and without forwarding ranks, compared with the rows that must be sent."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_ext.ops.exchange.row_exchange import MOST_RANKS
from ns_multigpu.core.dist.collectives import all_gather_objects
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.exchange import intra_node
from ns_multigpu.core.exchange.hierarchical_rows import HierarchicalRows, most_words
from ns_multigpu.core.exchange.hierarchy import Hierarchy
from ns_multigpu.core.step.step_settings import with_halos
from ns_multigpu.locality.options import LocalityOptions
from ns_multigpu.primitives.gaussians.kernels import GaussianKernels
from strategies.locality import locality
from tests.lib.overlaps import overlaps
from tests.lib.ranks import run_ranks
from tests.strategies import test_law_steps
from tests.strategies.scene import make_points, make_views
from tests.strategies.shared_memory import SharedFile
from tests.strategies.test_half_wire import autograd_step
from tests.strategies.test_half_wire import check as check_half
from tests.strategies.test_law import PRIMITIVES, held_at, on_machines
from tests.strategies.test_law_steps import KERNELS, LANDSCAPE, POINTS, check_step, count_of, fill, made, take_one
from tests.strategies.test_needs import target_of

VIEWS, KIND = 5, "gaussians, antialiased, absgrad"
ROW, GRADIENT = 4 * (10 + 4), 4 * (10 + 2)
"""Bytes of a row through autograd: ten floats, view, id and radii; and of its gradients, the absolute ones too."""


def crossed(machines: int, world: World, mode: str, relays: bool) -> dict[str, Any]:
    """Return the bytes of a step between machines, and the rows that must cross."""
    world = on_machines(world, machines)
    spread = locality(world, LocalityOptions(relays=relays))
    kind: Any = PRIMITIVES[KIND]()
    views = make_views(VIEWS, torch.float32, world.device, LANDSCAPE)
    spread.placement.look(lambda: views)
    held, _ = held_at(spread, make_points(POINTS, torch.float32, world.device))
    plan = with_halos(spread.plan(views), views)
    own = kind.splat(held, kind.cull(held, views, list(range(VIEWS))), views)
    touched = torch.stack([overlaps(own, views, patches) for patches in plan.drawn])
    other_machines = [k for k in range(machines) if k != world.machine]
    whole = torch.stack([touched[list(world.ranks_of(k))].any(0) for k in other_machines])
    counts = int(sum(touched[rank].sum() for k in other_machines for rank in world.ranks_of(k))), int(whole.sum())
    row_bytes = words = 0
    params = {name: value.detach().clone().requires_grad_() for name, value in held.params.items()}
    if mode == "autograd":
        splats = spread.rows.exchange(own, held, views, plan, world)
        world.traffic.between_since("step")
        splats = spread.rows.exchange(own, held, views, plan, world)
        assert splats.probe is not None
        (sum(row.sum() for row in splats.rows.values() if row.requires_grad) + splats.probe.sum()).backward()
    else:
        params = {name: value.detach() for name, value in params.items()}
        moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in params.items()}
        step = made(spread, kind, views, params, moments, {}, False)
        fill(step, views)
        targets = [target_of(patch, views) for patch in plan.owned[world.rank]]
        world.traffic.between_since("step")
        step.take(plan, targets)
        wire = step._transport.kernels.wire(half=False, slots=False)
        row_bytes, words = 4 * (wire.row_words + wire.gradient_words), step._transport.words
    between, rows = world.traffic.between_since("step"), all_gather_objects(counts, world)
    return {"between": between, "row": row_bytes, "words": words, "rows": rows}


def test_a_row_that_several_ranks_of_a_machine_need_crosses_once() -> None:
    ranks, machines = 6, 3
    relayed, direct = (run_ranks(partial(crossed, machines), ranks, "autograd", relays) for relays in (True, False))
    for by_relay, other in zip(relayed, direct, strict=True):
        assert by_relay["rows"] == other["rows"]
    each, once = (sum(counts) for counts in zip(*relayed[0]["rows"], strict=True))
    assert once < 0.8 * each, "many rows are needed by several ranks of a machine"
    # Gradients return on the same path. Each rank sends its counts: 8 bytes to a rank, or to a machine.
    others = ranks - ranks // machines
    assert sum(one["between"] for one in direct) == each * (ROW + GRADIENT) + 8 * ranks * others
    assert sum(one["between"] for one in relayed) == once * (ROW + GRADIENT) + 8 * ranks * (machines - 1)


def test_fused_steps_send_the_rows_that_must_cross_and_no_spare_capacity() -> None:
    ranks, machines = 4, 2
    relayed, direct = (run_ranks(partial(crossed, machines), ranks, "step", relays) for relays in (True, False))
    assert relayed[0]["rows"] == direct[0]["rows"]
    each, once = (sum(counts) for counts in zip(*relayed[0]["rows"], strict=True))
    messages = machines * (ranks - 1) * 8 * relayed[0]["words"]  # around a ring that leaves each machine once
    for found, rows, counts in ((relayed, once, machines - 1), (direct, each, ranks - ranks // machines)):
        assert sum(one["between"] for one in found) == rows * found[0]["row"] + 8 * ranks * counts + messages


def send_and_return(machines: int, world: World, half: bool) -> Any:
    kind: Any = PRIMITIVES[KERNELS[0]]()
    return take_one(locality(on_machines(world, machines)), kind, 11, LANDSCAPE, "step", False, half)


def autograd(machines: int, world: World, half: bool) -> Any:
    return autograd_step(on_machines(world, machines), "locality", half)


@pytest.mark.parametrize("mode", [send_and_return, autograd])
def test_float16_between_machines_is_close_to_float32(mode: Any) -> None:
    """Between machines alone: within one nothing is rounded. Sums of gradients there are rounded once."""
    whole, half = (run_ranks(partial(mode, 2), 4, h) for h in (False, True))
    check_half(half, whole, 4)


def by_shared_memory(folder: Path, machines: int, world: World, count: int) -> Any:
    """Return a step whose rows go through memory that ranks of a machine share; what it says of its bytes is right."""
    SharedFile.folder = folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intra_node, "PeerBuffer", SharedFile)
        usual = test_law_steps.make_transport
        patch.setattr(test_law_steps, "make_transport", lambda *all, **some: usual(*all, **{**some, "peer": True}))
        kind: Any = PRIMITIVES[KERNELS[0]]()
        spread = locality(on_machines(world, machines))
        outcome = take_one(spread, kind, count, LANDSCAPE, "step")
    assert SharedFile.made == 1, "there was memory to share"
    return outcome


def test_a_step_through_memory_that_ranks_of_a_machine_share(tmp_path: Path) -> None:
    found = run_ranks(partial(by_shared_memory, tmp_path, 2), 6, count_of("locality"))
    check_step(found, "locality", KERNELS[0], LANDSCAPE)


def test_hierarchical_exchange_locates_each_count() -> None:
    hierarchy = Hierarchy(3, 2)
    places = [hierarchy.to_rank(local) for local in range(2)] + [hierarchy.to_machine(k) for k in range(3)]
    places += [hierarchy.forwarded(k, local) for k in range(3) for local in range(2)]
    assert places == list(range(hierarchy.num_counts)) and hierarchy.num_destinations == 5
    assert hierarchy.destinations(2) == (2, 2, 0, 1, 4, 4), "rank 2 is the first of machine 1"
    # Rank r counts 100 r + k of its k-th number.
    pairs = tuple(tuple(100 * rank + k for k in range(11)) for rank in range(6))
    assert hierarchy.sent_within(pairs, 3, 2) == [305, 300, 309] and hierarchy.sent_within(pairs, 3, 3) == [
        306,
        301,
        310,
    ]
    assert hierarchy.received(pairs, 2) == [205, 305, 200, 300, 209, 309]
    assert [hierarchy.sent_between(pairs, 4, k) for k in range(3)] == [402, 403, 0]


def test_all_ranks_of_a_machine_know_where_things_are_in_each_others_memory() -> None:
    """Sender and receiver have the same capacity, however uneven pairs are."""
    hierarchy, g = Hierarchy(3, 2), torch.Generator().manual_seed(2)
    table = tuple(tuple(row) for row in torch.randint(0, 90, (6, hierarchy.num_counts), generator=g).tolist())
    worlds = [World(rank, 6, rank % 2, 2, torch.device("cpu")) for rank in range(6)]
    made = [HierarchicalRows(world, GaussianKernels(degree=0), 10, table, 4) for world in worlds]
    sizes = [len(one._intra_node.memory) for one in made]
    assert max(sizes) == most_words(hierarchy, table, made[0]._within.row_words) > min(sizes)
    for one, other in (made[:2], made[2:4], made[4:]):
        assert (
            one._within_words == other._within_words
            and one._out_at == other._out_at
            and one._within_rows == other._within_rows
        )
        for me, there in ((one, other), (other, one)):
            number = me.world.local_rank
            assert len(me._intra_node.memory) == me._out_at[number] + sum(me._within_words[number])
            # Rows that come stand behind their counts, in the order in which they were put to leave.
            starts = [me._from[there.world.local_rank][0][k] for k in range(3)]
            left = [there._to[number][0][k] for k in range(3)]
            assert [s - starts[0] for s in starts] == [s - left[0] for s in left]
            assert starts[0] == 3 and left[0] == there._out_at[there.world.local_rank] + 3
            assert me._from[there.world.local_rank][1] == there._to[number][1]


@pytest.mark.parametrize(("ranks", "machines"), [(99, 3), (136, 8)])
def test_more_ranks_than_kernels_know_are_refused(ranks: int, machines: int) -> None:
    world = World(0, ranks, 0, ranks // machines, torch.device("cpu"))
    kernels: Any = None
    with pytest.raises(
        ValueError, match=f"{machines} machines of {ranks // machines} ranks: .*128 ranks at most, 32 of a machine"
    ):
        HierarchicalRows(world, kernels, 1, 1, 1)


def test_32_machines_of_4_ranks_exchange_rows() -> None:
    world = World(5, 128, 1, 4, torch.device("cpu"))
    rows = HierarchicalRows(world, GaussianKernels(3), 8, 2, 16)
    assert rows.num_destinations == 36 > MOST_RANKS and len(rows.destinations) == 128


@pytest.mark.parametrize(("ranks", "machines"), [(1, 1), (4, 1), (3, 3)])
def test_no_forwarding_with_one_rank_per_machine(ranks: int, machines: int) -> None:
    world = World(0, ranks, 0, ranks // machines, torch.device("cpu"))
    assert Hierarchy.of(world) is None
