"""Whether two ways draw the same image with the same gradients: a figure of something else is worth nothing."""

from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.lib.report import empty_table
from cuda_ext.ops.optim.fused import PARAMETERS

MOST_IMAGE_DIFFERENCE = 2e-3
"""Mean difference of images that still counts as the same: gsplat cuts splats off at three sigma, tile by tile."""
LEAST_COSINE = 0.999
"""Of gradients."""


@dataclass
class Drawn:
    """Rendered image [H W, 3], and gradients of the raw parameters (or multiples of them) by name."""

    image: Tensor
    gradients: dict[str, Tensor]


def compare(console: Console, drawn: dict[str, Drawn], reference: str) -> dict[str, Any]:
    """Print and return each variant's distance from the reference.

    Raises:
        RuntimeError: one is too far, or there is nothing to compare.
    """
    if reference not in drawn or len(drawn) < 2:
        raise RuntimeError(f"there are renderings of {list(drawn)}: not of {reference} and another")
    found: dict[str, Any] = {}
    wrong: list[str] = []
    title = f"against {reference}; gradients: relative L2 distance, cosine"
    table = empty_table(title, ("way", "image: mean, largest", *PARAMETERS))
    wanted = drawn[reference]
    for name, ours in drawn.items():
        if name == reference:
            continue
        difference = (ours.image - wanted.image).abs()
        mean, most = float(difference.mean()), float(difference.max())
        entry: dict[str, Any] = {"image_mean": mean, "image_max": most}
        cells = [f"{mean:.1e}, {most:.1e}"]
        if not mean <= MOST_IMAGE_DIFFERENCE:
            wrong.append(f"{name}: the images' mean difference is {mean:.2e}")
        for parameter in PARAMETERS:
            error, cosine = distance(ours.gradients[parameter], wanted.gradients[parameter])
            entry[parameter] = {"relative_l2": error, "cosine": cosine}
            cells.append(f"{error:.1e}, {cosine:.5f}")
            if not cosine >= LEAST_COSINE:
                wrong.append(f"{name}: the cosine of the gradients of {parameter} is {cosine:.5f}")
        found[name] = entry
        table.add_row(name, *cells)
    console.print(table)
    if wrong:
        raise RuntimeError("; ".join(wrong))
    return found


def distance(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Return the relative L2 distance of two tensors of equal size, and the cosine of the angle between them."""
    found = found.view_as(wanted)
    f64 = torch.float64
    lengths = [float(torch.linalg.vector_norm(t, dtype=f64)) for t in (found, wanted)]
    apart = float(torch.linalg.vector_norm(found - wanted, dtype=f64))
    if 0.0 in lengths:
        return apart, 1.0 if apart == 0 else 0.0
    return apart / lengths[1], float((found * wanted).sum(dtype=f64)) / (lengths[0] * lengths[1])
