// ns_multigpu::sh_colors and its backward on CPU: a row reads its point's coefficients once, in one stretch of memory.

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <tuple>

#include "common/sh.h"
#include "cpu/common/rows.h"

namespace nsmg::sh_cpu {
namespace {

// The checked inputs that forward and backward share.
struct Inputs {
  at::Tensor means, centers, dc, rest, point_ids;
  std::vector<int64_t> starts;  // of each view's rows

  int64_t points() const { return means.size(0); }
  int64_t views() const { return centers.size(0); }
  int64_t rows() const { return point_ids.size(0); }
  int64_t rest_bases() const { return rest.size(1); }
};

Inputs check_inputs(int64_t degree, const at::Tensor& means, const at::Tensor& camera_centers, const at::Tensor& sh_dc,
                    const at::Tensor& sh_rest, const at::Tensor& view_ids, const at::Tensor& point_ids) {
  const auto dtype = means.scalar_type();
  const int64_t points = means.size(0), views = camera_centers.size(0);
  TORCH_CHECK_VALUE(degree >= 0 && degree <= 3, "degree must be 0, 1, 2 or 3, not ", degree, ".");
  Inputs in = {checked(means, "means", {-1, 3}, dtype),
               checked(camera_centers, "camera_centers", {-1, 3}, dtype),
               checked(sh_dc, "sh_dc", {points, 3}, dtype),
               checked(sh_rest, "sh_rest", {points, -1, 3}, dtype),
               point_ids.contiguous(),
               view_starts(view_ids.contiguous(), point_ids.contiguous(), views, points)};
  TORCH_CHECK_VALUE(in.rest_bases() >= sh_bases(degree) - 1, "sh_rest must hold at least ", sh_bases(degree) - 1,
                    " bases for degree ", degree, ", not ", in.rest_bases(), ".");
  return in;
}

template <typename T>
Vec3<T> load(const T* p, int64_t i) {
  return {p[3 * i], p[3 * i + 1], p[3 * i + 2]};
}

template <int Degree, typename T>
void forward_chunk(const Inputs& in, const Chunk& chunk, T* colors) {
  const int32_t* ids = in.point_ids.const_data_ptr<int32_t>();
  const T* means = in.means.const_data_ptr<T>();
  const T* dc = in.dc.const_data_ptr<T>();
  const T* rest = in.rest.const_data_ptr<T>();
  const Vec3<T> center = load(in.centers.const_data_ptr<T>(), chunk.view);
  for (int64_t row = chunk.begin; row < chunk.end; ++row) {
    const int64_t id = ids[row];
    T b[sh_bases(Degree)];
    sh_basis<Degree>(direction(center, load(means, id)).unit, b);
    const T* coefficient = rest + 3 * in.rest_bases() * id;
    Vec3<T> color = b[0] * load(dc, id);
    for (int k = 1; k < sh_bases(Degree); ++k) color = color + b[k] * load(coefficient, k - 1);
    colors[3 * row] = larger(color.x + T(0.5), T(0));
    colors[3 * row + 1] = larger(color.y + T(0.5), T(0));
    colors[3 * row + 2] = larger(color.z + T(0.5), T(0));
  }
}

template <typename T>
struct Gradients {
  const T *colors, *v_colors;
  T *means, *dc, *rest;
};

// Adds one chunk's rows to their points' gradients, and returns in `center` the sum for the view's camera centre.
template <int Degree, typename T>
void backward_chunk(const Inputs& in, const Chunk& chunk, const Gradients<T>& g, double* center_sum) {
  const int32_t* ids = in.point_ids.const_data_ptr<int32_t>();
  const T* means = in.means.const_data_ptr<T>();
  const T* rest = in.rest.const_data_ptr<T>();
  const Vec3<T> center = load(in.centers.const_data_ptr<T>(), chunk.view);
  double sx = 0, sy = 0, sz = 0;
  for (int64_t row = chunk.begin; row < chunk.end; ++row) {
    const int64_t id = ids[row];
    Vec3<T> v;  // zero where the colour was clamped at black
    v.x = g.colors[3 * row] > T(0) ? g.v_colors[3 * row] : T(0);
    v.y = g.colors[3 * row + 1] > T(0) ? g.v_colors[3 * row + 1] : T(0);
    v.z = g.colors[3 * row + 2] > T(0) ? g.v_colors[3 * row + 2] : T(0);
    const Direction<T> d = direction(center, load(means, id));
    T b[sh_bases(Degree)], g_b[sh_bases(Degree)];
    sh_basis<Degree>(d.unit, b);
    for (int c = 0; c < 3; ++c) g.dc[3 * id + c] += b[0] * (c == 0 ? v.x : c == 1 ? v.y : v.z);
    const T* coefficient = rest + 3 * in.rest_bases() * id;
    T* out = g.rest + 3 * in.rest_bases() * id;
    g_b[0] = T(0);
    for (int k = 1; k < sh_bases(Degree); ++k) {
      out[3 * k - 3] += b[k] * v.x;
      out[3 * k - 2] += b[k] * v.y;
      out[3 * k - 1] += b[k] * v.z;
      g_b[k] = dot(load(coefficient, k - 1), v);
    }
    if constexpr (Degree > 0) {
      const Vec3<T> g_mean = direction_vjp(d, sh_basis_vjp<Degree>(d.unit, g_b));
      g.means[3 * id] += g_mean.x;
      g.means[3 * id + 1] += g_mean.y;
      g.means[3 * id + 2] += g_mean.z;
      sx -= g_mean.x;
      sy -= g_mean.y;
      sz -= g_mean.z;
    }
  }
  center_sum[0] = sx;
  center_sum[1] = sy;
  center_sum[2] = sz;
}

// Calls f with the degree as a compile-time constant, so that its loops over the bases unroll.
template <typename F>
void with_degree(int64_t degree, const F& f) {
  if (degree == 0) return f(std::integral_constant<int, 0>());
  if (degree == 1) return f(std::integral_constant<int, 1>());
  if (degree == 2) return f(std::integral_constant<int, 2>());
  f(std::integral_constant<int, 3>());
}

at::Tensor sh_colors(int64_t degree, const at::Tensor& means, const at::Tensor& camera_centers, const at::Tensor& sh_dc,
                     const at::Tensor& sh_rest, const at::Tensor& view_ids, const at::Tensor& point_ids) {
  const Inputs in = check_inputs(degree, means, camera_centers, sh_dc, sh_rest, view_ids, point_ids);
  at::Tensor colors = at::empty({in.rows(), 3}, means.options());
  zero_padding(colors, in.starts);
  const std::vector<Chunk> chunks = chunks_of(in.starts, 0, in.views());
  AT_DISPATCH_FLOATING_TYPES(means.scalar_type(), "sh_colors", [&] {
    using T = scalar_t;
    T* out = colors.mutable_data_ptr<T>();
    with_degree(degree, [&](auto constant) {
      for_chunks(chunks, [&](int64_t, const Chunk& chunk) {
        forward_chunk<decltype(constant)::value, T>(in, chunk, out);
      });
    });
  });
  return colors;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> sh_colors_backward(
    int64_t degree, const at::Tensor& means, const at::Tensor& camera_centers, const at::Tensor& sh_dc,
    const at::Tensor& sh_rest, const at::Tensor& view_ids, const at::Tensor& point_ids, const at::Tensor& colors_,
    const at::Tensor& v_colors_) {
  const Inputs in = check_inputs(degree, means, camera_centers, sh_dc, sh_rest, view_ids, point_ids);
  const at::Tensor colors = checked(colors_, "colors", {in.rows(), 3}, means.scalar_type());
  const at::Tensor v_colors = checked(v_colors_, "v_colors", {in.rows(), 3}, means.scalar_type());
  at::Tensor v_means = at::zeros({in.points(), 3}, means.options());
  at::Tensor v_centers = at::zeros({in.views(), 3}, means.options());
  at::Tensor v_dc = at::zeros({in.points(), 3}, means.options());
  at::Tensor v_rest = at::zeros({in.points(), in.rest_bases(), 3}, means.options());
  AT_DISPATCH_FLOATING_TYPES(means.scalar_type(), "sh_colors_backward", [&] {
    using T = scalar_t;
    const Gradients<T> g = {colors.const_data_ptr<T>(), v_colors.const_data_ptr<T>(), v_means.mutable_data_ptr<T>(),
                            v_dc.mutable_data_ptr<T>(), v_rest.mutable_data_ptr<T>()};
    T* centers = v_centers.mutable_data_ptr<T>();
    // One view after the other: within a view each point appears once, so the rows of a view never meet.
    for (int64_t view = 0; view < in.views(); ++view) {
      const std::vector<Chunk> chunks = chunks_of(in.starts, view, view + 1);
      std::vector<double> sums(3 * chunks.size());
      with_degree(degree, [&](auto constant) {
        for_chunks(chunks, [&](int64_t i, const Chunk& chunk) {
          backward_chunk<decltype(constant)::value, T>(in, chunk, g, sums.data() + 3 * i);
        });
      });
      double total[3] = {};
      for (size_t i = 0; i < sums.size(); ++i) total[i % 3] += sums[i];
      for (int c = 0; c < 3; ++c) centers[3 * view + c] = static_cast<T>(total[c]);
    }
  });
  return {v_means, v_centers, v_dc, v_rest};
}

}  // namespace
}  // namespace nsmg::sh_cpu

TORCH_LIBRARY_IMPL(ns_multigpu, CPU, m) {
  m.impl("sh_colors", &nsmg::sh_cpu::sh_colors);
  m.impl("sh_colors_backward", &nsmg::sh_cpu::sh_colors_backward);
}
