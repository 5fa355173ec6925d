// The gradient of the colours: a thread a point, which goes through its rows in the order of the views, so the same
// inputs give the same bits. Coefficients come and gradients go through shared memory, in whole lines.

#include "cuda/project/sh.h"

namespace nsmg {
namespace {

constexpr int kWarps = kShGroup / 32;

// Copies the coefficients of the points in `mask` of a warp's 32 to shared memory. `rest` is the first of them.
template <int Degree>
__device__ __forceinline__ void stage(const float* __restrict__ rest, int64_t width, uint32_t mask, int lane,
                                      float* rows) {
  using Row = ShRow<Degree>;
#pragma unroll 9
  for (int e = lane; e < 32 * Row::kFloats; e += 32) {
    const int slot = e / Row::kFloats, k = e % Row::kFloats;
    if (mask >> slot & 1) rows[slot * Row::kStride + k] = rest[slot * width + k];
  }
  __syncwarp();
}

// Writes `count` points' gradients from shared memory; bases that the degree does not use get zero.
template <int Degree>
__device__ __forceinline__ void unstage(const float* rows, int count, int width, int lane, float* __restrict__ out) {
  using Row = ShRow<Degree>;
  if constexpr (Degree > 0) {
    if (width == Row::kFloats) {  // division by a constant
      for (int e = lane; e < count * Row::kFloats; e += 32) {
        out[e] = rows[e / Row::kFloats * Row::kStride + e % Row::kFloats];
      }
      return;
    }
  }
  for (int e = lane; e < count * width; e += 32) {
    const int slot = e / width, k = e - slot * width;
    out[e] = k < Row::kFloats ? rows[slot * Row::kStride + k] : 0.f;
  }
}

template <int Degree>
__global__ void __launch_bounds__(kShGroup)
    sh_backward_kernel(const __grid_constant__ ShInputs in, const __grid_constant__ ShGradients g, int groups) {
  using Row = ShRow<Degree>;
  constexpr int kBases = sh_bases(Degree);
  __shared__ float staged[kWarps][32 * Row::kStride];
  __shared__ int rows[kShGroup];  // of this view, for each point of the group; -1 for none
  __shared__ float warp_center[kWarps][3];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t base = int64_t(blockIdx.x) * kShGroup, warp_base = base + 32 * warp, point = base + threadIdx.x;
  const bool inside = point < in.points;
  const int64_t width = int64_t(3) * in.rest_bases;
  const Vec3<float> mean = inside ? load3(in.means, point) : Vec3<float>{0.f, 0.f, 0.f};
  float* const mine = staged[warp] + lane * Row::kStride;

  Vec3<float> v_mean = {0.f, 0.f, 0.f}, v_dc = {0.f, 0.f, 0.f};
  Vec3<float> v_rest[kBases] = {};  // the first is not used: degree 0 has an array too
  uint32_t loaded = 0;              // the points of this warp whose coefficients are in shared memory
  for (int view = 0; view < in.views; ++view) {
    const int64_t part = int64_t(view) * groups + blockIdx.x;
    const int begin = g.starts[part], end = g.starts[part + 1];
    float* const center_out = g.partial_centers + int64_t(view) * 3 * groups + blockIdx.x;
    if (begin == end) {  // for the whole block
      if (threadIdx.x < 3) center_out[int64_t(threadIdx.x) * groups] = 0.f;
      continue;
    }
    rows[threadIdx.x] = -1;
    __syncthreads();
    if (begin + int(threadIdx.x) < end) {  // a group has at most one row a point
      const int r = begin + threadIdx.x;
      rows[in.point_ids[r] - base] = r;
    }
    __syncthreads();
    const int64_t row = rows[threadIdx.x];
    if constexpr (Degree > 0) {
      const uint32_t missing = __ballot_sync(~0u, row >= 0) & ~loaded;
      if (missing != 0) stage<Degree>(in.rest + warp_base * width, width, missing, lane, staged[warp]);
      loaded |= missing;
    }
    Vec3<float> v_center = {0.f, 0.f, 0.f};
    if (row >= 0) {
      Vec3<float> v = load3(g.v_colors, row);  // zero where the colour was clamped at black
      const Vec3<float> color = load3(g.colors, row);
      v = {color.x > 0.f ? v.x : 0.f, color.y > 0.f ? v.y : 0.f, color.z > 0.f ? v.z : 0.f};
      const Direction<float> d = direction(load3(in.centers, view), mean);
      float b[kBases], g_b[kBases];
      sh_basis<Degree>(d.unit, b);
      v_dc = v_dc + b[0] * v;
      g_b[0] = 0.f;
#pragma unroll
      for (int k = 1; k < kBases; ++k) {
        v_rest[k] = v_rest[k] + b[k] * v;
        g_b[k] = dot(load3(mine, k - 1), v);
      }
      if constexpr (Degree > 0) {
        const Vec3<float> found = direction_vjp(d, sh_basis_vjp<Degree>(d.unit, g_b));
        v_mean = v_mean + found;
        v_center = -1.f * found;
      }
    }
    const Vec3<float> sum = {warp_sum(v_center.x), warp_sum(v_center.y), warp_sum(v_center.z)};
    if (lane == 0) {
      warp_center[warp][0] = sum.x;
      warp_center[warp][1] = sum.y;
      warp_center[warp][2] = sum.z;
    }
    __syncthreads();  // also: the next view writes `rows`
    if (threadIdx.x < 3) {
      float total = 0.f;
      for (int w = 0; w < kWarps; ++w) total += warp_center[w][threadIdx.x];
      center_out[int64_t(threadIdx.x) * groups] = total;
    }
    __syncthreads();
  }

  if (inside) {
    g.means[3 * point] = v_mean.x;
    g.means[3 * point + 1] = v_mean.y;
    g.means[3 * point + 2] = v_mean.z;
    g.dc[3 * point] = v_dc.x;
    g.dc[3 * point + 1] = v_dc.y;
    g.dc[3 * point + 2] = v_dc.z;
  }
  if (width == 0 || warp_base >= in.points) return;
  __syncwarp();  // the coefficients have been read: their place takes the gradients
#pragma unroll
  for (int k = 1; k < kBases; ++k) {
    mine[3 * k - 3] = v_rest[k].x;
    mine[3 * k - 2] = v_rest[k].y;
    mine[3 * k - 1] = v_rest[k].z;
  }
  __syncwarp();
  const int count = int(min(int64_t(32), in.points - warp_base));
  unstage<Degree>(staged[warp], count, int(width), lane, g.rest + warp_base * width);
}

}  // namespace

cudaError_t sh_colors_backward(const ShInputs& in, const ShGradients& g, cudaStream_t stream) {
  const int groups = groups_of(in.points, kShGroup);
  if (groups > 0) {
    constexpr decltype(&sh_backward_kernel<0>) kernels[] = {&sh_backward_kernel<0>, &sh_backward_kernel<1>,
                                                            &sh_backward_kernel<2>, &sh_backward_kernel<3>};
    kernels[in.degree]<<<groups, kShGroup, 0, stream>>>(in, g, groups);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return sum_partials(g.partial_centers, 3 * in.views, groups, false, g.centers, stream);
}

}  // namespace nsmg
