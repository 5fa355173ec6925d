"""What a run seldom needs is loaded when it is needed, and only then. Each in a process of its own, as in a start."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugin.test_launch import ROOT

START = """
import gc, sys
looks = []
class Look:
    def find_spec(self, name, path, target=None):
        if name == "ns_multigpu.plugin.model.options":  # the methods are being imported
            looks.append(gc.isenabled())
sys.meta_path.insert(0, Look())
sys.argv = ["ns-train", "splatfacto-batch"]
import nerfstudio.scripts.train
"""
NOT_NEEDED = """
late = ("tensorly.base", "torchvision._meta_registrations", "scipy.optimize", "scipy.interpolate._interpolate",
        "scipy.ndimage", "scipy.spatial", "torch.distributed.checkpoint", "torch._dynamo.eval_frame", "sympy",
        "torchmetrics", "transformers", "ns_multigpu.data.city", "ns_multigpu.plugin.checkpoint.saved_tensors")
loaded = [name for name in late if name in sys.modules]
assert not loaded, f"a start loads {loaded}"
assert looks == [False] and gc.isenabled() and gc.get_freeze_count() > 100_000, gc.get_freeze_count()
"""
NEEDS = {
    "tensorly": """
import tensorly
assert type(sys.modules["tensorly"]).__name__ == "StandIn"
from nerfstudio.model_components import lib_bilagrid
from tensorly.decomposition import parafac
assert tensorly.get_backend() == "pytorch", "lib_bilagrid has said so before it was loaded"
lib_bilagrid.tl.set_backend("numpy")
assert tensorly.get_backend() == "numpy", "nor is it lost afterwards"
assert parafac(tensorly.ones((2, 2, 2)), rank=1).rank == 1
""",
    "scipy.interpolate": """
import numpy
from nerfstudio.viewer import render_panel
kept = render_panel.interpolate
assert type(kept).__name__ == "StandIn"
assert kept.PchipInterpolator(numpy.arange(3.0), numpy.arange(3.0))(1.5) == 1.5
import scipy
assert kept.interp1d is scipy.interpolate.interp1d and type(scipy.interpolate).__name__ == "module"
""",
    "torchvision": """
import importlib.util, os, tempfile
from importlib.metadata import version
from nerfstudio.pipelines import base_pipeline
import torch, torchvision
assert type(torchvision).__name__ == "StandIn" and importlib.util.find_spec("torchvision").origin, "it is there"
with tempfile.TemporaryDirectory() as folder:
    base_pipeline.vutils.save_image(torch.zeros(3, 4, 4), os.path.join(folder, "black.png"))
    assert os.listdir(folder) == ["black.png"]
assert type(sys.modules["torchvision.utils"]).__name__ == "module"
assert sys.modules["torchvision"].__version__ == torchvision.__version__
from torchvision.io import decode_png, encode_png
assert torchvision.io.encode_png is encode_png and sys.modules["torchvision"].ops.nms
""",
    "torchvision, by a module in it": """
from torchvision.models import AlexNet_Weights
import torchvision
assert type(torchvision).__name__ == "module" and torchvision.models.AlexNet_Weights is AlexNet_Weights
""",
    "torchvision, by its release": """
import torchvision
assert torchvision.__version__ == sys.modules["torchvision"].__version__ and torchvision.__path__
""",
}


def run(program: str) -> None:
    words = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_start_loads_what_it_needs() -> None:
    run(START + NOT_NEEDED)


@pytest.mark.parametrize("need", NEEDS.values(), ids=NEEDS.keys())
def test_what_is_needed_is_loaded_then(need: str) -> None:
    run(START + need)


def test_another_program_is_left_as_it_is() -> None:
    """One that imports nerfstudio's methods for itself: Python goes on to look for circles meanwhile."""
    run("import gc, sys\nsys.argv = ['mine.py']\nimport ns_multigpu.dataparsers\nassert gc.isenabled()")


def test_what_is_loaded_or_not_there_is_not_stood_in_for() -> None:
    run("""
import sys, scipy.interpolate as real
from ns_multigpu.plugin.launch.stand_ins import StandIn, stand_in_for
stand_in_for(StandIn("scipy.interpolate", package=True))
assert sys.modules["scipy.interpolate"] is real
stand_in_for(StandIn("no_such_package", package=True))
try:
    import no_such_package
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("nobody has it")
""")


def test_a_package_that_is_loaded_meets_its_own_modules(tmp_path: Path) -> None:
    """It may set what they hold: on a stand-in that would be lost."""
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "__init__.py").write_text("from . import part\npart.set = 3\nhere = 1\n")
    (tmp_path / "held" / "part.py").write_text("set = 2\n")
    run(f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from ns_multigpu.plugin.launch.stand_ins import StandIn, stand_in_for
part = StandIn("held.part", together=["held"])
stand_in_for(StandIn("held", package=True, together=["held.part"], part=part), part)
import held.part
kept = held.part
assert kept is part and held.here == 1
assert type(sys.modules["held"].part).__name__ == "module" and kept.set == sys.modules["held.part"].set == 3
""")


def test_a_thread_loads_what_comes_later() -> None:
    run("""
import sys, threading
from ns_multigpu.plugin.launch import entering, quick_imports
entering.load_beside()
for thread in threading.enumerate():
    if thread.name == "imports":
        thread.join()
assert all(name in sys.modules for name in quick_imports._LATER), "the distances, and checkpoints"
""")
