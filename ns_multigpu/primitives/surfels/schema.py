"""Parameters of a 2D Gaussian: those of a 3D Gaussian, with two scales."""

from ns_multigpu.core.schema import HARMONICS, Parameter

SCHEMA = (
    Parameter("means", (3,), rate=1.6e-4, final_rate=1.6e-6, ply=("x", "y", "z")),
    Parameter("quats", (4,), rate=0.001, ply=("rot_",)),
    Parameter("scales", (2,), "exp", rate=0.005, ply=("scale_",)),
    Parameter("opacities", (1,), "sigmoid", rate=0.05, ply=("opacity",)),
    Parameter("features_dc", (3,), rate=0.0025, ply=("f_dc_",)),
    Parameter("features_rest", (HARMONICS, 3), rate=0.0025 / 20, ply=("f_rest_",)),
)
"""See `Surfels` for what each means. Learning rates are those of the published code, and Splatfacto's."""
CHANNELS = ("normals", "distortion", "median")
"""Optional outputs of `Surfels` besides colour, alpha and depth; see `Surfels.render`."""
