"""Sample pictures from a small diffusion model on all GPUs as one device, `multigpu`.

    python examples/aggregate_diffusion.py                    # all GPUs
    python examples/aggregate_diffusion.py --gpus 0           # one GPU: the same pictures
    python examples/aggregate_diffusion.py --host-members 2   # two pretended GPUs in host memory

The network is a UNet of 16 x 16 pixels with random weights of a fixed seed, so the pictures show textures. Only the
device's name differs from a program for a single GPU.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ns_multigpu import aggregate


class Block(nn.Module):
    """Two convolutions with group norms and a residual connection, conditioned on the time of the step."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(4, inputs), nn.GroupNorm(4, outputs)])
        self.convolutions = nn.ModuleList(nn.Conv2d(n, outputs, 3, padding=1) for n in (inputs, outputs))
        self.time = nn.Linear(32, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Return features [B, outputs, H, W] of features [B, inputs, H, W] at times [B, 32]."""
        inner = self.convolutions[0](F.silu(self.norms[0](x))) + self.time(time)[..., None, None]
        return self.skip(x) + self.convolutions[1](F.silu(self.norms[1](inner)))


class UNet(nn.Module):
    """Network that predicts the noise of pictures, on two scales with attention on the smaller one."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.middle, self.up = (Block(width * a, width * b) for a, b in ((1, 2), (2, 2), (3, 1)))
        self.attention = nn.Linear(2 * width, 6 * width)
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor, step: int) -> Tensor:
        """Return the noise [B, 3, H, W] of pictures [B, 3, H, W] at a step."""
        angles = step * torch.exp(torch.arange(16, device=x.device) * (-math.log(1000.0) / 16))
        time = torch.cat([angles.sin(), angles.cos()]).expand(len(x), 32)
        fine = self.first(x)
        coarse = self.middle(self.down(F.avg_pool2d(fine, 2), time), time)
        query, key, value = self.attention(coarse.flatten(2).mT).chunk(3, -1)
        seen = F.scaled_dot_product_attention(query, key, value).mT.reshape(coarse.shape)
        return self.last(self.up(torch.cat([fine, F.interpolate(coarse + seen, scale_factor=2)], 1), time))


@torch.no_grad()
def sample(device: str, pictures: int = 6, steps: int = 8, size: int = 16) -> Tensor:
    """Return pictures [B, 3, H, W] in 0..1 on the CPU, by DDPM sampling in a few steps."""
    torch.manual_seed(0)
    network = UNet().to(device).eval()
    torch.manual_seed(1)
    betas = torch.linspace(1e-2, 0.3, steps)
    kept = (1 - betas).cumprod(0)
    x = torch.randn(pictures, 3, size, size, device=device)
    for step in reversed(range(steps)):
        beta, alpha = betas[step].item(), kept[step].item()
        x = (x - beta / math.sqrt(1 - alpha) * network(x, step)) / math.sqrt(1 - beta)
        if step > 0:
            x = x + math.sqrt(beta) * torch.randn_like(x)
    return (x * 0.25 + 0.5).clamp(0, 1).cpu()


def write_row(pictures: Tensor, path: Path) -> None:
    """Write pictures [B, 3, H, W] side by side as a PPM file."""
    row = (255 * torch.cat(list(pictures), -1)).byte().permute(1, 2, 0).contiguous()
    path.write_bytes(b"P6 %d %d 255\n" % (row.shape[1], row.shape[0]) + bytes(row.flatten().tolist()))


def main() -> None:
    """Sample, write the pictures and print the calls of each member."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", help="numbers of GPUs (default: all)")
    parser.add_argument("--host-members", type=int, default=0, help="pretended GPUs in host memory, instead of GPUs")
    parser.add_argument("--pictures", type=int, default=6, help="number of pictures")
    parser.add_argument("--output", type=Path, default=Path("aggregate_diffusion.ppm"), help="the file to write")
    given = parser.parse_args()
    aggregate.use(given.gpus, given.host_members, small_bytes=1024)
    write_row(sample("multigpu", given.pictures), given.output)
    print(f"{given.output}: {given.pictures} pictures, calls of each member: {aggregate.calls()}")


if __name__ == "__main__":
    main()
