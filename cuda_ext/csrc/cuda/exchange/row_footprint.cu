// One thread a row, 20 bytes read; a block adds up in shared memory where the patches fit there. Sums of integers: the
// same on every run.
#include "cuda/exchange/row_footprint.h"

#include "cuda/exchange/row_patches.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256;
constexpr int kShared = 4096;  // patches whose counts a block holds
constexpr int kRows = 8;       // of a thread

__global__ void __launch_bounds__(kThreads)
    footprint_kernel(RouteRows rows, const RankPatch* patches, int patch_count, unsigned long long* counts) {
  extern __shared__ int sums[];
  const bool here = patch_count <= kShared;
  for (int k = int(threadIdx.x); here && k < patch_count; k += kThreads) sums[k] = 0;
  __syncthreads();
  const int64_t real = real_rows(rows), first = int64_t(blockIdx.x) * kThreads * kRows + threadIdx.x;
  for (int step = 0; step < kRows; ++step) {
    const int64_t row = first + int64_t(step) * kThreads;
    if (row >= real) break;
    patches_reached(rows, patches, patch_count, row, [&](const RankPatch& patch) {
      if (here)
        atomicAdd(&sums[patch.rank], 1);
      else
        atomicAdd(&counts[patch.rank], 1ull);
    });
  }
  __syncthreads();
  for (int k = int(threadIdx.x); here && k < patch_count; k += kThreads) {
    if (sums[k] > 0) atomicAdd(&counts[k], static_cast<unsigned long long>(sums[k]));
  }
}

}  // namespace

cudaError_t footprint_launch(const RouteRows& rows, const RankPatch* host_patches, int patch_count, RankPatch* patches,
                         int64_t* counts, cudaStream_t stream) {
  if (patch_count == 0) return cudaSuccess;
  upload_patches(host_patches, patch_count, patches, stream);
  cudaError_t status = cudaMemsetAsync(counts, 0, size_t(patch_count) * sizeof(int64_t), stream);
  if (status != cudaSuccess || rows.count == 0) return status;
  const int blocks = (rows.count + kThreads * kRows - 1) / (kThreads * kRows);
  const size_t shared = patch_count <= kShared ? size_t(patch_count) * sizeof(int) : 0;
  footprint_kernel<<<blocks, kThreads, shared, stream>>>(rows, patches, patch_count,
                                                     reinterpret_cast<unsigned long long*>(counts));
  return cudaGetLastError();
}

}  // namespace nsmg
