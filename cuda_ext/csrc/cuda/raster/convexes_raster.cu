// Compositing of 3D convexes.
#include "common/convex_pixel.h"
#include "cuda/raster/primitive_raster.h"

namespace nsmg {
NSMG_DRAW_PRIMITIVES(ConvexTraits);
}  // namespace nsmg
