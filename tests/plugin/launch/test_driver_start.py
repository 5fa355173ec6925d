"""`ns-train` with several workers does not start CUDA's driver in its own process: they do, each for itself.

The driver and its management library are stand-ins, compiled for the test: of a machine with two GPUs of sm_90. The
driver notes who begins to start it, and has nothing to give, so that workers end there.
"""

import subprocess
import sys
from pathlib import Path

from cuda_ext.build.native import required_compiler
from cuda_ext.dispatch import cuda
from tests.lib.captures import write_capture
from tests.plugin.launch.test_launch import HANG, ROOT, environment

DRIVER = """
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
// CUDA's runtime asks for all functions by these before it starts the driver; that it begins to is noted.
static int asked(void** found) {
  FILE* calls = fopen(getenv("DRIVER_CALLS"), "a");
  fprintf(calls, "%d\\n", getpid());
  fclose(calls);
  *found = 0;
  return 500;
}
extern "C" {
int cuGetProcAddress(const char*, void** found, int, unsigned long long) { return asked(found); }
int cuGetProcAddress_v2(const char*, void** found, int, unsigned long long, void*) { return asked(found); }
int cuInit(unsigned) { return 100; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuDeviceGetCount(int*) { return 3; }
}
"""
MANAGEMENT = """
extern "C" {
int nvmlInit() { return 0; }
int nvmlInit_v2() { return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned number, void** gpu) { *gpu = (void*)(unsigned long)(number + 1); return 0; }
int nvmlDeviceGetCudaComputeCapability(void*, int* major, int* minor) { *major = 9; *minor = 0; return 0; }
}
"""


def compiled(source: str, library: Path) -> None:
    file = library.with_suffix(".cpp")
    file.write_text(source)
    subprocess.run([*required_compiler(), "-shared", "-fPIC", str(file), "-o", str(library)], check=True)


def test_only_workers_start_the_driver(tmp_path: Path) -> None:
    for source, name in ((DRIVER, "libcuda.so.1"), (MANAGEMENT, "libnvidia-ml.so.1")):
        compiled(source, tmp_path / name)
    kernels, calls = tmp_path / "operators.so", tmp_path / "calls"
    kernels.write_text(cuda.library(("90",)).info())
    capture = write_capture(tmp_path / "capture")
    words = ["splatfacto-batch", "--machine.num-devices", "2", "--max-restarts", "0", "--output-dir", str(tmp_path)]
    words += ["--pipeline.model.num-downscales", "0"]  # images are small
    code = f"import sys; sys.argv = ['ns-train', *{[*words, 'nerfstudio-data', '--data', str(capture)]!r}]\n"
    code += "from nerfstudio.scripts.train import entrypoint; entrypoint()"
    env = environment(
        LD_LIBRARY_PATH=str(tmp_path), DRIVER_CALLS=str(calls), NS_MULTIGPU_OPS="auto",
        NS_MULTIGPU_CUDA_LIBRARY=str(kernels), CUDA_VISIBLE_DEVICES="0,1",
    )  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env, stderr=subprocess.STDOUT, stdout=-1)
    said = process.communicate(timeout=HANG)[0].decode()
    assert process.returncode == 1 and "Found no NVIDIA driver" in said, said
    started = calls.read_text().split() if calls.exists() else []
    assert len(set(started)) == 2 and str(process.pid) not in started, said
