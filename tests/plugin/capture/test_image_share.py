"""Each rank holds its share of the images, or as much of it as its memory takes, and gets those that it renders."""

import threading
import time
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from ns_multigpu.core.assign.assignment import RoundRobinViews
from ns_multigpu.core.assign.plan import Plan
from ns_multigpu.core.assign.view_sequence import ViewSequence
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import Patch, View
from ns_multigpu.plugin.capture.image_moves import rectangles_of
from ns_multigpu.plugin.capture.image_share import ImageError, ImageShare
from ns_multigpu.plugin.capture.image_store import ImageData, ImageShape, ImageStore, shape_of
from ns_multigpu.plugin.faults.errors import InputError
from tests.lib.ranks import run_ranks


def _image(index: int) -> ImageData:
    """Views of different sizes, channels and masks."""
    g = torch.Generator().manual_seed(index)
    height, width, channels = 3 + index % 4, 5 + index % 3, 4 if index % 5 == 0 else 3
    data = {"image": torch.randint(0, 256, (height, width, channels), generator=g, dtype=torch.uint8)}
    if index == 6:
        data["image"] = torch.rand(height, width, channels, generator=g)
    if index % 2:
        data["mask"] = torch.rand(height, width, 1, generator=g) > 0.5
    return data


def _shapes(count: int) -> list[ImageShape]:
    return [shape_of(_image(index)) for index in range(count)]


def _views(batch: list[int], factor: int = 1) -> list[View]:
    """Of a batch, at their images' resolution or a lower one."""
    shapes = [_shapes(max(batch) + 1)[index] for index in batch]
    return [View(torch.eye(4), torch.eye(3), shape.width // factor, shape.height // factor) for shape in shapes]


def _same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


BATCHES = ([0, 1, 2, 3], [0, 4, 8, 4], [6, 6], [9], [])


def _deliver(world: World, budget: int | None) -> dict[str, object]:
    share = ImageShare(_shapes(11), _image, world, label="test", budget=budget)
    assert share.own == list(range(world.rank, 11, world.size))
    assert share.store.complete == (budget is None)
    sent = []
    for step, batch in enumerate(BATCHES):
        share.expect([index for later in BATCHES[step:] for index in later])
        views = _views(batch)
        plan = RoundRobinViews().assign(views, world.size, [share.holder(i) for i in batch])
        before = world.traffic.sent
        images = share.deliver(batch, plan, world.device, views)
        sent.append(world.traffic.sent - before)
        assert set(images) == set(plan.drawn[world.rank])
        assert all(_same(part.data, _image(batch[patch.view])) for patch, part in images.items())
    for index in (0, 5, 6):
        assert _same(share.fetch(index, world.device), _image(index))
    some = [7, 0, 5, 6, 3]
    for index, data in zip(some, share.fetch_all(some, world.device), strict=True):
        assert _same(data, _image(index))
    assert share.fetch_all([], world.device) == []
    for index in share.own:
        assert _same(share.image(index, world.device), _image(index))
    with pytest.raises(KeyError):
        share.image((world.rank + 1) % world.size if world.size > 1 else 99, world.device)
    return {"sent": sent}


@pytest.mark.parametrize(("size", "budget"), [(1, None), (1, 640), (2, 640), (4, None)])
def test_images_are_received_by_their_readers(size: int, budget: int | None) -> None:
    """Images are the same with all images in memory and with memory for two."""
    sent = [r["sent"] for r in run_ranks(_deliver, size, budget)]
    total = [sum(column) for column in zip(*sent, strict=True)]
    assert total[0] == 0, "four views held by different ranks are rendered where they are held"
    if size == 4:
        # 0, 4, 8, 4 all lie on rank 0, which keeps one of them.
        assert total[1] > 0


def _cut(world: World, budget: int | None, owners: list[int] | None) -> tuple[int, int]:
    """Bands of most views of a batch for each rank, and rectangles for the third. Returns bytes sent, and decodings."""
    share = ImageShare(
        [SHAPE_OF_LARGE[index % 4] for index in range(8)], _large, world, owners=owners, label="test", budget=budget
    )
    batch = [6, 1, 4, 3, 1]
    views = [View(torch.eye(4), torch.eye(3), 40, 24) for _ in batch]
    upper = [Patch(position, 0, 0, 40, 8, 3) for position in range(5)]
    lower = [Patch(position, 0, 8, 40, 24, 3) for position in range(4)]
    corners = [Patch(4, 0, 8, 7, 24, 2), Patch(4, 30, 8, 40, 20, 2), Patch(4, 7, 24, 7, 24, 2)]
    plan = Plan.of([upper[2:], upper[:2] + lower[2:], lower[:2] + corners])
    before, decoded = world.traffic.sent, share.store.decoded
    share.expect(batch)
    there = share.deliver(batch, plan, world.device, views)
    sent, decoded = world.traffic.sent - before, share.store.decoded - decoded
    assert set(there) == set(plan.owned[world.rank])
    for patch, part in there.items():
        x0, y0, x1, y1 = rectangle = patch.rendered(views[patch.view])
        found, image = part.under(rectangle).data, _large(batch[patch.view])
        wanted = {name: value[y0:y1, x0:x1] for name, value in image.items()}
        assert _same(found, wanted) or x0 == x1
        if share.holder(batch[patch.view]) != world.rank:
            assert part.rectangle == rectangle, "no more than the rectangle has come"
    expected = sum(
        share.shapes[batch[patch.view]].cut(patch.rendered(views[patch.view])).nbytes
        for reader, patches in enumerate(plan.owned)
        for patch in patches
        if share.holder(batch[patch.view]) == world.rank != reader and patch.x0 < patch.x1
    )
    assert sent == expected
    return sent, decoded


SHAPE_OF_LARGE = [
    ImageShape(24, 40, channels, kind, masks)
    for channels, kind, masks in (
        (3, torch.uint8, 0), (4, torch.uint8, 1), (3, torch.float32, 2), (4, torch.float32, 0),
    )
]  # fmt: skip


def _large(index: int) -> ImageData:
    """Return one of each kind of image."""
    g, shape = torch.Generator().manual_seed(index), SHAPE_OF_LARGE[index % 4]
    size = (shape.height, shape.width, shape.channels)
    image = torch.rand(size, generator=g)
    data = {"image": image if shape.dtype == torch.float32 else (256 * image).to(torch.uint8)}
    if shape.masks:
        data["mask"] = torch.rand(*size[:2], shape.masks, generator=g) > 0.5
    return data


@pytest.mark.parametrize("owners", [None, [2] * 8, [0, 1, 2, 0, 1, 2, 2, 1]], ids=["dealt", "one holder", "given"])
def test_only_rendered_rectangles_are_sent(owners: list[int] | None) -> None:
    """Images decoded on demand, with memory for two, are the same. Each is decoded once, even for several ranks."""
    kept = run_ranks(_cut, 3, None, owners)
    late = run_ranks(_cut, 3, 2 * 24 * 40 * 16, owners)
    assert [sent for sent, _ in kept] == [sent for sent, _ in late] and sum(sent for sent, _ in kept) > 0
    holders = [view % 3 for view in range(8)] if owners is None else owners
    assert all(decoded == 0 for _, decoded in kept)
    for rank, (_, decoded) in enumerate(late):
        held = [view for view in range(8) if holders[view] == rank]
        fits = sum(-(-SHAPE_OF_LARGE[view % 4].nbytes // 64) * 64 for view in held) <= 2 * 24 * 40 * 16
        assert decoded == (0 if fits else len({6, 1, 4, 3} & set(held)))


def _owned(world: World) -> int:
    """With exchanged pixels the rank that draws a patch need not own it. No rank owns a pixel of the last view."""
    share = ImageShare(_shapes(4), _image, world, label="test", owners=[0, 1, 0, 1])
    batch, views = [0, 1, 2, 3], _views([0, 1, 2, 3])
    whole = [Patch.whole(position, view) for position, view in enumerate(views)]
    plan = Plan.of([whole, whole], [whole[2:3], [*whole[:2], Patch(3, 1, 1, 1, 1, 5)]])
    before = world.traffic.sent
    reading: list[int] = []
    read = share.store.rows
    share.store.rows = lambda index, *rest: reading.append(index) or read(index, *rest)  # type: ignore[method-assign]
    there = share.deliver(batch, plan, world.device, views)
    assert set(there) == set(plan.owned[world.rank])
    for patch in (whole[2:3], whole[:2])[world.rank]:
        assert _same(there[patch].data, _image(patch.view))
    assert reading == [[0, 2], [1]][world.rank]
    return world.traffic.sent - before


def test_images_are_sent_to_owners_of_pixels() -> None:
    assert run_ranks(_owned, 2) == [_shapes(1)[0].nbytes, 0]


def test_rectangles_or_the_whole_image_whichever_is_less() -> None:
    shape = ImageShape(20, 10, 3, torch.uint8, 0)
    view = View(torch.eye(4), torch.eye(3), 10, 20)
    bands = [Patch(0, 0, 0, 10, 6, 1), Patch(0, 0, 12, 10, 20, 1)]
    assert rectangles_of(bands, view, shape) == [(0, 0, 10, 7), (0, 11, 10, 20)]
    assert rectangles_of([*bands, bands[0]], view, shape) == [(0, 0, 10, 7), (0, 11, 10, 20)]
    # With wider halos they have 9 and 11 rows, as many as the image.
    wider = [Patch(0, 0, 0, 10, 6, 3), Patch(0, 0, 12, 10, 20, 3)]
    assert rectangles_of(wider, view, shape) == [(0, 0, 10, 20)]
    assert rectangles_of([Patch.whole(0, view)], view, shape) == [(0, 0, 10, 20)]
    assert rectangles_of([Patch(0, 4, 4, 4, 4, 5)], view, shape) == []
    half = View(torch.eye(4), torch.eye(3), 5, 10)
    assert rectangles_of([Patch(0, 0, 0, 5, 1)], half, shape) == [(0, 0, 10, 20)]
    assert rectangles_of([Patch(0, 4, 4, 4, 4)], half, shape) == []


def _broken(world: World, how: str) -> str:
    def decode(index: int) -> ImageData:
        if index in (1, 2):
            if how == "size":
                return _image(index + 1)
            raise OSError(f"photo_{index}.jpg is truncated")
        return _image(index)

    try:
        ImageShare(_shapes(4), decode, world, label="training", budget=1 if how == "memory" else None)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_hears_of_every_unreadable_image(size: int) -> None:
    for message in run_ranks(_broken, size, "raise"):
        assert "2 image(s)" in message and "photo_1.jpg" in message and "photo_2.jpg" in message


def test_an_image_unlike_its_camera_and_too_little_memory_are_refused() -> None:
    [message] = run_ranks(_broken, 1, "size")
    assert "view 1" in message and "view 2" in message
    assert "has 7x5 pixels, 3 channels, uint8, without a mask; expected were 6x4" in message
    [message] = run_ranks(_broken, 1, "memory")
    assert "Raise --pipeline.datamanager.image-memory-gb" in message and "too small for two images" in message


PLAIN = ImageShape(4, 4, 3, torch.uint8, 0)


def _plain(index: int) -> ImageData:
    return {"image": torch.full((4, 4, 3), index, dtype=torch.uint8)}


def test_store_decodes_on_demand_and_caches() -> None:
    """In a second epoch, a store for half of the images decodes only the other half again, whatever the order."""
    count, capacity = 40, 20
    store = ImageStore(dict.fromkeys(range(count), PLAIN), _plain, budget=capacity * 64, threads=2)
    assert store.capacity == capacity and store.nbytes == capacity * 64 and not store.complete and store.decoded == 0
    sequence = ViewSequence(count, seed=3)
    for epoch in range(4):
        before = store.decoded
        for place in range(epoch * count, (epoch + 1) * count):
            index = sequence.at(place)
            store.expect([sequence.at(place + i) for i in range(store.depth)])
            assert int(store.read(index, torch.device("cpu"))[0]) == index
        if epoch:
            assert store.decoded - before <= count - capacity + store.depth


def test_a_copy_on_the_host_outlives_its_place_in_memory() -> None:
    store = ImageStore(dict.fromkeys(range(9), PLAIN), _plain, budget=128, threads=2)
    held = [store.read(index, torch.device("cpu")) for index in range(9)]
    assert [int(image[0]) for image in held] == list(range(9)) and store.capacity == 2


@pytest.mark.parametrize("budget", [None, 2 * 15_360], ids=["kept", "on demand"])
def test_rows_of_an_image_are_all_that_is_copied(budget: int | None) -> None:
    store = ImageStore({view: SHAPE_OF_LARGE[view % 4] for view in range(8)}, _large, budget=budget)
    for view in (0, 5, 2, 7):
        image = _large(view)
        for top, bottom in ((3, 9), (0, 24), (0, 1), (20, 24)):
            rows = store.rows(view, torch.device("cpu"), top, bottom)
            assert _same(rows, {name: value[top:bottom] for name, value in image.items()})
            held = rows["image"].untyped_storage()
            if budget is None:
                assert held.data_ptr() == store._block.untyped_storage().data_ptr()
            elif (top, bottom) != (0, 24):
                assert held.nbytes() == rows["image"].nbytes
    with pytest.raises(KeyError):
        store.rows(8, torch.device("cpu"), 0, 1)


def _moved(world: World, budget: int | None) -> int:
    """Move images twice, also before some are read; each is there for all ranks afterwards."""

    def decode(view: int) -> ImageData:
        return {name: (value + view).to(value.dtype) for name, value in _image(view // 2).items()}

    share = ImageShare([shape_of(decode(view)) for view in range(8)], decode, world, label="test", budget=budget)
    decoded = share.store.decoded
    for owners in ([1, 0, 0, 1, 1, 0, 0, 1], [0, 1, 0, 1, 1, 0, 1, 0]):
        share.expect([3, 1, 0, 4])
        share.move(owners)
        assert share.owners == owners and share.own == [view for view in range(8) if owners[view] == world.rank]
        for view, data in enumerate(share.fetch_all(range(8), world.device)):
            assert _same(data, decode(view))
    return share.store.decoded - decoded


@pytest.mark.parametrize("budget", [None, 256])
def test_images_move_between_ranks(budget: int | None) -> None:
    found = run_ranks(_moved, 2, budget)
    if budget is None:
        assert found == [4, 4], "only what has moved"


def _lost(world: World) -> str:
    there = [0]

    def decode(index: int) -> ImageData:
        if index not in there:
            raise OSError("photo.jpg: gone")
        return _plain(index)

    there += range(4)
    share = ImageShare([PLAIN] * 4, decode, world, label="training")
    there.remove(2)
    with pytest.raises(InputError) as error:
        share.move([1, 0, 1, 0])
    return str(error.value)


def test_an_image_that_is_gone_when_it_moves_is_named_on_all_ranks() -> None:
    said = run_ranks(_lost, 2)
    assert said[0] == said[1] and "training view 2: OSError: photo.jpg: gone" in said[0]


def test_expected_images_are_decoded_in_the_background() -> None:
    done = threading.Event()

    def decode(index: int) -> ImageData:
        time.sleep(0.01)
        if index == 3:
            done.set()
        return _plain(index)

    store = ImageStore(dict.fromkeys(range(9), PLAIN), decode, budget=8 * 64, threads=1)
    store.expect([1, 2, 3, 1, 4, 5, 6])
    assert store.decoded == store.depth == 4
    assert done.wait(10), "view 3 is decoded before any read"
    assert int(store.read(1, torch.device("cpu"))[0]) == 1 and store.waited < 0.02
    store.expect([7, 8, 7, 2])
    for index in (7, 8, 7, 2, 0, 5):
        assert int(store.read(index, torch.device("cpu"))[0]) == index


def test_an_image_lost_on_the_way_is_named_and_leaves_its_place() -> None:
    fails = {2, 3}

    def decode(index: int) -> ImageData:
        if index in fails:
            raise OSError("photo.jpg: gone")
        return _plain(index)

    share = ImageShare([PLAIN] * 6, decode, World.single(), label="training", budget=128)
    for index in (0, 2, 3, 2):
        if index in fails:
            with pytest.raises(ImageError, match=f"training view {index} cannot be read: .*photo.jpg: gone"):
                share.image(index, torch.device("cpu"))
    fails.clear()
    for index in (2, 5, 3):
        assert _same(share.image(index, torch.device("cpu")), _plain(index))


@pytest.mark.gpu
def test_gpu_receives_streamed_and_page_locked_images_complete() -> None:
    """Slots are refilled while copies to the device may still be under way."""
    device = torch.device("cuda:0")
    shape = ImageShape(512, 512, 3, torch.uint8, 0)

    def decode(index: int) -> ImageData:
        return {"image": torch.full((512, 512, 3), index, dtype=torch.uint8)}

    for budget in (None, 4 * shape.nbytes):
        share = ImageShare([shape] * 64, decode, World.single(device), label="test", budget=budget, pinned=True)
        assert share.store._block.is_pinned()
        held = []
        for index in range(64):
            share.expect(list(range(index, 64)))
            held.append(share.image(index, device)["image"])
        assert all(bool((image == index).all()) for index, image in enumerate(held))
        view = View(torch.eye(4), torch.eye(3), 512, 512)
        plan = Plan.of([[Patch(position, 0, 128, 500, 500 - 64 * position, 16) for position in range(4)]])
        for first in range(0, 64, 4):
            batch = list(range(first, first + 4))
            share.expect(list(range(first, 64)))
            for patch, part in share.deliver(batch, plan, device, [view] * 4).items():
                held.append(part.under(patch.rendered(view)).data["image"])
                assert part.data["image"].shape[0] < 512, "the other rows are not copied"
        assert all(bool((image == index).all()) for index, image in enumerate(held[64:]))
    kept = ImageShare([shape] * 8, decode, World.single(device), label="test", place=device)
    assert kept.image(5, device)["image"].device.type == "cuda" and int(kept.image(5, device)["image"].max()) == 5
