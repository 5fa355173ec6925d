// Projection and colour of rows, from raw parameters: a thread a row, with the harmonics of a warp's rows brought into
// shared memory by the whole warp. 8 + 44 + 12 + 12 K bytes read a row that is drawn (K harmonics beyond the first), and
// 52 written (56 with depth as a feature).

#include "common/activations.h"
#include "common/sh.h"
#include "cuda/splat_forward.h"

namespace nsmg {
namespace {

constexpr int kThreads = 128;

// Floats of one row's harmonics in shared memory: odd, so that the lanes of a warp meet different banks.
__host__ __device__ constexpr int rest_floats(int degree) { return 3 * (sh_bases(degree) - 1); }
__host__ __device__ constexpr int rest_stride(int degree) { return rest_floats(degree) | 1; }

size_t shared_bytes(int degree, int views) {
  return view_bytes(views) + (degree > 0 ? sizeof(float) * kThreads * rest_stride(degree) : 0);
}

template <int Degree>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(const RawPoints points, const __grid_constant__ Views views, const SplatSettings settings,
                const SplatRows rows) {
  extern __shared__ float4 storage[];
  auto* setups = reinterpret_cast<ViewSetup*>(storage);
  load_views(setups, views);
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t count = smaller<int64_t>(*rows.count, rows.capacity);
  const bool real = row < count;
  const int view = real ? rows.view_ids[row] : 0;
  const int64_t id = real ? rows.point_ids[row] : 0;

  ProjectedRow<float> projected = {};
  Vec3<float> mean = {};
  if (real) {
    mean = load3(points.means, id);
    const Point<float> point =
        activated(mean, load_quat(points.quats, id), load3(points.log_scales, id), points.logits[id]);
    projected = project_row(setups[view].camera, point, settings.eps2d, settings.antialiased);
  }
  const Splat<float>& s = projected.splat;
  const bool alive = projected.alive;

  Vec3<float> color = {0.0f, 0.0f, 0.0f};
  if constexpr (Degree > 0) {
    constexpr int kFloats = rest_floats(Degree), kStride = rest_stride(Degree);
    const int lane = threadIdx.x & 31;
    float* mine = reinterpret_cast<float*>(reinterpret_cast<char*>(storage) + view_bytes(views.count)) +
                  (threadIdx.x & ~31) * kStride;
    const int source = alive ? static_cast<int>(id) : -1;
    // The rows' harmonics as one string of 32 kFloats numbers, of which each lane takes every 32nd.
#pragma unroll 9
    for (int k = 0; k < kFloats; ++k) {
      const int at = 32 * k + lane, owner = at / kFloats, number = at % kFloats;
      const int from = __shfl_sync(0xffffffffu, source, owner);
      if (from >= 0) mine[owner * kStride + number] = __ldg(points.sh_rest + int64_t{from} * points.rest_floats + number);
    }
    __syncwarp();
    if (alive) {
      float b[sh_bases(Degree)];
      sh_basis<Degree>(direction(setups[view].center, mean).unit, b);
      color = b[0] * load3(points.sh_dc, id);
      const float* coefficient = mine + lane * kStride;
#pragma unroll
      for (int k = 1; k < sh_bases(Degree); ++k) {
        color = color + b[k] * Vec3<float>{coefficient[3 * k - 3], coefficient[3 * k - 2], coefficient[3 * k - 1]};
      }
    }
  } else if (alive) {
    color = ShConstants<float>::k0 * load3(points.sh_dc, id);
  }

  if (row >= rows.capacity) return;
  if (!real) {
    rows.view_ids[row] = larger(views.count - 1, 0);
    rows.point_ids[row] = -1;
  }
  const float zero = 0.0f;
  reinterpret_cast<float2*>(rows.means2d)[row] = alive ? make_float2(s.x, s.y) : make_float2(zero, zero);
  rows.conics[3 * row] = alive ? s.conic_a : zero;
  rows.conics[3 * row + 1] = alive ? s.conic_b : zero;
  rows.conics[3 * row + 2] = alive ? s.conic_c : zero;
  rows.opacities[row] = alive ? s.opacity : zero;
  rows.depths[row] = alive ? s.depth : zero;
  reinterpret_cast<int2*>(rows.radii)[row] =
      alive ? make_int2(static_cast<int>(projected.rx), static_cast<int>(projected.ry)) : make_int2(0, 0);
  const float r = alive ? larger(color.x + 0.5f, zero) : zero;
  const float g = alive ? larger(color.y + 0.5f, zero) : zero;
  const float b = alive ? larger(color.z + 0.5f, zero) : zero;
  if (settings.depth) {
    reinterpret_cast<float4*>(rows.features)[row] = make_float4(r, g, b, alive ? s.depth : zero);
  } else {
    rows.features[3 * row] = r;
    rows.features[3 * row + 1] = g;
    rows.features[3 * row + 2] = b;
  }
}

template <int Degree>
cudaError_t launch(const RawPoints& points, const Views& views, const SplatSettings& settings, const SplatRows& rows,
                   cudaStream_t stream) {
  const int blocks = (rows.capacity + kThreads - 1) / kThreads;
  rows_kernel<Degree><<<blocks, kThreads, shared_bytes(Degree, views.count), stream>>>(points, views, settings, rows);
  return cudaGetLastError();
}

}  // namespace

cudaError_t splat_rows_launch(const RawPoints& points, const Views& views, const SplatSettings& settings,
                              const SplatRows& rows, cudaStream_t stream) {
  if (rows.capacity == 0) return cudaSuccess;
  switch (settings.degree) {
    case 0:
      return launch<0>(points, views, settings, rows, stream);
    case 1:
      return launch<1>(points, views, settings, rows, stream);
    case 2:
      return launch<2>(points, views, settings, rows, stream);
    default:
      return launch<3>(points, views, settings, rows, stream);
  }
}

}  // namespace nsmg
