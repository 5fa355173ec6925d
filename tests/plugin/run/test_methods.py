"""The methods are what they say."""

import copy
import dataclasses
import subprocess
import sys

import pytest
from nerfstudio.configs import external_methods as stock
from nerfstudio.configs.method_configs import method_configs

from ns_multigpu.methods import nerfacto_xl, splatfacto_batch
from ns_multigpu.plugin.faults.errors import InputError
from ns_multigpu.plugin.launch import quick_imports
from ns_multigpu.plugin.run import config as train_config
from ns_multigpu.primitives.gaussians.schema import SCHEMA
from ns_multigpu.primitives.registry import PRIMITIVES


def test_optimizers_besides_splatfactos_are_of_other_primitives_and_gains() -> None:
    """`test_the_same_settings` compares all others."""
    more = splatfacto_batch.config.optimizers.keys() - method_configs["splatfacto"].optimizers.keys()
    others = {parameter.name for kind in PRIMITIVES.values() for parameter in kind.schema} - {p.name for p in SCHEMA}
    assert more == others | {"exposures"}


def test_recipe_is_nerfactos() -> None:
    ours, theirs = nerfacto_xl.config, method_configs["nerfacto"]
    assert ours.optimizers == theirs.optimizers
    for name in ("steps_per_eval_image", "steps_per_eval_batch", "steps_per_save", "max_num_iterations"):
        assert getattr(ours, name) == getattr(theirs, name)
    model, base = vars(ours.pipeline.model), vars(theirs.pipeline.model)
    own = {"_target", "background_color", "implementation"}
    assert {k: model[k] for k in base if k not in own} == {k: v for k, v in base.items() if k not in own}
    assert model["implementation"] == "torch" and model["background_color"] == "auto", (
        "nerfacto's with one cell: `test_colours_behind_several_cells_are_random`"
    )
    data, theirs_ = ours.pipeline.datamanager, theirs.pipeline.datamanager
    assert data.train_num_rays_per_batch == theirs_.train_num_rays_per_batch


def test_the_list_of_other_methods_walks_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock.inspect, "stack", lambda: pytest.fail("walked"))
    methods, _ = stock.get_external_methods()
    assert "splatfacto-w" in methods


@pytest.mark.parametrize(("command", "during"), [("ns-train", False), ("mine.py", True)])
def test_only_a_training_command_imports_without_the_garbage_collector(command: str, during: bool) -> None:
    program = f"""
import gc, sys
sys.argv = [{command!r}, "splatfacto-batch"]
import ns_multigpu.dataparsers
assert gc.isenabled() is {during}
import ns_multigpu.methods
assert gc.isenabled() and (gc.get_freeze_count() > 100_000) is not {during}
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_method_that_is_not_installed_is_still_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    monkeypatch.setattr(stock.Confirm, "ask", lambda question, **_: asked.append(question))
    listed = stock.get_external_methods()[0]["splatfacto-w"]
    with pytest.raises(SystemExit):
        dataclasses.replace(listed)
    assert len(asked) == 1


ENDS = """
import atexit, os, sys
from ns_multigpu.plugin.launch import quick_imports
class Circle:
    def __init__(self):
        self.itself = self
    def __del__(self, write=os.write):
        write(1, b"searched for\\n")
class Alone:
    def __del__(self, write=os.write):
        write(1, b"closed\\n")
atexit.register(os.write, 1, b"at exit\\n")
if sys.argv[1] == "quickly":
    quick_imports.end_quickly()
circle, alone = Circle(), Alone()
sys.exit(3)
"""


@pytest.mark.parametrize(("how", "said"), [("quickly", ["closed"]), ("usually", ["closed", "searched for"])])
def test_process_exits_quickly_with_its_status(how: str, said: list[str]) -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", ENDS, how], capture_output=True, text=True)
    first, *others = done.stdout.splitlines()
    assert (done.returncode, first, sorted(others)) == (3, "at exit", said), done.stderr


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no run change how this process meets errors and signals, and ends."""
    for name in ("show_uncaught", "stop_before_training"):
        monkeypatch.setattr(train_config, name, lambda: None)
    monkeypatch.setattr(quick_imports, "end_quickly", lambda: None)


@pytest.mark.usefixtures("alone")
def test_a_run_ends_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    called = list[str]()
    monkeypatch.setattr(quick_imports, "end_quickly", lambda: called.append("it is"))
    config = copy.deepcopy(splatfacto_batch.config)
    config.max_num_images = -1
    with pytest.raises(InputError):
        config.set_timestamp()
    assert called


@pytest.mark.usefixtures("alone")
def test_a_run_without_workers_is_refused() -> None:
    """Before options that follow from their number."""
    config = copy.deepcopy(splatfacto_batch.config)
    config.machine.device_type, config.machine.num_devices = "cpu", 0
    with pytest.raises(InputError, match=r"--machine.num-devices 0: at least one worker"):
        config.set_timestamp()
