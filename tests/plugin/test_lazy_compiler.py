"""torch's compiler is loaded by whoever needs it, and only then. Each in its own process: others have loaded it."""

import subprocess
import sys

import pytest

from tests.plugin.test_launch import ROOT

BEFORE = """
import sys
from ns_multigpu.plugin.launch import lazy_compiler
lazy_compiler.load_later()
import torch
def loaded():
    return "torch._dynamo.eval_frame" in sys.modules
"""
USED = """
import torchvision, torch.distributed as dist
torch.library.define("lazy::twice", "(Tensor x) -> Tensor")
torch.library.impl("lazy::twice", "cpu", lambda x: 2 * x)
weight = torch.nn.Parameter(torch.ones(3))
adam = torch.optim.Adam([weight], lr=0.1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.ops.lazy.twice(weight.sum()).backward()
adam.step()
assert weight.tolist() != [1, 1, 1]
adam.load_state_dict(adam.state_dict())
adam.zero_grad()
assert not loaded(), "what a run does loads it"
"""
SAVED = """
import tempfile
import torch.distributed.checkpoint as dcp
assert torch.broadcast_shapes((2, 1), (3,), (1, 1, 1)) == (1, 2, 3)
try:
    torch.broadcast_shapes((2,), (3,))
except RuntimeError as error:
    assert "broadcast" in str(error)
else:
    raise AssertionError("these do not fit")
with tempfile.TemporaryDirectory() as folder:
    dcp.save({"x": torch.arange(5.0)}, checkpoint_id=folder)
    state = {"x": torch.zeros(5)}
    dcp.load(state, checkpoint_id=folder)
assert state["x"].tolist() == [0, 1, 2, 3, 4] and "sympy" not in sys.modules, "what a run does loads it"
"""
SHAPES = {
    "a name of theirs": "from torch.fx.experimental.symbolic_shapes import ShapeEnv; ShapeEnv()",
    "an attribute": "assert torch.fx.experimental.symbolic_shapes.ShapeEnv().create_unbacked_symint() is not None",
    "an exported module": "torch.export.export(torch.nn.ReLU(), (torch.ones(3),))",
}
KNOWN = """
import torch.fx.experimental.symbolic_shapes as real
assert "sympy" in sys.modules and real is torch.fx.experimental.symbolic_shapes and type(real).__name__ == "module"
from torch.distributed.tensor._ops._tensor_ops import statically_known_true as taken
symbol = real.ShapeEnv().create_unbacked_symint()
assert taken(True) is True and taken(False) is False and taken(symbol == symbol + 1) is False
assert torch.broadcast_shapes((2, 1), (3,)) == (2, 3)
"""
NEEDED = {
    "an attribute": "assert torch._dynamo.config.cache_size_limit > 0",
    "a module of it": "import torch._dynamo.config as config; assert config.cache_size_limit > 0",
    "torchvision": "from torchvision.ops.roi_align import is_compile_supported as f; assert f('cpu') in (True, False)",
    "a compiled function": "assert torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1)).item() == 2",
    "a module that is not to be compiled": "import torch as t; t._dynamo.disable(t.nn.Linear(1, 1))(t.ones(1))",
}
AFTER = """
assert loaded()
import torch._dynamo
assert torch._dynamo is sys.modules["torch._dynamo"] and type(torch._dynamo).__name__ == "module"
assert type(sys.modules["torch._dynamo.utils"]).__name__ == "module"
adam.step()
adam.zero_grad()
"""
STILL = """
@torch._disable_dynamo
def kept(x):
    return x + (1 if torch.compiler.is_compiling() else 2)
assert kept(torch.ones(1)).item() == 3
compiled = list()
def backend(graph, _):
    compiled.append(graph)
    return graph
assert torch.compile(lambda x: kept(x * 2) * 2, backend=backend)(torch.ones(1)).item() == 8
assert len(compiled) == 2, "what was asked for before the compiler was there, it keeps to"
"""


def run(program: str) -> None:
    words = [sys.executable, "-W", "ignore", "-c", BEFORE + program]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("need", NEEDED.values(), ids=NEEDED.keys())
def test_it_is_loaded_when_it_is_needed(need: str) -> None:
    run(f"{USED}\n{need}\n{AFTER}")


@pytest.mark.parametrize("need", SHAPES.values(), ids=SHAPES.keys())
def test_symbolic_shapes_are_loaded_when_they_are_needed(need: str) -> None:
    run(f"{SAVED}\n{need}\n{KNOWN}")


def test_a_function_that_is_not_to_be_compiled_never_is() -> None:
    run(STILL)


def test_what_has_been_loaded_stays() -> None:
    words = [
        sys.executable,
        "-c",
        f"import torch._dynamo as real\n{BEFORE}\nassert sys.modules['torch._dynamo'] is real",
    ]
    assert subprocess.run(words, cwd=ROOT, timeout=300).returncode == 0
