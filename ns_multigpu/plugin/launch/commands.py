"""Command lines: those printed for users to paste, and options given along with `--load-config`."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.ranks import Ranks

OWN_LAUNCHER = "NS_MULTIGPU_LAUNCHER"
"""Set in the environment of workers that `ns-train` itself has started: torchrun sets the same variables otherwise."""

_LOAD_CONFIG = "--load-config"
_SCRIPT = "nerfstudio.scripts.train"
T = TypeVar("T")


def train_command(method: str, *words: str | Path) -> str:
    """Return the command that starts a training run as this process was started: by ns-train, or by torchrun."""
    given = [method, *map(str, words)]
    ranks = Ranks.from_env()
    if ranks is None or OWN_LAUNCHER in os.environ:
        return shlex.join(["ns-train", *given])
    launcher = ["torchrun", "--nproc-per-node", str(ranks.local_size)]
    if ranks.machines > 1:
        launcher += ["--nnodes", str(ranks.machines), "--node-rank", os.environ.get("GROUP_RANK", "0")]
        launcher += ["--master-addr", os.environ.get("MASTER_ADDR", "HOST0")]
        launcher += ["--master-port", os.environ.get("MASTER_PORT", "29500")]
    return shlex.join([*launcher, "-m", _SCRIPT, *given])


def resume_command(method: str, folder: Path, models: Path, *more: str) -> str:
    """Return the command that resumes a run from its newest checkpoint, with the run's options.

    Args:
        method: the run's. folder: its folder. models: its folder of checkpoints.
        more: options to change.
    """
    return train_command(method, _LOAD_CONFIG, folder / "config.yml", "--load-dir", models, *more)


def commands_afterwards(method: str, folder: Path, models: Path, *longer: str) -> list[tuple[str, str]]:
    """Return (name, command) of possible next actions for a finished run.

    Args:
        method, folder, models: see `resume_command`.
        longer: the option that doubles its length.
    """
    config = str(folder / "config.yml")
    return [
        ("Look at it", shlex.join(["ns-viewer", "--load-config", config])),
        ("Measure it", shlex.join(["ns-eval", "--load-config", config])),
        ("Go on, for twice as long", resume_command(method, folder, models, *longer)),
    ]


def named_config(argv: Sequence[str] | None = None) -> Path | None:
    """Return the file that `--load-config` names on this process's command line; None without it."""
    words = sys.argv[1:] if argv is None else argv
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag.replace("_", "-") == _LOAD_CONFIG:
            return Path(value) if equals else Path(words[place + 1]) if place + 1 < len(words) else None
    return None


def with_options(config: T, argv: Sequence[str] | None = None) -> T:
    """Return a configuration read from a file, updated by the command line.

    nerfstudio reads the file and ignores the rest of the command line, including the checkpoint to resume from.

    Args:
        config: the configuration read. Its options about its own start (its checkpoint, starting over) are discarded.
        argv: the method's name and its options; by default this process's.

    Raises:
        InputError: the command line names another method than the file.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    settings: Any = config
    method = words.pop(0) if words and not words[0].startswith("-") else settings.method_name
    if method != settings.method_name:
        raise InputError(
            f"{_LOAD_CONFIG} {named_config(argv)}: this run's method is {settings.method_name}, not {method}. Give:\n\n"
            f"  {train_command(settings.method_name, *words)}"
        )
    settings.load_dir = settings.load_step = settings.load_checkpoint = None
    settings.start_over = False
    kind: Any = tyro.conf.SuppressFixed[tyro.conf.FlagConversionOff[type(config)]]
    given: Any = tyro.cli(kind, default=config, args=words, prog=f"ns-train {method}")
    if given.data is not None:
        given.pipeline.datamanager.data = given.data
    given.load_config = None
    return given
