"""Parameters of a 3D Gaussian, the single list that all other code reads, and the layout of its rows."""

from ns_multigpu.core.schema import HARMONICS, Parameter, names

SCHEMA = (
    Parameter("means", (3,), rate=1.6e-4, final_rate=1.6e-6, ply=("x", "y", "z")),
    Parameter("quats", (4,), rate=0.001, ply=("rot_",)),
    Parameter("scales", (3,), "exp", rate=0.005, ply=("scale_",)),
    Parameter("opacities", (1,), "sigmoid", rate=0.05, ply=("opacity",)),
    Parameter("features_dc", (3,), rate=0.0025, ply=("f_dc_",)),
    Parameter("features_rest", (HARMONICS, 3), rate=0.0025 / 20, ply=("f_rest_",)),
)
"""See `Gaussians` for what each means. Learning rates are Splatfacto's; properties are those of Inria's files."""
ORDER = names(SCHEMA)
"""The parameters' names, in the order in which operators take them (`cuda_ext.reference.lazy_adam.PARAMETERS`)."""
PLY_ORDER = ("means", "features_dc", "features_rest", "opacities", "scales", "quats")
"""The order in Inria's PLY files, where a normal, zero, follows the position."""

ROW = {"means2d": 2, "conics": 3, "opacities": 1, "features": 3, "depths": 1, "radii": 2}
"""Numbers of 4 bytes in a row, without its ids: see `Gaussians.splat`."""
RECORD_FLOATS = 16
"""Numbers of 4 bytes in an exchanged row, or in its gradients: `ROW`, two ids and zeros. See
`cuda_ext.ops.exchange.row_exchange`."""
