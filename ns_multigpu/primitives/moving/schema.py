"""Parameters of a 4D Gaussian. Rows are those of 3D Gaussians (`primitives.gaussians.schema.ROW`)."""

from ns_multigpu.core.schema import HARMONICS, Parameter

COSINES = 2
"""Terms of a colour's cosine series in time beyond the constant one: with 16 harmonics each, 144 numbers as in Yang et
al. 2024."""

SCHEMA = (
    Parameter("means", (3,), rate=1.6e-4, final_rate=1.6e-6),
    Parameter("times", (1,), rate=1.6e-4, final_rate=1.6e-6),
    Parameter("quats", (4,), rate=0.001),
    Parameter("motions", (4,), rate=5e-4, final_rate=5e-6),
    Parameter("scales", (3,), "exp", rate=0.005),
    Parameter("durations", (1,), "exp", rate=0.005),
    Parameter("opacities", (1,), "sigmoid", rate=0.05),
    Parameter("features_dc", (3,), rate=0.0025),
    Parameter("features_rest", (HARMONICS, 3), rate=0.0025 / 20),
    Parameter("cosines_dc", (COSINES, 3), rate=0.0025 / 20),
    Parameter("cosines_rest", (COSINES, HARMONICS, 3), rate=0.0025 / 20),
)
"""See `MovingGaussians` for what each means. Learning rates are Splatfacto's and, for what it does not have, those that
Yang et al. give to its likes; but that of `motions` is near that of positions, for it moves points."""
