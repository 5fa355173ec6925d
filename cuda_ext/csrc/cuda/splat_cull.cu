// Which points may be seen in which views: a bit and a count each, a prefix sum, then the rows in (view, point) order.
// The order does not depend on how blocks are scheduled. 28 bytes a point, whatever the number of views; 29 where steps
// may have been missed.

#include <cub/device/device_scan.cuh>

#include "common/activations.h"
#include "common/moving.h"
#include "cuda/splat_forward.h"
#include "cuda/splat_lazy_device.h"

namespace nsmg {
namespace {

constexpr int kWarps = kCullPoints / 32;

struct Add {
  __host__ __device__ int64_t operator()(int64_t a, int64_t b) const { return a + b; }
};

// Lazy: points whose missed steps may have moved them, by as much as the table says.
template <bool Lazy, typename Moment>
__global__ void __launch_bounds__(kCullPoints)
    flag_kernel(const RawPoints points, const MissedSteps missed, const __grid_constant__ Views views, float eps2d,
                uint32_t* bits, int32_t* counts) {
  extern __shared__ float4 storage[];
  auto* setups = reinterpret_cast<ViewSetup*>(storage);
  load_views(setups, views);
  const int64_t i = int64_t{blockIdx.x} * kCullPoints + threadIdx.x;
  const bool inside = i < points.count;
  Vec3<float> mean = {0.0f, 0.0f, 0.0f};
  float largest = 0.0f, reach2 = -1.0f, moved = 0.0f;
  if (inside) {
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
    reach2 = reach(sigmoid(points.logits[i] + risen));
  }
  for (int v = 0; v < views.count; ++v) {
    const Camera<float>& camera = setups[v].camera;
    const bool keep =
        inside && (Lazy ? may_touch_moving(camera, mean, moved, largest, reach2, eps2d)
                        : may_touch(camera, mean, largest, reach2, eps2d, 0.0f, 0.0f, camera.width, camera.height));
    const uint32_t word = __ballot_sync(0xffffffffu, keep);
    const int count = __syncthreads_count(keep);
    const int64_t block = int64_t{v} * gridDim.x + blockIdx.x;
    if ((threadIdx.x & 31) == 0) bits[block * kWarps + (threadIdx.x >> 5)] = word;
    if (threadIdx.x == 0) counts[block] = count;
  }
  // One more, so that the last of the exclusive sums is the total.
  if (blockIdx.x == 0 && threadIdx.x == 0) counts[int64_t{views.count} * gridDim.x] = 0;
}

__global__ void __launch_bounds__(kCullPoints)
    emit_kernel(int views, const uint32_t* bits, const int64_t* offsets, int32_t* view_ids, int32_t* point_ids,
                int64_t* total, int capacity) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int64_t point = int64_t{blockIdx.x} * kCullPoints + threadIdx.x;
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

}  // namespace

cudaError_t cull_scan_bytes(int64_t items, size_t* bytes, cudaStream_t stream) {
  return cub::DeviceScan::ExclusiveScan(nullptr, *bytes, static_cast<const int32_t*>(nullptr),
                                        static_cast<int64_t*>(nullptr), Add{}, int64_t{0}, items, stream);
}

cudaError_t splat_cull_launch(const RawPoints& points, const MissedSteps& missed, const Views& views, float eps2d,
                              const CullBuffers& buffers, const SplatRows& rows, cudaStream_t stream) {
  const int blocks = cull_blocks(points.count);
  if (blocks == 0 || views.count == 0) return cudaMemsetAsync(rows.count, 0, sizeof(int64_t), stream);
  const size_t shared = view_bytes(views.count);
  uint32_t* const bits = buffers.bits;
  int32_t* const counts = buffers.counts;
  cudaError_t status = with_moments(missed.compact, [&](auto moment) {
    using Moment = decltype(moment);
    const auto kernel = missed.last == nullptr ? flag_kernel<false, float> : flag_kernel<true, Moment>;
    kernel<<<blocks, kCullPoints, shared, stream>>>(points, missed, views, eps2d, bits, counts);
    return cudaGetLastError();
  });
  if (status != cudaSuccess) return status;
  size_t bytes = buffers.scan_bytes;
  status = cub::DeviceScan::ExclusiveScan(buffers.scan, bytes, static_cast<const int32_t*>(buffers.counts),
                                          buffers.offsets, Add{}, int64_t{0}, int64_t{blocks} * views.count + 1, stream);
  if (status != cudaSuccess) return status;
  emit_kernel<<<blocks, kCullPoints, 0, stream>>>(views.count, buffers.bits, buffers.offsets, rows.view_ids,
                                                  rows.point_ids, rows.count, rows.capacity);
  return cudaGetLastError();
}

}  // namespace nsmg
