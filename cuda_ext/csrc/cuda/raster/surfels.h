// Launchers of the kernels of 2D Gaussians: projection, and compositing over tiles. See cuda_ext/ops/surfels.py.
// Nothing here reads the device or depends on its data.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/raster/rasterize.h"
#include "cuda/common/rows.h"

namespace nsmg {

struct SurfelInputs {
  const float *means, *quats, *scales, *opacities;  // [N, 3], [N, 4], [N, 2], [N]
  Cameras cameras;
  const int64_t* sizes;  // on the host
  const int *view_ids, *point_ids;
  int points, views, rows;
};

struct SurfelOutputs {
  float *means2d, *transforms, *normals, *depths, *opacities;  // [M, 2], [M, 9], [M, 3], [M], [M]
  int* radii;                                                  // [M, 2]
};

cudaError_t project_surfels(const SurfelInputs& in, const SurfelOutputs& out, cudaStream_t stream);

constexpr int kSurfelGroup = 512;  // points that a block of the backward kernel owns

struct SurfelGradients {
  const float *means2d, *transforms, *normals, *depths, *opacities;  // of the outputs
  const int* radii;                                                  // rows where they are not positive are dead
  float *means, *quats, *scales, *opacities_out;                     // of the inputs, every element written
  float* viewmats;                                                   // [V, 4, 4], zeroed by the caller
  const int* starts;                                                 // find_group_starts with kSurfelGroup
  float* poses;                                                      // scratch: [V, 12, groups]
};

cudaError_t project_surfels_backward(const SurfelInputs& in, const SurfelGradients& g, cudaStream_t stream);

constexpr int kSurfelQuads = 5;  // of a packed row: its 19 numbers and one that is unused

struct SurfelRaster {
  const float *means2d, *transforms, *normals, *opacities, *colors, *depths;
  const int32_t *tile_offsets, *row_ids;
  int rows, intersections, tile_size;
};

struct SurfelImage {
  float *out, *geometry, *alpha;  // [P, 3], [P, 6], [P]; alpha is negative where drawing stopped
  int32_t* last;                  // [P] the last entry of row_ids that was blended, or -1
};

struct SurfelImageGradients {
  const float *out, *geometry, *alpha;
  const int32_t* last;
  const float *v_out, *v_geometry, *v_alpha;
};

struct SurfelRowSums {
  float *means2d, *transforms, *normals, *opacities, *colors, *depths;  // zeroed by the caller; added to
};

// table: [M, 5] float4. To come before the others.
cudaError_t pack_surfels(const SurfelRaster& in, float4* table, cudaStream_t stream);
// One group of patches each.
cudaError_t rasterize_surfels(const PatchGroup& group, const SurfelRaster& in, const float4* table,
                              const SurfelImage& image, cudaStream_t stream);
cudaError_t rasterize_surfels_backward(const PatchGroup& group, const SurfelRaster& in, const float4* table,
                                       const SurfelImageGradients& image, const SurfelRowSums& sums,
                                       cudaStream_t stream);

}  // namespace nsmg
