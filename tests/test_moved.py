"""A config.yml of an older run is read, wherever its classes are by now."""

import pickle
import subprocess
import sys

import pytest
import yaml

from ns_multigpu import _moved
from ns_multigpu.dataparsers import city
from ns_multigpu.methods import nerfacto_xl, splatfacto_batch, splatfacto_locality, splatfacto_pixel

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


CONFIGS = {
    "batch": splatfacto_batch, "locality": splatfacto_locality, "pixel": splatfacto_pixel,
    "nerfacto-xl": nerfacto_xl, "city": city,
}  # fmt: skip
OLD = "ns_multigpu.gone"


@pytest.mark.parametrize("config", [one.config for one in CONFIGS.values()], ids=CONFIGS.keys())
@pytest.mark.parametrize("listed", ["modules", "package", "twice"])
def test_every_module_may_move(config: object, listed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of a package that is gone; by a line each, by one for the package, and by two moves."""
    text = yaml.dump(config)
    old = text.replace(":ns_multigpu.", f":{OLD}.{listed}.")
    assert old != text
    modules = [name for name in sys.modules if name.startswith("ns_multigpu.") and OLD not in name]
    if listed == "package":
        monkeypatch.setitem(_moved.MOVED, f"{OLD}.{listed}", "ns_multigpu")
    for name in modules if listed != "package" else ():
        there = f"{OLD}.{listed}.{name.removeprefix('ns_multigpu.')}"
        if listed == "twice":
            monkeypatch.setitem(_moved.MOVED, there, f"{OLD}.between.{name}")
            there = f"{OLD}.between.{name}"
        monkeypatch.setitem(_moved.MOVED, there, name)
    assert yaml.load(old, Loader=yaml.Loader) == config


def test_a_module_that_was_never_there_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        __import__("ns_multigpu.plugin.trainers")


def test_old_names_are_found_in_a_new_process() -> None:
    """A process that has imported nothing of ours."""
    from ns_multigpu.locality.options import LocalityOptions

    stored = pickle.dumps(LocalityOptions()).replace(b"ns_multigpu.locality.options", b"ns_multigpu.locality.optionz")
    program = f"""
import ns_multigpu._moved as moved
moved.MOVED["ns_multigpu.locality.optionz"] = "ns_multigpu.locality.options"
import pickle
print(type(pickle.loads({stored!r})).__module__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "ns_multigpu.locality.options", done.stderr
