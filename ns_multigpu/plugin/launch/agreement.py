"""Check that all ranks were started alike: with the same options, code and versions."""

import dataclasses
import enum
import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import cuda_ext
import ns_multigpu
import strategies
from ns_multigpu.core.dist.collectives import all_gather_objects
from ns_multigpu.core.dist.world import World
from ns_multigpu.plugin.faults.errors import InputError

Manifest = dict[str, str]
"""Start of a rank: "option ...", "version ..." and "source ..." mapped to a short text each."""

_PACKAGES: tuple[ModuleType, ...] = (ns_multigpu, strategies, cuda_ext)
_SOURCES = (".py", ".cpp", ".h", ".cu", ".cuh")
_DISTRIBUTIONS = ("torch", "nerfstudio", "gsplat", "numpy")

_OWN = re.compile(
    # What belongs to one machine or one rank, or to rank 0 alone.
    r"machine\.(?!seed$|device_type$)|timestamp$|viewer\.|vis$|logging\.(?!steps_per_log$)|(?:experiment|project)_name$"
    r"|prompt$|base_dir$"
)
_OF_THE_START = re.compile(
    # Of a process and its files, and how a run is begun, followed and looked at.
    r"machine\.(?!seed$)|timestamp$|viewer\.|vis$|logging\.|(?:experiment|project|method)_name$|prompt$|.*base_dir$"
    r"|load_|.*(?:data|_dir|_target|load_ply)$|start_over$|verbose$|max_restarts$|stall_|save_"
    r"|steps_per_|keep_|eval_at_|fused_|pipeline\.datamanager\.offset$"
)
_PLACES = re.compile(r"(?:.*\.)?(?:data|output_dir|relative_model_dir|load_dir|load_checkpoint|load_config|load_ply)$")
"""Paths: machines may keep the same thing in different places, so only whether one is given is compared."""


def manifest_of(config: Any) -> Manifest:
    """Return this process's options and versions.

    Args:
        config: the run's configuration, a dataclass.
    """
    result = {f"option {_flag(name)}": value for name, value in _options(config).items() if not _OWN.match(name)}
    result["version python"] = platform.python_version()
    for name in _DISTRIBUTIONS:
        result[f"version {name}"] = metadata.version(name)
    for package in _PACKAGES:
        folder = Path(str(package.__file__)).parent
        for path in sorted(folder.rglob("*")):
            if path.suffix in _SOURCES and path.is_file():
                text = path.read_bytes()
                result[f"source {package.__name__}/{path.relative_to(folder)}"] = hashlib.sha1(text).hexdigest()[:12]
    return result


def options_of(config: Any) -> dict[str, str]:
    """Return the options that influence a run's result, as typed, with their values as text; of the data, the path.

    Args:
        config: the run's configuration, a dataclass.
    """
    options = {name: value for name, value in _options(config).items() if not _OF_THE_START.match(name)}
    if options.get("max_num_images", "None") != "None":
        options.pop("max_num_iterations", None)  # it follows
    datamanager = config.pipeline.datamanager
    data = Path(datamanager.data or datamanager.dataparser.data)
    if data != Path():  # a city has none
        options["data"] = str(data.resolve())
    return {_flag(name): value for name, value in options.items()}


def _options(config: Any) -> dict[str, str]:
    options: dict[str, str] = {}
    _flatten(config, "", options)
    return options


def differences(manifests: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a line for each difference between ranks.

    Args:
        manifests: by rank.
    """
    lines: list[str] = []
    for name in sorted({key for manifest in manifests for key in manifest}):
        values: dict[str, list[int]] = {}
        for rank, manifest in enumerate(manifests):
            values.setdefault(manifest.get(name, "absent"), []).append(rank)
        if len(values) > 1:
            lines.append(f"{name}: " + "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in values.items()))
    return lines


def refuse_differences(manifests: Sequence[Mapping[str, str]]) -> None:
    """Raise if ranks differ.

    Args:
        manifests: by rank.

    Raises:
        InputError: they do; it names what differs and the ranks.
    """
    lines = differences(manifests)
    if lines:
        raise InputError(
            "The ranks were not started alike. Give every machine the same command, and the same versions of the same "
            "packages:\n  " + "\n  ".join(lines)
        )


def check_same_start(config: Any, world: World) -> None:
    """Compare this rank with all others. Every rank calls it.

    Args:
        config: this rank's configuration.
        world: the ranks.

    Raises:
        InputError: on every rank, that they differ.
    """
    mine = manifest_of(config) if world.size > 1 else {}
    digests = all_gather_objects(digest_of(mine), world)
    if len(set(digests)) > 1:
        refuse_differences(all_gather_objects(mine, world))


def digest_of(manifest: Manifest) -> str:
    """Return a short text that differs if manifests differ."""
    return hashlib.sha1(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _flatten(value: Any, name: str, into: dict[str, str]) -> None:
    prefix = f"{name}." if name else ""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _flatten(getattr(value, field.name, None), prefix + field.name, into)
    elif isinstance(value, Mapping):
        for key in value:
            _flatten(value[key], f"{prefix}{key}", into)
    elif isinstance(value, (list, tuple)):
        into[name] = str([_text(item) for item in value])
    elif _PLACES.match(name):
        into[name] = "not given" if value in (None, Path()) else "given"
    else:
        into[name] = _text(value)


def _text(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, type) or callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    if value is None or isinstance(value, (str, int, float, bool, Path)):
        return str(value)
    return type(value).__qualname__


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
