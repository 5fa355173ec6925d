"""Options that are gone: runs of earlier versions resume or are refused, and command lines say what to use.

The files in `old_configs` were written by the last version that had these options.
"""

import copy
import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from ns_multigpu.methods import nerfacto_xl, splatfacto_batch, splatfacto_locality, splatfacto_pixel
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch.removed_options import REMOVED_OPTIONS, account_for, refuse_removed, take_out

OLD = Path(__file__).parent / "old_configs"
METHODS = {
    spec.config.method_name: spec.config
    for spec in (splatfacto_batch, splatfacto_locality, splatfacto_pixel, nerfacto_xl)
}


def old(method: str, **changes: str) -> Any:
    """Read the file of a method, with other values for some of its lines."""
    text = (OLD / f"{method}.yml").read_text("utf8")
    for name, value in changes.items():
        lines = [line for line in text.splitlines() if line.strip().startswith(f"{name}:")]
        assert len(lines) == 1, name
        text = text.replace(lines[0], f"{lines[0].partition(':')[0]}: {value}")
    return yaml.load(text, Loader=yaml.Loader)


def gone(method: str) -> list[str]:
    """Name the removed options that the file of a method has."""
    found, text = list[str](), (OLD / f"{method}.yml").read_text("utf8")
    for name in REMOVED_OPTIONS:
        *parents, last = name.split(".")
        part: Any = METHODS[method]
        for parent in parents:
            part = getattr(part, parent, None)
        if part is not None and not hasattr(part, last) and re.search(rf"^ *{last}:", text, re.M):
            found.append(name)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_run_with_defaults_resumes_and_lists_removed_options(method: str) -> None:
    config, expected = old(method), gone(method)
    line = account_for(config)
    assert (line is None) == (not expected), line
    assert line is None or line.endswith(": " + ", ".join(expected).replace("_", "-") + ".")
    assert account_for(config) is None, "said once"
    now = METHODS[method]
    for part in ("pipeline", "pipeline.model", "pipeline.locality", "pipeline.pixel"):
        ours, theirs = now, config
        for name in part.split("."):
            ours, theirs = getattr(ours, name, None), getattr(theirs, name, None)
        if ours is not None and theirs is not None:
            assert vars(theirs).keys() <= vars(ours).keys() | {"_checkpoints"}, part


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        ("splatfacto-batch", {"selective_adam": "true"}, "selective_adam True: every Gaussian takes Adam's step"),
        ("splatfacto-locality", {"placement": "random"}, "placement random: the strategy always uses its default"),
        ("splatfacto-locality", {"balance": "false"}, "take the line `balance: False` out of config.yml"),
        ("splatfacto-batch", {"exposure": "affine"}, "exposure affine: gain corrects exposure"),
        ("nerfacto-xl", {"spread": "mega"}, "spread mega: it is a baseline of the repository's benchmarks/baselines"),
        ("nerfacto-xl", {"spread": "block"}, "spread block: it is a baseline of the repository's benchmarks/baselines"),
    ],
)
def test_a_run_that_they_changed_is_refused(method: str, changes: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        account_for(old(method, **changes))


def test_removed_options_are_reported_on_resume(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named = OLD / "splatfacto-locality.yml"
    monkeypatch.setattr(sys, "argv", ["ns-train", "splatfacto-locality", "--load-config", str(named)])
    config = old("splatfacto-locality")
    config._follow(named)
    output = " ".join(capsys.readouterr().out.split())
    assert output.count("options that are gone and changed nothing of its results: ") == 1
    assert "pipeline.locality.placement, pipeline.locality.within" in output
    with pytest.raises(InputError, match="within metis: the strategy always uses its default"):
        old("splatfacto-locality", within="metis")._follow(named)


@pytest.mark.parametrize(("densifier", "cap"), [("default", None), ("mcmc", 5000)])
def test_cap_of_mcmc_is_migrated(densifier: str, cap: int | None) -> None:
    model = old("splatfacto-batch", densifier=densifier, max_gs_num="5000").pipeline.model
    assert model.max_gaussians == cap and not hasattr(model, "max_gs_num")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *((f"--{name.replace('_', '-')} x", f"--{name.replace('_', '-')} is gone: ") for name in REMOVED_OPTIONS),
        ("--pipeline.model.selective_adam=True", "--pipeline.model.selective-adam is gone: every Gaussian takes"),
        ("--pipeline.model.spread block", "--pipeline.model.spread block is gone: it is a baseline"),
    ],
)
def test_command_line_error_names_the_replacement(words: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        refuse_removed(words.split())


def test_existing_options_are_not_refused() -> None:
    refuse_removed(["--pipeline.model.spread", "ddp", "--pipeline.model.max-gs-num", "5", "--pipeline.stage", "--x"])


def test_ns_train_shows_the_message() -> None:
    words = ["splatfacto-batch", "--pipeline.model.selective-adam", "True", "--data", "capture"]
    program = "import sys; sys.argv[0] = 'ns-train'; import ns_multigpu.methods"
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "--pipeline.model.selective-adam is gone: every Gaussian takes Adam's step." in " ".join(done.stderr.split())


def test_workers_are_sent_what_the_run_has() -> None:
    config = copy.deepcopy(splatfacto_batch.config)
    assert dataclasses.asdict(config) == dataclasses.asdict(splatfacto_batch.config)


@pytest.mark.parametrize("pipeline", [None, "a name"])
def test_a_file_may_lack_parts(pipeline: object) -> None:
    config = SimpleNamespace(pipeline=pipeline)
    take_out(config)
    assert account_for(config) is None
