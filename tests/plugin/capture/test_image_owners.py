"""Owners of images: distributed evenly within a machine, and held exactly once over all ranks."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture import image_share
from ns_multigpu.plugin.capture.image_owners import image_owners_of, swapped_owners
from ns_multigpu.plugin.capture.image_share import ImageShare
from ns_multigpu.plugin.capture.image_store import ImageData, ImageShape, aligned
from tests.lib.ranks import run_ranks

SMALL = ImageShape(4, 16, 1, torch.uint8, 0)
"""64 bytes."""


def _held(owners: list[int], shapes: list[ImageShape], ranks: int) -> list[int]:
    held = [0] * ranks
    for home, shape in zip(owners, shapes, strict=True):
        held[home] += aligned(shape.nbytes)
    return held


def test_images_of_a_machine_are_spread_evenly_over_its_ranks() -> None:
    """By bytes: a rank with large images has few of them."""
    g = torch.Generator().manual_seed(2)
    heights = [int(h) for h in torch.randint(1, 40, (200,), generator=g)]
    shapes = [replace(SMALL, height=4 * height, masks=height % 2) for height in heights]
    machines = [int(m) for m in torch.randint(0, 3, (200,), generator=g)]
    owners = image_owners_of(machines, shapes, 3, 4)
    assert all(home // 4 == machine for home, machine in zip(owners, machines, strict=True))
    held = _held(owners, shapes, 12)
    for machine in range(3):
        own = held[4 * machine : 4 * machine + 4]
        assert max(own) - min(own) < 0.01 * sum(own) / 4
    assert owners == image_owners_of(machines, shapes, 3, 4, budget=max(held)), "a budget that is kept changes nothing"


def test_machines_swap_images_of_one_shape_in_pairs() -> None:
    large = replace(SMALL, height=8)
    owners = [0, 1, 2, 3, 4, 3, 0, 2]
    wanted = [1, 0, 0, 2, 1, 0, 1, 1]  # of three machines with two ranks; views 3 and 4, and 0 and 2 change places
    shapes = [*[SMALL] * 6, large, large]
    found = swapped_owners(owners, wanted, shapes, 2)
    assert found == [2, 1, 0, 4, 3, 3, 0, 2], "views 5 and 6 have no partner of their shape"
    assert _held(found, shapes, 6) == _held(owners, shapes, 6)
    assert swapped_owners(found, wanted, shapes, 2) == found


def test_images_of_one_size_are_distributed_round_robin() -> None:
    machines = [0, 0, 0, 0, 1, 1, 0]
    assert image_owners_of(machines, [SMALL] * 7, 2, 2) == [0, 1, 0, 1, 2, 3, 0]
    assert image_owners_of([], [], 2, 2) == [] and image_owners_of([0] * 3, [SMALL] * 3, 1, 1) == [0, 0, 0]


def test_images_beyond_memory_go_to_machines_with_memory() -> None:
    machines = [0] * 9 + [1]
    owners = image_owners_of(machines, [SMALL] * 10, 3, 2, budget=2 * 64)
    assert _held(owners, [SMALL] * 10, 6) == [128, 128, 128, 128, 64, 64], "no rank has more than it may hold"
    assert [home // 2 for home in owners].count(0) == 4 and owners[9] // 2 == 1
    # The largest stay: two of 128 bytes; the smaller ones, more of them, leave.
    large = replace(SMALL, height=8)
    shapes = [SMALL, large, SMALL, large]
    assert image_owners_of([0] * 4, shapes, 2, 1, budget=256) == [1, 0, 1, 0]
    # Two of ten exceed the memory of all machines: their machine owns them, and decodes them on demand.
    owners = image_owners_of([0] * 10, [SMALL] * 10, 2, 2, budget=128)
    assert _held(owners, [SMALL] * 10, 4) == [192, 192, 128, 128]


@pytest.mark.parametrize(
    ("machines", "size", "message"),
    [
        ([0, 1], (0, 2), r"0 machine\(s\) of 2 rank\(s\)"),
        ([0, 1], (2, 0), r"2 machine\(s\) of 0 rank\(s\)"),
        ([0], (2, 2), "1 machines for 2 views"),
        ([0, 2], (2, 2), "view 1 is assigned to machine 2, and there are 2"),
        ([-1, 0], (2, 2), "view 0 is assigned to machine -1, and there are 2"),
    ],
)
def test_machines_that_cannot_be_are_refused(machines: list[int], size: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        image_owners_of(machines, [SMALL] * 2, *size)


VIEW_MACHINES = [0, 0, 0, 1, 0, 1, 0, 0, 1, 0, 0]


def _shapes() -> list[ImageShape]:
    return [
        replace(SMALL, height=4 + 4 * (index % 3), masks=int(index % 4 == 0)) for index in range(len(VIEW_MACHINES))
    ]


def _hold(world: World, owners: list[int]) -> tuple[list[int], int, list[int]]:
    """Return the images that this rank has decoded, and the bytes that it stores."""
    decoded: list[int] = []
    shapes = _shapes()

    def decode(index: int) -> ImageData:
        decoded.append(index)
        shape = shapes[index]
        data = {"image": torch.full((shape.height, shape.width, 1), index, dtype=torch.uint8)}
        if shape.masks:
            data["mask"] = torch.ones(shape.height, shape.width, 1, dtype=torch.bool)
        return data

    share = ImageShare(shapes, decode, world, owners=owners, label="training")
    assert [share.holder(index) for index in range(len(shapes))] == owners
    for index, shape in enumerate(shapes):
        image = share.fetch(index, world.device)["image"]
        assert image.shape[:2] == (shape.height, shape.width) and int(image.min()) == int(image.max()) == index
    return sorted(decoded), share.store.nbytes, share.own


def test_a_machine_holds_its_share_and_each_image_is_decoded_once() -> None:
    """Two pretended machines of two ranks."""
    shapes = _shapes()
    owners = image_owners_of(VIEW_MACHINES, shapes, 2, 2)
    ranks: list[Any] = run_ranks(_hold, 4, owners)
    assert sorted(view for decoded, _, _ in ranks for view in decoded) == list(range(len(shapes)))
    for rank, (decoded, _, own) in enumerate(ranks):
        assert decoded == own == [view for view, home in enumerate(owners) if home == rank]
    for machine in range(2):
        kept = sum(nbytes for _, nbytes, _ in ranks[2 * machine : 2 * machine + 2])
        mine = [shape for shape, home in zip(shapes, VIEW_MACHINES, strict=True) if home == machine]
        assert kept == sum(aligned(shape.nbytes) for shape in mine)


def test_a_rank_may_hold_nothing() -> None:
    (nobody, none, _), (decoded, kept, _) = run_ranks(_hold, 2, [1] * len(VIEW_MACHINES))
    assert (nobody, none) == ([], 0) and decoded == list(range(len(VIEW_MACHINES)))
    assert kept == sum(aligned(shape.nbytes) for shape in _shapes())


def _refused(world: World, how: str) -> str:
    owners = {"few": [0], "far": [0, 2, 1], "negative": [0, -1, 1], "other": [0, world.rank, 1]}[how]
    try:
        ImageShare([SMALL] * 3, _never, world, owners=owners, label="training")
    except ValueError as error:
        return str(error)
    return ""


def _never(index: int) -> ImageData:
    raise AssertionError(f"view {index} is decoded although its owner is unknown")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("few", "homes of the training images must be one rank for each of 3 views, not 1"),
        ("far", "home of training view 1 is rank 2, of 2 ranks"),
        ("negative", "home of training view 1 is rank -1, of 2 ranks"),
        ("other", "homes of the training images differ between ranks"),
    ],
)
def test_invalid_owners_are_refused_on_every_rank(how: str, message: str) -> None:
    assert all(message in found for found in run_ranks(_refused, 2, how))


def _little(world: World, owners: list[int]) -> tuple[str, bool, int]:
    def decode(index: int) -> ImageData:
        return {"image": torch.full((4, 16, 1), index, dtype=torch.uint8)}

    with image_share.CONSOLE.capture() as said:
        share = ImageShare([SMALL] * 10, decode, world, owners=owners, label="training", budget=256)
    return said.get(), share.store.complete, share.lookahead


def test_memory_message_names_the_ranks_that_lack_it() -> None:
    """Rank 0, which prints the message, has memory for its own images."""
    (said, complete, ahead), (silent, incomplete, far) = run_ranks(_little, 2, [0, 0] + [1] * 8)
    assert complete and not incomplete and silent == ""
    assert "1 of 2 rank(s) cannot keep all of theirs" in said and "rank 1 keeps" in said
    # Of ten coming views it holds eight; two at a time are worth naming.
    assert ahead == 0 and far == 3
    said, _, _ = run_ranks(_little, 2, [0] * 5 + [1] * 5)[0]
    assert "2 of 2 rank(s)" in said
