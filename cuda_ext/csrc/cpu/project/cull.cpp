// ns_multigpu::cull on CPU: which points may be seen in which views' rectangles.

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <tuple>

#include "common/lens.h"
#include "cpu/common/cameras.h"
#include "cpu/common/rows.h"

namespace nsmg::cull_cpu {
namespace {

constexpr int64_t kPoints = 8192;  // a task: this many points of one view
constexpr int64_t kLanes = 1024;   // points whose flags are held at a time

// The part that does not depend on the view: the largest scale, and the splat's cutoff radius.
template <typename T>
struct Cutoffs {
  std::vector<T> largest_scale, cutoff2;

  Cutoffs(const T* scales, const T* opacities, int64_t points) : largest_scale(points), cutoff2(points) {
    at::parallel_for(0, points, kPoints, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        largest_scale[i] = larger(larger(scales[3 * i], scales[3 * i + 1]), scales[3 * i + 2]);
        cutoff2[i] = cutoff_squared(opacities[i]);
      }
    });
  }
};

template <typename C, typename T>
void cull_points(const C& camera, const T* means, const Cutoffs<T>& cutoffs, const T* rect, T eps2d,
                 int64_t begin, int64_t end, std::vector<int32_t>& hits) {
  uint8_t keep[kLanes];
  const T x0 = rect[0], y0 = rect[1], x1 = rect[2], y1 = rect[3];
  const T* scale = cutoffs.largest_scale.data();
  const T* cutoff2 = cutoffs.cutoff2.data();
  for (int64_t base = begin; base < end; base += kLanes) {
    const int64_t count = std::min(kLanes, end - base);
#pragma GCC ivdep
    for (int64_t l = 0; l < count; ++l) {
      const int64_t i = base + l;
      const Vec3<T> mean = {means[3 * i], means[3 * i + 1], means[3 * i + 2]};
      keep[l] = may_touch(camera, mean, scale[i], cutoff2[i], eps2d, x0, y0, x1, y1);
    }
    for (int64_t l = 0; l < count; ++l) {
      if (keep[l]) hits.push_back(static_cast<int32_t>(base + l));
    }
  }
}

std::tuple<at::Tensor, at::Tensor> cull(const at::Tensor& means_, const at::Tensor& scales_,
                                        const at::Tensor& opacities_, const at::Tensor& viewmats_,
                                        const at::Tensor& Ks_, at::IntArrayRef sizes, at::IntArrayRef rects,
                                        double eps2d, double near_plane, double far_plane) {
  const int64_t points = means_.size(0), views = viewmats_.size(0);
  const auto dtype = means_.scalar_type();
  const at::Tensor means = checked(means_, "means", {-1, 3}, dtype);
  const at::Tensor scales = checked(scales_, "scales", {points, 3}, dtype);
  const at::Tensor opacities = checked(opacities_, "opacities", {points}, dtype);
  const at::Tensor viewmats = checked(viewmats_, "viewmats", {-1, 4, 4}, dtype);
  const at::Tensor Ks = checked(Ks_, "Ks", {views, intrinsics_rows(Ks_), 3}, dtype);
  TORCH_CHECK_VALUE(static_cast<int64_t>(sizes.size()) == 2 * views, "sizes must hold 2 numbers a view.");
  TORCH_CHECK_VALUE(static_cast<int64_t>(rects.size()) == 4 * views, "rects must hold 4 numbers a view.");

  const int64_t parts = (points + kPoints - 1) / kPoints;  // a view
  std::vector<std::vector<int32_t>> hits(parts * views);
  AT_DISPATCH_FLOATING_TYPES(dtype, "cull", [&] {
    using T = scalar_t;
    const Cutoffs<T> cutoffs(scales.const_data_ptr<T>(), opacities.const_data_ptr<T>(), points);
    at::parallel_for(0, parts * views, 1, [&](int64_t first, int64_t last) {
      for (int64_t task = first; task < last; ++task) {
        const int64_t view = task / parts, begin = task % parts * kPoints;
        const int64_t* r = rects.data() + 4 * view;
        if (r[2] <= r[0] || r[3] <= r[1]) continue;
        const T rect[4] = {T(r[0]), T(r[1]), T(r[2]), T(r[3])};
        with_camera<T>(Ks, [&](auto kind) {
          const auto camera = camera_of<typename decltype(kind)::type>(
              viewmats.const_data_ptr<T>(), Ks.const_data_ptr<T>(), view, T(sizes[2 * view]), T(sizes[2 * view + 1]),
              T(near_plane), T(far_plane));
          cull_points(camera, means.const_data_ptr<T>(), cutoffs, rect, T(eps2d), begin,
                      std::min(begin + kPoints, points), hits[task]);
        });
      }
    });
  });

  std::vector<int64_t> starts(hits.size() + 1, 0);
  for (size_t task = 0; task < hits.size(); ++task) {
    starts[task + 1] = starts[task] + static_cast<int64_t>(hits[task].size());
  }
  at::Tensor view_ids = at::empty({starts.back()}, means.options().dtype(at::kInt));
  at::Tensor point_ids = at::empty_like(view_ids);
  int32_t* view = view_ids.mutable_data_ptr<int32_t>();
  int32_t* point = point_ids.mutable_data_ptr<int32_t>();
  for (size_t task = 0; task < hits.size(); ++task) {
    std::fill(view + starts[task], view + starts[task + 1], static_cast<int32_t>(task / std::max<int64_t>(parts, 1)));
    std::copy(hits[task].begin(), hits[task].end(), point + starts[task]);
  }
  return {view_ids, point_ids};
}

}  // namespace
}  // namespace nsmg::cull_cpu

TORCH_LIBRARY_IMPL(ns_multigpu, CPU, m) {
  m.impl("cull", &nsmg::cull_cpu::cull);
}
