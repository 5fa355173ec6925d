"""`project` on CUDA where its numbers are extreme: what the CPU twin says, within what float32 can say."""

import pytest
import torch
from torch.testing import assert_close

import cuda_ext
from tests.cuda_ext.projections import PROJECT_INPUTS, projected, rounding_noise
from tests.cuda_ext.scenes import one_point

pytestmark = [
    pytest.mark.usefixtures("native"),
    pytest.mark.skipif(cuda_ext.backend("cuda") != "native", reason="NS_MULTIGPU_OPS says so"),
]

EDGE_CASES: dict[str, dict[str, list]] = {
    "plain": {},
    "on the near plane": {"means": [[0.0, 0.0, 0.01]]},
    "before the near plane": {"means": [[0.0, 0.0, 0.0099]]},
    "behind the camera": {"means": [[0.1, 0.1, -5.0]]},
    "in the camera": {"means": [[0.0, 0.0, 0.0]]},
    "mean on a tile's corner": {"means": [[-0.1, 0.4, 5.0]]},
    "beyond the clamp": {"means": [[12.0, -9.0, 5.0]], "scales": [[3.0, 3.0, 3.0]]},
    "huge": {"scales": [[1e4, 1e4, 1e4]]},
    "far too huge": {"scales": [[1e25, 1e25, 1e25]]},
    "below a pixel": {"scales": [[1e-6, 1e-6, 1e-6]]},
    "a point": {"scales": [[0.0, 0.0, 0.0]]},
    "a needle": {"scales": [[1.0, 1e-7, 1e-7]], "quats": [[0.3, -0.2, 0.8, 0.1]]},
    "just opaque enough": {"opacities": [1.001 / 255]},
    "too transparent": {"opacities": [0.999 / 255]},
    "opaque": {"opacities": [1.0]},
    "long quaternion": {"quats": [[30.0, -20.0, 5.0, 1.0]]},
    "NaN mean": {"means": [[float("nan"), 0.0, 5.0]]},
    "NaN scale": {"scales": [[float("nan"), 0.1, 0.1]]},
    "NaN opacity": {"opacities": [float("nan")]},
}


@pytest.mark.gpu
@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize("case", EDGE_CASES)
def test_edge_cases_are_those_of_the_cpu(case: str, antialiased: bool) -> None:
    scene = one_point(torch.float32, **EDGE_CASES[case])
    rows = scene.all_rows()
    for found, expected in zip(scene.on("cuda").cull(), scene.cull(), strict=True):
        assert torch.equal(found.cpu(), expected)
    out, gradients = projected(scene.on("cuda"), (rows[0].cuda(), rows[1].cuda()), antialiased)
    expected, expected_gradients = projected(scene, rows, antialiased)
    for got, want in zip(out[:4], expected[:4], strict=True):
        assert_close(got.cpu(), want, rtol=1e-4, atol=1e-6)
    assert torch.equal(out[4].cpu().sign(), expected[4].sign())
    assert_close(out[4].cpu().float(), expected[4].float(), rtol=1e-5, atol=1.0)
    noise = rounding_noise(scene, rows, antialiased)
    for got, want, rounding in zip(gradients, expected_gradients, noise, strict=True):
        assert_close(got.cpu(), want, rtol=2e-3, atol=2 * rounding + 1e-3 * max(1e-30, float(want.abs().max())))


@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize("case", EDGE_CASES)
def test_rounding_hides_no_gradient(case: str, antialiased: bool) -> None:
    """The tolerance of the test above is far below any nonzero gradient; outputs' gradients are about 1."""
    scene = one_point(torch.float32, **EDGE_CASES[case])
    rows = scene.all_rows()
    _, gradients = projected(scene, rows, antialiased)
    for name, noise, gradient in zip(PROJECT_INPUTS, rounding_noise(scene, rows, antialiased), gradients, strict=True):
        assert noise <= max(0.06 * float(gradient.abs().nan_to_num().max()), 1e-7), name
