// The colours of rows: a thread a row, coefficients through shared memory.

#include "cuda/project/sh.h"

namespace nsmg {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

template <int Degree>
__global__ void __launch_bounds__(kThreads)
    sh_kernel(const __grid_constant__ ShInputs in, float* __restrict__ colors) {
  using Row = ShRow<Degree>;
  __shared__ float staged[kWarps][32 * Row::kStride];
  const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int lane = threadIdx.x % 32;
  float* const mine = staged[threadIdx.x / 32] + lane * Row::kStride;
  const bool inside = row < in.rows;
  const int id = inside ? in.point_ids[row] : -1;
  if constexpr (Degree > 0) {
    float* const warp_rows = staged[threadIdx.x / 32];
    const int64_t width = int64_t(3) * in.rest_bases;
#pragma unroll 9
    for (int e = lane; e < 32 * Row::kFloats; e += 32) {
      const int slot = e / Row::kFloats, k = e % Row::kFloats;
      const int point = __shfl_sync(~0u, id, slot);
      if (point >= 0) warp_rows[slot * Row::kStride + k] = in.rest[point * width + k];
    }
    __syncwarp();
  }
  if (!inside) return;
  Vec3<float> color = {0.f, 0.f, 0.f};
  if (id >= 0) {
    float b[sh_bases(Degree)];
    sh_basis<Degree>(direction(load3(in.centers, in.view_ids[row]), load3(in.means, id)).unit, b);
    color = b[0] * load3(in.dc, id);
#pragma unroll
    for (int k = 1; k < sh_bases(Degree); ++k) color = color + b[k] * load3(mine, k - 1);
    color = {larger(color.x + 0.5f, 0.f), larger(color.y + 0.5f, 0.f), larger(color.z + 0.5f, 0.f)};
  }
  colors[3 * row] = color.x;
  colors[3 * row + 1] = color.y;
  colors[3 * row + 2] = color.z;
}

}  // namespace

cudaError_t sh_colors(const ShInputs& in, float* colors, cudaStream_t stream) {
  if (in.rows == 0) return cudaSuccess;
  constexpr decltype(&sh_kernel<0>) kernels[] = {&sh_kernel<0>, &sh_kernel<1>, &sh_kernel<2>, &sh_kernel<3>};
  const int blocks = int((int64_t(in.rows) + kThreads - 1) / kThreads);
  kernels[in.degree]<<<blocks, kThreads, 0, stream>>>(in, colors);
  return cudaGetLastError();
}

}  // namespace nsmg
