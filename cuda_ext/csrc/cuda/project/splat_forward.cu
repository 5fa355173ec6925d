// Projection and colour of rows, from raw parameters: a thread a row, with the harmonics of a warp's rows copied into
// shared memory by the whole warp. 8 + 44 + 12 + 12 K bytes read a row that is drawn (K harmonics beyond the first),
// and 52 written (56 with depth as a feature). A point that has missed steps takes them here, in registers alone: as
// many bytes again for each of its two moments, or half as many where they are bfloat16.

#include "common/activations.h"
#include "common/sh.h"
#include "cuda/project/splat_forward.h"
#include "cuda/optim/splat_lazy_device.h"

namespace nsmg {
namespace {

constexpr int kThreads = 128;

// Floats of one row's harmonics in shared memory: odd, so that the lanes of a warp meet different banks.
__host__ __device__ constexpr int rest_floats(int degree) { return 3 * (sh_bases(degree) - 1); }
__host__ __device__ constexpr int rest_stride(int degree) { return rest_floats(degree) | 1; }

template <typename C>
size_t shared_bytes(int degree, int views) {
  return view_bytes<C>(views) + (degree > 0 ? sizeof(float) * kThreads * rest_stride(degree) : 0);
}

// A point, and its colour without direction, as they are.
struct Now {
  const RawPoints& points;

  __device__ __forceinline__ Point<float> point(int64_t id, int) const {
    return activated(load3(points.means, id), load_quat(points.quats, id), load3(points.log_scales, id),
                     points.logits[id]);
  }
  __device__ __forceinline__ Vec3<float> dc(int64_t id, int) const { return load3(points.sh_dc, id); }
};

// The colour that harmonics sum up to.
__device__ __forceinline__ Vec3<float> shown(const Vec3<float>& sum) {
  return {larger(sum.x + 0.5f, 0.0f), larger(sum.y + 0.5f, 0.0f), larger(sum.z + 0.5f, 0.0f)};
}

// The same as the missed steps leave it.
template <typename Moment>
struct CaughtUp {
  const RawPoints& points;
  const MissedSteps& missed;

  __device__ __forceinline__ LazyFactor factor(int last, int tensor) const {
    return load_lazy_factor(missed.table, last, tensor);
  }
  __device__ __forceinline__ const Moment* moment1(int tensor) const {
    return static_cast<const Moment*>(missed.moments1[tensor]);
  }
  __device__ __forceinline__ const Moment* moment2(int tensor) const {
    return static_cast<const Moment*>(missed.moments2[tensor]);
  }
  __device__ __forceinline__ Vec3<float> vector(const float* value, int tensor, int64_t id, int last) const {
    return caught_up3(factor(last, tensor), value, moment1(tensor), moment2(tensor), id);
  }
  __device__ __forceinline__ Point<float> point(int64_t id, int last) const {
    const Quat<float> quat = caught_up_quat(factor(last, kQuats), points.quats, moment1(kQuats), moment2(kQuats), id);
    const float logit = caught_up(factor(last, kLogits), points.logits, moment1(kLogits), moment2(kLogits), id);
    return activated(vector(points.means, kMeans, id, last), quat, vector(points.log_scales, kLogScales, id, last),
                     logit);
  }
  __device__ __forceinline__ Vec3<float> dc(int64_t id, int last) const {
    return vector(points.sh_dc, kShDc, id, last);
  }
};

// Copies the harmonics of the warp's rows, of points `drawn` (-1: of none), to its shared memory. They are one string
// of 32 kFloats numbers, of which each lane takes every 32nd.
template <int Degree>
__device__ __forceinline__ void stage(const RawPoints& points, int drawn, float* shared, int lane) {
  constexpr int kFloats = rest_floats(Degree), kStride = rest_stride(Degree);
#pragma unroll 9
  for (int k = 0; k < kFloats; ++k) {
    const int at = 32 * k + lane, owner = at / kFloats, number = at % kFloats;
    const int from = __shfl_sync(0xffffffffu, drawn, owner);
    if (from >= 0) {
      shared[owner * kStride + number] = __ldg(points.sh_rest + int64_t{from} * points.rest_floats + number);
    }
  }
}

// The same as the missed steps leave them.
template <int Degree, typename Moment>
__device__ __forceinline__ void stage(const CaughtUp<Moment>& source, int drawn, int last, float* shared, int lane) {
  const RawPoints& points = source.points;
  constexpr int kFloats = rest_floats(Degree), kStride = rest_stride(Degree);
  constexpr int kBatch = kFloats % 9 == 0 ? 9 : 8;  // loads of each array in flight
  static_assert(kFloats % kBatch == 0);
#pragma unroll 1
  for (int base = 0; base < kFloats; base += kBatch) {
    float p[kBatch] = {}, m[kBatch] = {}, v[kBatch] = {};
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int at = 32 * (base + k) + lane;
      const int from = __shfl_sync(0xffffffffu, drawn, at / kFloats);
      if (from >= 0) {
        const int64_t i = int64_t{from} * points.rest_floats + at % kFloats;
        p[k] = __ldg(points.sh_rest + i);
        m[k] = read_moment(source.moment1(kShRest) + i);
        v[k] = read_moment(source.moment2(kShRest) + i);
      }
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int at = 32 * (base + k) + lane, owner = at / kFloats;
      const LazyFactor f = source.factor(__shfl_sync(0xffffffffu, last, owner), kShRest);
      shared[owner * kStride + at % kFloats] = lazy_value(f.shift, f.eps, p[k], m[k], v[k]);
    }
  }
}

template <int Degree, bool Lazy, typename Moment, typename C>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(const __grid_constant__ RawPoints points, const __grid_constant__ MissedSteps missed,
                const __grid_constant__ Views views, const SplatSettings settings, const SplatRows rows) {
  extern __shared__ float4 storage[];
  auto* setups = reinterpret_cast<ViewSetup<C>*>(storage);
  load_views(setups, views);
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t count = smaller<int64_t>(*rows.count, rows.capacity);
  const bool real = row < count;
  const int view = real ? rows.view_ids[row] : 0;
  const int64_t id = real ? rows.point_ids[row] : 0;

  const int last = Lazy && real ? missed.last[id] : 0;
  const auto source = [&] {
    if constexpr (Lazy) {
      return CaughtUp<Moment>{points, missed};
    } else {
      return Now{points};
    }
  }();

  ProjectedRow<float> projected = {};
  Vec3<float> mean = {};
  if (real) {
    const Point<float> point = source.point(id, last);
    mean = point.mean;
    projected = project_row(setups[view].camera, point, settings.eps2d, settings.antialiased);
  }
  const Splat<float>& s = projected.splat;
  const bool alive = projected.alive;

  Vec3<float> color = {0.0f, 0.0f, 0.0f};
  if constexpr (Degree > 0) {
    constexpr int kStride = rest_stride(Degree);
    const int lane = threadIdx.x & 31;
    float* mine = reinterpret_cast<float*>(reinterpret_cast<char*>(storage) + view_bytes<C>(views.count)) +
                  (threadIdx.x & ~31) * kStride;
    const int drawn = alive ? static_cast<int>(id) : -1;
    if constexpr (Lazy) {
      stage<Degree>(source, drawn, last, mine, lane);
    } else {
      stage<Degree>(points, drawn, mine, lane);
    }
    __syncwarp();
    if (alive) {
      float b[sh_bases(Degree)];
      sh_basis<Degree>(direction(setups[view].center, mean).unit, b);
      color = b[0] * source.dc(id, last);
      const float* coefficient = mine + lane * kStride;
#pragma unroll
      for (int k = 1; k < sh_bases(Degree); ++k) {
        color = color + b[k] * Vec3<float>{coefficient[3 * k - 3], coefficient[3 * k - 2], coefficient[3 * k - 1]};
      }
      color = shown(color);
    }
  } else if (alive) {
    const Vec3<float> dc = source.dc(id, last);
    color = settings.degree == kPlainColor ? sigmoid(dc) : shown(ShConstants<float>::k0 * dc);
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
      make_int2(static_cast<int>(projected.rx), static_cast<int>(projected.ry));
  rows.features[3 * row] = color.x;
  rows.features[3 * row + 1] = color.y;
  rows.features[3 * row + 2] = color.z;
}

template <int Degree>
cudaError_t launch(const RawPoints& points, const MissedSteps& missed, const Views& views,
                   const SplatSettings& settings, const SplatRows& rows, cudaStream_t stream) {
  const int blocks = (rows.capacity + kThreads - 1) / kThreads;
  return with_camera(views.intrinsics_rows, [&](auto kind) {
    using C = typename decltype(kind)::type;
    const size_t shared = shared_bytes<C>(Degree, views.count);
    return with_moments(missed.compact, [&](auto moment) {
      using Moment = decltype(moment);
      const auto kernel =
          missed.last == nullptr ? rows_kernel<Degree, false, float, C> : rows_kernel<Degree, true, Moment, C>;
      kernel<<<blocks, kThreads, shared, stream>>>(points, missed, views, settings, rows);
      return cudaGetLastError();
    });
  });
}

}  // namespace

cudaError_t splat_rows_launch(const RawPoints& points, const MissedSteps& missed, const Views& views,
                              const SplatSettings& settings, const SplatRows& rows, cudaStream_t stream) {
  if (rows.capacity == 0) return cudaSuccess;
  switch (settings.degree) {
    case kPlainColor:
    case 0:
      return launch<0>(points, missed, views, settings, rows, stream);
    case 1:
      return launch<1>(points, missed, views, settings, rows, stream);
    case 2:
      return launch<2>(points, missed, views, settings, rows, stream);
    default:
      return launch<3>(points, missed, views, settings, rows, stream);
  }
}

}  // namespace nsmg
