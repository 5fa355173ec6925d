"""Checkpoints name the kind of their points, and are refused by a run of another."""

from pathlib import Path
from typing import get_args

import pytest
import torch

from ns_multigpu.core.dist.world import World
from ns_multigpu.core.schema import names
from ns_multigpu.methods import splatfacto_batch
from ns_multigpu.plugin.checkpoint.objective_kind import PRIMITIVE, check_kind, kind_in
from ns_multigpu.plugin.checkpoint.verify import checkpoints_in, read_checkpoint_file
from ns_multigpu.plugin.export.ply import export_ply
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.primitives.registry import PRIMITIVES, PrimitiveName, all_parameters
from tests.lib.training_run import follow

OTHER = "a later kind"


def test_the_option_can_be_each_kind_and_methods_have_rates_for_all_parameters() -> None:
    assert set(get_args(PrimitiveName)) == set(PRIMITIVES)
    for kind in PRIMITIVES.values():
        assert set(names(kind.schema)) <= set(splatfacto_batch.config.optimizers)
    assert len(set(names(all_parameters()))) == len(all_parameters())


def test_a_state_without_a_name_is_of_3d_gaussians() -> None:
    check_kind({}, "3dgs", "there")
    with pytest.raises(
        InputError, match=r"there is a checkpoint of 3D Gaussians \(3dgs\).*another primitive.*later kind"
    ):
        check_kind({}, OTHER, "there")


def test_a_checkpoint_of_another_kind_is_refused_by_training_and_exporter(tmp_path: Path, capture: Path) -> None:
    world = World.single()
    trainer = follow(world, capture, tmp_path / "first", {"pipeline.model.num_downscales": 0}, 1, 1, double=False)
    models = tmp_path / "saved"
    models.mkdir()
    assert trainer.checkpoints.write(0, models) == ""
    (path,) = checkpoints_in(models)
    content = read_checkpoint_file(path)
    assert kind_in(content["pipeline"]) == "3dgs"
    content["pipeline"][PRIMITIVE] = OTHER
    with pytest.raises(InputError, match=rf"another primitive \({OTHER}\), and this run is of 3D Gaussians"):
        trainer.pipeline.load_pipeline(content["pipeline"], 0)
    alone = tmp_path / "alone"
    alone.mkdir()
    content.pop("ns_multigpu")  # the training state, whose manifest would notice
    content |= {"optimizers": {}}
    torch.save(content, alone / path.name)
    with pytest.raises(
        InputError,
        match=rf"step-000000000.ckpt is a checkpoint of another primitive.*--pipeline.model.primitive {OTHER}",
    ):
        follow(world, capture, tmp_path / "second", {"load_dir": alone}, 2, 1, double=False)
    with pytest.raises(InputError, match=rf"{OTHER}.*which have no place in PLY"):
        export_ply(alone / path.name, tmp_path / "points.ply")
