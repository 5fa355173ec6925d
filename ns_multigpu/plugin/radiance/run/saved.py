"""A field in a checkpoint: the .ckpt, the state folder next to it, and reading on any number of ranks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ns_multigpu.cells.tree import CellTree
from ns_multigpu.plugin.checkpoint.verify import (
    SHARDS,
    DamagedCheckpoint,
    cut_short,
    read_checkpoint_file,
    read_manifest,
    states_folder,
)
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.radiance.contraction import Domain
from ns_multigpu.radiance.partition import Partition

MODEL = "model/"
"""Prefix of cells' parameter names among a checkpoint's tensors."""
_SHARED, _TREE, _DOMAIN, _SEED = "_model.", "radiance.tree", "radiance.domain", "radiance.seed"
_SPREAD = "radiance.spread"


class CellModel(Protocol):
    """A model in cells."""

    def own_parameters(self) -> dict[str, torch.nn.Parameter]: ...

    def shared_parameters(self) -> dict[str, torch.nn.Parameter]: ...


@dataclass(frozen=True)
class SavedField:
    """Content of the .ckpt: small, and the same on every rank.

    Attributes:
        partition: the cells. shared: by name, the parameters that all cells share.
        seed: of the run.
        spread: the model's option of that name.
    """

    partition: Partition
    shared: Mapping[str, Tensor]
    seed: int
    spread: str = "xl"

    @property
    def density(self) -> str:
        """The model's option of that name."""
        return density_of(self.shared)

    def state(self) -> dict[str, Any]:
        """Return the `pipeline` entry of a .ckpt. The state folder has the cells' parameters; its name is added once it
        exists."""
        domain = self.partition.domain
        return {
            **{_SHARED + name: value for name, value in self.shared.items()},
            _TREE: self.partition.tree.tensor(),
            _DOMAIN: [list(domain.lower), list(domain.upper), domain.contracted],
            _SEED: self.seed,
            _SPREAD: self.spread,
            SHARDS: {"cells": self.partition.cells},
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> "SavedField":
        """Invert `state`.

        Raises:
            InputError: it is another method's.
        """
        if not {_TREE, _DOMAIN, _SEED, SHARDS} <= state.keys():
            raise InputError("This is no checkpoint of nerfacto-xl: it has no cells. Give one of a run of nerfacto-xl.")
        low, high, contracted = state[_DOMAIN]
        cells = Partition(CellTree.from_tensor(state[_TREE]), Domain(tuple(low), tuple(high), bool(contracted)))
        names = [key for key in state if key.startswith(_SHARED)]
        shared = {name.removeprefix(_SHARED): state[name] for name in names}
        # A checkpoint older than the option has cells that are trained together.
        return SavedField(cells, shared, int(state[_SEED]), str(state.get(_SPREAD, "xl")))


def density_of(shared: Iterable[str]) -> str:
    """Return the model's option `density` from the names of its shared parameters."""
    return "shared" if any(name.startswith("shared.density.") for name in shared) else "cell"


def field_in(checkpoint: Path) -> SavedField:
    """Read the field of a .ckpt.

    Raises:
        InputError: it is damaged, or another method's.
    """
    return SavedField.from_state(read_checkpoint_file(checkpoint)["pipeline"])


def cells_folder(state: Mapping[str, Any], models: Path) -> Path:
    """Return the folder with the cells of a .ckpt.

    Args:
        state: the pipeline of the .ckpt. models: the folder of the .ckpt.

    Raises:
        DamagedCheckpoint: the folder is missing.
    """
    folder = states_folder(models) / str(state[SHARDS].get("state"))
    if not folder.is_dir():
        raise DamagedCheckpoint(f"The cells of the checkpoint are missing: they belong into {folder}")
    return folder


@torch.no_grad()
def read_parameters(model: CellModel, saved: SavedField, state: Mapping[str, Any], models: Path) -> None:
    """Read a model's parameters: the shared ones, and those of its cells.

    Args:
        model: with its cells placed. saved: the field in `state`, the pipeline of a .ckpt.
        models: the folder of the .ckpt.

    Raises:
        InputError: parameters are missing, damaged, or of another shape.
    """
    folder = cells_folder(state, models)
    if found := cut_short(folder, read_manifest(folder)):
        raise DamagedCheckpoint("; ".join(found))
    from ns_multigpu.plugin.checkpoint.saved_tensors import SavedTensors

    tensors = SavedTensors(folder)
    own, shared = model.own_parameters(), model.shared_parameters()
    there = set(tensors.names)
    missing = [name for name in own if MODEL + name not in there] + [
        name for name in shared if name not in saved.shared
    ]
    shapes = {name: tuple(saved.shared[name].shape) for name in shared if name in saved.shared}
    shapes.update({name: tensors.shape(MODEL + name) for name in own if MODEL + name in there})
    wrong = [
        f"{name} is of shape {list(shapes[name])}, here {list(p.shape)}"
        for name, p in {**own, **shared}.items()
        if name in shapes and shapes[name] != tuple(p.shape)
    ]
    if missing or wrong:
        what = [f"it has no {', '.join(missing[:3])}{' and others' if len(missing) > 3 else ''}"] if missing else []
        raise InputError(
            f"The checkpoint in {models} does not fit this model: {'; '.join(what + wrong[:3])}. Use the options and "
            "the capture that it was trained with (its run folder's config.yml has them)."
        )
    values = {**tensors.read([MODEL + name for name in own]), **{MODEL + name: saved.shared[name] for name in shared}}
    for name, param in {**own, **shared}.items():
        param.copy_(values[MODEL + name])
