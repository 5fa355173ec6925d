// Compositing of 2D Gaussians.
#include "common/surfel_pixel.h"
#include "cuda/raster/primitive_raster.h"

namespace nsmg {
NSMG_DRAW_PRIMITIVES(SurfelTraits);
}  // namespace nsmg
