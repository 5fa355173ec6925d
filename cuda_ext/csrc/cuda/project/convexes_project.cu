// Projection of 3D convexes.
#include "common/convex_pixel.h"
#include "cuda/project/primitive_project.h"

namespace nsmg {
NSMG_PROJECT_PRIMITIVES(ConvexTraits);
}  // namespace nsmg
