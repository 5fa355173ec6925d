// Forward compositing of 3D Gaussians in 16x16 tiles, up to 4 channels: see raster_forward.h.
#include <algorithm>

#include "cuda/raster/gaussian_traits.h"
#include "cuda/raster/raster_forward.h"

namespace nsmg {
namespace {

constexpr int kSegmentBlocks = 1056;  // at most: eight on each of 132 multiprocessors

// What each segment alone lets through. Nobody asks it of the last ones.
__global__ void __launch_bounds__(kTileThreads, 10)
let_through(const int32_t* __restrict__ row_ids, int rows, RasterState state, RasterPlan plan, RasterOutputs outputs) {
  __shared__ Stage<GaussianTraits<0>> staged;
  const int count = min(*plan.segment_count, plan.most);
  for (int i = blockIdx.x; i < count; i += gridDim.x) {
    const Segment segment = plan.segments[i];
    const TileInfo info = state.tiles[segment.tile];
    const Spot spot(info);
    if (segment.index == 0) {
      if (spot.has_upper()) outputs.last[spot.upper(info)] = -1;
      if (spot.has_lower()) outputs.last[spot.lower(info)] = -1;
    }
    if (segment.index + 1 == segments_of(info)) continue;  // the whole block
    Pixel<0> upper, lower;
    upper.transmittance = spot.has_upper() ? 1.0f : -1.0f;
    lower.transmittance = spot.has_lower() ? 1.0f : -1.0f;
    walk<GaussianTraits<0>>(row_ids, begin_of(info, segment), count_of(info, segment), state.table, rows, info, spot, nullptr, staged,
         upper, lower);
    float* alone = plan.transmittances + int64_t(i) * kChunk + spot.thread;
    alone[0] = upper.transmittance;
    alone[32] = lower.transmittance;
  }
}

}  // namespace

cudaError_t launch_forward(const RasterInputs& in, const RasterShape& shape, const RasterState& state,
                           const RasterPlan& plan, const RasterOutputs& outputs, cudaStream_t stream) {
  if (shape.tiles == 0) return cudaSuccess;
  const int segment_blocks = std::min(plan.most, kSegmentBlocks);
  if (segment_blocks > 0)
    let_through<<<unsigned(segment_blocks), kTileThreads, 0, stream>>>(in.row_ids, int(shape.rows), state, plan,
                                                                       outputs);
  const auto kernel = shape.packed_channels() == 4 ? (segment_blocks > 0 ? forward<GaussianTraits<4>, true> : forward<GaussianTraits<4>, false>)
                                                   : (segment_blocks > 0 ? forward<GaussianTraits<3>, true> : forward<GaussianTraits<3>, false>);
  kernel<<<unsigned(shape.tiles + segment_blocks), kTileThreads, 0, stream>>>(
      in.row_ids, int(shape.rows), shape.channels, state, plan, segment_blocks, outputs);
  return cudaGetLastError();
}

}  // namespace nsmg
