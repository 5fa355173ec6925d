// Pixels of views that are drawn cell by cell: rectangles of patches gathered and scattered, layers composited front to
// back, and the way back. Everything runs on the given stream, waits for nothing and takes its sizes from the arguments
// alone, so that a CUDA graph can hold it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace nsmg {

// A rectangle of a patch: its first pixel among those of all patches, the patch's width, its own width and height, and
// its first row in a buffer of pixels; negative for none.
struct PixelPiece {
  int32_t corner, stride, width, height, row;
};

// A rectangle of a patch, x0 <= x < x1: its first row among the received ones, and among gradients; negative for none.
struct PixelLayer {
  int32_t x0, y0, x1, y1, row, back;
};

// A patch: its first pixel among those of all patches, its width and height, and its layers, front to back.
struct LayeredPatch {
  int32_t first, width, height, first_layer, last_layer;
};

// `pieces` is device memory, `host_fragments` long; so are `layers` and `patches` below. What the host holds may go at once.
// color [P, channels], alpha [P], out [N, channels + 1]; `most` is the most pixels of any piece.
cudaError_t gather_fragments_launch(const float* color, const float* alpha, int channels, const PixelPiece* host_fragments,
                                 int count, int most, PixelPiece* fragments, float* out, cudaStream_t stream);

cudaError_t scatter_fragments_launch(const float* gradients, int channels, const PixelPiece* host_fragments, int count,
                                  int most, PixelPiece* fragments, float* v_color, float* v_alpha, cudaStream_t stream);

struct HostLayers {
  const PixelLayer* layers;
  const LayeredPatch* patches;
  int layer_count, patch_count;
  int most;  // pixels of any patch
};

struct DeviceLayers {
  PixelLayer* layers;
  LayeredPatch* patches;
};

// received [N, channels + 1], its alphas negative where the layer stopped; out [Q, channels], alpha [Q], before [N], of which rows that are no layer's stay.
cudaError_t composite_fragments_launch(const float* received, int channels, const HostLayers& host,
                                    const DeviceLayers& device, float* out, float* alpha, float* before,
                                    cudaStream_t stream);

// v_received [.., channels + 1], written where layers have a row there.
cudaError_t composite_fragments_backward_launch(const float* received, const float* before, const float* v_out,
                                             const float* v_alpha, int channels, const HostLayers& host,
                                             const DeviceLayers& device, float* v_received, cudaStream_t stream);

// A rectangle of a layer: what it counts for, its first row, the place of its first pixel, its size.
struct WatchedPiece {
  int32_t slot, first, x0, y0, width, height;
};

inline constexpr int64_t kNowhere = -(int64_t{1} << 30);

// boxes [slots, 5]; pieces as above.
cudaError_t live_boxes_launch(const float* before, const WatchedPiece* host_fragments, int count, int most,
                              WatchedPiece* fragments, int slots, float least, int64_t* boxes, cudaStream_t stream);

}  // namespace nsmg
