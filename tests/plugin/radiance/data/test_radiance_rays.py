"""Rays of `nerfacto-xl`: each rank holds its share of the images, and what is drawn is what nerfstudio draws."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.data.datamanagers.base_datamanager import VanillaDataManager, VanillaDataManagerConfig
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from nerfstudio.scripts.render import _disable_datamanager_setup  # pyright: ignore[reportPrivateUsage]
from PIL import Image

from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.capture import image_share
from ns_multigpu.plugin.capture.image_store import ImageShape
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.process_world import set_world
from ns_multigpu.plugin.radiance.data import held_images
from ns_multigpu.plugin.radiance.data.datamanager import RadianceDataManager, RadianceDataManagerConfig
from ns_multigpu.plugin.radiance.data.masks import Masks
from ns_multigpu.plugin.radiance.field.draws import drawn
from tests.lib.captures import HEIGHT, WIDTH, edit, write_capture
from tests.lib.ranks import run_ranks

RAYS, SEED = 48, 7


def options(folder: Path, **more: Any) -> dict[str, Any]:
    """Return those of a datamanager."""
    parser = NerfstudioDataParserConfig(
        data=folder, load_3D_points=False, eval_mode="interval", eval_interval=4, downscale_factor=1
    )
    rays = {"train_num_rays_per_batch": RAYS, "eval_num_rays_per_batch": RAYS}
    return {"dataparser": parser, **rays, **more}


def manager(folder: Path, world: World, test_mode: str = "val", sampler: dict[str, Any] | None = None, **more: Any):
    """The datamanager of a run, with options of its sampler."""
    torch.manual_seed(SEED)
    set_world(world)
    try:
        config = RadianceDataManagerConfig(**options(folder, **more))
        for name, value in (sampler or {}).items():
            assert hasattr(config.pixel_sampler, name), name
            setattr(config.pixel_sampler, name, value)
        return RadianceDataManager(config, device=world.device, test_mode=test_mode)
    finally:
        set_world(None)


def different_sizes(folder: Path) -> Path:
    """Make every third image of a capture smaller, and its mask, if there is one."""
    meta = json.loads((folder / "transforms.json").read_text())
    for name in ("w", "h"):
        del meta[name]
    for number, frame in enumerate(meta["frames"]):
        size = (WIDTH - 5, HEIGHT - 3) if number % 3 == 0 else (WIDTH, HEIGHT)
        frame["w"], frame["h"] = size
        for path in [frame["file_path"], *([frame["mask_path"]] if "mask_path" in frame else [])]:
            with Image.open(folder / path) as image:
                image.crop((0, 0, *size)).save(folder / path)
    (folder / "transforms.json").write_text(json.dumps(meta))
    return folder


def transparent(folder: Path) -> Path:
    """Give all images a fourth channel."""
    for file in sorted((folder / "images").glob("photo*")):
        with Image.open(file) as image:
            image.putalpha(Image.fromarray(np.asarray(image)[:, :, 0]))
            image.save(file)
    return folder


def wide_masks(folder: Path) -> Path:
    """Write masks with a rectangle that is large enough for patches."""
    for number, file in enumerate(sorted((folder / "images").glob("mask*"))):
        mask = np.zeros((HEIGHT, WIDTH), dtype=np.uint8)
        mask[2 : 9 + number % 4, 3 : 12 + number] = 255
        Image.fromarray(mask).save(file)
    return folder


CAPTURES: dict[str, Any] = {
    "plain": write_capture,
    "masks": lambda folder: write_capture(folder, masks=True),
    "wide masks": lambda folder: wide_masks(write_capture(folder, masks=True)),
    "sizes": lambda folder: different_sizes(write_capture(folder)),
    "sizes and masks": lambda folder: different_sizes(write_capture(folder, masks=True)),
    "alpha": lambda folder: transparent(write_capture(folder)),
    "lens": lambda folder: write_capture(folder, k1=0.2),  # rays bend, and images stay as they are
    "eight": lambda folder: write_capture(folder, k1=0.2, k4=0.1, k6=0.05),
}


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("captures")
    return {name: write(folder / name.replace(" ", "-")) for name, write in CAPTURES.items()}


PATCHES = {"train_num_rays_per_batch": 1024, "eval_num_rays_per_batch": 1024}  # nerfstudio rounds down to this
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in CAPTURES},
    "blended": ("alpha", {"blended": True}),  # floats, of which bytes would lose something
    "patches": ("plain", {"patch_size": 4, **PATCHES}),
    "patches in masks": ("wide masks", {"patch_size": 2, **PATCHES}),
    "masks ignored": ("masks", {"sampler": {"ignore_mask": True}}),
    "none twice": ("masks", {"sampler": {"rejection_sample_mask": False}}),
    "none twice, sizes": ("sizes and masks", {"sampler": {"rejection_sample_mask": False}}),
    "some": ("masks", {"train_num_images_to_sample_from": 4, "train_num_times_to_repeat_images": 1}),
    "some for ever": ("plain", {"train_num_images_to_sample_from": 4}),
}
STEPS = (0, 1, 2, 5)


def _case(case: str, captures: dict[str, Path], world: World) -> RadianceDataManager:
    capture, more = CASES[case]
    more = dict(more)
    found = options(captures[capture])
    if more.pop("blended", False):
        found["dataparser"].alpha_color = "white"
        more["dataparser"] = found["dataparser"]
    return manager(captures[capture], world, **more)


def draws(world: World, captures: dict[str, Path]) -> dict[str, Any]:
    """By case, what is drawn in some steps, whatever was drawn before, and the bytes of images that this rank holds."""
    found: dict[str, Any] = {}
    for case in CASES:
        data = _case(case, captures, world)
        steps = {step: data.next_train(step) for step in (*STEPS, 0)}
        held = data._splits[5].images
        assert held is not None
        found[case] = (
            {step: (rays.origins, rays.directions, batch) for step, (rays, batch) in steps.items()},
            data.next_eval(3)[1],
            held.nbytes,
        )
    return found


def test_sampled_rays_are_independent_of_the_world_size(captures: dict[str, Path]) -> None:
    expected = draws(World.single(), captures)
    for size in (2, 3):
        for rank, found in enumerate(run_ranks(draws, size, captures)):
            for case, (steps, held_out, _) in expected.items():
                for step, values in steps.items():
                    _same(found[case][0][step], values, f"{case}, step {step}, rank {rank} of {size}")
                _same(found[case][1], held_out, f"{case}, held out")
            for case, (_, _, whole) in expected.items():
                # Images of one size: 9, or 4 of them, over the ranks. Of different sizes: as near as can be.
                assert abs(found[case][2] - whole / size) <= WIDTH * HEIGHT * 16, case
                assert found[case][2] < whole * (0.67 if size == 2 else 0.51), case


def _same(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            _same(found[name], value, f"{where}, {name}")
    elif isinstance(expected, tuple):
        for a, b in zip(found, expected, strict=True):
            _same(a, b, where)
    else:
        assert torch.equal(found, expected), where


@pytest.mark.parametrize("case", CASES)
def test_colours_are_those_of_nerfstudios_dataset(captures: dict[str, Path], case: str) -> None:
    data = _case(case, captures, World.single())
    masked = "mask" in CASES[case][0]
    for split, (_, batch) in (
        (data.train_dataset, data.next_train(2)), (data.eval_dataset, data.next_eval(2))
    ):  # fmt: skip
        assert len(batch["image"]) == CASES[case][1].get("train_num_rays_per_batch", RAYS)
        assert ("mask" in batch) == masked
        images = {index: split.get_data(index) for index in range(len(split))}
        for (view, row, column), colour in zip(batch["indices"].tolist(), batch["image"], strict=True):
            assert torch.equal(images[view]["image"][row, column], colour)
        if masked:
            through = torch.stack([images[v]["mask"][r, c] for v, r, c in batch["indices"].tolist()])
            assert torch.equal(through, batch["mask"])
            assert bool(batch["mask"].all()) == (case != "masks ignored")
        if "twice" in case:
            assert len(batch["indices"].unique(dim=0)) == RAYS
    first = data.next_train(2)[1]["indices"]
    assert not torch.equal(first, data.next_train(3)[1]["indices"])


@pytest.mark.parametrize("case", ["plain", "sizes", "alpha", "lens", "patches", "patches in masks", "masks ignored"])
def test_pixels_are_those_that_nerfstudio_draws(captures: dict[str, Path], case: str) -> None:
    """With all images, and generators in the same state."""
    capture, more = CASES[case]
    config = VanillaDataManagerConfig(**options(captures[capture], **{k: v for k, v in more.items() if k != "sampler"}))
    config.pixel_sampler.ignore_mask = "ignored" in case
    with drawn("cpu", SEED, 5):
        theirs = VanillaDataManager(config, device="cpu", test_mode="inference")
        theirs.test_mode = "val"
        theirs.setup_train()
    ours = _case(case, captures, World.single())
    for step in STEPS:
        with drawn("cpu", SEED, 5, step):
            rays, batch = theirs.next_train(step)
        found_rays, found = ours.next_train(step)
        assert torch.equal(found["indices"], batch["indices"]) and torch.equal(found["image"], batch["image"])
        assert torch.equal(found_rays.directions, rays.directions)
        if "mask" in batch:
            assert torch.equal(found["mask"], batch["mask"])


def test_pixels_within_masks_are_equally_likely(captures: dict[str, Path]) -> None:
    data = manager(captures["masks"], World.single(), train_num_rays_per_batch=1 << 16)
    indices = data.next_train(0)[1]["indices"]
    through = torch.stack([data.train_dataset.get_data(i)["mask"] for i in range(len(data.train_dataset))])[..., 0]
    counts = torch.zeros(through.shape).index_put_(tuple(indices.T), torch.ones(len(indices)), accumulate=True)
    assert torch.equal(counts > 0, through), "each pixel that may come comes, 37 times on average"
    mean = counts.sum() / through.sum()
    assert float(((counts[through] - mean) ** 2).mean() / mean) == pytest.approx(1, abs=0.15), "as Poisson has it"


def test_numbers_of_pixels_within_masks() -> None:
    """All of them, in order, of images that begin and end anywhere in a block of 64."""
    g = torch.Generator().manual_seed(1)
    sizes, own = [(5, 13), (9, 7), (1, 1), (16, 8), (11, 3)], [0, 1, 3, 4]
    shapes = [ImageShape(height, width, 3, torch.uint8, masks=1) for height, width in sizes]
    given = {place: torch.rand(*sizes[place], 1, generator=g) < (0.3, 0.9, 1, 0.5, 0.1)[place] for place in own}
    given[3][:12] = False  # a whole block, and more
    masks = Masks(shapes, own, "cpu")
    for place, mask in given.items():
        masks.put(place, mask)
    masks.count(World.single())
    assert masks.counts.tolist() == [int(given[place].sum()) if place in given else 0 for place in range(5)]
    where = [(place, number) for place in own for number in range(int(masks.counts[place]))]
    where = [where[i] for i in torch.randperm(len(where), generator=g).tolist()]
    images, numbers = torch.tensor(where).T
    expected = [int(given[place].reshape(-1).nonzero()[number]) for place, number in where]
    assert masks.nth(images, numbers).tolist() == expected
    every = torch.arange(16 * 8)
    assert torch.equal(masks.values(torch.full_like(every, 3), every), given[3].reshape(-1))
    assert all(torch.equal(masks.whole(place), given[place]) for place in own)
    with pytest.raises(ValueError, match=r"the mask has \[5, 12, 1\]"):
        masks.put(0, given[0][:, 1:])


def test_images_in_memory_follow_from_the_step(captures: dict[str, Path]) -> None:
    """Some at a time, which follow from the step: also where a run goes on."""

    def views(data: RadianceDataManager, step: int) -> set[int]:
        return set(data.next_train(step)[1]["indices"][:, 0].tolist())

    more: dict[str, Any] = {"train_num_images_to_sample_from": 3, "train_num_times_to_repeat_images": 2}
    data, again = (manager(captures["plain"], World.single(), **more) for _ in range(2))
    turns = [views(data, step) for step in range(12)]
    assert all(len(turn) == 3 for turn in turns), "48 rays of 3 images"
    assert all(turns[step] == turns[step - step % 3] for step in range(12)), "a draw and two repetitions"
    assert len({frozenset(turn) for turn in turns}) > 1
    assert views(again, 10) == turns[10]
    for_ever = manager(captures["plain"], World.single(), train_num_images_to_sample_from=3)
    assert len(set().union(*(views(for_ever, step) for step in (0, 50, 1000)))) == 3
    each = manager(captures["plain"], World.single(), train_num_images_to_sample_from=3,
                   train_num_times_to_repeat_images=0)  # fmt: skip
    assert len(set().union(*(views(each, step) for step in range(8)))) > 6
    held_out = manager(captures["plain"], World.single(), eval_num_images_to_sample_from=1,
                       eval_num_times_to_repeat_images=1)  # fmt: skip
    seen = [set(held_out.next_eval(100 * call)[1]["indices"][:, 0].tolist()) for call in range(12)]
    assert all(len(one) == 1 for one in seen) and seen[0::2] == seen[1::2] and len(set().union(*seen)) > 1


def test_viewing_a_model_reads_no_images(captures: dict[str, Path], monkeypatch: Any) -> None:
    """Rays are not drawn before a request. Like ns-export, one rank requests any number of rays."""
    made: list[World] = []
    usual = held_images.HeldImages.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(args[2])
        usual(self, *args, **kwargs)

    monkeypatch.setattr(held_images.HeldImages, "__init__", init)
    team = World.single()
    data = manager(captures["plain"], team, test_mode="test")
    assert made == [] and data.eval_dataloader.get_camera(0)[1]["image"].shape == (HEIGHT, WIDTH, 3)
    assert data.train_pixel_sampler is not None
    data.train_pixel_sampler.num_rays_per_batch = 10
    assert data.next_train(0)[1]["image"].shape == (10, 3)
    assert len(made) == 1 and made[0] is not team
    manager(captures["plain"], team)
    assert len(made) == 3 and made[2] is team, "training reads both splits at its start"
    with _disable_datamanager_setup(RadianceDataManager):  # as `ns-render dataset --split val`
        assert len(manager(captures["plain"], team).eval_dataset) == 3 and len(made) == 3


def _refused(world: World, folder: Path, more: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        data = manager(folder, world, **more)
        data.next_train(0)
    return str(caught.value)


def test_unusable_images_are_named_on_every_rank(tmp_path: Path, captures: dict[str, Path]) -> None:
    broken = write_capture(tmp_path / "broken")
    file = broken / "images/photo_05.png"
    file.write_bytes(file.read_bytes()[:100])
    mixed = write_capture(tmp_path / "mixed")
    with Image.open(mixed / "images/photo_05.png") as image:
        image.convert("RGBA").save(mixed / "images/photo_05.png")
    black = write_capture(tmp_path / "black", masks=True)
    for mask in (black / "images").glob("mask*"):
        Image.fromarray(np.zeros((HEIGHT, WIDTH), dtype=np.uint8)).save(mask)
    missing = write_capture(tmp_path / "missing", masks=True)
    edit(missing, 3, file_path="images/none.png")
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (broken, {}, "photo_05.png: it is truncated or unreadable"),
        (missing, {}, "none.png: there is no such file"),
        (mixed, {}, "training images are of different kinds"),
        (black, {}, "masks of the training images leave no pixel"),
        (captures["sizes"], {"train_num_rays_per_batch": 47}, "train-num-rays-per-batch 47: the training images are"),
        (captures["sizes"], {"patch_size": 2, **PATCHES}, "patches of pixels cannot be drawn"),
        (captures["masks"], {"patch_size": 4, **PATCHES}, "leave no pixels for patches"),
        (captures["plain"], {"patch_size": 2}, "train-num-rays-per-batch: too few for a patch"),
        (
            captures["masks"],
            {"sampler": {"rejection_sample_mask": False}, "train_num_rays_per_batch": 5000},
            "for 5000 rays, and none may come twice",
        ),
    ]
    for folder, more, expected in cases:
        assert expected in _refused(World.single(), folder, more), expected
    said = run_ranks(_refused, 2, broken, {})  # one of them reads that image
    assert said[0] == said[1] and cases[0][2] in said[0]


def test_more_than_the_hosts_memory_is_refused(captures: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_share, "available_memory", lambda: 9 * 1152 - 1)  # a byte less than 9 images of 24 x 16
    said = _refused(World.single(), captures["plain"], {})
    assert "The training images do not fit the host's memory" in said and "num-images-to-sample-from" in said
    monkeypatch.setattr(image_share, "available_memory", lambda: 9 * 1152)
    manager(captures["plain"], World.single())
