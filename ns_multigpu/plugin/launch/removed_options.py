"""Options that earlier versions had: in the config.yml of a run that resumes, and on the command line.

A config.yml is read in three places of nerfstudio's. So the options that it names and that are gone are taken out as it
is read, and accounted for once, where the run resumes. Tools that only show a run have no use for them.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.option_help import given

_FOUND = "_removed_options"
"""Name of a config's attribute that holds the removed options found in its file, by name; never saved."""
_ANY = None
"""In place of a default: no value changed the results."""
_TIME = "only the time of a step depended on it"
_ABLATION = (
    "the strategy always uses its default; the repository's benchmarks/scaling/locality_sim.py compares the others"
)
_BASELINE = "it is a baseline of the repository's benchmarks/baselines: see docs/methods/nerfacto-xl.md#baselines"

REMOVED_OPTIONS: dict[str, tuple[str, Any]] = {
    "pipeline.exchange": ("cells exchange pixels, which was the default", "pixels"),
    "pipeline.gradients": (_TIME, _ANY),
    "pipeline.overlap": (_TIME, _ANY),
    "pipeline.stages": (_TIME, _ANY),
    "pipeline.model.implementation": ("fields run in torch, and hash grids in an operator of this package", _ANY),
    "pipeline.model.selective_adam": ("every Gaussian takes Adam's step", False),
    "pipeline.locality.placement": (_ABLATION, "metis"),
    "pipeline.locality.within": (_ABLATION, "dealt"),
    "pipeline.locality.hierarchy": (_ABLATION, True),
    "pipeline.locality.assignment": (_ABLATION, "search"),
    "pipeline.locality.balance": (_ABLATION, True),
}
"""Of each removed option what takes its place, and the default, with which a run resumes."""
REMOVED_VALUES: dict[tuple[str, str], str] = {
    ("pipeline.model.spread", "mega"): _BASELINE,
    ("pipeline.model.spread", "block"): _BASELINE,
    ("pipeline.model.exposure", "affine"): "gain corrects exposure with three numbers a view",
}
"""Removed values of options, and their replacements."""


def take_out(config: Any) -> None:
    """Take the removed options out of a configuration that was read from a file; see `account_for`.

    Args:
        config: a `DistributedTrainerConfig`, whose parts have all been read.
    """
    found = dict[str, Any]()
    for name in REMOVED_OPTIONS:
        part, last = _part(config, name)
        if last in vars(part) and not hasattr(type(part), last):
            found[name] = vars(part).pop(last)
    model, _ = _part(config, "pipeline.model.max_gaussians")
    cap = vars(model).pop("max_gs_num", None)  # what MCMC's cap was called; the command line knows both names
    if cap is not None and model.densifier == "mcmc":
        model.max_gaussians = cap
    for name, value in REMOVED_VALUES:
        part, last = _part(config, name)
        if vars(part).get(last) == value:
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
            raise InputError(f"{option} is gone: {REMOVED_OPTIONS[name][0]}. Leave it out.")
        if (name, value) in REMOVED_VALUES:
            raise InputError(f"{option} {value} is gone: {REMOVED_VALUES[name, value]}.")


def _refusal(name: str, value: Any) -> str | None:
    """Return why a run with this value of a removed option cannot resume; None if it can."""
    if name not in REMOVED_OPTIONS:
        return f"{name} {value}: {REMOVED_VALUES[name, value]}."
    instead, default = REMOVED_OPTIONS[name]
    if default in (_ANY, value):
        return None
    line = f"{name.rpartition('.')[2]}: {value}"
    return f"{name} {value}: {instead}. To go on so, take the line `{line}` out of config.yml."


def _part(config: Any, name: str) -> tuple[Any, str]:
    """Return the part of a configuration that has an option, an empty one if it has no such part; and the option's own
    name."""
    *parents, last = name.split(".")
    for parent in parents:
        config = vars(config).get(parent)
        config = config if hasattr(config, "__dict__") else SimpleNamespace()
    return config, last
