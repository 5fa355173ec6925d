"""Checkpoint format of a model whose points are sharded over the ranks.

The state folder holds points, their moments and their statistics as rows of full tensors. Their names are
`model/<parameter>`, `optimizers/<parameter>/0/<moment>` and `densifier/<statistic>`. Each rank writes its own rows. The
.ckpt, which nerfstudio's commands read, holds the rest of the pipeline's state. Its key SHARDS names the state folder.

Rows are in rank order. If each rank has a range of the full model, that is the full model's order. With any other
placement the marker names it, and `placement/places` holds each point's place. So any number of ranks can resume, each
reading its own rows (`own_rows`). Strategies that replicate the model can resume too, and vice versa.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ns_multigpu.core.assign.placement import Placement, rows_of
from ns_multigpu.core.assign.shard_index import ShardIndex
from ns_multigpu.core.dist.collectives import all_gather_ints, all_gather_objects
from ns_multigpu.core.dist.world import World
from ns_multigpu.core.schema import POSITION
from ns_multigpu.plugin.checkpoint.held_rows import Rows
from ns_multigpu.plugin.checkpoint.training_state import MERGED
from ns_multigpu.plugin.checkpoint.verify import SHARDS, DamagedCheckpoint, cut_short, read_manifest, states_folder
from ns_multigpu.plugin.faults.errors import InputError

if TYPE_CHECKING:
    from ns_multigpu.plugin.checkpoint.saved_tensors import SavedTensors

POINTS = "_model.gauss_params."
"""Prefix of the keys of points in a pipeline's state."""
PLACEMENT_STATE = "knowledge/"
"""Prefix of the tensors of a placement's state."""
PLACES = "placement/places"
"""Places of points in the order of the full model, saved if the rows are in another order."""


# ---- saving ----


def split_state(
    tensors: Mapping[str, Tensor], params: Mapping[str, Tensor], world: World, shard_index: ShardIndex | None = None
) -> tuple[dict[str, Tensor | Rows], dict[str, Any]]:
    """Return the tensors that the ranks of a sharded model write, each its own rows. Every rank calls it; no rows are
    sent.

    Args:
        tensors: the training state (see training_state).
        params: this rank's rows of the model's parameters.
        shard_index: their places; None for a range of the full model.

    Returns:
        the training state with the model, and the marker for the .ckpt.

    Raises:
        ValueError: a moment of a point parameter does not have a row for each point.
    """
    own = len(next(iter(params.values())))
    counts = [row[0] for row in all_gather_ints([own], world)]
    mine = {f"model/{name}": value.detach() for name, value in params.items()}
    rest: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name.startswith("optimizers/") and name.split("/")[1] in params and value.dim() > 0:
            if len(value) != own:
                raise ValueError(f"{name} has {len(value)} rows for {own} points: it cannot be saved in shards")
            mine[name] = value
        elif "/densifier/" in name and value.dim() > 0 and len(value) == own:
            mine[f"densifier/{name.split('/densifier/')[1]}"] = value
        else:
            rest[name] = value
    # A rank without points, or whose points had no gradients yet, has no moments and statistics: write zeros.
    columns: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for part in all_gather_objects({name: (tuple(v.shape[1:]), v.dtype) for name, v in mine.items()}, world):
        columns.update(part)
    device, first, total = next(iter(params.values())).device, sum(counts[: world.rank]), sum(counts)
    rows: dict[str, Tensor | Rows] = {}
    for name, (shape, dtype) in columns.items():
        value = mine[name] if name in mine else torch.zeros((own, *shape), dtype=dtype, device=device)
        rows[name] = Rows(value, first, total)
    marker: dict[str, Any] = {"counts": counts}
    marker["shapes"] = {name: [total, *value.shape[1:]] for name, value in params.items()}
    if shard_index is not None and shard_index.places is not None:
        shard_index.check(own, world)
        rows[PLACES] = Rows(shard_index.places, first, total)
        marker["placement"] = shard_index.placement.kind
    return {**rest, **rows}, marker


def without_points(pipeline: Mapping[str, Any], marker: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pipeline's state for the .ckpt, with the marker in place of the points."""
    rest = {name: value for name, value in pipeline.items() if not name.startswith(POINTS)}
    return {**rest, SHARDS: dict(marker)}


# ---- which rows are whose ----


def counts_in(pipeline: Mapping[str, Any]) -> list[int]:
    """Return the number of points of each rank that wrote a pipeline's state; one number if they were replicated."""
    if SHARDS in pipeline:
        return [int(count) for count in pipeline[SHARDS]["counts"]]
    return [len(pipeline[POINTS + POSITION])]


def shapes_in(pipeline: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes in a pipeline's state, with the full shapes of points."""
    marker = pipeline.get(SHARDS, {"shapes": {}})
    shapes = {key: tuple(value.shape) for key, value in pipeline.items() if isinstance(value, Tensor)}
    return {**shapes, **{f"{POINTS}{name}": tuple(shape) for name, shape in marker["shapes"].items()}}


# ---- going on ----


@dataclass(frozen=True)
class SavedPoints:
    """Points of a sharded checkpoint, in its state folder."""

    tensors: "SavedTensors"
    shapes: Mapping[str, tuple[int, ...]]

    @staticmethod
    def of(pipeline: Mapping[str, Any], models: Path | None) -> "SavedPoints":
        """Open the points that a pipeline's state refers to.

        Only the sizes of all files are checked. Their contents are compared with the manifest when training resumes.

        Args:
            pipeline: of a .ckpt, with a marker.
            models: the folder of the .ckpt; None if unknown.

        Raises:
            InputError: the state folder is missing, or (`DamagedCheckpoint`) one of its files is missing or incomplete.
        """
        marker = pipeline[SHARDS]
        if models is None:
            raise InputError(
                "The Gaussians of this checkpoint lie in shards, in a folder next to it, and nothing says where it was "
                "read from. Load it through nerfstudio's commands and the config.yml of its run."
            )
        folder = states_folder(models) / marker["state"]
        if not folder.is_dir():
            raise InputError(
                f"The Gaussians of the checkpoint in {models} are missing: they lie in shards, which belong into "
                f"{folder}. Move or copy a run with its whole folder."
            )
        if found := cut_short(folder, read_manifest(folder)):
            raise DamagedCheckpoint("; ".join(found))
        from ns_multigpu.plugin.checkpoint.saved_tensors import SavedTensors

        tensors = SavedTensors(folder)
        shapes = {name: tuple(shape) for name, shape in marker["shapes"].items()}
        names = [name for name in tensors.names if name.startswith("model/")]
        there = {name.removeprefix("model/"): tensors.shape(name) for name in names}
        if shapes != there:
            raise DamagedCheckpoint(f"{folder} holds other Gaussians than its checkpoint says: {there}, not {shapes}")
        return SavedPoints(tensors, shapes)

    def read(
        self, names: Sequence[str], rows: range | Tensor, *, device: Any = "cpu", dtype: Any = None
    ) -> dict[str, Tensor]:
        """Return rows of parameters, on `device`, read one block at a time."""
        return {name: self.tensors.rows_of(f"model/{name}", rows, device, dtype) for name in names}


def load_points(
    load: Callable[[dict[str, Any]], None],
    params: torch.nn.ParameterDict,
    pipeline: Mapping[str, Any],
    models: Path | None,
    rows: range | Tensor,
    device: torch.device,
) -> None:
    """Load a pipeline's state with only `rows` of its points.

    Sharded points are read straight into the parameters, without a second copy on host or device.

    Args:
        load: loads an ordinary state.
        params: the model's point parameters; replaced.
        pipeline: of a .ckpt, with a marker or with all points.
        models: the folder of the .ckpt.

    Raises:
        InputError: see `SavedPoints.of`.
    """
    if SHARDS not in pipeline:
        load({k: rows_of(v, rows) if k.startswith(POINTS) else v for k, v in pipeline.items()})
        return
    points = SavedPoints.of(pipeline, models)
    columns = {name: param.dtype for name, param in params.items()}
    empty = {f"{POINTS}{name}": torch.empty((0, *shape[1:])) for name, shape in points.shapes.items()}
    load({**{key: value for key, value in pipeline.items() if key != SHARDS}, **empty})
    for name, dtype in columns.items():
        value = points.read([name], rows, device=device, dtype=dtype)[name]
        params[name] = torch.nn.Parameter(value)


def learn_placement(placement: Placement, pipeline: Mapping[str, Any], models: Path | None) -> None:
    """Load a placement's state from a pipeline's state of the same placement.

    Call it before rows are read: the placement may assign rows by its state.

    Args:
        pipeline, models: see `load_points`.

    Raises:
        InputError: see `SavedPoints.of`.
    """
    written = pipeline.get(SHARDS, {}).get("placement")
    if written is None or written != placement.kind:
        return
    tensors = SavedPoints.of(pipeline, models).tensors
    known = tensors.read([name for name in tensors.names if name.startswith(PLACEMENT_STATE)])
    placement.load_state({name[len(PLACEMENT_STATE) :]: value for name, value in known.items()})


class OwnMoments(Mapping[str, Any]):
    """Moments in the form that `put_optimizers` takes, reduced to this rank's rows of the point parameters.

    Each is read on access, on the device, so only one moment at a time exists twice.

    Args:
        saved: full tensors by name, or their reader.
        plain: plain values by name.
        groups: the names of the point parameters.
        total: points of the full model.
        rows: this rank's.
    """

    def __init__(
        self,
        saved: "SavedTensors | Mapping[str, Any]",
        plain: Mapping[str, Any],
        groups: Sequence[str],
        total: int,
        rows: range | Tensor,
        device: torch.device,
    ) -> None:
        self._saved, self._plain = saved, dict(plain)
        self._groups, self._total, self._rows, self._device = set(groups), total, rows, device
        names = list(saved) if isinstance(saved, Mapping) else saved.names
        self._names = [name for name in names if name.startswith("optimizers/")]

    def __len__(self) -> int:
        return len(self._names) + len(self._plain)

    def __iter__(self) -> Iterator[str]:
        return iter([*self._names, *self._plain])

    def __getitem__(self, name: str) -> Any:
        if name in self._plain:
            return self._plain[name]
        saved, rows = self._saved, self._rows
        shape = tuple(getattr(saved[name], "shape", ())) if isinstance(saved, Mapping) else saved.shape(name)
        if name.split("/")[1] not in self._groups or not shape or shape[0] != self._total:
            return saved[name] if isinstance(saved, Mapping) else saved.read([name])[name]
        if isinstance(saved, Mapping):
            return rows_of(saved[name], rows).to(self._device)
        return saved.rows_of(name, rows, self._device)


def put_statistics(
    state: dict[str, Any],
    saved: "SavedTensors",
    total: int,
    rows: range | Tensor,
    sharded: bool,
    world: World,
    device: torch.device,
) -> list[str]:
    """Load densification statistics into `state`, if the checkpoint or the current model is sharded.

    Args:
        total: points of the full model.
        rows: this rank's; all of them unless the model is `sharded` now.

    Returns:
        the remaining names, for `training_state.put_densifier`.

    Raises:
        InputError: a statistic without a merge rule differs between the ranks that wrote it.
    """
    left: list[str] = []
    merged: dict[str, Tensor] = {}
    for name in saved.names:
        if name.startswith("densifier/"):
            kind = name.removeprefix("densifier/")
            if not sharded and kind in MERGED and not world.is_main:
                # Replicas take the sum (or maximum) over ranks: rank 0 holds the values, the others zeros.
                state[kind] = torch.zeros(saved.shape(name), dtype=saved.dtype(name), device=device)
            else:
                state[kind] = saved.rows_of(name, rows, device)
        elif sharded and "/densifier/" in name and saved.shape(name)[:1] == (total,):
            kind = name.split("/densifier/")[1]
            part = saved.rows_of(name, rows, device)
            if kind not in merged:
                merged[kind] = part
            elif kind in MERGED:
                merged[kind] = MERGED[kind](merged[kind], part)
            elif not torch.equal(merged[kind], part):
                raise InputError(
                    f"The densifier's {kind!r} differs between the workers that wrote the checkpoint, and cannot be "
                    "carried to points that are spread over workers."
                )
        else:
            left.append(name)
    state.update(merged)
    return left
