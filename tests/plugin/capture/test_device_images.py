"""The images of a fused step's views: kept on every GPU, or received from the ranks that hold them."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ns_multigpu.core.assign.assignment import RoundRobinViews
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import View
from ns_multigpu.plugin.capture import device_images, image_share
from ns_multigpu.plugin.capture.device_images import DeviceImages
from ns_multigpu.plugin.capture.image_share import ImageShare
from ns_multigpu.plugin.capture.image_store import ImageData, ImageShape
from tests.lib.ranks import run_ranks

COUNT = 9
SHAPE = ImageShape(4, 5, 3, torch.uint8, 0)
BATCHES = ([0, 1, 2, 3], [5, 5, 0, 5], [8, 7], [2, 4, 6, 8, 0, 2])


def _image(index: int) -> Tensor:
    return torch.randint(0, 256, (4, 5, 3), generator=torch.Generator().manual_seed(index), dtype=torch.uint8)


def _decode(index: int) -> ImageData:
    return {"image": _image(index)}


def _views(count: int, factor: int = 1) -> list[View]:
    return [View(torch.eye(4), torch.eye(3), 5 // factor, 4 // factor) for _ in range(count)]


def _smaller(image: Tensor, factor: int) -> Tensor:
    height, width = image.shape[0] // factor * factor, image.shape[1] // factor * factor
    return image.float()[:height:factor, :width:factor].clone()


def _images_of(share: ImageShare, world: World) -> DeviceImages:
    datamanager: Any = SimpleNamespace(train_share=share)
    return DeviceImages(datamanager, world)


def _images(world: World, budget: int | None = None) -> DeviceImages:
    return _images_of(ImageShare([SHAPE] * COUNT, _decode, world, label="test", budget=budget), world)


def _at_home(world: World) -> int:
    """Every rank owns patches of what it holds: nothing may be exchanged, nor copied."""
    share = ImageShare([SHAPE] * COUNT, _decode, world, label="test", owners=[0, 0, 0, 1, 1, 1, 0, 0, 1])
    images = _images_of(share, world)

    def nothing_moves(*_: object) -> Tensor:
        raise AssertionError("ranks meet though no image moves")

    image_share.exchange_rows = nothing_moves  # type: ignore[assignment]
    block = share.store._block.untyped_storage().data_ptr()
    for batch in ([0, 3], [1, 4, 2, 5], [8, 6]):
        views = _views(len(batch))
        plan = RoundRobinViews().assign(views, world.size, [share.holder(index) for index in batch])
        for patch, part in zip(plan.owned[world.rank], images.get(batch, plan, views), strict=True):
            assert torch.equal(part.data["image"], _image(batch[patch.view]))
            assert part.data["image"].untyped_storage().data_ptr() == block
    return world.traffic.sent


def test_no_wait_if_every_image_is_local() -> None:
    assert run_ranks(_at_home, 2) == [0, 0]


def _all_here(world: World) -> int:
    """Return the number of collectives until each rank has all images."""
    images, met = _images(world), list[int]()
    images._fits = True
    device_images._AT_ONCE = 4 * SHAPE.nbytes
    exchange = image_share.exchange_rows

    def counted(*given: Any) -> Tensor:
        met.append(1)
        return exchange(*given)

    image_share.exchange_rows = counted
    images.load(1, lambda image: image)
    assert images.kept is not None and len(images.kept) == COUNT
    assert all(torch.equal(image, _image(index)) for index, image in enumerate(images.kept))
    return len(met)


def test_many_images_are_sent_in_one_message() -> None:
    assert run_ranks(_all_here, 2) == [3, 3], "four, four and one"


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.1, 0.0], ids=["kept", "brought"])
def test_images_are_kept_on_the_gpu_if_they_fit(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_images, "_SHARE", share)
    world = World.single("cuda:0")
    images = _images(world)
    for batch in BATCHES:
        views = _views(len(batch))
        found = [part.data["image"] for part in images.get(batch, RoundRobinViews().assign(views, 1), views)]
        assert all(image.is_cuda and torch.equal(image.cpu(), _image(i)) for image, i in zip(found, batch, strict=True))
    assert (images.kept is not None) == (share > 0)


def _made_smaller(world: World, fits: bool, budget: int | None = None, *, whole: bool = False) -> dict[str, int]:
    """Return the numbers of downscaled and decoded images, and of those kept at two resolutions and at the full one.
    `whole`: memory suffices for full images in addition."""
    device_images._SHARE = 0.1 if fits else -1.0
    if not whole:
        device_images._WHOLE = 0.0
    if fits:  # a CPU counts as having no memory for them
        gather = device_images.all_gather_ints
        device_images.all_gather_ints = lambda values, world: gather([1 << 30, *values[1:]], world)
    shrunk, decoded = list[int](), list[int]()

    def decode(index: int) -> ImageData:
        decoded.append(index)
        return _decode(index)

    share = ImageShare([SHAPE] * COUNT, decode, world, label="test", budget=budget)
    images = _images_of(share, world)
    decoded.clear()

    def shrink(factor: int, image: Tensor) -> Tensor:
        shrunk.append(1)
        return _smaller(image, factor)

    images.load(4, partial(shrink, 4))
    if fits:
        assert len(shrunk) == COUNT, "before the first step"
    for factor in (4, 4, 2, 2):
        for batch in BATCHES:
            views = _views(len(batch), factor)
            plan = RoundRobinViews().assign(views, world.size)
            found = images.get_smaller(batch, plan, views, factor, partial(shrink, factor))
            mine = [batch[patch.view] for patch in plan.owned[world.rank]]
            expected = [_smaller(_image(index), factor) for index in mine]
            assert all(torch.equal(a.data["image"], b) for a, b in zip(found, expected, strict=True))
        if fits:  # full images in addition would double the memory
            assert images.kept is not None and images.kept.shape == (COUNT, 4 // factor, 5 // factor, 3)
    plan = RoundRobinViews().assign(_views(4), world.size)
    for part, patch in zip(images.get(BATCHES[0], plan, _views(4)), plan.owned[world.rank], strict=True):
        assert torch.equal(part.data["image"], _image(BATCHES[0][patch.view]))
    if fits:
        assert images.kept is not None and images.kept.shape == (COUNT, 4, 5, 3)
    whole = images._originals
    return {"shrunk": len(shrunk), "decoded": len(decoded), "originals": 0 if whole is None else len(whole)}


@pytest.mark.parametrize("size", [1, 2])
def test_gpu_images_are_downscaled_once_and_originals_freed(size: int) -> None:
    for found in run_ranks(_made_smaller, size, True):
        assert found == {"shrunk": 2 * COUNT, "decoded": 0, "originals": 0}


def test_full_images_are_kept_with_smaller_ones_if_memory_allows() -> None:
    """Then a change of resolution takes no other rank, and no host."""
    for found in run_ranks(partial(_made_smaller, whole=True), 2, True):
        assert found == {"shrunk": 2 * COUNT, "decoded": 0, "originals": COUNT}


def test_images_that_do_not_fit_are_made_smaller_in_each_step() -> None:
    [found] = run_ranks(_made_smaller, 1, False)
    assert found["shrunk"] == 4 * sum(map(len, BATCHES))


def test_images_that_cannot_be_cached_on_the_host_are_kept() -> None:
    """A host without memory for its share decodes images on demand, so decoded ones are kept."""
    found = run_ranks(_made_smaller, 2, True, 128)
    assert [one["shrunk"] for one in found] == [2 * COUNT] * 2
    assert [one["originals"] for one in found] == [COUNT] * 2
    assert sum(one["decoded"] for one in found) == COUNT


@pytest.mark.parametrize(
    ("memory", "complete", "kept", "again"),
    [
        ([1 << 30, 1 << 30], [1, 1], True, True),
        ([1 << 30, 1000], [1, 1], False, True),  # one GPU has too little memory: images are sent to both
        ([1 << 30, 1 << 30], [0, 1], True, False),  # one rank would have to decode its images again
    ],
)
def test_the_weakest_rank_decides(
    memory: list[int], complete: list[int], kept: bool, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetching takes all ranks, so they decide alike."""
    rows = [list(row) for row in zip(memory, complete, strict=True)]
    monkeypatch.setattr(device_images, "all_gather_ints", lambda own, world: rows)
    monkeypatch.setattr(device_images, "_SHARE", 0.1)
    monkeypatch.setattr(device_images, "_WHOLE", 1e-7)
    images = _images(World.single())
    assert (images._fits, images._again) == (kept, again)


def _layered(world: World, fits: bool, again: bool = True) -> None:
    """Photographs of two sizes, one with an alpha channel, one with a mask."""
    g = torch.Generator().manual_seed(3)
    sizes = [(4, 6), (6, 4), (4, 6), (4, 6)]  # height, width
    data = [{"image": torch.randint(0, 256, (*size, 3), generator=g, dtype=torch.uint8)} for size in sizes]
    data[1]["image"] = torch.cat([data[1]["image"], 7 + 0 * data[1]["image"][..., :1]], -1)
    data[2]["mask"] = torch.rand(4, 6, 1, generator=g) > 0.5
    shapes = [
        ImageShape(*size, d["image"].shape[2], torch.uint8, int("mask" in d))
        for size, d in zip(sizes, data, strict=True)
    ]
    share = ImageShare(shapes, data.__getitem__, world, label="test")
    images = _images_of(share, world)
    images._fits, images._again = fits, again
    assert images.alpha and images.masks == 1
    batch = [2, 1, 3, 0]
    for factor in (2, 1):
        views = [View(torch.eye(4), torch.eye(3), sizes[i][1] // factor, sizes[i][0] // factor) for i in batch]
        plan = RoundRobinViews().assign(views, world.size)
        scale = partial(_smaller, factor=factor) if factor > 1 else lambda image: image
        for part, patch in zip(
            images.get_smaller(batch, plan, views, factor, scale), plan.owned[world.rank], strict=True
        ):
            of = data[batch[patch.view]]
            image = of["image"]
            alpha = image[..., 3:] if image.shape[2] == 4 else torch.full_like(image[..., :1], 255)
            mask = 255 * of["mask"].byte() if "mask" in of else torch.full_like(alpha, 255)
            expected = scale(torch.cat([image[..., :3], alpha, mask], -1))
            assert torch.equal(part.data["image"], expected)


@pytest.mark.parametrize(("fits", "again"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("size", [1, 2])
def test_alpha_masks_and_sizes_are_layers(size: int, fits: bool, again: bool) -> None:
    """Images are kept or not; smaller ones are made of kept originals, or of images that are fetched again."""
    run_ranks(_layered, size, fits, again)
