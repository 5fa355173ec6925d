"""The tests of the aggregate device, in the files that `TESTS` names.

A device stays registered with torch, as its accelerator: other tests must not meet it. A forked process runs each file.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cuda_ext
from ns_multigpu.plugin.launch.processes import RankProcesses

FOLDER = Path(__file__).parent
# Files, and how many tests pass in each. The last replaces CUDA's driver, if that is not loaded.
TESTS = {
    "device.py": 15,
    "operators.py": 12,
    "models.py": 16,
    "steps.py": 24,
    "training.py": 6,
    "memory.py": 1,
    "driver.py": int(not torch.cuda.is_available()),
}


def run_file(name: str, output: str) -> None:
    """Run the tests of a file in this process; raise AssertionError with pytest's output if one fails."""
    with open(output, "w") as file, contextlib.redirect_stdout(file):
        status = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(FOLDER / name)])
    assert status == 0, Path(output).read_text()


@pytest.mark.parametrize("name", [name for name, tests in TESTS.items() if tests])
def test_file(name: str, tmp_path: Path) -> None:
    if problem := cuda_ext.compiler_problem():
        pytest.skip(problem)
    output = tmp_path / "output"
    process = RankProcesses(run_file, (name, str(output)), 1, threads=1)
    try:
        process.wait(grace=5.0)
    finally:
        process.end()
    assert f"{TESTS[name]} passed" in output.read_text()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["operators.py", "models.py", "steps.py", "training.py"])
def test_file_on_gpus(name: str) -> None:
    """The same tests over GPUs; those of more members than there are GPUs are skipped."""
    environment = {**os.environ, "NS_MULTIGPU_TEST_GPUS": str(torch.cuda.device_count())}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / name)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout[-4000:]
    if torch.cuda.device_count() < 2:
        pytest.skip(f"most need 2 GPUs: {done.stdout.strip().splitlines()[-1]}")
    assert " passed" in done.stdout
