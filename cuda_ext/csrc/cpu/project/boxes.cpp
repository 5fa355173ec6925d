// ns_multigpu::box_views on CPU: in which views groups of points may show.

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>

#include "common/compact.h"
#include "common/lazy_adam.h"
#include "cpu/common/cameras.h"
#include "cpu/common/rows.h"

namespace nsmg::boxes_cpu {
namespace {

constexpr int64_t kBoxes = 4096;  // a task: this many boxes of one view
constexpr int64_t kTensors = 6, kNumbers = 8, kBound = 4, kMeans = 0, kLogScales = 2;  // of the table

// The most that the table says of a tensor's parameters, whichever step wrote them last; NaN if there is one.
template <typename T>
T largest_bound(const T* table, int64_t tensor) {
  T most = T(0);
  for (int64_t last = 0; last <= kLazySteps; ++last) {
    const T bound = table[(last * kTensors + tensor) * kNumbers + kBound];
    most = !(bound <= most) ? bound : most;
    if (std::isnan(most)) break;
  }
  return most;
}

at::Tensor box_views(const at::Tensor& boxes_, const at::Tensor& viewmats_, const at::Tensor& Ks_,
                     at::IntArrayRef sizes, double eps2d, double near_plane, double far_plane,
                     const std::optional<at::Tensor>& table_, bool compact) {
  const auto dtype = boxes_.scalar_type();
  const int64_t groups = boxes_.size(0), views = viewmats_.size(0);
  const at::Tensor boxes = checked(boxes_, "boxes", {-1, kBoxFloats}, dtype);
  const at::Tensor viewmats = checked(viewmats_, "viewmats", {-1, 4, 4}, dtype);
  const at::Tensor Ks = checked(Ks_, "Ks", {views, intrinsics_rows(Ks_), 3}, dtype);
  const bool lazy = table_.has_value();
  const at::Tensor table = lazy ? checked(*table_, "table", {kLazySteps + 1, kTensors, kNumbers}, dtype) : at::Tensor();
  TORCH_CHECK_VALUE(static_cast<int64_t>(sizes.size()) == 2 * views, "sizes must hold 2 numbers a view.");
  const at::Tensor shows = at::empty({views, groups}, boxes.options().dtype(at::kBool));
  bool* const out = shows.mutable_data_ptr<bool>();
  AT_DISPATCH_FLOATING_TYPES(dtype, "box_views", [&] {
    using T = scalar_t;
    Motion<T> motion = {T(0), T(0)};
    if (lazy) {
      const T* lines = table.const_data_ptr<T>();
      const T more = compact ? T(wander<Bfloat16>()) : T(wander<float>());
      motion = {T(1.7321f) * (more * largest_bound(lines, kMeans)), more * largest_bound(lines, kLogScales)};
    }
    const T* all = boxes.const_data_ptr<T>();
    with_camera<T>(Ks, [&](auto kind) {
      for (int64_t v = 0; v < views; ++v) {
        const auto camera = camera_of<typename decltype(kind)::type>(
            viewmats.const_data_ptr<T>(), Ks.const_data_ptr<T>(), v, T(sizes[2 * v]), T(sizes[2 * v + 1]),
            T(near_plane), T(far_plane));
        at::parallel_for(0, groups, kBoxes, [&](int64_t begin, int64_t end) {
          for (int64_t g = begin; g < end; ++g) {
            const Box<T> box = load_box(all + kBoxFloats * g);
            out[v * groups + g] = lazy ? may_show<true>(camera, box, motion, T(eps2d))
                                       : may_show<false>(camera, box, motion, T(eps2d));
          }
        });
      }
    });
  });
  return shows;
}

}  // namespace
}  // namespace nsmg::boxes_cpu

TORCH_LIBRARY_IMPL(ns_multigpu, CPU, m) { m.impl("box_views", &nsmg::boxes_cpu::box_views); }
