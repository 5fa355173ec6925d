// Which points may be seen in which views: a bit and a count each, a prefix sum, then the rows in (view, point) order.
// The order does not depend on how blocks are scheduled. 28 bytes a point, whatever the number of views; 29 where steps
// may have been missed. With boxes, of those points alone whose group may show in a view, and only there a point is
// tested; then a byte a point for its group's box, and a 32nd of one a view.

#include <cub/device/device_scan.cuh>

#include "common/activations.h"
#include "common/moving.h"
#include "cuda/project/splat_boxes.h"
#include "cuda/project/splat_forward.h"
#include "cuda/optim/splat_lazy_device.h"

namespace nsmg {
namespace {

constexpr int kWarps = kCullBlock / 32;
static_assert(kBoxPoints == 32, "a warp has a group");

struct Add {
  __host__ __device__ int64_t operator()(int64_t a, int64_t b) const { return a + b; }
};

// What a thread's point is tested by. Lazy: points whose missed steps may have moved them, by as much as the table says.
template <bool Lazy, typename Moment>
struct Candidate {
  Vec3<float> mean = {0.0f, 0.0f, 0.0f};
  float largest = 0.0f, cutoff2 = -1.0f, moved = 0.0f;

  __device__ __forceinline__ void load(const RawPoints& points, const MissedSteps& missed, int64_t i) {
    mean = load3(points.means, i);
    const Vec3<float> log_scale = load3(points.log_scales, i);
    float grown = 0.0f, risen = 0.0f;
    if constexpr (Lazy) {
      const int last = missed.last[i];
      const auto most = [&](int tensor) { return wander<Moment>() * load_lazy_bound(missed.table, last, tensor); };
      moved = 1.7321f * most(kMeans);  // in each of three directions
      grown = most(kLogScales);
      risen = most(kLogits);
    }
    largest = std::exp(larger(larger(log_scale.x, log_scale.y), log_scale.z) + grown);
    cutoff2 = cutoff_squared(sigmoid(points.logits[i] + risen));
  }

  template <typename C>
  __device__ __forceinline__ bool shows(const C& camera, float eps2d) const {
    return Lazy ? may_touch_moving(camera, mean, moved, largest, cutoff2, eps2d)
                : may_touch(camera, mean, largest, cutoff2, eps2d, 0.0f, 0.0f, camera.width, camera.height);
  }
};

template <bool Lazy, typename Moment, typename C>
__global__ void __launch_bounds__(kCullBlock)
    flag_kernel(const RawPoints points, const MissedSteps missed, const __grid_constant__ Views views, float eps2d,
                uint32_t* bits, int32_t* counts) {
  extern __shared__ float4 storage[];
  auto* setups = reinterpret_cast<ViewSetup<C>*>(storage);
  load_views(setups, views);
  const int64_t i = int64_t{blockIdx.x} * kCullBlock + threadIdx.x;
  const bool inside = i < points.count;
  Candidate<Lazy, Moment> point;
  if (inside) point.load(points, missed, i);
  for (int v = 0; v < views.count; ++v) {
    const bool keep = inside && point.shows(setups[v].camera, eps2d);
    const uint32_t word = __ballot_sync(0xffffffffu, keep);
    const int count = __syncthreads_count(keep);
    const int64_t block = int64_t{v} * gridDim.x + blockIdx.x;
    if ((threadIdx.x & 31) == 0) bits[block * kWarps + (threadIdx.x >> 5)] = word;
    if (threadIdx.x == 0) counts[block] = count;
  }
  // One more, so that the last of the exclusive sums is the total.
  if (blockIdx.x == 0 && threadIdx.x == 0) counts[int64_t{views.count} * gridDim.x] = 0;
}

// The same, of the groups that may show alone: `shows` [views, groups]. A warp has a group.
template <bool Lazy, typename Moment, typename C>
__global__ void __launch_bounds__(kCullBlock)
    flag_shown_kernel(const RawPoints points, const MissedSteps missed, const __grid_constant__ Views views,
                      float eps2d, const uint8_t* shows, uint32_t* bits, int32_t* counts) {
  extern __shared__ float4 storage[];
  __shared__ int32_t kept[kMaxViews];
  auto* setups = reinterpret_cast<ViewSetup<C>*>(storage);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int groups = box_groups(points.count), group = blockIdx.x * kWarps + warp;
  // Whether the warp's group may show in view `v`; there is none beyond the last.
  const auto may = [&](int v) {
    return v < views.count && group < groups && shows[int64_t{v} * groups + group] != 0;
  };
  bool somewhere = false;
  for (int v = lane; v < views.count; v += 32) somewhere |= may(v);
  somewhere = __any_sync(0xffffffffu, somewhere);
  for (int v = threadIdx.x; v < views.count; v += kCullBlock) kept[v] = 0;
  if (__syncthreads_or(somewhere)) load_views(setups, views);

  const int64_t i = int64_t{blockIdx.x} * kCullBlock + threadIdx.x;
  const bool inside = somewhere && i < points.count;
  Candidate<Lazy, Moment> point;
  if (inside) point.load(points, missed, i);
  for (int base = 0; base < views.count; base += 32) {
    uint32_t word = 0;  // of the view that is this lane's
    for (uint32_t left = __ballot_sync(0xffffffffu, somewhere && may(base + lane)); left != 0; left &= left - 1) {
      const int v = __ffs(left) - 1;
      const bool keep = inside && point.shows(setups[base + v].camera, eps2d);
      const uint32_t found = __ballot_sync(0xffffffffu, keep);
      word = lane == v ? found : word;
    }
    const int v = base + lane;
    if (v < views.count) bits[(int64_t{v} * gridDim.x + blockIdx.x) * kWarps + warp] = word;
    if (word != 0) atomicAdd(&kept[v], __popc(word));
  }
  __syncthreads();
  for (int v = threadIdx.x; v < views.count; v += kCullBlock) counts[int64_t{v} * gridDim.x + blockIdx.x] = kept[v];
  if (blockIdx.x == 0 && threadIdx.x == 0) counts[int64_t{views.count} * gridDim.x] = 0;
}

__global__ void __launch_bounds__(kCullBlock)
    emit_kernel(int views, const uint32_t* bits, const int64_t* offsets, int32_t* view_ids, int32_t* point_ids,
                int64_t* total, int capacity) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int64_t point = int64_t{blockIdx.x} * kCullBlock + threadIdx.x;
  for (int v = 0; v < views; ++v) {
    const int64_t block = int64_t{v} * gridDim.x + blockIdx.x;
    const uint32_t* words = bits + block * kWarps;
    const uint32_t word = words[warp];
    if (word == 0) continue;
    int64_t row = offsets[block];
    for (int w = 0; w < warp; ++w) row += __popc(words[w]);
    row += __popc(word & ((1u << lane) - 1));
    if (((word >> lane) & 1) && row < capacity) {
      view_ids[row] = v;
      point_ids[row] = static_cast<int32_t>(point);
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *total = offsets[int64_t{views} * gridDim.x];
}

// The same where a warp has points in few views: it looks at all of them at once.
__global__ void __launch_bounds__(kCullBlock)
    emit_shown_kernel(int views, const uint32_t* bits, const int64_t* offsets, int32_t* view_ids, int32_t* point_ids,
                      int64_t* total, int capacity) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int64_t point = int64_t{blockIdx.x} * kCullBlock + threadIdx.x;
  for (int base = 0; base < views; base += 32) {
    const int mine = base + lane;
    const uint32_t own = mine < views ? bits[(int64_t{mine} * gridDim.x + blockIdx.x) * kWarps + warp] : 0u;
    for (uint32_t left = __ballot_sync(0xffffffffu, own != 0); left != 0; left &= left - 1) {
      const int v = base + __ffs(left) - 1;
      const int64_t block = int64_t{v} * gridDim.x + blockIdx.x;
      const uint32_t word = __shfl_sync(0xffffffffu, own, v - base);
      int64_t row = offsets[block] + __popc(word & ((1u << lane) - 1));
      for (int w = 0; w < warp; ++w) row += __popc(bits[block * kWarps + w]);
      if (((word >> lane) & 1) && row < capacity) {
        view_ids[row] = v;
        point_ids[row] = static_cast<int32_t>(point);
      }
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *total = offsets[int64_t{views} * gridDim.x];
}

// Flags the points of all groups, or with boxes of those that may show.
template <bool Lazy, typename Moment, typename C>
cudaError_t flag(const RawPoints& points, const MissedSteps& missed, const Views& views, float eps2d,
                 const CullBuffers& buffers, cudaStream_t stream) {
  const int blocks = cull_blocks(points.count);
  const size_t shared = view_bytes<C>(views.count);
  if (buffers.boxes == nullptr) {
    flag_kernel<Lazy, Moment, C>
        <<<blocks, kCullBlock, shared, stream>>>(points, missed, views, eps2d, buffers.bits, buffers.counts);
    return cudaGetLastError();
  }
  const cudaError_t status = box_views_launch(buffers.boxes, box_groups(points.count), views, eps2d, missed.table,
                                              missed.compact, buffers.shows, stream);
  if (status != cudaSuccess) return status;
  flag_shown_kernel<Lazy, Moment, C><<<blocks, kCullBlock, shared, stream>>>(
      points, missed, views, eps2d, buffers.shows, buffers.bits, buffers.counts);
  return cudaGetLastError();
}

}  // namespace

cudaError_t cull_scan_bytes(int64_t items, size_t* bytes, cudaStream_t stream) {
  return cub::DeviceScan::ExclusiveScan(nullptr, *bytes, static_cast<const int32_t*>(nullptr),
                                        static_cast<int64_t*>(nullptr), Add{}, int64_t{0}, items, stream);
}

cudaError_t splat_cull_launch(const RawPoints& points, const MissedSteps& missed, const Views& views, float eps2d,
                              const CullBuffers& buffers, const SplatRows& rows, cudaStream_t stream) {
  const int blocks = cull_blocks(points.count);
  if (blocks == 0 || views.count == 0) return cudaMemsetAsync(rows.count, 0, sizeof(int64_t), stream);
  cudaError_t status = with_camera(views.intrinsics_rows, [&](auto kind) {
    using C = typename decltype(kind)::type;
    return with_moments(missed.compact, [&](auto moment) {
      using Moment = decltype(moment);
      return missed.last == nullptr ? flag<false, float, C>(points, missed, views, eps2d, buffers, stream)
                                    : flag<true, Moment, C>(points, missed, views, eps2d, buffers, stream);
    });
  });
  if (status != cudaSuccess) return status;
  size_t bytes = buffers.scan_bytes;
  status = cub::DeviceScan::ExclusiveScan(buffers.scan, bytes, static_cast<const int32_t*>(buffers.counts),
                                          buffers.offsets, Add{}, int64_t{0}, int64_t{blocks} * views.count + 1, stream);
  if (status != cudaSuccess) return status;
  const auto emit = buffers.boxes == nullptr ? emit_kernel : emit_shown_kernel;
  emit<<<blocks, kCullBlock, 0, stream>>>(views.count, buffers.bits, buffers.offsets, rows.view_ids, rows.point_ids,
                                           rows.count, rows.capacity);
  return cudaGetLastError();
}

}  // namespace nsmg
