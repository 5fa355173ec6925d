"""A config.yml of an older run is read, wherever its classes are by now."""

import subprocess
import sys

import pytest
import yaml

NAMED = [
    "cells.options.PixelOptions",
    "locality.options.LocalityOptions",
    "plugin.capture.city_dataparser.CityDataParser",
    "plugin.capture.city_dataparser.CityDataParserConfig",
    "plugin.capture.datamanager.DistributedDataManager",
    "plugin.capture.datamanager.DistributedDataManagerConfig",
    "plugin.city_dataparser.CityDataParserConfig",
    "plugin.datamanager.DistributedDataManagerConfig",
    "plugin.model.options.SplatModelConfig",
    "plugin.model.splat_model.SplatModel",
    "plugin.pipeline.DistributedPipelineConfig",
    "plugin.radiance.config.RadianceTrainerConfig",
    "plugin.radiance.datamanager.RadianceDataManager",
    "plugin.radiance.datamanager.RadianceDataManagerConfig",
    "plugin.radiance.model.NerfactoXLModel",
    "plugin.radiance.model.NerfactoXLModelConfig",
    "plugin.radiance.pipeline.RadiancePipeline",
    "plugin.radiance.pipeline.RadiancePipelineConfig",
    "plugin.radiance.trainer.RadianceTrainer",
    "plugin.splat_model.SplatModel",
    "plugin.splat_options.SplatModelConfig",
    "plugin.train.config.DistributedTrainerConfig",
    "plugin.train.pipeline.DistributedPipeline",
    "plugin.train.pipeline.DistributedPipelineConfig",
    "plugin.train.pipeline.LocalityPipelineConfig",
    "plugin.train.pipeline.PixelPipelineConfig",
    "plugin.train.terminal.TerminalLog",
    "plugin.train.trainer.DistributedTrainer",
    "plugin.trainer.DistributedTrainer",
    "plugin.trainer_config.DistributedTrainerConfig",
]
"""All that config.yml files of commit 00c21f4 and earlier name. Frozen: a name that moves gets a line in `_moved`."""


@pytest.mark.parametrize("name", NAMED)
def test_old_module_names_are_found(name: str) -> None:
    found = yaml.load(f"!!python/name:ns_multigpu.{name} ''", Loader=yaml.Loader)
    assert isinstance(found, type)


def test_a_module_that_was_never_there_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        __import__("ns_multigpu.plugin.trainers")


def test_old_names_are_found_in_a_new_process() -> None:
    """A process that has imported nothing of ours."""
    program = "from ns_multigpu.plugin.pipeline import DistributedPipelineConfig as old; print(old.__module__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "ns_multigpu.plugin.splats.pipeline", done.stderr
