"""Names of modules that have moved, for the config.yml of older runs: it names classes by where they lay."""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "city_dataparser": "capture.city_dataparser",
    "datamanager": "capture.datamanager",
    "pipeline": "train.pipeline",
    "splat_model": "model.splat_model",
    "splat_options": "model.options",
    "trainer": "train.trainer",
    "radiance.trainer": "train.trainer",
    "trainer_config": "train.config",
}
"""From a module's old name in this package to its new one."""

RENAMED = {"RadianceTrainer": "DistributedTrainer"}
"""From a class's old name to its new one."""

_PACKAGE = __name__.rpartition(".")[0]


class _OldNames(MetaPathFinder, Loader):
    """Finds a module by its old name."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if _short(fullname) in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        there = import_module(f"{_PACKAGE}.{MOVED[_short(module.__name__)]}")
        vars(module).update({name: value for name, value in vars(there).items() if not name.startswith("__")})
        vars(module).update({old: vars(there)[new] for old, new in RENAMED.items() if new in vars(there)})


def _short(fullname: str) -> str:
    """Return a module's name within this package."""
    return fullname.removeprefix(f"{_PACKAGE}.")


def know_old_names() -> None:
    """From now on modules of this package are found by their old names, too."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.append(_OldNames())
