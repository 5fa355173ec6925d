"""Old names of modules that have moved, for the config.yml of older runs: it names classes by their modules."""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "ns_multigpu.plugin.city_dataparser": "ns_multigpu.plugin.capture.city_dataparser",
    "ns_multigpu.plugin.datamanager": "ns_multigpu.plugin.capture.datamanager",
    "ns_multigpu.plugin.pipeline": "ns_multigpu.plugin.splats.pipeline",
    "ns_multigpu.plugin.splat_model": "ns_multigpu.plugin.model.splat_model",
    "ns_multigpu.plugin.splat_options": "ns_multigpu.plugin.model.options",
    "ns_multigpu.plugin.trainer": "ns_multigpu.plugin.run.trainer",
    "ns_multigpu.plugin.radiance.config": "ns_multigpu.plugin.radiance.run.config",
    "ns_multigpu.plugin.radiance.datamanager": "ns_multigpu.plugin.radiance.data.datamanager",
    "ns_multigpu.plugin.radiance.model": "ns_multigpu.plugin.radiance.field.model",
    "ns_multigpu.plugin.radiance.pipeline": "ns_multigpu.plugin.radiance.run.pipeline",
    "ns_multigpu.plugin.radiance.trainer": "ns_multigpu.plugin.run.trainer",
    "ns_multigpu.plugin.train": "ns_multigpu.plugin.run",
    "ns_multigpu.plugin.train.aggregate": "ns_multigpu.plugin.splats.aggregate",
    "ns_multigpu.plugin.train.config": "ns_multigpu.plugin.splats.config",
    "ns_multigpu.plugin.train.pipeline": "ns_multigpu.plugin.splats.pipeline",
    "ns_multigpu.plugin.train.terminal": "ns_multigpu.plugin.run.terminal",
    "ns_multigpu.plugin.train.trainer": "ns_multigpu.plugin.run.trainer",
    "ns_multigpu.plugin.trainer_config": "ns_multigpu.plugin.splats.config",
}
"""From the old name of a module, or of a package that is gone, to its new one."""

RENAMED = {"RadianceTrainer": "DistributedTrainer"}
"""From the old name of a class to its new one, in modules that are found by an old name."""


class _OldNames(MetaPathFinder, Loader):
    """Finder of modules by their old names, asked after all others, so that a module that exists wins."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_package = any(name.startswith(f"{fullname}.") for name in MOVED)
        return ModuleSpec(fullname, self, is_package=is_package) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        there = vars(import_module(MOVED[module.__name__]))
        vars(module).update({name: value for name, value in there.items() if not name.startswith("__")})
        vars(module).update({old: there[new] for old, new in RENAMED.items() if new in there})


def know_old_names() -> None:
    """Find modules by their old names, too, in this process."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.append(_OldNames())
