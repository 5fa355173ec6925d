"""Fixtures of the operators' tests."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

import cuda_ext
from cuda_ext.dispatch.load import load_native
from tests.cuda_ext.scenes import Scene, random_scene


@pytest.fixture
def native() -> None:
    """Load the compiled operators; the test is skipped, with the reason, only where there is no compiler."""
    if cuda_ext.reference_forced():
        pytest.skip("NS_MULTIGPU_OPS=reference switches the native operators off")
    if problem := cuda_ext.compiler_problem():
        pytest.skip(problem)
    assert load_native(), "there is a compiler"


@pytest.fixture(params=["native", "reference"])
def either(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test with the compiled operators, then with the reference."""
    if request.param == "native" or "native" in request.fixturenames:
        request.getfixturevalue("native")  # which must not find the reference switched on
    with nullcontext() if request.param == "native" else cuda_ext.use_reference():
        yield request.param


@pytest.fixture
def scene() -> Scene:
    """300 points, 2 views, float32."""
    return random_scene()
