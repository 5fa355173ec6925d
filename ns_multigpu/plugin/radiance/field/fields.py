"""The fields of a cell, built from nerfstudio's, and the parts that all cells share (NeRF-XL, appendix A.1)."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from nerfstudio.cameras.rays import Frustums, RaySamples
from nerfstudio.field_components.encodings import HashEncoding
from nerfstudio.field_components.field_heads import FieldHeadNames
from nerfstudio.field_components.spatial_distortions import SpatialDistortion
from nerfstudio.fields.base_field import Field, get_normalized_directions
from nerfstudio.fields.density_fields import HashMLPDensityField
from nerfstudio.fields.nerfacto_field import NerfactoField
from nerfstudio.models.nerfacto import NerfactoModelConfig
from torch import Tensor, nn

import cuda_ext
from ns_multigpu.plugin.radiance.field.draws import drawn
from ns_multigpu.radiance.contraction import Domain

_SHARED, _CELL = 1, 2
"""First seed numbers of the shared parts and of cells."""
_INSIDE = 1e-6
"""Minimum distance of samples from the cell's faces, relative to its extent, against rounding to the outside."""


class CellCoordinates(SpatialDistortion):
    """Map from world positions to a cell's coordinates within [-2, 2], in place of nerfacto's contraction.

    Args:
        extent: [2, 3] the cell's corners, as of `Partition.extents`.
        domain: space that cells are cut from.
    """

    low: Tensor
    size: Tensor

    def __init__(self, extent: Tensor, domain: Domain) -> None:
        super().__init__()
        self.domain = domain
        self.register_buffer("low", extent[0].float(), persistent=False)
        self.register_buffer("size", (extent[1] - extent[0]).float(), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the coordinates of world positions [..., 3]."""
        inside = (self.domain.inward(positions) - self.low) / self.size
        return inside.clamp(_INSIDE, 1 - _INSIDE) * 4 - 2

    def outward(self, inside: Tensor) -> Tensor:
        """Invert `forward`: return world positions, always finite."""
        part = ((inside + 2) / 4).clamp(_INSIDE, 1 - _INSIDE)
        return self.domain.outward(part * self.size + self.low)


class Head(nn.Module):
    """The networks that all cells share: colour head, appearance embedding and, if so, the density network.

    Args:
        config: the model's. images: number of training images. seed, number: of the parameters.
        density: True to share a density network.
    """

    def __init__(
        self, config: NerfactoModelConfig, images: int, seed: int, *number: int, density: bool = False
    ) -> None:
        super().__init__()
        options = {**field_options(config, images), "log2_hashmap_size": 1}  # the grid itself is not kept
        with drawn("cpu", seed, _SHARED, *number):
            field = NerfactoField(torch.zeros(2, 3), **(options if density else {**options, "num_levels": 1}))
        self.mlp_head, self.embedding_appearance = field.mlp_head, field.embedding_appearance
        self.density: nn.Module | None = field.mlp_base.model[1] if density else None


class CellField(NerfactoField):
    """nerfacto's field in one cell, with a hash grid of its own and, unless all cells share one, a density network.

    Args:
        coordinates: of the cell. shared: parts that all cells share. options: see `field_options`.
    """

    def __init__(self, coordinates: SpatialDistortion, shared: Head, options: dict[str, Any]) -> None:
        super().__init__(torch.zeros(2, 3), spatial_distortion=coordinates, **options)
        for name in ("mlp_head", "embedding_appearance"):
            if getattr(self, name) is not None:
                delattr(self, name)
                # Not as a submodule: each cell would save it.
                self.__dict__[name] = getattr(shared, name)
        if shared.density is not None:
            self.grid, density = self.mlp_base.model[0], shared.density
            del self.mlp_base
            self.__dict__["mlp_base"] = lambda positions: density(self.grid(positions))

    def get_outputs(
        self, ray_samples: RaySamples, density_embedding: Tensor | None = None
    ) -> dict[FieldHeadNames, Tensor]:
        """Return colours as nerfacto's field does, for samples [n, S].

        Direction encodings and appearances are computed once per ray; nerfstudio's field computes them for each sample.

        Args:
            density_embedding: [n, S, features] of the samples.
        """
        assert density_embedding is not None
        of_rays = self._of_rays([ray_samples])
        encoded, *appearance = [x[:, None].expand(-1, density_embedding.shape[1], -1) for x in of_rays]
        features = torch.cat([encoded, density_embedding.to(encoded), *appearance], -1)
        rgb = self.mlp_head(features.flatten(0, 1)).view(*features.shape[:2], -1)
        return {FieldHeadNames.RGB: rgb.to(ray_samples.frustums.directions)}

    def together(self, several: Sequence[RaySamples]) -> list[dict[FieldHeadNames, Tensor]]:
        """Evaluate several groups of samples, each [n, S] with its own n and S, with one launch of each network.
        Results equal `forward`'s."""
        if len(several) == 1:
            return [self(several[0])]
        shapes = [one.frustums.starts.shape[:2] for one in several]
        density, embedding = self.get_density(_flat(several))
        encoded, *appearance = [
            torch.cat([x[:, None].expand(-1, s, -1).flatten(0, 1) for x, (_, s) in zip(parts, shapes, strict=True)])
            for parts in (x.split([n for n, _ in shapes]) for x in self._of_rays(several))
        ]
        rgb = self.mlp_head(torch.cat([encoded, embedding.to(encoded), *appearance], -1)).to(density)
        sizes = [n * s for n, s in shapes]
        return [
            {FieldHeadNames.RGB: colour.view(*shape, -1), FieldHeadNames.DENSITY: dense.view(*shape, 1)}
            for colour, dense, shape in zip(rgb.split(sizes), density.split(sizes), shapes, strict=True)
        ]

    def _of_rays(self, several: Sequence[RaySamples]) -> list[Tensor]:
        """Return the features that a ray's samples share, [n, features] each: directions and, if any, appearance."""
        directions = get_normalized_directions(torch.cat([one.frustums.directions[:, 0] for one in several]))
        encoded = self.direction_encoding(directions)
        return [encoded] if self.embedding_appearance is None else [encoded, self._appearance(several, directions)]

    def _appearance(self, several: Sequence[RaySamples], directions: Tensor) -> Tensor:
        """Return appearance features [n, features] of rays: the image's own in training, else the mean or zeros."""
        assert self.embedding_appearance is not None
        if self.training:
            cameras = [one.camera_indices for one in several]
            return self.embedding_appearance(torch.cat([one[:, 0, 0] for one in cameras if one is not None]))
        if self.use_average_appearance_embedding:
            return self.embedding_appearance.mean(dim=0).expand(len(directions), -1)
        return directions.new_zeros(len(directions), self.appearance_embedding_dim)


class Cell(nn.Module):
    """All modules and parameters of one cell.

    Args:
        number: the cell's. coordinates: of the cell. config: the model's.
        shared: the networks that all cells share.
        images: number of training images. seed: of the parameters, together with the number.
        resolution: voxels of an occupancy grid along each axis; 0 for proposal networks instead.
        proposes: False if all cells share proposal networks.
        voxels: coordinates of the field's hash grid; the cell's unless given.
    """

    def __init__(
        self, number: int, coordinates: CellCoordinates, config: NerfactoModelConfig, shared: Head, images: int,
        seed: int, resolution: int = 0, proposes: bool = True, voxels: CellCoordinates | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.coordinates = coordinates
        # A parameter, so that it is saved and moved with the others; it has no gradient.
        self.occupancy = nn.Parameter(torch.ones(resolution**3), requires_grad=False) if resolution else None
        with drawn("cpu", seed, _CELL, number):
            self.field = CellField(voxels or coordinates, shared, field_options(config, images))
            self.proposal_networks = (
                proposal_networks(coordinates, config) if proposes and not resolution else nn.ModuleList()
            )
        use_operator(self)

    def forget(self) -> None:
        """See `forget`."""
        forget((self.field, *self.proposal_networks))


def proposal_networks(coordinates: CellCoordinates, config: NerfactoModelConfig) -> nn.ModuleList:
    """Return nerfacto's proposal networks over a cell."""
    count = 1 if config.use_same_proposal_network else config.num_proposal_iterations
    listed = config.proposal_net_args_list
    return nn.ModuleList(
        HashMLPDensityField(
            torch.zeros(2, 3),
            spatial_distortion=coordinates,
            **listed[min(i, len(listed) - 1)],
            average_init_density=config.average_init_density,
            implementation=config.implementation,
        )
        for i in range(count)
    )


def shared_proposals(config: NerfactoModelConfig, domain: Domain, seed: int) -> nn.ModuleList:
    """Return the proposal networks over all of space, which all cells share."""
    with drawn("cpu", seed, _SHARED, _CELL):
        networks = proposal_networks(CellCoordinates(torch.tensor([domain.lower, domain.upper]), domain), config)
    use_operator(networks)
    return networks


def use_operator(fields: nn.Module) -> None:
    """Replace torch's hash encodings by one operator, and move their scalings with the module."""
    for module in fields.modules():
        if isinstance(module, HashEncoding):
            # nerfstudio's is a plain tensor, which would remain on the host.
            scalings = vars(module).pop("scalings").float()
            module.register_buffer("scalings", scalings, persistent=False)
            module.pytorch_fwd = functools.partial(_encoded, module)  # type: ignore[method-assign]


def forget(fields: Iterable[nn.Module]) -> None:
    """Release the last samples that nerfstudio's fields store: they keep a step's whole graph alive."""
    for one in fields:
        assert isinstance(one, Field)
        vars(one)["_sample_locations"] = vars(one)["_density_before_activation"] = None


def _flat(several: Sequence[RaySamples]) -> RaySamples:
    """Concatenate samples, each with the inputs that density networks read."""

    def joined(of: str, width: int) -> Tensor:
        parts = [getattr(one.frustums, of) for one in several]
        shapes = [one.frustums.starts.shape[:2] for one in several]
        return torch.cat([x.expand(*shape, width).reshape(-1, width) for x, shape in zip(parts, shapes, strict=True)])

    ends = joined("starts", 1), joined("ends", 1)
    return RaySamples(Frustums(joined("origins", 3), joined("directions", 3), *ends, joined("pixel_area", 1)))


def _encoded(grid: HashEncoding, positions: Tensor) -> Tensor:
    """Compute the same as nerfstudio's `HashEncoding.pytorch_fwd`, [..., L F], in one custom operator."""
    flat = positions.reshape(-1, 3).float()
    # hash_table_size is a power of two.
    found = cuda_ext.encode_grid(flat, grid.hash_table, grid.scalings, grid.hash_table_size.bit_length() - 1)
    return found.view(*positions.shape[:-1], found.shape[1])


def field_options(config: NerfactoModelConfig, images: int) -> dict[str, Any]:
    """Return nerfacto's options as arguments of its field."""
    return {
        "num_images": images,
        "hidden_dim": config.hidden_dim,
        "num_levels": config.num_levels,
        "max_res": config.max_res,
        "base_res": config.base_res,
        "features_per_level": config.features_per_level,
        "log2_hashmap_size": config.log2_hashmap_size,
        "hidden_dim_color": config.hidden_dim_color,
        "hidden_dim_transient": config.hidden_dim_transient,
        "use_average_appearance_embedding": config.use_average_appearance_embedding,
        "appearance_embedding_dim": config.appearance_embed_dim if config.use_appearance_embedding else 0,
        "average_init_density": config.average_init_density,
        "implementation": config.implementation,
    }
