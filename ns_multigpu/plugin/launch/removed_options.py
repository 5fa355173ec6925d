"""Options that earlier versions had: in the config.yml of a run that resumes, and on the command line.

A config.yml is read in three places of nerfstudio's. So the options that it names and that are gone are taken out as it
is read, and accounted for once, where the run resumes. Tools that only show a run have no use for them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.option_help import given

_FOUND = "_removed_options"
"""Name of a config's attribute that holds the removed options found in its file, by name; never saved."""
_NO_STEP_DEPENDS = "only the time of a step depended on it"
_SENT = "cells exchange pixels, which was the default"
_ABLATION = "the strategy always uses its default; benchmarks/scaling/locality_sim.py compares the others"
_BASELINE = "it is a baseline of benchmarks/baselines: see docs/methods/nerfacto-xl.md#baselines"

REMOVED_OPTIONS: dict[str, str | None] = {
    "pipeline.exchange": _SENT,
    "pipeline.gradients": None,
    "pipeline.overlap": None,
    "pipeline.stages": None,
    "pipeline.model.implementation": "fields run in torch, and hash grids in an operator of this package",
    "pipeline.model.selective_adam": "every Gaussian takes Adam's step",
    "pipeline.locality.placement": _ABLATION,
    "pipeline.locality.within": _ABLATION,
    "pipeline.locality.hierarchy": _ABLATION,
    "pipeline.locality.assignment": _ABLATION,
    "pipeline.locality.balance": _ABLATION,
}
"""Replacement of each removed option whose value changed the run; None if no value changed the results."""
REMOVED_VALUES: dict[tuple[str, str], str] = {
    ("pipeline.model.spread", "mega"): _BASELINE,
    ("pipeline.model.spread", "block"): _BASELINE,
    ("pipeline.model.exposure", "affine"): "gain corrects exposure with three numbers a view",
}
"""Removed values of options, and their replacements."""
_CAP, _OLD_CAP = "pipeline.model.max_gaussians", "max_gs_num"
"""The cap of both densifiers, and the name that MCMC's had; the command line knows both."""
_DEFAULTS: Mapping[str, Any] = {
    "pipeline.exchange": "pixels",
    "pipeline.gradients": "atomics",
    "pipeline.overlap": 1,
    "pipeline.stages": 1,
    "pipeline.model.selective_adam": False,
    "pipeline.locality.placement": "metis",
    "pipeline.locality.within": "dealt",
    "pipeline.locality.hierarchy": True,
    "pipeline.locality.assignment": "search",
    "pipeline.locality.balance": True,
}


def take_out(config: Any) -> None:
    """Take the removed options out of a configuration that was read from a file; see `account_for`.

    Args:
        config: a `DistributedTrainerConfig`, whose parts have all been read.
    """
    found = dict[str, Any]()
    for name in REMOVED_OPTIONS:
        part, last = _part(config, name)
        if part is not None and last in vars(part) and not hasattr(type(part), last):
            found[name] = vars(part).pop(last)
    model, _ = _part(config, _CAP)
    if model is not None and _OLD_CAP in vars(model):
        cap = vars(model).pop(_OLD_CAP)
        if model.densifier == "mcmc":
            model.max_gaussians = cap
    for name, value in REMOVED_VALUES:
        part, last = _part(config, name)
        if part is not None and vars(part).get(last) == value:
            found[name] = value
    if found:
        vars(config)[_FOUND] = found


def account_for(config: Any) -> str | None:
    """Return the line on removed options in a run's config.yml; None if it has none.

    Raises:
        InputError: the run had one of them at a value that changed the run.
    """
    found: dict[str, Any] = vars(config).pop(_FOUND, {})
    refused = [text for name, value in found.items() if (text := _refusal(name, value))]
    if refused:
        raise InputError("The run's config.yml has options that are gone:\n  " + "\n  ".join(refused))
    if not found:
        return None
    names = ", ".join(name.replace("_", "-") for name in found)
    return f"The run's config.yml has options that are gone and changed nothing of its results: {names}."


def refuse_removed(words: Sequence[str]) -> None:
    """Raise if a command line gives a removed option or value.

    Args:
        words: the command line behind the method's name.

    Raises:
        InputError: it does; the message says what takes its place.
    """
    for name, value in given(words).items():
        option = "--" + name.replace("_", "-")
        if name in REMOVED_OPTIONS:
            instead = REMOVED_OPTIONS[name] or _NO_STEP_DEPENDS
            raise InputError(f"{option} is gone: {instead}. Leave it out.")
        if (name, value) in REMOVED_VALUES:
            raise InputError(f"{option} {value} is gone: {REMOVED_VALUES[name, value]}.")


def _refusal(name: str, value: Any) -> str | None:
    """Return why a run with this value of a removed option cannot resume; None if it can."""
    last = name.rpartition(".")[2]
    if name not in REMOVED_OPTIONS:
        return f"{name} {value}: {REMOVED_VALUES[name, value]}."
    instead = REMOVED_OPTIONS[name]
    if instead is None or value == _DEFAULTS[name]:
        return None
    return f"{name} {value}: {instead}. To go on so, take the line `{last}: {value}` out of config.yml."


def _part(config: Any, name: str) -> tuple[Any, str]:
    """Return the part of a configuration that has an option, None if it has no such part; and the option's own name."""
    *parents, last = name.split(".")
    for parent in parents:
        config = vars(config).get(parent) if hasattr(config, "__dict__") else None
    return config, last
