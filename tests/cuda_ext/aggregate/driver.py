"""The memory of GPUs: which functions of CUDA's driver are called, and what a lack of memory leaves behind.

A library in the driver's place counts the memory of two GPUs. Nothing is written to it: no GPU is here.
"""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from cuda_ext.build.native import required_compiler
from ns_multigpu import aggregate

DRIVER = """
enum { OUT_OF_MEMORY = 2, CAPACITY = 4 << 20 };
typedef struct { int type, kind, place, gpu; } Property;  // as CUmemAllocationProp begins
extern "C" {
long created[2], mapped, reserved, opened, handle_gpu[99], handle_size[99], at_handle[99], at_address[99];
long handles, mappings;
int cuMemGetAllocationGranularity(unsigned long *unit, const Property *, int) { *unit = 1 << 20; return 0; }
int cuMemAddressReserve(unsigned long *base, unsigned long size, unsigned long, unsigned long, unsigned long) {
  static unsigned long next = 1UL << 40;
  *base = next, next += size, reserved += size;
  return 0;
}
int cuMemAddressFree(unsigned long, unsigned long size) { reserved -= size; return 0; }
int cuMemCreate(unsigned long *handle, unsigned long size, const Property *wanted, unsigned long) {
  if (created[wanted->gpu] + size > CAPACITY >> wanted->gpu) return OUT_OF_MEMORY;  // the second has half as much
  created[wanted->gpu] += size;
  handle_gpu[handles] = wanted->gpu, handle_size[handles] = size;
  *handle = handles++;
  return 0;
}
int cuMemMap(unsigned long address, unsigned long size, unsigned long, unsigned long handle, unsigned long) {
  at_address[mappings] = address, at_handle[mappings++] = handle, mapped += size;
  return 0;
}
int cuMemRelease(unsigned long) { return 0; }
int cuMemSetAccess(unsigned long, unsigned long size, const void *, unsigned long count) {
  opened = size * count;
  return 0;
}
int cuMemUnmap(unsigned long address, unsigned long size) {
  for (long k = 0; k < mappings; ++k)
    if (at_address[k] == address) created[handle_gpu[at_handle[k]]] -= size, at_address[k] = 0;
  mapped -= size;
  return 0;
}
int cuGetErrorString(int, const char **said) { *said = "an error"; return 0; }
}
"""
MIB = 2**20


@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver is loaded, and cannot be replaced")
def test_ranges_over_two_gpus(tmp_path: Path) -> None:
    source, library = tmp_path / "driver.cpp", tmp_path / "libcuda.so.1"
    source.write_text(DRIVER)
    flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(source), "-o", str(library)]
    subprocess.run([*required_compiler(), *flags], check=True)
    driver = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)

    def count(name: str, size: int = 1) -> list[int]:
        return list((ctypes.c_long * size).in_dll(driver, name))

    torch.ops.multigpu.start([0, 1], 0, 0, 1024)
    one = torch.empty(3 * MIB // 4, device="multigpu")  # 3 MiB: shards of 2 MiB
    assert aggregate.shards(one) == [2 * MIB, MIB] and one.data_ptr() >= 2**40
    assert count("created", 2) == [2 * MIB] * 2 and count("mapped") == count("reserved") == [4 * MIB]
    assert count("opened") == [8 * MIB]  # the range for both GPUs
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 1048576 bytes over 2 members"):
        torch.empty(MIB // 4, device="multigpu")  # the first GPU has memory, the second has not
    assert count("created", 2) == [2 * MIB] * 2 and count("mapped") == count("reserved") == [4 * MIB]
    place = one.data_ptr()
    del one
    again = torch.empty(MIB, device="multigpu")
    assert again.data_ptr() == place and count("created", 2) == [2 * MIB] * 2
