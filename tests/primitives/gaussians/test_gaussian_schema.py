"""The schema of Gaussians is what operators, points and rows are."""

import pytest
import torch

from cuda_ext.ops.exchange.row_exchange import RECORD_FLOATS as TRAVELS
from cuda_ext.ops.optim.fused import SplatRows
from cuda_ext.reference.lazy_adam import PARAMETERS
from ns_multigpu.core.schema import POSITION, degree_of, floats, harmonics
from ns_multigpu.primitives.gaussians.functions import Gaussians
from ns_multigpu.primitives.gaussians.init import initial_gaussians
from ns_multigpu.primitives.gaussians.kernels import GaussianKernels
from ns_multigpu.primitives.gaussians.schema import ORDER, PLY_ORDER, RECORD_FLOATS, ROW, SCHEMA
from tests.strategies.scene import make_points, make_views


def test_operators_take_the_parameters_in_its_order() -> None:
    assert tuple(parameter.operator or parameter.name for parameter in SCHEMA) == PARAMETERS
    assert GaussianKernels(3).parameters == ORDER and Gaussians.schema is SCHEMA


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
def test_points_match_the_schema(degree: int) -> None:
    made = initial_gaussians(None, sh_degree=degree, count=7, extent=1.0, generator=torch.Generator())
    assert made.keys() == set(ORDER) and ORDER[0] == POSITION
    assert [parameter.floats(degree) for parameter in SCHEMA] == [made[name].numel() // 7 for name in ORDER]
    assert floats(SCHEMA, degree) == sum(value.numel() for value in made.values()) // 7
    assert degree_of(harmonics(degree)) == degree


def test_rows_match_the_schema() -> None:
    points, views = make_points(20, torch.float32), make_views(2, torch.float32)
    kind = Gaussians(sh_degree=3)
    rows = kind.splat(points, kind.cull(points, views, [0, 1]), views).rows
    assert {name: row[0].numel() for name, row in rows.items()} == ROW
    assert SplatRows._fields == ("view_ids", "point_ids", "count", *ROW)
    assert RECORD_FLOATS == TRAVELS == GaussianKernels(3).record_floats >= sum(ROW.values()) + 2


def test_each_parameter_has_its_columns_in_files() -> None:
    assert set(PLY_ORDER) == set(ORDER) and len(PLY_ORDER) == len(ORDER)
    properties = {parameter.name: parameter.properties(1) for parameter in SCHEMA}
    assert properties["means"] == ["x", "y", "z"] and properties["opacities"] == ["opacity"]
    assert properties["features_rest"] == [f"f_rest_{i}" for i in range(9)] and properties["quats"][3] == "rot_3"
    assert SCHEMA[-1].properties(0) == []
