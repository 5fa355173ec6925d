"""Nerfstudio's own splatfacto on one device, trained and evaluated in one process: the peer in `benchmarks.capture`.

The only change to it: where the weights of LPIPS cannot be had, LPIPS is left out instead of ending the run. With
`--operators ours` our operators draw in the place of gsplat's kernels: what then differs from splatfacto is their
doing, and what differs from our method is not. With `gsplat-2dgs` it trains gsplat's 2D Gaussians (`gsplat_surfels`).
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchmetrics.image.lpip as lpip
import tyro
from PIL import Image

from benchmarks.captures.gsplat_surfels import Peer
from benchmarks.captures.our_rasterization import rasterization


class NoLpips(torch.nn.Module):
    """In the place of LPIPS, whose weights would be downloaded."""

    def __init__(self, **_: object) -> None:
        super().__init__()

    def forward(self, *_: torch.Tensor) -> torch.Tensor:
        return torch.zeros(())


class _Earlier:
    """Takes the scores in the middle of a run, in the place of nerfstudio's evaluation, which is switched off."""

    def __init__(self, trainer: Any, images: Sequence[int], output: Path) -> None:
        self._trainer, self._images, self._began = trainer, set(images), time.perf_counter()
        self._output = output
        self.seconds, self.results = 0.0, list[dict[str, float]]()

    def begin(self) -> None:
        self._began = time.perf_counter()

    def look(self, step: int) -> None:
        if step + 1 not in self._images:
            return
        torch.cuda.synchronize()
        start = time.perf_counter()
        pipeline = self._trainer.pipeline
        scores = pipeline.get_average_eval_image_metrics()
        self.results.append(
            {
                "images": step + 1,
                "psnr": scores["psnr"],
                "ssim": scores["ssim"],
                "gaussians": pipeline.model.num_points,
                "train_seconds": start - self._began - self.seconds,
                "peak_mib": peak_mib(),
            }
        )
        # A run that is cut off later leaves these behind.
        self._output.write_text(json.dumps(self.results))
        pipeline.train()
        torch.cuda.synchronize()
        self.seconds += time.perf_counter() - start


def peak_mib() -> float:
    """Return the peak GPU memory of tensors so far, MiB."""
    return torch.cuda.max_memory_allocated() / 2**20


def correct_few(pipeline: Any) -> None:
    """Enable colour correction if at most 100 views are held out: it takes 15 least-squares fits for each."""
    pipeline.model.config.color_corrected_metrics = len(pipeline.datamanager.eval_dataset) <= 100


@torch.no_grad()
def draw_view(pipeline: Any, file: Path) -> None:
    """Write the middle held-out view as a PNG: the photograph, the rendering, and normals of points that have some."""
    pipeline.eval()
    dataset = pipeline.datamanager.eval_dataset
    index = len(dataset) // 2
    outputs = pipeline.model.get_outputs_for_camera(dataset.cameras[index : index + 1].to(pipeline.device))
    images = [dataset[index]["image"][..., :3], *(outputs[name] for name in ("rgb", "normals") if name in outputs)]
    picture = torch.cat([image.to(outputs["rgb"]).clamp(0, 1) for image in images], 1)
    Image.fromarray((picture * 255 + 0.5).to(torch.uint8).cpu().numpy()).save(file)


def recorded(strategy: Any) -> list[dict[str, int]]:
    """Record each later refinement of gsplat's `strategy`: image, numbers of duplicated, split and pruned Gaussians,
    and the resulting total."""
    done: list[dict[str, int]] = []
    grow, prune = strategy._grow_gs, strategy._prune_gs

    def grow_gs(params: Any, optimizers: Any, state: Any, step: int) -> tuple[int, int]:
        duplicated, split = grow(params, optimizers, state, step)
        done.append({"image": step, "duplicated": duplicated, "split": split})
        return duplicated, split

    def prune_gs(params: Any, optimizers: Any, state: Any, step: int) -> int:
        pruned = prune(params, optimizers, state, step)
        done[-1] |= {"pruned": pruned, "gaussians": len(params["means"])}
        return pruned

    strategy._grow_gs, strategy._prune_gs = grow_gs, prune_gs
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=15000)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--also-at", type=int, nargs="*", default=[], help="evaluate after so many images too, off the clock"
    )
    whose = ("gsplat", "ours", "gsplat-2dgs")
    parser.add_argument("--operators", choices=whose, default="gsplat", help="whose draw; gsplat-2dgs: 2D Gaussians")
    parser.add_argument("--normal-loss", type=float, default=0.0, help="of 2D Gaussians, its weight")
    parser.add_argument("--normal-loss-start", type=int, default=0, help="images before it counts")
    parser.add_argument("--options", default="", help="further options of ns-train, as one string")
    parser.add_argument("--picture", type=Path, help="PNG of the middle held-out view, photograph and rendering")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("dataparser", nargs="+")
    options = parser.parse_args()
    lpip.LearnedPerceptualImagePatchSimilarity = NoLpips  # pyright: ignore
    from nerfstudio.configs.method_configs import AnnotatedBaseConfigUnion
    from nerfstudio.models import splatfacto

    if options.operators == "ours":
        splatfacto.rasterization = rasterization
    peer = Peer(options.normal_loss, options.normal_loss_start) if options.operators == "gsplat-2dgs" else None
    if peer is not None:
        splatfacto.rasterization = peer.rasterization

    words = ["splatfacto", "--output-dir", str(options.output), "--vis", "tensorboard"]
    words += ["--max-num-iterations", str(options.images), "--steps-per-eval-image", "0"]
    words += ["--steps-per-eval-all-images", "0", "--steps-per-save", "1000000"]
    words += ["--pipeline.datamanager.train-cameras-sampling-seed", str(options.seed)]
    config = tyro.cli(AnnotatedBaseConfigUnion, args=[*words, *options.options.split(), *options.dataparser])
    config.set_timestamp()
    random.seed(options.seed)
    np.random.seed(options.seed)  # noqa: NPY002 - nerfstudio draws from it
    torch.manual_seed(options.seed)
    trainer = config.setup(local_rank=0, world_size=1)
    trainer.setup()
    config.viewer.quit_on_train_completion = True
    _ = trainer.pipeline.datamanager.cached_train  # loading is not training, as in our own summaries
    if peer is not None:
        peer.join(trainer)
    earlier = _Earlier(trainer, options.also_at, options.output / "looks.json")
    trainer.eval_iteration = earlier.look
    refinements = recorded(trainer.pipeline.model.strategy)
    torch.cuda.synchronize()
    start = time.perf_counter()
    earlier.begin()
    trainer.train()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start - earlier.seconds
    peak = peak_mib()
    correct_few(trainer.pipeline)
    scores = trainer.pipeline.get_average_eval_image_metrics()
    if options.picture is not None:
        draw_view(trainer.pipeline, options.picture)
    result = {
        "psnr": scores["psnr"],
        "cc_psnr": scores.get("cc_psnr"),
        "ssim": scores["ssim"],
        "train_seconds": seconds,
        "images_per_s": options.images / seconds,
        "gaussians": trainer.pipeline.model.num_points,
        "bytes_per_step": 0.0,
        "peak_mib": peak,
        "earlier": earlier.results[0] if earlier.results else {},
        "looks": earlier.results,
        "refinements": refinements,
    }
    (options.output / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
