"""Primitives by the name of the option `--pipeline.model.primitive`.

A checkpoint names its primitive, and only runs with the same one resume from it. A new one needs a package here, an
entry in `PRIMITIVES`, and its name in `PrimitiveName`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from torch import Tensor

from ns_multigpu.core.primitive import Primitive
from ns_multigpu.core.schema import Parameter
from ns_multigpu.core.types import FAR, Splats
from ns_multigpu.primitives.convexes.densifier import ConvexParts
from ns_multigpu.primitives.convexes.functions import Convexes
from ns_multigpu.primitives.convexes.functions import screen_radii as convex_radii
from ns_multigpu.primitives.convexes.init import initial_convexes
from ns_multigpu.primitives.densify.regroup import GAUSSIAN_SPLIT, SplitRule
from ns_multigpu.primitives.gaussians.functions import Gaussians, screen_radii
from ns_multigpu.primitives.gaussians.init import initial_gaussians
from ns_multigpu.primitives.moving.densifier import MovingSplitRule
from ns_multigpu.primitives.moving.functions import MovingGaussians
from ns_multigpu.primitives.moving.init import initial_moving
from ns_multigpu.primitives.surfels.functions import Surfels
from ns_multigpu.primitives.surfels.functions import screen_radii as surfel_radii

PrimitiveName = Literal["3dgs", "2dgs", "4dgs", "convex"]
"""Values of the option; the names in `PRIMITIVES`."""
FIRST: PrimitiveName = "3dgs"
"""Primitive of checkpoints that name none: old ones, and nerfstudio's own."""


@dataclass(frozen=True)
class RenderOptions:
    """Render options of a model; each primitive reads those that it supports.

    Attributes:
        sh_degree: harmonics in use now; None for plain colours.
        depth: render expected depth as well.
        antialiased, absgrad: see `Gaussians`.
        channels: further outputs, by the primitive's names.
        far: largest depth that is drawn, world units. radius_clip: see `clip_rows`.
    """

    sh_degree: int | None
    depth: bool = False
    antialiased: bool = False
    absgrad: bool = False
    channels: tuple[str, ...] = ()
    far: float = FAR
    radius_clip: float = 0.0


@dataclass(frozen=True)
class Kind:
    """A primitive's properties for the trainer.

    Attributes:
        title: name of its points in messages.
        primitive: its class.
        initial: creates the initial raw parameters; arguments as `initial_gaussians`'s.
        screen_radii: radii in pixels of a step's splats, [M], for densification; see `densification_info`.
        lacks: reasons for unsupported options, by option and value.
        split_rule: its split rule.
        timed: True if rendering depends on a view's time.
    """

    title: str
    primitive: type[Any]
    initial: Callable[..., dict[str, Tensor]]
    screen_radii: Callable[[Splats], Tensor]
    lacks: Mapping[tuple[str, object], str] = field(default_factory=dict[tuple[str, object], str])
    split_rule: SplitRule = GAUSSIAN_SPLIT
    timed: bool = False

    @property
    def schema(self) -> tuple[Parameter, ...]:
        """The parameters of a point."""
        return self.primitive.schema

    def make(self, wanted: RenderOptions) -> Primitive:
        """Return the primitive with those render options that it has."""
        return self.primitive(
            **{f.name: getattr(wanted, f.name) for f in fields(self.primitive) if hasattr(wanted, f.name)}
        )


def _initial_surfels(*seeds: Any, **options: Any) -> dict[str, Tensor]:
    """Return the parameters of 3D Gaussians without the third scale, as the published code does."""
    params = initial_gaussians(*seeds, **options)
    return {**params, "scales": params["scales"][:, :2].contiguous()}


_NO_OPERATORS = "only the fused steps of 3D Gaussians do that"
_WITHOUT: dict[tuple[str, object], str] = {
    ("rasterize_mode", "antialiased"): "2D Gaussians have a low-pass filter of their own; use classic",
    ("densifier", "mcmc"): "MCMC's noise and relocation are those of 3D Gaussians; use default",
    ("optimizer_state", "compact"): _NO_OPERATORS,
}
_WITHOUT_SCALES = {
    **_WITHOUT,
    ("rasterize_mode", "antialiased"): "it widens 3D Gaussians by their covariance, which convexes lack; use classic",
    ("use_scale_regularization", True): "it is a penalty on scales, which convexes lack",
}
_STILL_ONLY = {asked: why for asked, why in _WITHOUT.items() if asked[0] != "rasterize_mode"}

PRIMITIVES: dict[str, Kind] = {
    "3dgs": Kind("3D Gaussians", Gaussians, initial_gaussians, screen_radii),
    "2dgs": Kind("2D Gaussians", Surfels, _initial_surfels, surfel_radii, _WITHOUT),
    "4dgs": Kind(
        "4D Gaussians", MovingGaussians, initial_moving, screen_radii, _STILL_ONLY, MovingSplitRule(), timed=True
    ),
    "convex": Kind("3D convexes", Convexes, initial_convexes, convex_radii, _WITHOUT_SCALES, ConvexParts()),
}


def all_parameters() -> tuple[Parameter, ...]:
    """Return the parameters of all primitives, each name once: the learning-rate groups that a method must have.

    Raises:
        ValueError: two primitives have different learning rates for a parameter of the same name.
    """
    found = dict[str, Parameter]()
    for name, kind in PRIMITIVES.items():
        for parameter in kind.schema:
            same = found.setdefault(parameter.name, parameter)
            if (same.rate, same.final_rate) != (parameter.rate, parameter.final_rate):
                raise ValueError(f"{name}: {parameter.name} has another learning rate than another primitive's")
    return tuple(found.values())


def titled(name: str) -> str:
    """Return a primitive's title and name for messages, also for unknown ones."""
    return f"{PRIMITIVES[name].title} ({name})" if name in PRIMITIVES else f"another primitive ({name})"
