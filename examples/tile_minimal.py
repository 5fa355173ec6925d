"""Train a toy scene on several GPUs, or CPU workers, with the library alone: no nerfstudio.

    torchrun --nproc-per-node 4 examples/tile_minimal.py
    torchrun --nproc-per-node 2 examples/tile_minimal.py --device cpu --steps 30 --size 64

A random model of Gaussians is rendered from a ring of cameras; these pictures are the photographs. A second model
begins at the same places, grey, and learns them. `--strategy tile` gives each rank a part of the Gaussians and a band
of each picture; `batch` gives each rank all Gaussians and views of its own.
"""

import argparse
import math

import torch
from torch import Tensor

import ns_multigpu

SH_C0 = 0.28209479177387814
VIEWS = 8


def camera_ring(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return viewmats [V, 4, 4] and Ks [V, 3, 3] of cameras around the origin that look at it."""
    viewmats = torch.eye(4).repeat(VIEWS, 1, 1)
    for i in range(VIEWS):
        angle = 2 * math.pi * i / VIEWS
        position = torch.tensor([4 * math.cos(angle), 4 * math.sin(angle), 1.0])
        forward = -position / position.norm()
        right = torch.linalg.cross(forward, torch.tensor([0.0, 0.0, 1.0]))
        right /= right.norm()
        rotation = torch.stack([right, torch.linalg.cross(forward, right), forward])  # x right, y down, z forward
        viewmats[i, :3, :3], viewmats[i, :3, 3] = rotation, -rotation @ position
    focal = 1.2 * size
    K = torch.tensor([[focal, 0.0, size / 2], [0.0, focal, size / 2], [0.0, 0.0, 1.0]])
    return viewmats.to(device), K.repeat(VIEWS, 1, 1).to(device)


def toy_model(count: int, device: torch.device) -> dict[str, Tensor]:
    """Return random Gaussians in a ball, with gsplat's keys; the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    directions = torch.nn.functional.normalize(torch.randn(count, 3, generator=generator), dim=-1)
    colors = torch.rand(count, 3, generator=generator)
    model = {
        "means": directions * torch.rand(count, 1, generator=generator).pow(1 / 3),
        "quats": torch.nn.functional.normalize(torch.randn(count, 4, generator=generator), dim=-1),
        "scales": (0.02 + 0.06 * torch.rand(count, 3, generator=generator)).log(),
        "opacities": torch.full((count,), 0.7).logit(),
        "sh0": ((colors - 0.5) / SH_C0)[:, None],
        "shN": torch.zeros(count, 3, 3),
    }
    return {name: value.to(device) for name, value in model.items()}


def photographs(model: dict[str, Tensor], viewmats: Tensor, Ks: Tensor, size: int) -> Tensor:
    """Return pictures [V, size, size, 3] of a model."""
    with torch.no_grad():
        images, _, _ = ns_multigpu.render(
            model["means"], model["quats"], model["scales"].exp(), model["opacities"].sigmoid(), model["sh0"],
            viewmats, Ks, size, size, sh_degree=0,
        )  # fmt: skip
    return images.clamp(0, 1)


def train(options: argparse.Namespace, world: ns_multigpu.World) -> float:
    """Train on all ranks of `world`; print the loss and PSNR on the first, and return the last PSNR."""
    viewmats, Ks = camera_ring(options.size, world.device)
    truth = toy_model(options.points, world.device)
    images = photographs(truth, viewmats, Ks, options.size)
    grey = {**truth, "sh0": torch.zeros_like(truth["sh0"]), "opacities": torch.zeros_like(truth["opacities"])}
    step = ns_multigpu.Step(
        grey, options.size, options.size, options.batch_size,
        ns_multigpu.make_strategy(options.strategy, world), lr={"sh0": 0.05}, cameras=(viewmats, Ks),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    psnr = 0.0
    for number in range(1, options.steps + 1):
        batch = torch.randperm(VIEWS, generator=generator)[: options.batch_size]  # the same views on every rank
        loss = step(viewmats[batch], Ks[batch], images[batch])
        if number == 1 or number % options.print_every == 0 or number == options.steps:
            psnr = step.psnr()  # every rank takes part
            if world.is_main:
                print(f"step {number}: loss {loss:.4f}, PSNR {psnr:.2f} dB", flush=True)
    return psnr


def main() -> None:
    """Parse options, join the process group, train, and close the group."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--strategy", choices=["batch", "tile", "single"], default="tile")
    parser.add_argument("--points", type=int, default=2000)
    parser.add_argument("--size", type=int, default=256, help="side of the square images, pixels")
    parser.add_argument("--batch-size", type=int, default=4, help="views a step, over all ranks")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--print-every", type=int, default=50)
    options = parser.parse_args()
    world = ns_multigpu.World.from_env(options.device)
    try:
        train(options, world)
    finally:
        world.close()


if __name__ == "__main__":
    main()
