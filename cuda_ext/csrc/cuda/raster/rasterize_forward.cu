// Forward compositing of 3D Gaussians in 16x16 tiles, up to 4 channels: see raster_forward.h.
#include <algorithm>

#include "cuda/raster/gaussian_traits.h"
#include "cuda/raster/raster_forward.h"

namespace nsmg {
namespace {

constexpr int kSegmentBlocks = 1056;  // at most: eight on each of 132 multiprocessors

template <typename Traits>
void launch_of(const RasterInputs& in, const RasterShape& shape, const RasterState& state, const RasterPlan& plan,
               const RasterOutputs& outputs, cudaStream_t stream) {
  const int rows = int(shape.rows), segment_blocks = std::min(plan.most, kSegmentBlocks);
  const auto kernel = segment_blocks > 0 ? forward<Traits, true> : forward<Traits, false>;
  kernel<<<unsigned(shape.tiles + segment_blocks), kTileThreads, 0, stream>>>(
      in.row_ids, rows, shape.channels, state, plan, segment_blocks, outputs);
  if (segment_blocks == 0) return;
  const auto segments = forward_segments<Traits>;
  segments<<<unsigned(segment_blocks), kTileThreads, 0, stream>>>(in.row_ids, rows, shape.channels, state, plan,
                                                                  outputs);
}

}  // namespace

cudaError_t launch_forward(const RasterInputs& in, const RasterShape& shape, const RasterState& state,
                           const RasterPlan& plan, const RasterOutputs& outputs, cudaStream_t stream) {
  if (shape.tiles == 0) return cudaSuccess;
  const auto launch = shape.packed_channels() == 4 ? launch_of<GaussianTraits<4>> : launch_of<GaussianTraits<3>>;
  launch(in, shape, state, plan, outputs, stream);
  return cudaGetLastError();
}

}  // namespace nsmg
