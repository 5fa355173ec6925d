// The first part of a sort over ranks: each rank sorts its own pairs.
#include <cub/device/device_radix_sort.cuh>

#include "cuda/sort/merge.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256;

// CUB takes the count from the host, and only the device knows it: surplus keys sort last.
__global__ void __launch_bounds__(kThreads) pad_kernel(int64_t* keys, const int64_t* count, int capacity) {
  const int64_t line = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (line < capacity && line >= *count) keys[line] = 0x7fffffffffffffff;
}

}  // namespace

cudaError_t pair_sort_bytes(int capacity, int begin_bit, int end_bit, size_t* bytes) {
  const int64_t* keys = nullptr;
  const int32_t* values = nullptr;
  return cub::DeviceRadixSort::SortPairs(nullptr, *bytes, keys, static_cast<int64_t*>(nullptr), values,
                                         static_cast<int32_t*>(nullptr), capacity, begin_bit, end_bit, nullptr);
}

cudaError_t pair_sort(int64_t* keys, const int32_t* values, const int64_t* count, int capacity, int begin_bit,
                      int end_bit, int64_t* out_keys, int32_t* out_values, void* temporary, size_t bytes,
                      cudaStream_t stream) {
  const int blocks = int((int64_t(capacity) + kThreads - 1) / kThreads);
  pad_kernel<<<blocks, kThreads, 0, stream>>>(keys, count, capacity);
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) return status;
  const int64_t* in = keys;
  return cub::DeviceRadixSort::SortPairs(temporary, bytes, in, out_keys, values, out_values, capacity, begin_bit,
                                         end_bit, stream);
}

}  // namespace nsmg
