"""`project` with gradients, and what rounding does to them."""

import torch
from torch import Tensor

import cuda_ext
from tests.cuda_ext.scenes import Scene

PROJECT_INPUTS = ("means", "quats", "scales", "opacities", "viewmats")


def weights(outputs: list[Tensor], seed: int = 7) -> list[Tensor]:
    """Fixed gradients of the outputs, the same on every device and in every dtype."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(o.shape, generator=g, dtype=torch.float64).to(o) for o in outputs]


def projected(scene: Scene, rows: tuple[Tensor, Tensor], antialiased: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs of `project` and the gradients of its inputs."""
    leaves = [getattr(scene, name).detach().clone().requires_grad_() for name in PROJECT_INPUTS]
    out = cuda_ext.project(*leaves, scene.Ks, scene.sizes, *rows, antialiased=antialiased)
    return list(out), list(torch.autograd.grad(out[:4], leaves, weights(list(out[:4]))))


def check_gradients(scene: Scene, rows: tuple[Tensor, Tensor], antialiased: bool) -> None:
    """Check gradients of `project` by finite differences."""

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        return cuda_ext.project(*inputs, scene.Ks, scene.sizes, *rows, antialiased=antialiased)[:4]

    inputs = [getattr(scene, name).clone().requires_grad_() for name in PROJECT_INPUTS]
    assert torch.autograd.gradcheck(run, inputs, eps=1e-7, atol=1e-5, rtol=1e-4)


def rounding_noise(scene: Scene, rows: tuple[Tensor, Tensor], antialiased: bool) -> list[float]:
    """Return the largest error of each input's float32 gradient on the CPU, against the fp64 reference, at this scene
    and at some a few units in the last place away from it.

    Where terms cancel (a round point's gradient by its rotation, a needle's determinant) it is this, and not the
    gradient, that says how near two float32 implementations can be. Places where float32 and float64 do not agree on
    whether the point is seen are left out.
    """
    g = torch.Generator().manual_seed(0)
    noise = [0.0] * len(PROJECT_INPUTS)
    for _ in range(16):
        near = scene.to(torch.float64)
        for name in PROJECT_INPUTS[:4]:
            value = getattr(near, name)
            setattr(near, name, value * (1 + 2**-22 * (2 * torch.rand(value.shape, generator=g) - 1)))
        near = near.to(torch.float32)
        out, found = projected(near, rows, antialiased)
        with cuda_ext.use_reference():
            exact, expected = projected(near.to(torch.float64), rows, antialiased)
        if torch.equal(out[4] > 0, exact[4] > 0):
            errors = [float((a.double() - b).abs().nan_to_num().max()) for a, b in zip(found, expected, strict=True)]
            noise = [max(pair) for pair in zip(noise, errors, strict=True)]
    return noise
