// One thread a position and level; a block has one level, so that its lookups share a part of the table that the cache
// may hold. Ways back meet in atomic adds, whose order differs by run; both numbers of a row of two go in one.
#include "cuda/radiance/encode_grid.h"

#include "common/hash_grid.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256;
constexpr unsigned kAll = 0xffffffffu;
constexpr int kMostRuns = 20;  // of a warp's samples in voxels, up to which each run is summed before it is added

template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    encode_kernel(HashGrid grid, const float* __restrict__ positions, int64_t count, float* __restrict__ features) {
  const int64_t n = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (n >= count) return;
  const int level = int(blockIdx.y);
  const unsigned mask = (1u << grid.log2_size) - 1u;
  const float* table = grid.table + (int64_t(level) << grid.log2_size) * kWidth;
  const Voxel<float> voxel(positions + n * 3, grid.scalings[level]);
  float sum[kWidth] = {};
#pragma unroll
  for (int corner = 0; corner < 8; ++corner) {
    const float weight = voxel.weight(corner);
    const float* row = table + int64_t(voxel.row(corner, mask)) * kWidth;
#pragma unroll
    for (int f = 0; f < kWidth; ++f) sum[f] += weight * row[f];
  }
  float* out = features + (n * grid.levels + level) * kWidth;
#pragma unroll
  for (int f = 0; f < kWidth; ++f) out[f] = sum[f];
}

template <int kWidth>
__device__ void add_row(float* row, const float* v) {
#if __CUDA_ARCH__ >= 900
  if constexpr (kWidth % 2 == 0) {
#pragma unroll
    for (int f = 0; f < kWidth; f += 2) {
      atomicAdd(reinterpret_cast<float2*>(row + f), make_float2(v[f], v[f + 1]));
    }
  } else
#endif
  {
#pragma unroll
    for (int f = 0; f < kWidth; ++f) atomicAdd(row + f, v[f]);
  }
}

// Neighbouring samples of a ray often lie in one voxel: a run of lanes.
struct Run {
  bool first;  // this lane is its run's
  int end;     // lane behind the run
};

__device__ Run run_of(const Voxel<float>& voxel, int lane, unsigned* firsts) {
  bool alone = lane == 0;
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) {
    const unsigned key = 2 * voxel.low[axis] + (voxel.high[axis] - voxel.low[axis]);  // on a face both are one
    alone |= __shfl_up_sync(kAll, key, 1) != key;
  }
  *firsts = __ballot_sync(kAll, alone);
  const unsigned behind = *firsts & ~((2u << lane) - 1u);
  return {alone, behind == 0 ? 32 : __ffs(behind) - 1};
}

template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    encode_backward_kernel(HashGrid grid, const float* __restrict__ positions, int64_t count,
                           const float* __restrict__ v_features, float* __restrict__ v_positions,
                           float* __restrict__ v_table) {
  const int64_t n = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t own = n < count ? n : count - 1;  // each lane takes part
  const int level = int(blockIdx.y), lane = int(threadIdx.x) % 32;
  const unsigned mask = (1u << grid.log2_size) - 1u;
  const int64_t first = (int64_t(level) << grid.log2_size) * kWidth;
  const float scaling = grid.scalings[level];
  const Voxel<float> voxel(positions + own * 3, scaling);
  float v[kWidth];
  bool any = false;
#pragma unroll
  for (int f = 0; f < kWidth; ++f) {
    v[f] = n < count ? v_features[(own * grid.levels + level) * kWidth + f] : 0.0f;
    any |= v[f] != 0.0f;
  }
  if (!__any_sync(kAll, any)) return;
  unsigned firsts;
  const Run run = run_of(voxel, lane, &firsts);
  const bool together = __popc(firsts) <= kMostRuns;
  float moved[3] = {};
#pragma unroll
  for (int corner = 0; corner < 8; ++corner) {
    const int64_t at = first + int64_t(voxel.row(corner, mask)) * kWidth;
    const float weight = voxel.weight(corner);
    float sum[kWidth];
#pragma unroll
    for (int f = 0; f < kWidth; ++f) sum[f] = weight * v[f];
    if (together) {
      for (int by = 1; __any_sync(kAll, lane + by < run.end); by *= 2) {
#pragma unroll
        for (int f = 0; f < kWidth; ++f) {
          const float next = __shfl_sync(kAll, sum[f], (lane + by) % 32);
          if (lane + by < run.end) sum[f] += next;
        }
      }
    }
    if (together ? run.first : any) add_row<kWidth>(v_table + at, sum);
    if (v_positions == nullptr) continue;
    float dot = 0.0f;
#pragma unroll
    for (int f = 0; f < kWidth; ++f) dot += v[f] * grid.table[at + f];
    voxel.add_slope(corner, dot, moved);
  }
  if (v_positions == nullptr || !any) return;
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) atomicAdd(v_positions + n * 3 + axis, moved[axis] * scaling);
}

dim3 blocks(const HashGrid& grid, int64_t count) {
  return dim3(unsigned((count + kThreads - 1) / kThreads), unsigned(grid.levels));
}

}  // namespace

cudaError_t encode_grid_launch(const HashGrid& grid, const float* positions, int64_t count, float* features,
                               cudaStream_t stream) {
  if (count == 0 || grid.levels == 0) return cudaSuccess;
  const dim3 size = blocks(grid, count);
  switch (grid.width) {
    case 1: encode_kernel<1><<<size, kThreads, 0, stream>>>(grid, positions, count, features); break;
    case 2: encode_kernel<2><<<size, kThreads, 0, stream>>>(grid, positions, count, features); break;
    case 4: encode_kernel<4><<<size, kThreads, 0, stream>>>(grid, positions, count, features); break;
    case 8: encode_kernel<8><<<size, kThreads, 0, stream>>>(grid, positions, count, features); break;
    default: return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

cudaError_t encode_grid_backward_launch(const HashGrid& grid, const float* positions, int64_t count,
                                        const float* v_features, float* v_positions, float* v_table,
                                        cudaStream_t stream) {
  if (count == 0 || grid.levels == 0) return cudaSuccess;
  const dim3 size = blocks(grid, count);
  const auto run = [&](auto kernel) {
    kernel<<<size, kThreads, 0, stream>>>(grid, positions, count, v_features, v_positions, v_table);
  };
  switch (grid.width) {
    case 1: run(encode_backward_kernel<1>); break;
    case 2: run(encode_backward_kernel<2>); break;
    case 4: run(encode_backward_kernel<4>); break;
    case 8: run(encode_backward_kernel<8>); break;
    default: return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace nsmg
