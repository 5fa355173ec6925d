"""Each rank holds its share of the images, and gets those that it renders."""

import pytest
import torch

from ns_multigpu.core.assignment import DealtViews
from ns_multigpu.core.types import View
from ns_multigpu.core.world import World
from ns_multigpu.plugin.errors import InputError
from ns_multigpu.plugin.image_share import ImageShare
from tests.ranks import run_ranks


def _image(index: int) -> dict[str, torch.Tensor]:
    """Views of different sizes, channels and masks."""
    g = torch.Generator().manual_seed(index)
    height, width, channels = 3 + index % 4, 5 + index % 3, 4 if index % 5 == 0 else 3
    data = {"image": torch.randint(0, 256, (height, width, channels), generator=g, dtype=torch.uint8)}
    if index == 6:
        data["image"] = torch.rand(height, width, channels, generator=g)
    if index % 2:
        data["mask"] = torch.rand(height, width, 1, generator=g) > 0.5
    return data


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def _deliver(world: World) -> dict[str, object]:
    share = ImageShare(11, _image, world, pinned=False, label="test")
    assert share.own == list(range(world.rank, 11, world.size))
    sent = []
    for batch in ([0, 1, 2, 3], [0, 4, 8, 4], [6, 6], [9], []):
        views = [View(torch.eye(4), torch.eye(3), 9, 9) for _ in batch]
        plan = DealtViews().assign(views, world.size, [share.holder(i) for i in batch])
        before = world.traffic.sent
        images = share.deliver(batch, plan, world.device)
        sent.append(world.traffic.sent - before)
        assert sorted(images) == sorted({p.view for p in plan[world.rank]})
        assert all(_same(images[position], _image(batch[position])) for position in images)
    for index in (0, 5, 6):
        assert _same(share.fetch(index, world.device), _image(index))
    with pytest.raises(KeyError):
        share[(world.rank + 1) % world.size if world.size > 1 else 99]
    return {"sent": sent}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_images_reach_their_readers(size: int) -> None:
    sent = [r["sent"] for r in run_ranks(_deliver, size)]
    total = [sum(column) for column in zip(*sent, strict=True)]
    assert total[0] == 0, "four views held by different ranks are rendered where they are held"
    if size == 4:
        # 0, 4, 8, 4 all lie on rank 0, which keeps one of them.
        assert total[1] > 0


def _broken(world: World) -> str:
    def decode(index: int) -> dict[str, torch.Tensor]:
        if index in (1, 2):
            raise OSError(f"photo_{index}.jpg is truncated")
        return _image(index)

    try:
        ImageShare(4, decode, world, pinned=False, label="training")
    except InputError as error:
        return str(error)
    return ""


def test_every_rank_hears_of_every_unreadable_image() -> None:
    for message in run_ranks(_broken, 2):
        assert "2 image(s)" in message and "photo_1.jpg" in message and "photo_2.jpg" in message
