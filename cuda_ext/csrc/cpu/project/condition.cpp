// ns_multigpu::condition and its backward on CPU.

#include "common/conditioning.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <tuple>

#include "cpu/common/rows.h"

namespace nsmg::condition_cpu {
namespace {

// The checked inputs that forward and backward share.
struct Inputs {
  at::Tensor means, times, left, motions, scales, opacities, view_times, point_ids;
  std::vector<int64_t> starts;  // of each view's rows

  int64_t points() const { return means.size(0); }
  int64_t views() const { return view_times.size(0); }
  int64_t rows() const { return point_ids.size(0); }

  template <typename T>
  MovingPoint<T> point(int64_t row) const {
    const int64_t i = point_ids.const_data_ptr<int32_t>()[row];
    const T *m = means.const_data_ptr<T>() + 3 * i, *l = left.const_data_ptr<T>() + 4 * i;
    const T *r = motions.const_data_ptr<T>() + 4 * i, *s = scales.const_data_ptr<T>() + 4 * i;
    return {{m[0], m[1], m[2]},       times.const_data_ptr<T>()[i],    {l[0], l[1], l[2], l[3]}, {r[0], r[1], r[2], r[3]},
            {s[0], s[1], s[2], s[3]}, opacities.const_data_ptr<T>()[i]};
  }
};

Inputs check_inputs(const at::Tensor& means, const at::Tensor& times, const at::Tensor& left, const at::Tensor& motions,
                    const at::Tensor& scales, const at::Tensor& opacities, const at::Tensor& view_times,
                    const at::Tensor& view_ids, const at::Tensor& point_ids) {
  const auto dtype = means.scalar_type();
  const int64_t points = means.size(0);
  return {checked(means, "means", {-1, 3}, dtype),
          checked(times, "times", {points}, dtype),
          checked(left, "left", {points, 4}, dtype),
          checked(motions, "motions", {points, 4}, dtype),
          checked(scales, "scales", {points, 4}, dtype),
          checked(opacities, "opacities", {points}, dtype),
          checked(view_times, "view_times", {-1}, dtype),
          point_ids.contiguous(),
          view_starts(view_ids.contiguous(), point_ids.contiguous(), view_times.size(0), points)};
}

using Moments = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Moments condition(const at::Tensor& means, const at::Tensor& times, const at::Tensor& left, const at::Tensor& motions,
                  const at::Tensor& scales, const at::Tensor& opacities, const at::Tensor& view_times,
                  const at::Tensor& view_ids, const at::Tensor& point_ids) {
  const Inputs in = check_inputs(means, times, left, motions, scales, opacities, view_times, view_ids, point_ids);
  const auto options = means.options();
  at::Tensor row_means = at::empty({in.rows(), 3}, options), axes = at::empty({in.rows(), 3, 3}, options);
  at::Tensor row_opacities = at::empty({in.rows()}, options);
  for (const at::Tensor& output : {row_means, axes, row_opacities}) zero_padding(output, in.starts);
  AT_DISPATCH_FLOATING_TYPES(means.scalar_type(), "condition", [&] {
    using T = scalar_t;
    T* const mean_out = row_means.mutable_data_ptr<T>();
    T* const axes_out = axes.mutable_data_ptr<T>();
    T* const opacity_out = row_opacities.mutable_data_ptr<T>();
    const T* const moments = in.view_times.const_data_ptr<T>();
    for_chunks(chunks_of(in.starts, 0, in.views()), [&](int64_t, const Chunk& chunk) {
      for (int64_t row = chunk.begin; row < chunk.end; ++row) {
        const AxesPoint<T> p = moment_of(in.point<T>(row), moments[chunk.view]);
        const T numbers[12] = {p.mean.x,    p.mean.y,    p.mean.z,    p.axes.r0.x, p.axes.r0.y, p.axes.r0.z,
                               p.axes.r1.x, p.axes.r1.y, p.axes.r1.z, p.axes.r2.x, p.axes.r2.y, p.axes.r2.z};
        std::copy_n(numbers, 3, mean_out + 3 * row);
        std::copy_n(numbers + 3, 9, axes_out + 9 * row);
        opacity_out[row] = p.opacity;
      }
    });
  });
  return {row_means, axes, row_opacities};
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Gradients condition_backward(const at::Tensor& means, const at::Tensor& times, const at::Tensor& left,
                             const at::Tensor& motions, const at::Tensor& scales, const at::Tensor& opacities,
                             const at::Tensor& view_times, const at::Tensor& view_ids, const at::Tensor& point_ids,
                             const at::Tensor& v_means_, const at::Tensor& v_axes_, const at::Tensor& v_opacities_) {
  const Inputs in = check_inputs(means, times, left, motions, scales, opacities, view_times, view_ids, point_ids);
  const auto dtype = means.scalar_type();
  const at::Tensor v_means = checked(v_means_, "v_means", {in.rows(), 3}, dtype);
  const at::Tensor v_axes = checked(v_axes_, "v_axes", {in.rows(), 3, 3}, dtype);
  const at::Tensor v_opacities = checked(v_opacities_, "v_opacities", {in.rows()}, dtype);
  const auto options = means.options();
  const at::Tensor g_means = at::zeros({in.points(), 3}, options), g_times = at::zeros({in.points()}, options);
  const at::Tensor g_left = at::zeros({in.points(), 4}, options), g_motions = at::zeros({in.points(), 4}, options);
  const at::Tensor g_scales = at::zeros({in.points(), 4}, options), g_opacities = at::zeros({in.points()}, options);
  AT_DISPATCH_FLOATING_TYPES(dtype, "condition_backward", [&] {
    using T = scalar_t;
    const T* const moments = in.view_times.const_data_ptr<T>();
    const int32_t* const ids = in.point_ids.const_data_ptr<int32_t>();
    const T *const by_mean = v_means.const_data_ptr<T>(), *const by_axes = v_axes.const_data_ptr<T>();
    const T* const by_opacity = v_opacities.const_data_ptr<T>();
    const auto add = [](const at::Tensor& to, int64_t first, std::initializer_list<T> values) {
      T* out = to.mutable_data_ptr<T>() + first;
      for (const T value : values) *out++ += value;
    };
    // One view after the other: within a view each point appears once, so the rows of a view never meet.
    for (int64_t view = 0; view < in.views(); ++view) {
      for_chunks(chunks_of(in.starts, view, view + 1), [&](int64_t, const Chunk& chunk) {
        for (int64_t row = chunk.begin; row < chunk.end; ++row) {
          const T *m = by_mean + 3 * row, *a = by_axes + 9 * row;
          const AxesPoint<T> given = {{m[0], m[1], m[2]},
                                      {{a[0], a[1], a[2]}, {a[3], a[4], a[5]}, {a[6], a[7], a[8]}},
                                      by_opacity[row]};
          const MovingPoint<T> g = moment_vjp(in.point<T>(row), moments[view], given);
          const int64_t i = ids[row];
          add(g_means, 3 * i, {g.mean.x, g.mean.y, g.mean.z});
          add(g_times, i, {g.time});
          add(g_left, 4 * i, {g.left.w, g.left.x, g.left.y, g.left.z});
          add(g_motions, 4 * i, {g.motion.w, g.motion.x, g.motion.y, g.motion.z});
          add(g_scales, 4 * i, {g.scale.w, g.scale.x, g.scale.y, g.scale.z});
          add(g_opacities, i, {g.opacity});
        }
      });
    }
  });
  return {g_means, g_times, g_left, g_motions, g_scales, g_opacities};
}

}  // namespace
}  // namespace nsmg::condition_cpu

TORCH_LIBRARY_IMPL(ns_multigpu, CPU, m) {
  m.impl("condition", &nsmg::condition_cpu::condition);
  m.impl("condition_backward", &nsmg::condition_cpu::condition_backward);
}
