// What splat_bind.cpp and step_bind.cpp do for cameras' poses, for pointers.
#include <vector>

#include "cuda/optim/splat_update.h"
#include "cuda/optim/view_poses.h"

using namespace nsmg;

extern "C" {

struct Arguments {
  int32_t points, rest_floats, rows, views, intrinsics_rows, degree, compact;
  float* values[kUpdateTensors];
  void *moments1[kUpdateTensors], *moments2[kUpdateTensors];
  const float *viewmats, *Ks, *features, *records;
  const int32_t *sizes, *point_ids, *radii;
  int32_t* starts;  // [views, groups + 1]
  uint8_t* last;    // or null
  float* table;
  float* v_viewmats;
};

void correct_views(const PoseCorrections* in, float* out) { correct_views_launch(*in, out, nullptr); }

void correction_gradients(const PoseCorrections* in, const PoseGradients* gradients) {
  correction_gradients_launch(*in, *gradients, nullptr);
}

void pose_gradients(const Arguments* a) {
  UpdateLaunch launch = {};
  for (int i = 0; i < kUpdateTensors; ++i) {
    launch.values[i] = a->values[i];
    launch.moments1[i] = a->moments1[i];
    launch.moments2[i] = a->moments2[i];
  }
  launch.compact = a->compact != 0;
  launch.points = a->points;
  launch.rest_floats = a->rest_floats;
  launch.rows = {nullptr, a->point_ids, nullptr, nullptr, a->features, a->radii, a->records, a->rows, 1, false};
  launch.settings = {a->degree, 0.3f, true, false, 0.0f, 0.0f};
  launch.starts = a->starts;
  launch.lazy = {a->last, a->table, nullptr};
  launch.views = {a->viewmats, a->Ks, a->intrinsics_rows, a->views, 0.01f, 1e10f, {}};
  for (int i = 0; i < 2 * a->views; ++i) launch.views.size[i] = a->sizes[i];
  std::vector<float> poses(a->views * kPose * kPoseBlocks);
  launch.poses = poses.data();
  launch.viewmats = a->v_viewmats;
  splat_poses_launch(launch, nullptr);
}
}
