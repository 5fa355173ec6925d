// Launchers of the kernels of 3D convexes: projection with the hull, and compositing over tiles. See
// cuda_ext/ops/convexes.py. Nothing here reads the device or depends on its data.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/raster/rasterize.h"
#include "cuda/common/rows.h"

namespace nsmg {

struct ConvexInputs {
  const float *means, *corners, *deltas, *sigmas, *opacities;  // [N, 3], [N, 18], [N], [N], [N]
  Cameras cameras;
  const int64_t* sizes;  // on the host
  const int *view_ids, *point_ids;
  int points, views, rows;
};

struct ConvexOutputs {
  float *means2d, *lines, *sharpness, *depths, *opacities;  // [M, 2], [M, 18], [M], [M], [M]
  int* radii;                                               // [M, 2]
};

cudaError_t project_convexes(const ConvexInputs& in, const ConvexOutputs& out, cudaStream_t stream);

constexpr int kConvexGroup = 256;  // points that a block of the backward kernel owns

struct ConvexGradients {
  const float *means2d, *lines, *sharpness, *depths, *opacities;  // of the outputs
  const int* radii;                                               // rows where they are not positive are dead
  float *means, *corners, *deltas, *sigmas, *opacities_out;       // of the inputs, every element written
  float* viewmats;                                                // [V, 4, 4], zeroed by the caller
  const int* starts;                                              // find_group_starts with kConvexGroup
  float* poses;                                                   // scratch: [V, 12, groups]
};

cudaError_t project_convexes_backward(const ConvexInputs& in, const ConvexGradients& g, cudaStream_t stream);

constexpr int kConvexQuads = 7;  // of a packed row: its 26 numbers, and two that are unused

struct ConvexRaster {
  const float *means2d, *lines, *sharpness, *opacities, *colors, *depths;
  const int32_t *tile_offsets, *row_ids;
  int rows, intersections, tile_size;
};

struct ConvexImage {
  float *out, *depth, *alpha;  // [P, 3], [P], [P]; alpha is negative where drawing stopped
  int32_t* last;               // [P] the last entry of row_ids that was blended, or -1
};

struct ConvexImageGradients {
  const float *out, *depth, *alpha;
  const int32_t* last;
  const float *v_out, *v_depth, *v_alpha;
};

struct ConvexRowSums {
  float *means2d, *lines, *sharpness, *opacities, *colors, *depths;  // zeroed by the caller; added to
};

// table: [M, 7] float4. To come before the others.
cudaError_t pack_convexes(const ConvexRaster& in, float4* table, cudaStream_t stream);
// One group of patches each.
cudaError_t rasterize_convexes(const PatchGroup& group, const ConvexRaster& in, const float4* table,
                               const ConvexImage& image, cudaStream_t stream);
cudaError_t rasterize_convexes_backward(const PatchGroup& group, const ConvexRaster& in, const float4* table,
                                        const ConvexImageGradients& image, const ConvexRowSums& sums,
                                        cudaStream_t stream);

}  // namespace nsmg
