"""Train a toy scene in one process, on all GPUs as one device, `multigpu`.

    python examples/aggregate_splats.py                       # all GPUs
    python examples/aggregate_splats.py --host-members 2      # two pretended GPUs in host memory

The scene is that of tile_minimal.py, and so is the call that renders; no rank, no process group, no exchange.
"""

import argparse

import torch
from tile_minimal import VIEWS, camera_ring, photographs, toy_model
from torch import Tensor

import ns_multigpu
from ns_multigpu import aggregate


def train(device: str, steps: int, size: int, points: int) -> list[float]:
    """Return the losses of a grey model that learns the photographs of a random one, a view a step."""
    viewmats, Ks = camera_ring(size, torch.device(device))
    truth = toy_model(points, torch.device(device))
    images = photographs(truth, viewmats, Ks, size)
    model = {**truth, "sh0": torch.zeros_like(truth["sh0"])}
    model = {name: value.clone().requires_grad_() for name, value in model.items()}
    optimizer = torch.optim.Adam(
        [{"params": [value], "lr": 0.05 if name == "sh0" else 1e-3} for name, value in model.items()], fused=True
    )
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = (render(model, viewmats, Ks, size, step % VIEWS) - images[step % VIEWS]).abs().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def render(model: dict[str, Tensor], viewmats: Tensor, Ks: Tensor, size: int, view: int) -> Tensor:
    """Return the image [size, size, 3] of one view."""
    colors = torch.cat([model["sh0"], model["shN"]], 1)
    images, _, _ = ns_multigpu.render(
        model["means"], model["quats"], model["scales"].exp(), model["opacities"].sigmoid(), colors,
        viewmats[view, None], Ks[view, None], size, size, sh_degree=1,
    )  # fmt: skip
    return images[0]


def main() -> None:
    """Train and print the first and last losses, and the calls of each member."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", help="numbers of GPUs (default: all)")
    parser.add_argument("--host-members", type=int, default=0, help="pretended GPUs in host memory, instead of GPUs")
    parser.add_argument("--steps", type=int, default=16, help="training steps, of a view each")
    parser.add_argument("--size", type=int, default=32, help="pixels of an image's side")
    parser.add_argument("--points", type=int, default=200, help="number of Gaussians")
    given = parser.parse_args()
    aggregate.use(given.gpus, given.host_members, small_bytes=1024)
    losses = train("multigpu", given.steps, given.size, given.points)
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}, calls of each member: {aggregate.calls()}")


if __name__ == "__main__":
    main()
