"""Options that `--help` shows only if they have an effect.

A method's options are those of its dataclasses. Some have an effect only with one value of another option: those of one
primitive, of MCMC, of one strategy. They are marked with `Only` in their declaration. `--help` omits them unless the
command line gives that value, as in `ns-train splatfacto-batch --help --pipeline.model.primitive 2dgs`. A command line
without `--help` may name all of them; `without_effect` names those of the model that do nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tyro

from ns_multigpu.primitives.registry import PRIMITIVES

_HELP = {"-h", "--help", "-H", "--help-verbose"}
_PRIMITIVE = "pipeline.model.primitive"


@dataclass(frozen=True, init=False)
class Only:
    """Mark of an option, `Annotated[float, Only(option, *values)]`, that has an effect only with values of another.

    Attributes:
        option: the other's name on the command line, with underscores and without leading dashes.
        values: those with which the marked option has an effect; none if any value but a default None or 0.0 does.
    """

    option: str
    values: tuple[str, ...]

    def __init__(self, option: str, *values: str) -> None:
        object.__setattr__(self, "option", option)
        object.__setattr__(self, "values", values)


def given(words: Sequence[str]) -> dict[str, str]:
    """Return the options that a command line gives, by name as in `Only`, and their first values."""
    found = dict[str, str]()
    for place, word in enumerate(words):
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            following = words[place + 1 : place + 2]
            found[flag.replace("-", "_")] = value if equals else "".join(following)
    return found


def show_what_applies(config: Any, words: Sequence[str]) -> None:
    """Hide from a method's `--help` the options and optimizers that have no effect; nothing without `--help`.

    Changes the annotations of the config's classes, which tyro reads: only for a process that shows help and ends.

    Args:
        config: the method's default `DistributedTrainerConfig`; its optimizers are reduced to those shown.
        words: the command line behind the method's name.
    """
    if not _HELP & set(words):
        return
    asked = given(words)
    if asked.get("recipe") == "best":
        asked = {"pipeline.model.densifier": "mcmc", "pipeline.model.exposure": "auto", **asked}
    for part in (config.pipeline, config.pipeline.model):
        for kind in type(part).__mro__:
            _hide(kind, config, asked)
    if _value(config, asked, _PRIMITIVE):
        config.optimizers = {name: group for name, group in config.optimizers.items() if _steps(name, config, asked)}


def without_effect(config: Any, words: Sequence[str]) -> list[str]:
    """Return a line for each option of the model that a command line gives and other options leave without effect.

    Of the pipeline's options, those for the exchange are refused instead (`check_requests`).

    Args:
        config: the run's `RunConfig`, complete.
        words: the command line.
    """
    lines, named = list[str](), given(words)
    for name, mark in (one for kind in type(config.pipeline.model).__mro__ for one in _unmet(kind, config, {}).items()):
        option = f"pipeline.model.{name}"
        if option in named:
            needed = f"--{mark.option} {' or '.join(mark.values)}".replace("_", "-").rstrip()
            lines.append(f"Note: --{option.replace('_', '-')} has no effect in this run: it needs {needed}.")
    return sorted(lines)


def _hide(kind: type, config: Any, asked: dict[str, str]) -> None:
    """Suppress the fields declared by a class of options whose condition is not met."""
    for name in _unmet(kind, config, asked):
        kind.__annotations__[name] = tyro.conf.Suppress[kind.__annotations__[name]]


def _unmet(kind: type, config: Any, asked: dict[str, str]) -> dict[str, Only]:
    """Return the fields declared by a class of options whose condition is not met, with the first such condition."""
    found: dict[str, Only] = {}
    for name, hint in vars(kind).get("__annotations__", {}).items():
        for mark in getattr(hint, "__metadata__", ()):
            if isinstance(mark, Only) and not _applies(mark, _value(config, asked, mark.option)):
                found.setdefault(name, mark)
    return found


def _applies(mark: Only, value: str | None) -> bool:
    return value in mark.values if mark.values else value not in (None, "None", "0.0")


def _value(config: Any, asked: dict[str, str], option: str) -> str | None:
    """Return an option's value, given or default; None if the method does not have it."""
    if option in asked:
        return asked[option]
    for name in option.split("."):
        config = getattr(config, name, None)
    return None if config is None else str(config)


def _steps(group: str, config: Any, asked: dict[str, str]) -> bool:
    """Return whether the run has parameters of an optimizers' group."""
    groups = {
        "camera_opt": ("pipeline.model.camera_optimizer.mode", "off"),
        "bilateral_grid": ("pipeline.model.use_bilateral_grid", "False"),
        "exposures": ("pipeline.model.exposure", "off"),
    }
    if group in groups:
        option, absent = groups[group]
        return _value(config, asked, option) != absent
    kind = PRIMITIVES.get(str(_value(config, asked, _PRIMITIVE)))
    return kind is None or group in {parameter.name for parameter in kind.schema}
