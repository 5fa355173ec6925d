// ns_multigpu::project and its backward on CPU. Rows go through in blocks of kLanes, gathered into one array a
// component, so that the compiler vectorises the maths of csrc/common over the lanes.

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <tuple>

#include "common/lens.h"
#include "cpu/common/cameras.h"
#include "cpu/common/rows.h"

namespace nsmg::project_cpu {
namespace {

constexpr int64_t kLanes = 16;
static_assert(kChunk % kLanes == 0, "a chunk is a whole number of blocks");

// The checked inputs that forward and backward share.
struct Inputs {
  at::Tensor means, quats, scales, opacities, viewmats, Ks, point_ids;
  std::vector<int64_t> starts;  // of each view's rows
  std::vector<int64_t> sizes;
  double eps2d, near_plane, far_plane;
  bool antialiased;

  int64_t points() const { return means.size(0); }
  int64_t views() const { return viewmats.size(0); }
  int64_t rows() const { return point_ids.size(0); }

  template <typename C, typename T>
  C camera(int64_t view) const {
    return camera_of<C>(viewmats.const_data_ptr<T>(), Ks.const_data_ptr<T>(), view, T(sizes[2 * view]),
                        T(sizes[2 * view + 1]), T(near_plane), T(far_plane));
  }
};

Inputs check_inputs(const at::Tensor& means, const at::Tensor& quats, const at::Tensor& scales,
                    const at::Tensor& opacities, const at::Tensor& viewmats, const at::Tensor& Ks,
                    at::IntArrayRef sizes, const at::Tensor& view_ids, const at::Tensor& point_ids, double eps2d,
                    double near_plane, double far_plane, bool antialiased) {
  const auto dtype = means.scalar_type();
  const int64_t points = means.size(0), views = viewmats.size(0);
  TORCH_CHECK_VALUE(static_cast<int64_t>(sizes.size()) == 2 * views, "sizes must hold 2 numbers a view.");
  return {checked(means, "means", {-1, 3}, dtype),
          checked(quats, "quats", {points, 4}, dtype),
          checked(scales, "scales", {points, 3}, dtype),
          checked(opacities, "opacities", {points}, dtype),
          checked(viewmats, "viewmats", {-1, 4, 4}, dtype),
          checked(Ks, "Ks", {views, intrinsics_rows(Ks), 3}, dtype),
          point_ids.contiguous(),
          view_starts(view_ids.contiguous(), point_ids.contiguous(), views, points),
          sizes.vec(),
          eps2d,
          near_plane,
          far_plane,
          antialiased};
}

// The parameters of a block's points, one array a component. Lanes past the last row repeat it.
template <typename T>
struct PointBlock {
  T value[11][kLanes];

  PointBlock(const Inputs& in, int64_t row, int64_t count) {
    const int32_t* ids = in.point_ids.const_data_ptr<int32_t>() + row;
    const T* mean = in.means.const_data_ptr<T>();
    const T* quat = in.quats.const_data_ptr<T>();
    const T* scale = in.scales.const_data_ptr<T>();
    const T* opacity = in.opacities.const_data_ptr<T>();
    for (int64_t l = 0; l < kLanes; ++l) {
      const int64_t id = ids[std::min(l, count - 1)];
      for (int c = 0; c < 3; ++c) value[c][l] = mean[3 * id + c];
      for (int c = 0; c < 4; ++c) value[3 + c][l] = quat[4 * id + c];
      for (int c = 0; c < 3; ++c) value[7 + c][l] = scale[3 * id + c];
      value[10][l] = opacity[id];
    }
  }

  NSMG_HD Point<T> operator[](int64_t l) const {
    return {{value[0][l], value[1][l], value[2][l]},
            {value[3][l], value[4][l], value[5][l], value[6][l]},
            {value[7][l], value[8][l], value[9][l]},
            value[10][l]};
  }
};

template <bool Antialiased, typename C, typename T>
void project_chunk(const Inputs& in, const Chunk& chunk, T* means2d, T* conics, T* depths, T* row_opacities,
                   int32_t* radii) {
  const C camera = in.camera<C, T>(chunk.view);
  const T eps2d = T(in.eps2d);
  T out[7][kLanes], variance_x[kLanes], variance_y[kLanes], square[kLanes], cutoff2[kLanes], rx[kLanes], ry[kLanes];
  int32_t alive[kLanes], regular[kLanes];
  for (int64_t row = chunk.begin; row < chunk.end; row += kLanes) {
    const int64_t count = std::min(kLanes, chunk.end - row);
    const PointBlock<T> points(in, row, count);
#pragma GCC ivdep
    for (int64_t l = 0; l < kLanes; ++l) {
      const Splat<T> s = make_splat(camera, points[l], eps2d, Antialiased);
      out[0][l] = s.x;
      out[1][l] = s.y;
      out[2][l] = s.conic_a;
      out[3][l] = s.conic_b;
      out[4][l] = s.conic_c;
      out[5][l] = s.depth;
      out[6][l] = s.opacity;
      variance_x[l] = s.variance_x;
      variance_y[l] = s.variance_y;
      square[l] = s.square;
      regular[l] = s.regular;
      alive[l] = s.alive;
    }
    for (int64_t l = 0; l < kLanes; ++l) cutoff2[l] = alive[l] ? cutoff_squared(out[6][l]) : T(0);  // the logarithm: not vector
#pragma GCC ivdep
    for (int64_t l = 0; l < kLanes; ++l) {
      rx[l] = outward(std::sqrt(cutoff2[l] * variance_x[l]), extent_margin<T>());
      ry[l] = outward(std::sqrt(cutoff2[l] * variance_y[l]), extent_margin<T>());
      alive[l] = set_radii(camera, out[0][l], out[1][l], square[l], regular[l] != 0, alive[l] != 0, rx[l], ry[l]);
    }
    for (int64_t l = 0; l < count; ++l) {
      const int64_t i = row + l;
      for (int c = 0; c < 2; ++c) means2d[2 * i + c] = alive[l] ? out[c][l] : T(0);
      for (int c = 0; c < 3; ++c) conics[3 * i + c] = alive[l] ? out[2 + c][l] : T(0);
      depths[i] = alive[l] ? out[5][l] : T(0);
      row_opacities[i] = alive[l] ? out[6][l] : T(0);
      radii[2 * i] = static_cast<int32_t>(rx[l]);
      radii[2 * i + 1] = static_cast<int32_t>(ry[l]);
    }
  }
}

// The gradients of the outputs and of the inputs.
template <typename T>
struct Gradients {
  const T *means2d, *conics, *depths, *row_opacities;
  T *means, *quats, *scales, *opacities;
};

// Adds one chunk's rows to their points' gradients, and returns in `pose` its sum for the view: the rotation's nine
// numbers, then the translation's three.
template <bool Antialiased, typename C, typename T>
void backward_chunk(const Inputs& in, const Chunk& chunk, const int32_t* radii, const Gradients<T>& g, double* pose) {
  const C camera = in.camera<C, T>(chunk.view);
  const int32_t* ids = in.point_ids.const_data_ptr<int32_t>();
  const T eps2d = T(in.eps2d);
  T given[7][kLanes], out[11][kLanes], turn[12][kLanes];
  int32_t alive[kLanes];
  double sums[12][kLanes] = {};
  for (int64_t row = chunk.begin; row < chunk.end; row += kLanes) {
    const int64_t count = std::min(kLanes, chunk.end - row);
    const PointBlock<T> points(in, row, count);
    int32_t any = 0;
    for (int64_t l = 0; l < kLanes; ++l) {
      const int64_t i = row + std::min(l, count - 1);
      alive[l] = l < count && radii[2 * i] > 0;
      any |= alive[l];
      for (int c = 0; c < 2; ++c) given[c][l] = g.means2d[2 * i + c];
      for (int c = 0; c < 3; ++c) given[2 + c][l] = g.conics[3 * i + c];
      given[5][l] = g.depths[i];
      given[6][l] = g.row_opacities[i];
    }
    if (!any) continue;
#pragma GCC ivdep
    for (int64_t l = 0; l < kLanes; ++l) {
      const SplatGradient<T> splat = {given[0][l], given[1][l], given[2][l], given[3][l],
                                      given[4][l], given[5][l], given[6][l]};
      const PointGradient<T> p = splat_vjp(camera, points[l], eps2d, Antialiased, splat);
      out[0][l] = p.mean.x;
      out[1][l] = p.mean.y;
      out[2][l] = p.mean.z;
      out[3][l] = p.quat.w;
      out[4][l] = p.quat.x;
      out[5][l] = p.quat.y;
      out[6][l] = p.quat.z;
      out[7][l] = p.scale.x;
      out[8][l] = p.scale.y;
      out[9][l] = p.scale.z;
      out[10][l] = p.opacity;
      turn[0][l] = p.rotation.r0.x;
      turn[1][l] = p.rotation.r0.y;
      turn[2][l] = p.rotation.r0.z;
      turn[3][l] = p.rotation.r1.x;
      turn[4][l] = p.rotation.r1.y;
      turn[5][l] = p.rotation.r1.z;
      turn[6][l] = p.rotation.r2.x;
      turn[7][l] = p.rotation.r2.y;
      turn[8][l] = p.rotation.r2.z;
      turn[9][l] = p.translation.x;
      turn[10][l] = p.translation.y;
      turn[11][l] = p.translation.z;
    }
    for (int c = 0; c < 12; ++c) {
#pragma GCC ivdep
      for (int64_t l = 0; l < kLanes; ++l) sums[c][l] += alive[l] ? static_cast<double>(turn[c][l]) : 0.0;
    }
    for (int64_t l = 0; l < count; ++l) {
      if (!alive[l]) continue;
      const int64_t id = ids[row + l];
      for (int c = 0; c < 3; ++c) g.means[3 * id + c] += out[c][l];
      for (int c = 0; c < 4; ++c) g.quats[4 * id + c] += out[3 + c][l];
      for (int c = 0; c < 3; ++c) g.scales[3 * id + c] += out[7 + c][l];
      g.opacities[id] += out[10][l];
    }
  }
  for (int c = 0; c < 12; ++c) {
    pose[c] = 0.0;
    for (int64_t l = 0; l < kLanes; ++l) pose[c] += sums[c][l];
  }
}

// Calls f with the flag as a compile-time constant: a branch in the loop over the lanes would keep it from vectorising.
template <typename F>
void with_flag(bool flag, const F& f) {
  if (flag) return f(std::true_type());
  f(std::false_type());
}

using Projected = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Projected project(const at::Tensor& means, const at::Tensor& quats, const at::Tensor& scales,
                  const at::Tensor& opacities, const at::Tensor& viewmats, const at::Tensor& Ks, at::IntArrayRef sizes,
                  const at::Tensor& view_ids, const at::Tensor& point_ids, double eps2d, double near_plane,
                  double far_plane, bool antialiased) {
  const Inputs in = check_inputs(means, quats, scales, opacities, viewmats, Ks, sizes, view_ids, point_ids, eps2d,
                                 near_plane, far_plane, antialiased);
  const auto options = means.options();
  at::Tensor means2d = at::empty({in.rows(), 2}, options), conics = at::empty({in.rows(), 3}, options);
  at::Tensor depths = at::empty({in.rows()}, options), row_opacities = at::empty({in.rows()}, options);
  at::Tensor radii = at::empty({in.rows(), 2}, options.dtype(at::kInt));
  for (const at::Tensor& output : {means2d, conics, depths, row_opacities, radii}) zero_padding(output, in.starts);
  AT_DISPATCH_FLOATING_TYPES(means.scalar_type(), "project", [&] {
    using T = scalar_t;
    with_camera<T>(in.Ks, [&](auto kind) {
      using C = typename decltype(kind)::type;
      with_flag(antialiased, [&](auto flag) {
        for_chunks(chunks_of(in.starts, 0, in.views()), [&](int64_t, const Chunk& chunk) {
          project_chunk<decltype(flag)::value, C, T>(
              in, chunk, means2d.mutable_data_ptr<T>(), conics.mutable_data_ptr<T>(), depths.mutable_data_ptr<T>(),
              row_opacities.mutable_data_ptr<T>(), radii.mutable_data_ptr<int32_t>());
        });
      });
    });
  });
  return {means2d, conics, depths, row_opacities, radii};
}

// The conics are recomputed with the rest of the footprint, which costs less than to read them.
Projected project_backward(const at::Tensor& means, const at::Tensor& quats, const at::Tensor& scales,
                           const at::Tensor& opacities, const at::Tensor& viewmats, const at::Tensor& Ks,
                           at::IntArrayRef sizes, const at::Tensor& view_ids, const at::Tensor& point_ids, double eps2d,
                           double near_plane, double far_plane, bool antialiased, const at::Tensor& /*conics*/,
                           const at::Tensor& radii_, const at::Tensor& v_means2d_, const at::Tensor& v_conics_,
                           const at::Tensor& v_depths_, const at::Tensor& v_row_opacities_) {
  const Inputs in = check_inputs(means, quats, scales, opacities, viewmats, Ks, sizes, view_ids, point_ids, eps2d,
                                 near_plane, far_plane, antialiased);
  const auto dtype = means.scalar_type();
  const at::Tensor radii = checked(radii_, "radii", {in.rows(), 2}, at::kInt);
  const at::Tensor v_means2d = checked(v_means2d_, "v_means2d", {in.rows(), 2}, dtype);
  const at::Tensor v_conics = checked(v_conics_, "v_conics", {in.rows(), 3}, dtype);
  const at::Tensor v_depths = checked(v_depths_, "v_depths", {in.rows()}, dtype);
  const at::Tensor v_row_opacities = checked(v_row_opacities_, "v_row_opacities", {in.rows()}, dtype);
  const auto options = means.options();
  at::Tensor v_means = at::zeros({in.points(), 3}, options), v_quats = at::zeros({in.points(), 4}, options);
  at::Tensor v_scales = at::zeros({in.points(), 3}, options), v_opacities = at::zeros({in.points()}, options);
  at::Tensor v_viewmats = at::zeros({in.views(), 4, 4}, options);
  AT_DISPATCH_FLOATING_TYPES(dtype, "project_backward", [&] {
    using T = scalar_t;
    const Gradients<T> g = {v_means2d.const_data_ptr<T>(),       v_conics.const_data_ptr<T>(),
                            v_depths.const_data_ptr<T>(),        v_row_opacities.const_data_ptr<T>(),
                            v_means.mutable_data_ptr<T>(),       v_quats.mutable_data_ptr<T>(),
                            v_scales.mutable_data_ptr<T>(),      v_opacities.mutable_data_ptr<T>()};
    T* pose = v_viewmats.mutable_data_ptr<T>();
    // One view after the other: within a view each point appears once, so the rows of a view never meet.
    for (int64_t view = 0; view < in.views(); ++view) {
      const std::vector<Chunk> chunks = chunks_of(in.starts, view, view + 1);
      std::vector<double> sums(12 * chunks.size());
      with_camera<T>(in.Ks, [&](auto kind) {
        using C = typename decltype(kind)::type;
        with_flag(antialiased, [&](auto flag) {
          for_chunks(chunks, [&](int64_t i, const Chunk& chunk) {
            backward_chunk<decltype(flag)::value, C, T>(in, chunk, radii.const_data_ptr<int32_t>(), g,
                                                        sums.data() + 12 * i);
          });
        });
      });
      double total[12] = {};
      for (size_t i = 0; i < sums.size(); ++i) total[i % 12] += sums[i];
      for (int r = 0; r < 3; ++r) {
        for (int c = 0; c < 3; ++c) pose[16 * view + 4 * r + c] = static_cast<T>(total[3 * r + c]);
        pose[16 * view + 4 * r + 3] = static_cast<T>(total[9 + r]);
      }
    }
  });
  return {v_means, v_quats, v_scales, v_opacities, v_viewmats};
}

}  // namespace
}  // namespace nsmg::project_cpu

TORCH_LIBRARY_IMPL(ns_multigpu, CPU, m) {
  m.impl("project", &nsmg::project_cpu::project);
  m.impl("project_backward", &nsmg::project_cpu::project_backward);
}
