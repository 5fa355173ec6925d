// The lazy update of points that are drawn through lenses.

#define NSMG_CAMERA LensCamera
#include "cuda/optim/splat_update_lazy.cu"
