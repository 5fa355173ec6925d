"""Cost of an open viewer page: training speed and frame latency on one GPU while the page's camera moves all the time.

    python -m benchmarks.looking.latency --points 8000000 --max-res 1080 --seconds 20 --json out.json
    python -m benchmarks.looking.latency --points 2000 --max-res 90 --seconds 6 --device cpu --width 96 --height 64

The page is a client of the viewer's own protocol in this machine: it moves the camera, waits for the picture, and moves
it again. Its latency excludes only the browser's own drawing. Training runs at the same time, and is measured without
a page, with one that moves, and without one again. For several GPUs start it under torchrun; the page is rank 0's.
"""

import argparse
import os
import statistics
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from nerfstudio.configs.method_configs import all_methods
from rich.console import Console
from websockets.sync.client import connect

from benchmarks.lib.report import write_report
from ns_multigpu.plugin.capture.city_dataparser import CityDataParserConfig

CAMERA = {
    "type": "ViewerCameraMessage", "wxyz": (0.0, 1.0, 0.0, 0.0), "fov": 1.0, "aspect": 16 / 9,
    "look_at": (0.0, 0.0, 0.0), "up_direction": (0.0, 1.0, 0.0),
}  # fmt: skip


class Page:
    """A page whose camera moves as soon as it has seen a picture.

    Args:
        port: the viewer's.

    Attributes:
        waits: seconds from a move to its picture. sizes: bytes of the messages with pictures.
    """

    def __init__(self, port: int) -> None:
        self.waits: list[float] = []
        self.sizes: list[int] = []
        self._over = threading.Event()
        self._port = port
        self._thread = threading.Thread(target=self._move, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the page."""
        self._over.set()
        self._thread.join(30)

    def _move(self) -> None:
        with connect(f"ws://127.0.0.1:{self._port}", max_size=None, compression=None) as connection:
            number = 0
            while not self._over.is_set():
                number += 1
                position = (0.3 * (number % 20 - 10) / 10, 0.0, 4.0)
                began = time.perf_counter()
                connection.send(msgspec.msgpack.encode({**CAMERA, "position": position}))
                while not self._over.is_set():
                    try:
                        data = bytes(connection.recv(timeout=1.0, decode=False))
                    except TimeoutError:
                        continue
                    if any(m["type"] == "BackgroundImageMessage" for m in msgspec.msgpack.decode(data)):
                        self.waits.append(time.perf_counter() - began)
                        self.sizes.append(len(data))
                        break


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=8_000_000)
    parser.add_argument("--strategy", default="batch")
    parser.add_argument("--max-res", type=int, default=1080, help="the page's resolution, lines")
    parser.add_argument("--width", type=int, default=1920, help="of the training views")
    parser.add_argument("--height", type=int, default=1080)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of the three parts")
    parser.add_argument("--port", type=int, default=7107)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    with TemporaryDirectory(prefix="latency-") as folder:
        config: Any = all_methods["splatfacto-batch"]
        config.pipeline.strategy, config.machine.device_type = options.strategy, options.device
        config.pipeline.datamanager.dataparser = CityDataParserConfig(
            blocks=2, views=6, width=options.width, height=options.height, points=1000
        )
        model = config.pipeline.model
        model.random_init, model.num_random, model.num_downscales = True, options.points, 0
        model.warmup_length = model.refine_every = 10**8
        config.vis, config.viewer.websocket_port, config.viewer.quit_on_train_completion = "viewer", options.port, True
        config.viewer.max_num_display_images = 1
        config.output_dir, config.timestamp, config.experiment_name = Path(folder), "run", "latency"
        config.max_num_images, config.max_num_iterations, config.fused_steps = None, 10**7, "auto"
        config.steps_per_eval_image = config.steps_per_eval_all_images = config.steps_per_save = 10**8
        config.get_base_dir().mkdir(parents=True, exist_ok=True)
        trainer = config.setup()
        trainer.setup()
        trainer.save_last = lambda _, look: look() or trainer.base_dir
        found: dict[str, Any] = {}
        if int(os.environ.get("RANK", "0")) == 0:
            trainer.viewer_state.control_panel._max_res.value = options.max_res
            threading.Thread(target=_watch, args=(trainer, options, found), daemon=True).start()
        trainer.train()
    if found:
        Console().print(found)
        write_report(options.json, **{k: v for k, v in vars(options).items() if k != "json"}, **found)


def _watch(trainer: Any, options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Measure training without a page, with one and without one again; then end it."""
    while getattr(trainer, "steps_taken", 0) < 10:
        time.sleep(0.1)
    before = _pace(trainer, options.seconds)
    page = Page(trainer.viewer_state.viser_server.get_port())
    while len(page.waits) < 3:
        time.sleep(0.1)
    page.waits.clear()
    page.sizes.clear()
    during = _pace(trainer, options.seconds)
    waits, sizes = sorted(page.waits), list(page.sizes)
    page.close()
    time.sleep(0.5)
    after = _pace(trainer, options.seconds)
    alone = (before + after) / 2
    found.update(
        ms_a_step_alone=1e3 * alone, ms_a_step_watched=1e3 * during, slower_by=during / alone - 1,
        pictures_a_second=len(waits) / options.seconds, latency_ms_median=1e3 * statistics.median(waits),
        latency_ms_worst=1e3 * waits[-1], kb_a_picture=statistics.mean(sizes) / 1e3,
    )  # fmt: skip
    trainer.stop_training = True


def _pace(trainer: Any, seconds: float) -> float:
    """Return the seconds per step."""
    steps, began = trainer.steps_taken, time.perf_counter()
    time.sleep(seconds)
    return (time.perf_counter() - began) / max(1, trainer.steps_taken - steps)


if __name__ == "__main__":
    main()
