// Backward compositing of 3D Gaussians in 16x16 tiles: see raster_backward.h.
#include "cuda/raster/gaussian_traits.h"
#include "cuda/raster/raster_backward.h"

namespace nsmg {
namespace {

template <int kChannels>
auto kernel_of(bool absgrad) {
  return absgrad ? backward<GaussianTraits<kChannels, true>> : backward<GaussianTraits<kChannels, false>>;
}

}  // namespace

cudaError_t launch_backward(const RasterInputs& in, const RasterShape& shape, const RasterState& state,
                            const RasterGradients& pixels, const RecordTarget& target, bool absgrad,
                            cudaStream_t stream) {
  if (shape.tiles == 0 || shape.rows == 0) return cudaSuccess;  // without tiles nothing has written the slots
  const auto kernel = shape.packed_channels() == 4 ? kernel_of<4>(absgrad) : kernel_of<3>(absgrad);
  kernel<<<unsigned(shape.chunk_slots()), kTileThreads, 0, stream>>>(in.row_ids, int(shape.rows), shape.channels,
                                                                     state, pixels, target);
  return cudaGetLastError();
}

}  // namespace nsmg
