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
    "ns_multigpu.plugin.pipeline": "ns_multigpu.plugin.train.pipeline",
    "ns_multigpu.plugin.splat_model": "ns_multigpu.plugin.model.splat_model",
    "ns_multigpu.plugin.splat_options": "ns_multigpu.plugin.model.options",
    "ns_multigpu.plugin.trainer": "ns_multigpu.plugin.train.trainer",
    "ns_multigpu.plugin.radiance.config": "ns_multigpu.plugin.radiance.run.config",
    "ns_multigpu.plugin.radiance.datamanager": "ns_multigpu.plugin.radiance.data.datamanager",
    "ns_multigpu.plugin.radiance.model": "ns_multigpu.plugin.radiance.field.model",
    "ns_multigpu.plugin.radiance.pipeline": "ns_multigpu.plugin.radiance.run.pipeline",
    "ns_multigpu.plugin.radiance.trainer": "ns_multigpu.plugin.train.trainer",
    "ns_multigpu.plugin.trainer_config": "ns_multigpu.plugin.train.config",
}
"""From the old name of a module or package to its new one. A package's modules move along, unless they are listed.

A name on the right may itself be an old one: the import of it is led on. A module whose name is now a package's cannot
be listed: that package has to import what older runs name.
"""

RENAMED = {"RadianceTrainer": "DistributedTrainer"}
"""From the old name of a class to its new one, in modules that are found by an old name."""


def new_name(name: str) -> str | None:
    """Return what a module's old name became; None if it is not listed."""
    longest = max((old for old in MOVED if f"{name}.".startswith(f"{old}.")), key=len, default=None)
    return None if longest is None else MOVED[longest] + name[len(longest) :]


class _OldNames(MetaPathFinder, Loader):
    """Finder of modules by their old names, asked after all others, so that a module that exists wins."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if new_name(fullname) is not None or any(old.startswith(f"{fullname}.") for old in MOVED):
            return ModuleSpec(fullname, self, is_package=True)  # modules may have been in it
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = new_name(module.__name__)
        if name is not None:  # else a package that is gone, and some of whose modules are in other packages
            there = vars(import_module(name))
            vars(module).update({name: value for name, value in there.items() if not name.startswith("__")})
            vars(module).update({old: there[new] for old, new in RENAMED.items() if new in there})


def know_old_names() -> None:
    """Find modules by their old names, too, in this process."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.append(_OldNames())
