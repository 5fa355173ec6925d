"""One way of training a radiance field, in one process or one of several: what `benchmarks.captures.radiance` starts.

The steps of all ways are taken by the same loop here, without a viewer, logs or checkpoints. Evaluations are off the
clock. Nerfstudio's own `nerfacto` is as it comes, but for LPIPS, whose weights would be downloaded; on several GPUs it
is wrapped in DDP, as its own launcher does it.
"""

import argparse
import json
import os
import random
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torchmetrics.image.lpip as lpip
import tyro
from nerfstudio.configs.method_configs import AnnotatedBaseConfigUnion
from nerfstudio.engine.callbacks import TrainingCallbackLocation
from nerfstudio.utils import comms
from torch import Tensor
from torchmetrics.functional import structural_similarity_index_measure

from benchmarks.baselines.separate_fields import BASELINES
from benchmarks.captures.perturbed_poses import pose_errors
from benchmarks.captures.radiance import EVALUATIONS
from benchmarks.captures.splatfacto_baseline import NoLpips
from ns_multigpu.radiance.exchange import bytes_a_ray

_AVERAGED = 50
"""Steps whose training PSNR is averaged."""
_LOOKED = 10
"""Steps after which the clock is looked at."""
_EVALUATED = 1 << 15
"""Rays of a picture at once."""


_METHODS = ("nerfacto", "nerfacto-xl", *(config.method_name for config in BASELINES.values()))


def _config(words: list[str]) -> Any:
    """Return the configuration that a command line of ns-train describes, also of a baseline."""
    for config in BASELINES.values():
        if words[0] == config.method_name:
            kind: Any = tyro.conf.SuppressFixed[tyro.conf.FlagConversionOff[type(config)]]
            return tyro.cli(kind, default=config, args=words[1:])
    return tyro.cli(AnnotatedBaseConfigUnion, args=words)


class Run:
    """A trainer, its clock and what was measured.

    Args:
        options: see `main`.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.rank, self.ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._theirs = options.method == "nerfacto"
        self._device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if options.device == "cuda" else "cpu")
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        words = [options.method, "--machine.device-type", options.device, "--output-dir", str(options.output)]
        words += ["--experiment-name", "run", "--timestamp", "now", "--vis", "tensorboard", "--steps-per-save"]
        words += ["1000000", "--steps-per-eval-image", "0", "--steps-per-eval-batch", "0"]
        words += ["--steps-per-eval-all-images", "0", "--max-num-iterations", str(options.steps)]
        words += ["--pipeline.model.eval-num-rays-per-chunk", str(_EVALUATED)]
        words += [*options.options.split(), *options.dataparser]
        config: Any = _config(words)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(options.seed + (self.rank if self._theirs else 0))
        if self._theirs and self.ranks > 1:
            dist.init_process_group("nccl" if self._device.type == "cuda" else "gloo")
            comms.LOCAL_PROCESS_GROUP = dist.group.WORLD  # pyright: ignore[reportAttributeAccessIssue]
        self.rays = config.pipeline.datamanager.train_num_rays_per_batch
        config.get_base_dir().mkdir(parents=True, exist_ok=True)
        self.trainer = config.setup(local_rank=self.rank, world_size=self.ranks)
        self.trainer.setup()
        if not self._theirs:
            self.trainer.guards.numbers.prepare(self.trainer.optimizers.optimizers)
            self.trainer.objective.begin(0)

    def train(self) -> dict[str, Any]:
        """Train until the number of steps or seconds is complete."""
        options = self._options
        recent: deque[Tensor] = deque(maxlen=_AVERAGED)
        evaluations: list[dict[str, Any]] = []
        rates: list[tuple[int, float]] = []
        off, begun, step = 0.0, self._now(), 0
        while step < options.steps:
            recent.append(self._step(step)["psnr"].detach())
            step += 1
            if step % _LOOKED == 0 or step in (*options.at, options.steps):
                now = self._now()
                spent = now - begun - off
                rates.append((step, spent))
                over = self._any(spent > options.seconds)
                if step in options.at or over or step == options.steps:
                    training = float(torch.stack(list(recent)).mean())
                    row = {"steps": step, "rays": step * self._rays_a_step(), "seconds": spent, "training": training}
                    evaluations.append({**row, **self._evaluated()})
                    if self.rank == 0:  # for a way that is ended before it is done
                        (options.output / EVALUATIONS).write_text(json.dumps(evaluations))
                if over:
                    break
                off += self._now() - now
        return {"courses": evaluations, "steps": step, **self._speed(rates)}

    def profile(self, first: int, steps: int = 5) -> str:
        """Profile a few more steps: time by operator."""
        cuda = self._device.type == "cuda"
        activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
        with torch.profiler.profile(activities=activities) as seen:
            for step in range(first, first + steps):
                self._step(step)
            self._now()
        by = "self_device_time_total" if cuda else "self_cpu_time_total"
        return seen.key_averages().table(sort_by=by, row_limit=30, max_name_column_width=60)

    def figures(self) -> dict[str, Any]:
        """Return the parameters of all ranks together, and the peak memory of a rank."""
        model = self.trainer.pipeline.model
        own = sum(p.numel() for p in model.parameters())
        memory = torch.cuda.max_memory_allocated() / 2**20 if self._device.type == "cuda" else 0.0
        result: dict[str, Any] = {"parameters": own, "peak_mib": memory, "ranks": self.ranks, "rays_a_step": self.rays}
        if not self._theirs:
            shared = sum(p.numel() for p in model.shared_parameters().values())
            result["parameters"] = int(self._total(own - shared)) + shared
            if model.figures is not None:
                result["segments_a_ray"] = len(model.figures.segments) / model.figures.rays
                result["samples_a_ray"] = self._total(model.figures.samples) / model.figures.rays
                sent = bytes_a_ray(model.figures.rays, len(model.figures.segments), 0, model.family.width)[1]
                result["bytes_a_ray"] = sent
            if model.partition is not None:
                result["cells"] = model.partition.cells
        if self._options.truth is not None:
            result["pose_errors"] = self._pose_errors(self._options.truth)
        return result

    # ---- helpers ----

    def _step(self, step: int) -> dict[str, Tensor]:
        """Run a step and return its metrics."""
        trainer = self.trainer
        trainer.pipeline.train()
        self._call(step, TrainingCallbackLocation.BEFORE_TRAIN_ITERATION)
        trainer.step = step
        metrics = trainer.train_iteration(step)[2]
        self._call(step, TrainingCallbackLocation.AFTER_TRAIN_ITERATION)
        if not self._theirs:
            trainer._look_for_nan(now=False)
        return metrics

    def _rays_a_step(self) -> int:
        """Return the rays of all ranks: DDP gives each rank its own."""
        return self.rays * (self.ranks if self._theirs else 1)

    def _call(self, step: int, location: TrainingCallbackLocation) -> None:
        for callback in self.trainer.callbacks:
            callback.run_callback_at_location(step, location=location)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _speed(self, rates: list[tuple[int, float]]) -> dict[str, float]:
        """Return the speed of the second half: by then allocators are warm and proposal networks are rarely updated."""
        if len(rates) < 2:
            return {}
        (a, begin), (b, end) = rates[len(rates) // 2 - 1], rates[-1]
        return {
            "rays_per_s": (b - a) * self._rays_a_step() / (end - begin),
            "ms_per_step": 1e3 * (end - begin) / (b - a),
        }

    @torch.no_grad()
    def _evaluated(self) -> dict[str, Any]:
        """Return PSNR, SSIM and opacity of held-out views, and rays rendered per second. All methods are evaluated
        alike."""
        pipeline = self.trainer.pipeline
        data, model = pipeline.datamanager, pipeline.model
        pipeline.eval()
        dataset, found, seconds, rays = data.eval_dataset, list[tuple[float, float]](), 0.0, 0
        opacity = list[float]()
        count = min(self._options.views, len(dataset)) or len(dataset)
        if self._theirs and self.rank:
            count = 0  # every rank has all of the model
        for index in range(count):
            camera = dataset.cameras[index * len(dataset) // count].reshape((1,)).to(self._device)
            began = self._now()
            outputs = model.get_outputs_for_camera(camera)
            image = outputs["rgb"]
            if index > 0:  # the first loads kernels
                seconds, rays = seconds + self._now() - began, rays + image.shape[0] * image.shape[1]
            if self.rank == 0:
                opacity.append(float(outputs["accumulation"].mean()))
                truth = dataset.get_data(index * len(dataset) // count)["image"][..., :3].to(image)
                pair = [picture.moveaxis(-1, 0)[None] for picture in (image, truth)]
                ssim = float(structural_similarity_index_measure(*pair, data_range=1.0))  # pyright: ignore
                found.append((-10 * float((image - truth).square().mean().log10()), ssim))
        pipeline.train()
        if self.ranks > 1:
            dist.barrier()
        if not found:
            return {}
        psnr, ssim = np.mean(found, axis=0).tolist()
        by_view = [round(view, 3) for view, _ in found]
        speed = rays / seconds if rays else 0.0
        return {
            "psnr": psnr, "ssim": ssim, "views": count, "psnr_by_view": by_view, "opacity": float(np.mean(opacity)),
            "rays_per_s": speed,
        }  # fmt: skip

    @torch.no_grad()
    def _pose_errors(self, truth: Path) -> dict[str, float]:
        """Return the errors of the training views' poses as they are corrected, against a capture's."""
        pipeline = self.trainer.pipeline
        parsed, poses = pipeline.datamanager.train_dataparser_outputs, list[Tensor]()
        for index in range(len(parsed.cameras)):
            camera = parsed.cameras[index : index + 1]
            camera.metadata = {"cam_idx": index}
            poses.append(pipeline.model.camera_optimizer.apply_to_camera(camera).cpu())
        folder = pipeline.datamanager.config.dataparser.data
        names = ["/".join(file.relative_to(folder).parts[1:]) for file in parsed.image_filenames]
        return pose_errors(truth, names, parsed.transform_poses_to_original_space(torch.cat(poses)).double().numpy())

    def _any(self, here: bool) -> bool:
        return self._total(float(here)) > 0

    def _total(self, value: float) -> float:
        if self.ranks == 1:
            return value
        box = torch.tensor([value], dtype=torch.float64, device=self._device)
        dist.all_reduce(box)
        return float(box)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=_METHODS, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--at", type=int, nargs="*", default=[])
    parser.add_argument("--views", type=int, default=0)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--options", default="", help="further options of ns-train, as one string")
    parser.add_argument("--profile", action="store_true", help="see what the last steps take their time for")
    parser.add_argument("--truth", type=Path, help="a capture with the true poses")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("dataparser", nargs="+")
    options = parser.parse_args()
    lpip.LearnedPerceptualImagePatchSimilarity = NoLpips  # pyright: ignore
    started = time.perf_counter()
    run = Run(options)
    ready = time.perf_counter() - started
    result = {**run.train(), **run.figures(), "startup_s": ready}
    if options.profile:
        result["profile"] = run.profile(result["steps"])
    if run.rank == 0:
        (options.output / "result.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
