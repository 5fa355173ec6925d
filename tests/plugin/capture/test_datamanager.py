"""Every rank sees the same views; images wait on disk, or in memory, and are the same in both cases."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.datamanagers.full_images_datamanager import FullImageDatamanager, FullImageDatamanagerConfig
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from nerfstudio.data.datasets.base_dataset import InputDataset
from PIL import Image

from ns_multigpu.core.assign.assignment import RoundRobinViews
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.types import View
from ns_multigpu.plugin.capture.city_dataparser import CityDataParserConfig
from ns_multigpu.plugin.capture.datamanager import DistributedDataManager, DistributedDataManagerConfig
from ns_multigpu.plugin.capture.image_files import is_damaged_jpeg
from ns_multigpu.plugin.capture.image_reading import FileDataset
from ns_multigpu.plugin.capture.image_store import ImageData
from ns_multigpu.plugin.capture.reading import reads_files
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.faults.host_memory import available_memory
from tests.lib.captures import HEIGHT, WIDTH, manager, write_capture
from tests.lib.ranks import run_ranks


def _images(data: DistributedDataManager, steps: int, size: int) -> list[tuple[int, ImageData]]:
    """Return the images that this rank receives over some training steps."""
    world = data.world
    seen = []
    for step in range(steps):
        batch = data.train_batch(step, size)
        shapes = [data.train_shapes[index] for index in batch]
        views = [View(torch.eye(4), torch.eye(3), shape.width, shape.height) for shape in shapes]
        plan = RoundRobinViews().assign(views, world.size, [data.train_share.holder(i) for i in batch])
        received = data.train_share.deliver(batch, plan, world.device, views)
        seen += [(batch[patch.view], dict(received[patch].data)) for patch in plan.owned[world.rank]]
    return seen


def _load(world: World, folder: Path, gigabytes: float | None) -> list[tuple[int, ImageData]]:
    data = manager(folder, world, image_memory_gb=gigabytes)
    data.check_capture()
    assert data.train_share.store.complete == (gigabytes is None) and data.eval_share.own
    if gigabytes is not None:
        assert data.train_share.store.decoded == 0, "nothing is decoded before it is needed"
        assert data.train_share.store.nbytes + data.eval_share.store.nbytes <= gigabytes * 1e9
    seen = _images(data, steps=16, size=2)
    for place, (camera, batch) in enumerate(data.fixed_indices_eval_dataloader):
        assert int(camera.height.item()) == batch["image"].shape[0]
        seen.append((100 + data.eval_share.own[place], batch))
    seen += [(200, data.next_eval_image(3)[1]), (300, data.next_train(5)[1])]
    return [(index, {name: part.clone() for name, part in image.items()}) for index, image in seen]


def _load_both(world: World, folder: Path, gigabytes: float) -> list[list[tuple[int, ImageData]]]:
    return [_load(world, folder, None), _load(world, folder, gigabytes)]


@pytest.mark.parametrize(("size", "distorted"), [(1, False), (1, True), (2, True)])
def test_images_decoded_on_demand_are_those_of_memory(tmp_path: Path, size: int, distorted: bool) -> None:
    lens: dict[str, Any] = {"k1": 0.05, "p1": 0.01} if distorted else {}
    folder = write_capture(tmp_path / "capture", masks=True, **lens)
    little = 5 * (WIDTH * HEIGHT * 4 + 128) / 1e9  # of 9 training and 3 held-out images, two of each
    for one, other in run_ranks(_load_both, size, folder, little):
        assert [index for index, _ in one] == [index for index, _ in other]
        for (_, a), (_, b) in zip(one, other, strict=True):
            assert torch.equal(a["image"], b["image"]) and torch.equal(a["mask"], b["mask"])


@pytest.mark.parametrize(
    "lens",
    [{}, {"k1": 0.05, "k2": -0.01, "p1": 0.01}, {"camera_model": "OPENCV_FISHEYE", "k1": 0.05, "k2": 0.01}],
    ids=["pinhole", "opencv", "fisheye"],
)
def test_cameras_and_images_are_nerfstudios(tmp_path: Path, lens: dict[str, Any]) -> None:
    """Sizes known before an image is read equal those that nerfstudio finds by reading all images."""
    folder = write_capture(tmp_path / "capture", masks=True, **lens)
    data = manager(folder, World.single())
    data.check_capture()
    share = data.train_share
    parser: Any = NerfstudioDataParserConfig(
        data=folder, load_3D_points=False, eval_mode="interval", eval_interval=4, downscale_factor=1
    )  # fmt: skip
    plain = FullImageDatamanagerConfig(dataparser=parser, cache_images="gpu", cache_images_type="uint8")
    theirs = FullImageDatamanager(plain, device="cpu")
    images = theirs.cached_train
    ours: Cameras = data.train_dataset.cameras
    for name in ("fx", "fy", "cx", "cy", "width", "height"):
        assert torch.equal(getattr(ours, name).float(), getattr(theirs.train_dataset.cameras, name).float()), name
    assert bool((ours.distortion_params == 0).all())
    for index in range(len(images)):
        mine = share.image(index, torch.device("cpu"))
        assert torch.equal(mine["image"], images[index]["image"]) and torch.equal(mine["mask"], images[index]["mask"])


def _files(folder: Path) -> dict[str, Path]:
    """Write a photograph of odd size in each kind of file, and damaged ones."""
    photo, lying = Image.effect_noise((37, 23), 90).convert("RGB"), Image.Exif()
    photo.putpixel((3, 4), (250, 10, 10))
    lying[0x0112] = 6
    jpegs: dict[str, dict[str, Any]] = {f"{n}": {"subsampling": n, "quality": 70 + 10 * n} for n in range(3)}
    jpegs |= {"progressive": {"progressive": True}, "turned": {"exif": lying}, "rgb": {"keep_rgb": True}}
    for name, options in jpegs.items():
        photo.save(folder / f"{name}.jpg", **options)
    for mode, end in (("L", "jpg"), ("CMYK", "jpg"), ("L", "png"), ("RGBA", "png"), ("P", "png"), ("RGB", "webp")):
        photo.convert(mode).save(folder / f"{mode}.{end}")
    Image.fromarray(np.arange(35, dtype=np.uint16).reshape(5, 7)).save(folder / "16 bits.png")
    whole = (folder / "1.jpg").read_bytes()
    for name, data in (("more", whole + b"what a camera writes"), ("half", whole[: len(whole) // 2]), ("empty", b"")):
        (folder / f"{name}.jpg").write_bytes(data)
    (folder / "folder.jpg").mkdir()
    return {path.name: path for path in (*folder.iterdir(), folder / "missing.jpg")}


def test_files_are_decoded_to_nerfstudios_pixels_or_fail_as_there(tmp_path: Path, monkeypatch: Any) -> None:
    files = _files(tmp_path)
    poses = torch.eye(4)[:3].repeat(len(files), 1, 1)
    cameras = Cameras(poses, fx=20.0, fy=20.0, cx=18.0, cy=11.0, width=37, height=23)
    outputs = DataparserOutputs(list(files.values()), cameras)

    def read(dataset: InputDataset, place: int) -> Any:
        try:
            return dataset.get_numpy_image(place)
        except (AssertionError, OSError) as error:
            return f"{type(error).__name__}: {error}"

    for scale in (1.0, 0.5):
        for place, name in enumerate(files):
            ours, theirs = (read(kind(outputs, scale), place) for kind in (FileDataset, InputDataset))
            assert type(ours) is type(theirs) and np.array_equal(ours, theirs), name
            assert isinstance(theirs, str) == (name in ("half.jpg", "empty.jpg", "folder.jpg", "missing.jpg"))
    monkeypatch.setattr(Image, "open", None)
    assert FileDataset(outputs).get_numpy_image(list(files).index("L.jpg")).flags.writeable, "decoded without PIL"
    kind = manager(write_capture(tmp_path / "capture"), World.single()).train_dataset
    assert isinstance(kind, FileDataset) and reads_files(kind)


def _jpeg(photo: Image.Image, **options: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    file = io.BytesIO()
    photo.save(file, "jpeg", **options)
    return np.frombuffer(file.getvalue(), np.uint8).copy()


def test_bytes_that_no_encoder_writes_are_damage() -> None:
    noise, plain = Image.effect_noise((256, 256), 90).convert("RGB"), Image.new("RGB", (512, 512), "white")
    kinds: list[dict[str, Any]] = [{}, {"progressive": True}, {"restart_marker_blocks": 3}, {"optimize": True}]
    for photo in (noise, plain, noise.convert("L")):
        for options in kinds:
            assert not is_damaged_jpeg(_jpeg(photo, **options)), options
    assert not is_damaged_jpeg(np.append(_jpeg(noise), np.zeros(99, np.uint8))), (
        "bytes behind the picture are none of it"
    )
    for mark in (b"\xff\xdb", b"\xff\xda"):
        filled = _jpeg(noise).tobytes().replace(mark, b"\xff\xff\xff" + mark[1:], 1)
        assert not is_damaged_jpeg(np.frombuffer(filled, np.uint8)), "filling may precede a marker (T.81, B.1.1.2)"
    scans = _jpeg(noise, progressive=True).tobytes()
    noted = scans.replace(b"\xff\xda", b"\xff\xfe\x00\x04ok\xff\xda")
    assert not is_damaged_jpeg(np.frombuffer(noted, np.uint8)), "comments may lie between scans"
    middle, random = len(_jpeg(noise)) // 2, np.random.default_rng(0)
    for options in kinds:
        if "progressive" in options:
            continue
        data = _jpeg(noise, **options)
        some = random.integers(0, 256, 4096, dtype=np.uint8)
        data[middle : middle + 4096] = np.where(some == 0xDA, 0xDB, some)  # otherwise it may look like another scan
        assert is_damaged_jpeg(data), options
    data = _jpeg(noise)
    data[middle : middle + 64] = 0
    assert is_damaged_jpeg(data)


def test_a_photograph_damaged_in_its_middle_is_named(tmp_path: Path) -> None:
    folder = write_capture(tmp_path / "capture")
    data = _jpeg(Image.effect_noise((WIDTH, HEIGHT), 90).convert("RGB"), quality=100)
    data[-200:-100] = 0
    data.tofile(folder / "images" / "photo_03.png")
    with pytest.raises(InputError, match=r"1 image.*cannot be used:\n.*photo_03.png: its pixels are damaged; copy it"):
        _ = manager(folder, World.single()).train_share


def test_a_fisheye_without_parameters_is_undistorted(tmp_path: Path) -> None:
    """nerfstudio would take its image as a pinhole camera's."""
    folder = write_capture(tmp_path / "capture", camera_model="OPENCV_FISHEYE")
    bent = manager(write_capture(tmp_path / "bent", camera_model="OPENCV_FISHEYE", k1=1e-9), World.single())
    data = manager(folder, World.single())
    one, other = (part.train_share.image(0, torch.device("cpu"))["image"] for part in (data, bent))
    assert torch.equal(one, other) and torch.equal(data.train_dataset.cameras.fx, bent.train_dataset.cameras.fx)
    assert float(data.train_dataset.cameras.fx[0]) != 20.0


def test_undistorted_images_can_be_read_before_the_capture_is_checked(tmp_path: Path) -> None:
    """As ns-eval reads them: the files have the sizes of their own cameras, not of the undistorted ones."""
    data = manager(write_capture(tmp_path / "capture", k1=0.3), World.single())
    image = data.eval_share.image(0, torch.device("cpu"))["image"]
    camera = data.eval_dataset.cameras[0]
    assert image.shape[:2] == (int(camera.height), int(camera.width)) != (HEIGHT, WIDTH)


def test_a_render_on_demand_capture_is_never_rendered_as_a_whole() -> None:
    parser = CityDataParserConfig(blocks=1, views=4000, width=16, height=8, samples=1, points=50, cache_mb=0)
    config = DistributedDataManagerConfig(dataparser=parser, image_memory_gb=2e-5)  # type: ignore[arg-type]
    data = DistributedDataManager(config, device="cpu")
    data.check_capture()
    seen = _images(data, steps=20, size=4)
    assert len(seen) == 80 and all(image["image"].shape == (8, 16, 3) for _, image in seen)
    assert data.train_share.store.decoded <= 80 + data.train_share.lookahead
    index, image = seen[-1]
    direct = torch.from_numpy(data.train_dataset.get_numpy_image(index))  # type: ignore[attr-defined]
    assert torch.equal(image["image"], direct)


def test_the_views_after_an_epoch_drawn_by_distance_can_be_seen_ahead(tmp_path: Path) -> None:
    folder = write_capture(tmp_path / "capture", views=16)
    options: dict[str, Any] = {"train_cameras_sampling_strategy": "fps", "fps_reset_every": 6}
    little = 8 * (WIDTH * HEIGHT * 3 + 128) / 1e9
    kept, streamed = (manager(folder, World.single(), image_memory_gb=gb, **options) for gb in (None, little))
    assert streamed.train_share.lookahead and not kept.train_share.lookahead
    orders = [[index for index, _ in _images(data, steps=12, size=2)] for data in (kept, streamed)]
    assert orders[0] == orders[1]


def test_the_memory_for_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_capture(tmp_path / "capture")
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(InputError, match=r"--pipeline.datamanager.image-memory-gb"):
            manager(folder, World.single(), image_memory_gb=wrong)
    with pytest.raises(InputError, match=r"training images do not fit. Raise .*image-memory-gb.\n.*too small for two"):
        _ = manager(folder, World.single(), image_memory_gb=3e-6).train_share
    # Two held-out images take all of it and more: none is left for the others, not less than none.
    with pytest.raises(InputError, match=r"their share of the memory, 0 GB, is too small for two images of \d"):
        _ = manager(folder, World.single(), image_memory_gb=1e-6).train_share
    monkeypatch.setattr("ns_multigpu.plugin.capture.image_share.available_memory", lambda: 2_000)
    with pytest.raises(InputError, match=r"(?s)training images do not fit.*image-memory-gb less.*and 2e-06 GB free"):
        _ = manager(folder, World.single(), image_memory_gb=1.0).train_share
    assert manager(folder, World.single(), image_memory_gb=1.0).eval_share.own, "held-out ones are not compared"
    monkeypatch.setattr("ns_multigpu.plugin.capture.image_share.available_memory", lambda: 1_000_000)
    assert manager(folder, World.single(), image_memory_gb=1.0).train_share.store.complete, "they need less than that"
    monkeypatch.setattr("ns_multigpu.plugin.capture.datamanager.available_memory", lambda: 20_000)
    data = manager(folder, World.single())
    assert data.image_memory == 10_000 and not data.train_share.store.complete
    sharing = manager(folder, replace(World.single(), local_size=2))
    assert sharing.image_memory == 5_000, "workers of one machine share its memory"
    monkeypatch.setattr("ns_multigpu.plugin.capture.datamanager.available_memory", lambda: None)
    assert manager(folder, World.single()).image_memory is None


def test_available_memory(tmp_path: Path) -> None:
    assert (available_memory() or 0) > 1 << 20
    proc, group = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    group.mkdir()
    assert available_memory(proc, group) is None
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert available_memory(proc, group) == 4000 << 10
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1000000\n")
    assert available_memory(proc, group) == 4000 << 10
    (group / "memory.max").write_text("1500000\n")
    (group / "memory.stat").write_text("anon 5\ninactive_file 200000\n")
    assert available_memory(proc, group) == 700_000


def _held(world: World, folder: Path) -> None:
    data = manager(folder, world)
    data.hold_by([2, 1, 0, 0, 0, 0, 0, 0, 1])
    own = [[2, 3, 4, 5, 6, 7], [1, 8], [0]][world.rank]
    assert data.train_share.own == own and data.train_share.store.decoded == len(own)
    assert data.train_share.holder(0) == 2
    assert data.eval_share.own == [world.rank], "held-out views are distributed round-robin"
    with pytest.raises(RuntimeError, match="hold_by: the training images are held already"):
        data.hold_by([0] * 9)
    assert manager(folder, world).train_share.own == [world.rank, world.rank + 3, world.rank + 6]
    data = manager(folder, world)
    data.hold_by([0] * 8)
    with pytest.raises(ValueError, match="one rank for each of 9 views, not 8"):
        _ = data.train_share


def test_images_are_held_by_the_given_owners(tmp_path: Path) -> None:
    run_ranks(_held, 3, write_capture(tmp_path / "capture"))


@pytest.mark.parametrize("lens", [{"k1": 0.05, "p1": 0.01}, {"camera_model": "OPENCV_FISHEYE"}], ids=str)
def test_photographs_that_are_not_undistorted_are_as_they_are(tmp_path: Path, lens: dict[str, Any]) -> None:
    folder = write_capture(tmp_path / "capture", masks=True, **lens)
    data, plain = manager(folder, World.single(), undistort=False), write_capture(tmp_path / "plain", masks=True)
    image, wanted = (of.train_share.image(1, torch.device("cpu")) for of in (data, manager(plain, World.single())))
    assert torch.equal(image["image"], wanted["image"]) and torch.equal(image["mask"], wanted["mask"])
    cameras = data.train_dataset.cameras
    assert float(cameras.fx[0]) == 20.0 and bool(cameras.distortion_params[:, 0].all())
