"""Machines of the ranks, real or pretended; and a rendezvous in a folder with files of an earlier run."""

import re
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ns_multigpu.core.dist.machines import PRETEND_MACHINES, Layout, Place, layout_of
from ns_multigpu.core.dist.rendezvous import store_of_attempt
from ns_multigpu.core.dist.world import World, pretended_machines
from tests.lib.ranks import run_ranks


def _places(groups: str, pretended: int = 1) -> list[Place]:
    return [Place(int(group), f"node{group}", pretended) for group in groups]


def test_machines_are_numbered_in_order_of_ranks() -> None:
    assert layout_of(_places("0011")) == Layout(2, ("node0", "node1"))
    assert layout_of(_places("5")) == Layout(1, ("node5",))
    assert layout_of(_places("773311")) == Layout(2, ("node7", "node3", "node1"))
    assert layout_of(_places("0000", 2)) == Layout(2, ("node0", "node0"), 2)
    assert layout_of(_places("000000", 3)) == Layout(2, ("node0",) * 3, 3)


@pytest.mark.parametrize(
    ("places", "said"),
    [
        (_places("00011"), "machine 0 (node0) has 3, machine 1 (node1) has 2. Give torchrun the same --nproc-per-node"),
        (_places("0101"), "machine 0 (node0) has ranks 0, 2, machine 1 (node1) has ranks 1, 3. Number them machine by"),
        (_places("0000", 3), f"{PRETEND_MACHINES}=3: 4 ranks cannot be distributed to 3 machines equally. Start 6 ranks"),
        (_places("0", 2), "1 rank cannot be distributed to 2 machines equally. Start 2 ranks"),
        (_places("0011", 2), f"{PRETEND_MACHINES}=2 makes one machine pass for several, and this job has 2. Unset it"),
        (_places("0", 2) + _places("0"), f"{PRETEND_MACHINES} must be the same for all ranks, and is 2 on rank 0, 1 "),
    ],
)
def test_machines_that_cannot_be_are_refused_with_what_they_have(places: list[Place], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        layout_of(places)


@pytest.mark.parametrize("value", ["0", "-1", "two", ""])
def test_only_a_number_of_machines_can_be_pretended(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRETEND_MACHINES, value)
    with pytest.raises(ValueError, match=f"{PRETEND_MACHINES}={value}: must be the number of machines"):
        pretended_machines()


def _where(world: World) -> tuple[object, ...]:
    place = world.machine, world.machines, world.local_rank, world.local_size, world.host_size
    neighbours = dist.get_process_group_ranks(world.local_group)  # type: ignore[arg-type]
    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total, group=world.local_group)
    assert (world.local_group is world.group) == (world.machines == 1), "one machine needs no second communicator"
    return *place, neighbours, total.item(), world.rank_name(3), list(world.ranks_of(1)), world.machine_of(2)


def test_one_machine_passes_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    host = socket.gethostname()
    for rank, located in enumerate(run_ranks(_where, 4)):
        assert located == (0, 1, rank, 4, 4, [0, 1, 2, 3], 6.0, "rank 3", [4, 5, 6, 7], 0)
    monkeypatch.setenv(PRETEND_MACHINES, "2")
    for rank, located in enumerate(run_ranks(_where, 4)):
        own = [0, 1] if rank < 2 else [2, 3]
        called = f"rank 3 on machine 1 ({host})"
        assert located == (rank // 2, 2, rank % 2, 2, 4, own, float(sum(own)), called, [2, 3], 1)


def _refused(world: World) -> list[str]:
    raise AssertionError("it was to be refused")


def test_three_ranks_are_not_two_machines(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(PRETEND_MACHINES, "2")
    with pytest.raises(Exception, match=f"ValueError: {PRETEND_MACHINES}=2: 3 ranks cannot be distributed"):
        run_ranks(_refused, 3)


def test_world_without_description_is_one_machine() -> None:
    world = World.single()
    assert (world.machine, world.machines, world.host_size, world.rank_name(0)) == (0, 1, 1, "rank 0")


# ---- meeting ----


def _meet(store: dist.Store, ranks: list[int], size: int, word: str, seconds: float = 20.0) -> dict[int, object]:
    """Ranks that are threads, and come one after the other; what each reads of all where they meet, or its error."""
    got: dict[int, object] = {}

    def come(rank: int) -> None:
        try:
            ours = store_of_attempt(store, rank, size, timedelta(seconds=seconds))
        except dist.DistStoreError as error:
            got[rank] = str(error)
            return
        ours.set(f"word/{rank}", word)
        got[rank] = {ours.get(f"word/{other}").decode() for other in range(size)}

    threads = [threading.Thread(target=come, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join(seconds + 10)
    return got


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_each_restart_has_its_own_rendezvous(order: list[int]) -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    for word in ("first", "second"):
        assert _meet(store, order, 3, word) == {rank: {word} for rank in range(3)}
    # A life that ended while its ranks were on their way here, with and without rank 0.
    assert "did not come" in str(_meet(store, [1], 3, "lost", seconds=0.5)[1])
    assert _meet(store, [0, 2], 3, "lost", seconds=1.0).keys() == {0, 2}
    assert _meet(store, order, 3, "last") == {rank: {"last"} for rank in range(3)}


def test_missing_rank_is_named() -> None:
    said = _meet(dist.HashStore(), [0, 2], 4, "", seconds=1.0)
    assert said == {0: "ranks 1, 3 did not come.", 2: "rank 0, or another, did not come."}


def test_single_rank_needs_no_rendezvous() -> None:
    assert _meet(dist.HashStore(), [0], 1, "alone", seconds=1.0) == {0: {"alone"}}
