"""Parameters of a 3D convex."""

from cuda_ext.ops.raster.convexes import LINES
from ns_multigpu.core.schema import HARMONICS, Parameter

SCHEMA = (
    Parameter("means", (3,), rate=1.6e-4, final_rate=1.6e-6),
    Parameter("corners", (LINES,), rate=5e-4, final_rate=5e-6),
    Parameter("deltas", (1,), "exp", rate=0.005),
    Parameter("sigmas", (1,), "exp", rate=0.0045),
    Parameter("opacities", (1,), "sigmoid", rate=0.05),
    Parameter("features_dc", (3,), rate=0.0025),
    Parameter("features_rest", (HARMONICS, 3), rate=0.0025 / 20),
)
"""See `Convexes` for what each means. Learning rates of `corners`, `deltas` and `sigmas` are those of the published
code; the others, Splatfacto's."""
