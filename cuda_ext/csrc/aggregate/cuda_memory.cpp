// One virtual range over the memory of several GPUs, by the driver's virtual memory management.
#include "members.h"

#include <c10/util/Exception.h>

#include <algorithm>

#if __has_include(<cuda.h>)
#include <cuda.h>
#include <dlfcn.h>

namespace aggregate {
namespace {

// The driver's functions, looked up when GPUs are used: this library also loads where there is no driver.
template <typename Function>
Function* driver(const char* name) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  void* found = library ? dlsym(library, name) : nullptr;
  TORCH_CHECK(found, "multigpu: the CUDA driver (libcuda.so.1) has no function ", name);
  return reinterpret_cast<Function*>(found);
}
#define DRIVER(name) driver<decltype(name)>(#name)

void check(CUresult status, const char* what) {
  const char* said = "unknown error";
  if (status != CUDA_SUCCESS) DRIVER(cuGetErrorString)(status, &said);
  TORCH_CHECK(status == CUDA_SUCCESS, "multigpu: CUDA cannot ", what, ": ", said);
}

struct CudaMemory final : Memory {
  explicit CudaMemory(const std::vector<int>& gpus) : gpus(gpus) {
    for (int gpu : gpus) {
      const CUmemAllocationProp wanted = property(gpu);
      size_t needed = 0;
      check(
          DRIVER(cuMemGetAllocationGranularity)(&needed, &wanted, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
          "map memory of several GPUs into one range");
      unit = std::max(unit, needed);
    }
  }

  size_t granularity() const override { return unit; }

  void* map(size_t shard) override {
    CUdeviceptr base = 0;
    check(DRIVER(cuMemAddressReserve)(&base, shard * gpus.size(), unit, 0, 0), "reserve addresses");
    size_t mapped = 0;
    CUresult status = CUDA_SUCCESS;
    for (; mapped < gpus.size() && status == CUDA_SUCCESS; mapped += status == CUDA_SUCCESS) {
      const CUmemAllocationProp wanted = property(gpus[mapped]);
      CUmemGenericAllocationHandle handle = 0;
      status = DRIVER(cuMemCreate)(&handle, shard, &wanted, 0);
      if (status == CUDA_SUCCESS) {
        status = DRIVER(cuMemMap)(base + mapped * shard, shard, 0, handle, 0);
        DRIVER(cuMemRelease)(handle); // the mapping keeps the memory
      }
    }
    std::vector<CUmemAccessDesc> access;
    for (int gpu : gpus) access.push_back({{CU_MEM_LOCATION_TYPE_DEVICE, gpu}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
    if (status == CUDA_SUCCESS) {
      status = DRIVER(cuMemSetAccess)(base, shard * gpus.size(), access.data(), access.size());
    }
    if (status != CUDA_SUCCESS) {
      for (size_t member = 0; member < mapped; ++member) DRIVER(cuMemUnmap)(base + member * shard, shard);
      DRIVER(cuMemAddressFree)(base, shard * gpus.size());
      if (status != CUDA_ERROR_OUT_OF_MEMORY) check(status, "map memory of several GPUs into one range");
      return nullptr;
    }
    return reinterpret_cast<void*>(base);
  }

  void unmap(void* start, size_t shard) override {
    const auto base = reinterpret_cast<CUdeviceptr>(start);
    for (size_t member = 0; member < gpus.size(); ++member) {
      check(DRIVER(cuMemUnmap)(base + member * shard, shard), "unmap memory");
    }
    check(DRIVER(cuMemAddressFree)(base, shard * gpus.size()), "free addresses");
  }

  static CUmemAllocationProp property(int gpu) {
    CUmemAllocationProp wanted = {};
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location = {CU_MEM_LOCATION_TYPE_DEVICE, gpu};
    return wanted;
  }

  std::vector<int> gpus;
  size_t unit = 1;
};

} // namespace

std::unique_ptr<Memory> cuda_memory(const std::vector<int>& gpus) { return std::make_unique<CudaMemory>(gpus); }

} // namespace aggregate

#else

std::unique_ptr<aggregate::Memory> aggregate::cuda_memory(const std::vector<int>&) {
  TORCH_CHECK(false, "multigpu was compiled without CUDA's headers: install CUDA's toolkit");
}

#endif
