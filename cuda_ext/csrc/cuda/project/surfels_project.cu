// Projection of 2D Gaussians.
#include "common/surfel_pixel.h"
#include "cuda/project/primitive_project.h"

namespace nsmg {
NSMG_PROJECT_PRIMITIVES(SurfelTraits);
}  // namespace nsmg
