"""Compare gsplat 1.4.0's operators with ours on one trained model: densification's counts, and 2,000 more images.

    python -m benchmarks.captures.against_gsplat --images 6050 --more 2000 -- colmap --data fox --downscale-factor 1

`splatfacto-batch` trains the model, with refinements up to its last fifty images. Then both count the views that see
each Gaussian, and the sums of its gradients. Training resumes from this model and Adam's moments without refinement,
with the same views and backgrounds: in a plain torch loop with gsplat's rasterization, pytorch_msssim and torch's Adam;
in the same loop with our operators and loss; in fused and in autograd steps of the trainer. Complete runs diverge at
the first split that rounding decides. These runs do not, so differences of 0.01 dB are visible.

With --images 6052 --more 148 the model's opacities have just been reset, at image 6,000, and runs end before the next
refinement: `to_prune` is the number of points that it would prune. (With 6050 refining stops at 6,000, and nothing is
reset.)
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import tyro
from gsplat import rasterization
from nerfstudio.configs.method_configs import AnnotatedBaseConfigUnion
from pytorch_msssim import SSIM
from rich.console import Console
from torch import Tensor

from benchmarks.lib.environment import describe
from ns_multigpu.core.random import keyed_generator
from ns_multigpu.core.step.loss import photometric_loss
from ns_multigpu.core.types import Patch, Points, View, stack_intrinsics, stack_viewmats
from ns_multigpu.plugin.model.cameras import view_from_camera
from ns_multigpu.primitives.gaussians.densifier import densification_info
from ns_multigpu.primitives.gaussians.functions import Gaussians

# A way draws a view over a background: (parameters, view, background) -> the image [H, W, 3], and a function that says
# after the backward pass what densification counts: of each Gaussian, the gradient's length and whether it was seen.
Count = Callable[[], tuple[Tensor, Tensor]]
Way = Callable[[dict[str, Tensor], View, Tensor], tuple[Tensor, Count]]


def by_gsplat(params: dict[str, Tensor], view: View, background: Tensor) -> tuple[Tensor, Count]:
    out, alpha, info = rasterization(
        params["means"], params["quats"], params["scales"].exp(), params["opacities"].sigmoid().reshape(-1),
        torch.cat([params["features_dc"][:, None], params["features_rest"]], dim=1),
        stack_viewmats([view]), stack_intrinsics([view]), view.width, view.height,
        packed=False, near_plane=0.01, far_plane=1e10, sh_degree=3, absgrad=True,
    )  # fmt: skip
    info["means2d"].retain_grad()

    def count() -> tuple[Tensor, Tensor]:
        half = torch.tensor([view.width / 2, view.height / 2], device=out.device)
        return (info["means2d"].absgrad[0] * half).norm(dim=-1), (info["radii"][0] > 0).float()

    return (out[0] + (1 - alpha[0]) * background).clamp(0, 1), count


def by_ours(params: dict[str, Tensor], view: View, background: Tensor) -> tuple[Tensor, Count]:
    kind, points = Gaussians(sh_degree=3, absgrad=True), Points(params)
    splats = kind.splat(points, kind.cull(points, [view], [0]), [view])
    pixels = kind.render(splats, [Patch.whole(0, view)], [view])[0]

    def count() -> tuple[Tensor, Tensor]:
        info = densification_info(splats, [view])
        empty = torch.zeros(len(params["means"]), device=pixels.color.device)
        return empty.index_add(0, info["ids"], info["gradients"]), empty.index_add(0, info["ids"], info["visible"])

    return (pixels.color + (1 - pixels.alpha) * background).clamp(0, 1), count


class Bench:
    """A trained model, and what is done with it.

    Args:
        options: the command line. folder: for runs.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self.trainer = self._train(options.images, "from-the-start")
        self.model, self.data = self.trainer.pipeline.model, self.trainer.pipeline.datamanager
        self.device = self.model.means.device
        config, ready = self.model.config, options.images
        if ready < max(3 * config.sh_degree_interval, config.num_downscales * config.resolution_schedule):
            raise SystemExit(
                f"--images {ready}: too few for all harmonics and the full resolution, which the ways draw."
            )
        self.start = {name: p.detach().clone() for name, p in self.model.gauss_params.items()}
        optimizers = self.trainer.optimizers.optimizers
        self.states = {name: next(iter(optimizers[name].state.values())) for name in self.start}
        self.rates = {name: float(optimizers[name].param_groups[0]["lr"]) for name in self.start}
        self._ssim = SSIM(data_range=1.0, size_average=True, channel=3)

    def _train(self, images: int, name: str, *more: str) -> Any:
        words = ["splatfacto-batch", "--machine.device-type", self._options.device, "--output-dir", str(self._folder)]
        words += ["--experiment-name", "beside", "--timestamp", name, "--vis", "tensorboard"]
        words += ["--max-num-images", str(images), "--steps-per-eval-image", "0", "--steps-per-eval-all-images", "0"]
        words += ["--recipe", "splatfacto", "--pipeline.model.stop-split-at", str(self._options.images - 50)]
        words += [*more, *self._options.dataparser]
        config: Any = tyro.cli(AnnotatedBaseConfigUnion, args=words)
        torch.manual_seed(42)
        trainer = config.setup(local_rank=0, world_size=1)
        trainer.setup()
        trainer.train()
        return trainer

    def go_on(self, wish: str) -> dict[str, float]:
        """From the checkpoint, in the trainer's own steps."""
        saved = next(self._folder.rglob("from-the-start")) / "nerfstudio_models"
        more = ("--load-dir", str(saved), "--fused-steps", wish)
        return self._scores(self._train(self._options.images + self._options.more, wish, *more))

    def _view(self, index: int) -> tuple[View, Tensor]:
        pose = self.data.train_camera_on_device(index).camera_to_worlds.reshape(-1, 3, 4)[0]
        view = view_from_camera(self.data.train_camera(index), pose, 0)
        return view, self.data.train_share.fetch(index, self.device)["image"]

    def count(self, way: Way, loss: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Sums over the training views: [N] of gradients, [N] of views that see a Gaussian."""
        sums = torch.zeros(2, len(self.start["means"]), device=self.device)
        for index in range(len(self.data.train_dataset)):
            params = {name: value.clone().requires_grad_() for name, value in self.start.items()}
            view, image = self._view(index)
            rgb, count = way(params, view, torch.full((3,), 0.5, device=self.device))
            loss(rgb, image).backward()
            sums += torch.stack(count())
        return sums[0], sums[1]

    def loop(self, way: Way) -> dict[str, float]:
        """From the model, in a plain loop; for gsplat's way with nerfstudio's loss."""
        params = {name: torch.nn.Parameter(value.clone()) for name, value in self.start.items()}
        optimizers = {name: torch.optim.Adam([p], lr=self.rates[name], eps=1e-15) for name, p in params.items()}
        for name, param in params.items():
            moments = {key: self.states[name][key].clone() for key in ("exp_avg", "exp_avg_sq")}
            optimizers[name].state[param] = {**moments, "step": torch.tensor(float(self.states[name]["step"]))}
        for step in range(self._options.images, self._options.images + self._options.more):
            optimizers["means"].param_groups[0]["lr"] = 1.6e-4 * 0.01 ** (step / 30000)
            view, image = self._view(self.data.sequence.at(step))
            background = torch.rand(3, generator=keyed_generator(self.model.seed, "background", step)).to(self.device)
            rgb, _ = way(params, view, background)  # pyright: ignore[reportArgumentType]
            loss = (self.nerfstudios if way is by_gsplat else self.our_loss)(rgb, image)
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers.values():
                optimizer.step()
        for name, param in self.model.gauss_params.items():
            param.data.copy_(params[name])
        return self._scores(self.trainer)

    @staticmethod
    def our_loss(rgb: Tensor, image: Tensor) -> Tensor:
        view = View(torch.eye(4), torch.eye(3), rgb.shape[1], rgb.shape[0])
        return photometric_loss(rgb, image, Patch.whole(0, view), view, 0.2)

    def nerfstudios(self, rgb: Tensor, image: Tensor) -> Tensor:
        """L1 and pytorch_msssim's SSIM, whose convolutions may be cuDNN's on a GPU, and may round to TF32 there."""
        target = image.float() / 255
        similar = self._ssim(target.permute(2, 0, 1)[None], rgb.permute(2, 0, 1)[None])
        return 0.8 * (target - rgb).abs().mean() + 0.2 * (1 - similar)

    @torch.no_grad()
    def _scores(self, trainer: Any) -> dict[str, float]:
        held_out = trainer.pipeline.get_average_eval_image_metrics()["psnr"]
        trainer.pipeline.eval()
        total = 0.0
        for index in range(len(self.data.train_dataset)):
            rgb = trainer.pipeline.model.get_outputs_for_camera(self.data.train_camera_on_device(index))["rgb"]
            error = rgb - self._view(index)[1].float() / 255
            total -= 10 * float(error.square().mean().log10())
        model = trainer.pipeline.model
        # Refining is off, but opacities recover from a reset, or do not: these a refinement would take away.
        faint = int((model.opacities.sigmoid() < model.config.cull_alpha_thresh).sum())
        return {"held_out": held_out, "training_views": total / len(self.data.train_dataset), "to_prune": faint}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=6050, help="images that the model is trained on first")
    parser.add_argument(
        "--more", type=int, default=2000, help="images that training goes on with, in each way; 0: count only"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="on a CPU without gsplat's ways")
    parser.add_argument("--threshold", type=float, default=0.0008, help="of densification")
    parser.add_argument("--json", type=Path)
    parser.add_argument("dataparser", nargs="+", help="after --: options of the model, the dataparser and its own")
    options = parser.parse_args()
    if options.more < 0:
        parser.error(f"--more {options.more}: 0, to count only, or a number of images")
    bench = Bench(options, Path(mkdtemp(prefix="beside-")))
    variants: dict[str, Way] = {"gsplat": by_gsplat, "ours": by_ours}
    if options.device == "cpu":
        del variants["gsplat"]
    counted: dict[str, Any] = {}
    for name, way in variants.items():
        for said, loss, tf32 in (
            ("our loss", bench.our_loss, True),
            ("nerfstudio's loss", bench.nerfstudios, True),
            ("nerfstudio's loss without TF32", bench.nerfstudios, False),
        ):
            torch.backends.cudnn.allow_tf32 = tf32
            sums, seen = bench.count(way, loss)
            above = int((sums / seen.clamp_min(1) > options.threshold).sum())
            counted[f"{name}, {said}"] = {"gradients": float(sums.sum()), "seen": float(seen.sum()), "above": above}
    torch.backends.cudnn.allow_tf32 = True
    runs: dict[str, Any] = {}
    if options.more:
        runs = {f"loop, {name}": bench.loop(way) for name, way in variants.items()}
        runs |= {f"{wish} fused": bench.go_on(wish) for wish in ("always", "never")}
    result = {"gaussians": len(bench.start["means"]), "counted": counted, "courses": runs}
    Console(soft_wrap=True).print(result)
    if options.json:
        options.json.write_text(json.dumps({**describe(), **result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
