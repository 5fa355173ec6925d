// The gradients of rows, summed over the ranks that they went to, in the ranks' order: the same bits on every run.
//
// A warp takes 32 rows, four lanes a record, 16 bytes a lane. Sources lie on other GPUs, microseconds away: what a row
// gets from each rank is read before it is added.
#include <cuda_runtime.h>

#include "cuda/exchange/row_exchange.h"

namespace nsmg {
namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kThreads = 256;
constexpr int kRows = 32 / kRecordQuads;  // records that a warp reads at once

__global__ void __launch_bounds__(kThreads)
    collect_kernel(const int32_t* place, const int64_t* real_, const int64_t* sources, int ranks, int capacity,
                   int count, float4* records) {
  const int lane = threadIdx.x % 32, quad = lane % kRecordQuads;
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x - lane;  // of the warp's rows
  const int64_t given = *real_, real = given < count ? given : count;
  float4 sums[kRecordQuads] = {};
  if (first < real) {
    const int64_t row = first + lane;
#pragma unroll 4
    for (int rank = 0; rank < ranks; ++rank) {
      const int line = row < real ? place[int64_t(rank) * count + row] : -1;
      const int mine = line < capacity ? line : -1;
      const float4* from = reinterpret_cast<const float4*>(sources[rank]);
      float4 found[kRecordQuads];
#pragma unroll
      for (int k = 0; k < kRecordQuads; ++k) {
        const int one = __shfl_sync(kAll, mine, k * kRows + lane / kRecordQuads);
        found[k] = one >= 0 ? from[int64_t(one) * kRecordQuads + quad] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
#pragma unroll
      for (int k = 0; k < kRecordQuads; ++k) {
        sums[k].x += found[k].x;
        sums[k].y += found[k].y;
        sums[k].z += found[k].z;
        sums[k].w += found[k].w;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kRecordQuads; ++k) {
    const int64_t row = first + k * kRows + lane / kRecordQuads;
    if (row < count) records[row * kRecordQuads + quad] = sums[k];
  }
}

}  // namespace

cudaError_t collect_launch(const int32_t* place, const int64_t* real, const int64_t* sources, int ranks, int capacity,
                           int count, float* records, cudaStream_t stream) {
  const int blocks = int((int64_t{count} + kThreads - 1) / kThreads);
  if (blocks == 0) return cudaSuccess;
  auto* quads = reinterpret_cast<float4*>(records);
  collect_kernel<<<blocks, kThreads, 0, stream>>>(place, real, sources, ranks, capacity, count, quads);
  return cudaGetLastError();
}

}  // namespace nsmg
