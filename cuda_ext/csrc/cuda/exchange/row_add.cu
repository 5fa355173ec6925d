// Gradients of rows that are in memory, added to the records of their owners: a thread a number.
#include <cuda_runtime.h>

#include "cuda/exchange/row_exchange.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    add_records_kernel(const float* records, int64_t numbers, int floats, const int64_t* sinks, int sink_count,
                       const int32_t* owners, const int32_t* slots, bool system_scope) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= numbers) return;
  const float value = records[i];
  if (value == 0.0f) return;
  const int64_t row = i / floats;
  const int owner = owners[row];
  if (owner < 0 || owner >= sink_count) return;
  float* to = reinterpret_cast<float*>(sinks[owner]) + int64_t(slots[row]) * floats + (i - row * floats);
  if (system_scope) {
    atomicAdd_system(to, value);
  } else {
    atomicAdd(to, value);
  }
}

}  // namespace

cudaError_t add_records_launch(const float* records, int count, int floats, const int64_t* sinks, int sink_count,
                               const int32_t* owners, const int32_t* slots, bool system_scope, cudaStream_t stream) {
  const int64_t numbers = int64_t(count) * floats;
  if (numbers == 0) return cudaSuccess;
  const unsigned blocks = unsigned((numbers + kThreads - 1) / kThreads);
  add_records_kernel<<<blocks, kThreads, 0, stream>>>(records, numbers, floats, sinks, sink_count, owners, slots,
                                                      system_scope);
  return cudaGetLastError();
}

}  // namespace nsmg
