// Projection and compositing of 2D Gaussians and convexes, and their gradients, on CPU: once for all primitives, from the
// traits that the CUDA kernels have (common/surfel_pixel.h, common/convex_pixel.h). A row at a time, and a pixel after the
// other of a tile. Gradients are summed in an order that the number of threads does not change: by view, and by entry of
// a tile's list.

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "common/boxed_call.h"
#include "common/convex_pixel.h"
#include "common/surfel_pixel.h"
#include "cpu/common/cameras.h"
#include "cpu/common/patches.h"
#include "cpu/common/rows.h"

namespace nsmg::primitives_cpu {
namespace {

constexpr int kPose = 12;  // the camera's rotation by rows and its translation

at::Tensor take(BoxedCall& call, const char* name, at::IntArrayRef shape, at::ScalarType dtype) {
  return checked(call.tensor(name), name, shape, dtype);
}

// Columns [count, ...]: the arguments behind the one that was read last; a count of -1 is that of the first.
template <typename Columns>
std::vector<at::Tensor> take_columns(BoxedCall& call, int64_t count, at::ScalarType dtype) {
  std::vector<at::Tensor> found;
  for (int c = 0; c < Columns::kCount; ++c) {
    found.push_back(take(call, call.next_name(), column_shape(count, Columns::width(c)), dtype));
    if (c == 0) count = found[0].size(0);
  }
  return found;
}

// The pointers of columns that are already checked.
template <typename Columns, typename T>
typename Columns::template Pointers<const T> const_pointers(const std::vector<at::Tensor>& tensors) {
  typename Columns::template Pointers<const T> found;
  for (int c = 0; c < Columns::kCount; ++c) found.at[c] = tensors[c].template const_data_ptr<T>();
  return found;
}

template <typename Columns, typename T>
typename Columns::template Pointers<T> pointers(const std::vector<at::Tensor>& tensors) {
  typename Columns::template Pointers<T> found;
  for (int c = 0; c < Columns::kCount; ++c) found.at[c] = tensors[c].template mutable_data_ptr<T>();
  return found;
}

template <typename Columns>
std::vector<at::Tensor> zeros_of(int64_t count, const at::TensorOptions& options) {
  std::vector<at::Tensor> found;
  for (int c = 0; c < Columns::kCount; ++c)
    found.push_back(at::zeros(column_shape(count, Columns::width(c)), options));
  return found;
}

// The inputs of projection.
template <typename Primitive>
struct Points {
  std::vector<at::Tensor> columns;
  at::Tensor viewmats, Ks, point_ids;
  std::vector<int64_t> sizes, starts;  // starts: of each view's rows
  double near_plane, far_plane;

  Points(BoxedCall& call, at::ScalarType dtype)
      : columns(take_columns<typename Primitive::PointColumns>(call, -1, dtype)) {
    viewmats = take(call, "viewmats", {-1, 4, 4}, dtype);
    Ks = take(call, "Ks", {views(), intrinsics_rows(call.tensor("Ks")), 3}, dtype);
    sizes = call.integers("sizes").vec();
    TORCH_CHECK_VALUE(static_cast<int64_t>(sizes.size()) == 2 * views(), "sizes must hold 2 numbers a view.");
    const at::Tensor view_ids = call.tensor("view_ids").contiguous();
    point_ids = call.tensor("point_ids").contiguous();
    starts = view_starts(view_ids, point_ids, views(), columns[0].size(0));
    near_plane = call.real("near");
    far_plane = call.real("far");
  }

  int64_t views() const { return viewmats.size(0); }
  int64_t rows() const { return point_ids.size(0); }

  template <typename C, typename T>
  C camera(int64_t view) const {
    return camera_of<C>(viewmats.const_data_ptr<T>(), Ks.const_data_ptr<T>(), view, T(sizes[2 * view]),
                        T(sizes[2 * view + 1]), T(near_plane), T(far_plane));
  }

  template <typename T>
  auto point(int64_t row) const {
    T numbers[Primitive::PointColumns::kNumbers];
    Primitive::PointColumns::load(const_pointers<typename Primitive::PointColumns, T>(columns),
                                  point_ids.const_data_ptr<int32_t>()[row], numbers);
    return as_struct<typename Primitive::template Point<T>>(numbers);
  }
};

void give(BoxedCall& call, const std::vector<at::Tensor>& results) {
  for (const at::Tensor& result : results) call.result(result);
}

template <typename Primitive>
void project(BoxedCall& call) {
  using Projected = typename Primitive::ProjectedColumns;
  const at::ScalarType dtype = call.first().scalar_type();
  const Points<Primitive> in(call, dtype);
  std::vector<at::Tensor> found = zeros_of<Projected>(in.rows(), in.viewmats.options());
  found.push_back(at::zeros({in.rows(), 2}, in.viewmats.options().dtype(at::kInt)));
  AT_DISPATCH_FLOATING_TYPES(dtype, "project", [&] {
    using T = scalar_t;
    const auto to = pointers<Projected, T>(found);
    int32_t* radius = found.back().mutable_data_ptr<int32_t>();
    with_camera<T>(in.Ks, [&](auto kind) {
      for_chunks(chunks_of(in.starts, 0, in.views()), [&](int64_t, const Chunk& chunk) {
        const auto camera = in.template camera<typename decltype(kind)::type, T>(chunk.view);
        for (int64_t i = chunk.begin; i < chunk.end; ++i) {
          auto row = Primitive::project(camera, in.template point<T>(i));
          radius[2 * i] = static_cast<int32_t>(row.rx);
          radius[2 * i + 1] = static_cast<int32_t>(row.ry);
          if (!row.alive) row = {};
          T numbers[Projected::kNumbers];
          to_numbers(row, numbers);
          Projected::store(to, i, numbers);
        }
      });
    });
  });
  give(call, found);
}

template <typename Primitive>
void project_backward(BoxedCall& call) {
  using PointColumns = typename Primitive::PointColumns;
  using Projected = typename Primitive::ProjectedColumns;
  constexpr int kNumbers = PointColumns::kNumbers;
  const at::ScalarType dtype = call.first().scalar_type();
  const Points<Primitive> in(call, dtype);
  const at::Tensor radii = take(call, "radii", {in.rows(), 2}, at::kInt);
  const std::vector<at::Tensor> v_rows = take_columns<Projected>(call, in.rows(), dtype);
  std::vector<at::Tensor> found = zeros_of<PointColumns>(in.columns[0].size(0), in.viewmats.options());
  found.push_back(at::zeros({in.views(), 4, 4}, in.viewmats.options()));
  AT_DISPATCH_FLOATING_TYPES(dtype, "project_backward", [&] {
    using T = scalar_t;
    const auto from = const_pointers<Projected, T>(v_rows);
    const auto to = pointers<PointColumns, T>(found);
    const int32_t *radius = radii.const_data_ptr<int32_t>(), *ids = in.point_ids.template const_data_ptr<int32_t>();
    T* pose = found.back().template mutable_data_ptr<T>();
    // One view after the other: within a view each point appears once, so the rows of a view never meet.
    for (int64_t view = 0; view < in.views(); ++view) {
      const std::vector<Chunk> chunks = chunks_of(in.starts, view, view + 1);
      std::vector<double> sums(kPose * chunks.size(), 0.0);
      with_camera<T>(in.Ks, [&](auto kind) {
        const auto camera = in.template camera<typename decltype(kind)::type, T>(view);
        for_chunks(chunks, [&](int64_t at, const Chunk& chunk) {
          for (int64_t i = chunk.begin; i < chunk.end; ++i) {
            if (radius[2 * i] <= 0) continue;
            T given[Projected::kNumbers], numbers[kNumbers + kPose];
            Projected::load(from, i, given);
            to_numbers(Primitive::project_vjp(camera, in.template point<T>(i),
                                              as_struct<typename Primitive::template RowGradient<T>>(given)),
                       numbers);
            PointColumns::each(to, ids[i], [&](T* sum, int c) { *sum += numbers[c]; });
            for (int c = 0; c < kPose; ++c) sums[kPose * at + c] += double(numbers[kNumbers + c]);
          }
        });
      });
      double total[kPose] = {};
      for (size_t i = 0; i < sums.size(); ++i) total[i % kPose] += sums[i];
      for (int r = 0; r < 3; ++r) {
        for (int c = 0; c < 3; ++c) pose[16 * view + 4 * r + c] = static_cast<T>(total[3 * r + c]);
        pose[16 * view + 4 * r + 3] = static_cast<T>(total[9 + r]);
      }
    }
  });
  give(call, found);
}

// The inputs of compositing.
template <typename Primitive>
struct Rows {
  std::vector<at::Tensor> columns;
  at::Tensor tile_offsets, row_ids;
  PatchList list;

  Rows(BoxedCall& call, at::ScalarType dtype)
      : columns(take_columns<typename Primitive::RowColumns>(call, -1, dtype)),
        tile_offsets(take(call, "tile_offsets", {-1}, at::kInt)),
        row_ids(take(call, "row_ids", {-1}, at::kInt)),
        list(call.integers("patches"), call.integer("tile_size")) {
    checked(tile_offsets, "tile_offsets", {list.tiles + 1}, at::kInt);
    const int64_t rows = columns[0].size(0);
    const int32_t* offsets = tile_offsets.const_data_ptr<int32_t>();
    bool good = offsets[0] >= 0 && offsets[list.tiles] <= row_ids.size(0);
    for (int64_t t = 0; t < list.tiles; ++t) good &= offsets[t] <= offsets[t + 1];
    const int32_t* ids = row_ids.const_data_ptr<int32_t>();
    for (int64_t i = 0; good && i < offsets[list.tiles]; ++i) good &= ids[i] >= 0 && ids[i] < rows;
    TORCH_CHECK_INDEX(good, "rasterize_", Primitive::kName,
                      ": tile_offsets or row_ids name what does not exist; take both from intersect, of the same rows.");
  }

  template <typename T>
  auto splat(int64_t row) const {
    T numbers[Primitive::RowColumns::kNumbers];
    Primitive::RowColumns::load(const_pointers<typename Primitive::RowColumns, T>(columns), row, numbers);
    return Primitive::pack(numbers);
  }
};

// Calls f(first entry, the tile's splats, pixel, x, y) for every pixel of every tile.
template <typename Primitive, typename T, typename F>
void for_pixels(const Rows<Primitive>& in, const F& f) {
  const std::vector<Tile> tiles = in.list.cut();
  const int32_t *offsets = in.tile_offsets.template const_data_ptr<int32_t>(),
                *ids = in.row_ids.template const_data_ptr<int32_t>();
  for_each_task(int64_t(tiles.size()), [&] {
    return [&, splats = std::vector<typename Primitive::template Splat<T>>()](int64_t number) mutable {
      const Tile& tile = tiles[number];
      splats.clear();
      for (int64_t i = offsets[number]; i < offsets[number + 1]; ++i) splats.push_back(in.template splat<T>(ids[i]));
      for (int y = tile.y0; y < tile.y1; ++y)
        for (int x = tile.x0; x < tile.x1; ++x)
          f(int64_t(offsets[number]), splats, tile.pixel + (y - tile.y0) * tile.pitch + (x - tile.x0), T(x) + T(0.5),
            T(y) + T(0.5));
    };
  });
}

template <typename Primitive>
void rasterize(BoxedCall& call) {
  constexpr int kSums = Primitive::kSums, kExtra = Primitive::kExtra;
  const at::ScalarType dtype = call.first().scalar_type();
  const Rows<Primitive> in(call, dtype);
  const auto options = in.columns[0].options();
  const int64_t pixels = in.list.pixels;
  at::Tensor out = at::empty({pixels, 3}, options), extra = at::empty(column_shape(pixels, kExtra), options);
  at::Tensor alpha = at::empty({pixels}, options), last = at::empty({pixels}, options.dtype(at::kInt));
  AT_DISPATCH_FLOATING_TYPES(dtype, "rasterize", [&] {
    using T = scalar_t;
    T *colored = out.mutable_data_ptr<T>(), *more = extra.mutable_data_ptr<T>(), *covered = alpha.mutable_data_ptr<T>();
    int32_t* ends = last.mutable_data_ptr<int32_t>();
    for_pixels<Primitive, T>(in, [&](int64_t first, const auto& splats, int64_t pixel, T px, T py) {
      T transmittance = T(1), sums[kSums] = {};
      int64_t end = -1;
      for (size_t i = 0; i < splats.size() && transmittance > T(0); ++i) {
        auto sight = Primitive::look(splats[i], px, py);
        if (!sight.may) continue;
        Primitive::find_alpha(splats[i], sight);
        if (Primitive::blend(splats[i], sight, transmittance, sums)) end = first + int64_t(i);
      }
      for (int d = 0; d < kSums; ++d) (d < 3 ? colored[3 * pixel + d] : more[kExtra * pixel + d - 3]) = sums[d];
      covered[pixel] = std::copysign(T(1) - std::abs(transmittance), transmittance);
      ends[pixel] = static_cast<int32_t>(end);
    });
  });
  give(call, {out, extra, alpha, last, at::empty({0}, options)});
}

template <typename Primitive>
void rasterize_backward(BoxedCall& call) {
  using RowColumns = typename Primitive::RowColumns;
  constexpr int kSums = Primitive::kSums, kExtra = Primitive::kExtra, kGradients = Primitive::kGradients;
  const at::ScalarType dtype = call.first().scalar_type();
  const Rows<Primitive> in(call, dtype);
  const int64_t pixels = in.list.pixels, rows = in.columns[0].size(0);
  const auto extra_shape = column_shape(pixels, kExtra);
  // Each primitive has another name for its pixels' numbers other than colour.
  const at::Tensor out = take(call, "out", {pixels, 3}, dtype),
                   extra = take(call, call.next_name(), extra_shape, dtype),
                   alpha = take(call, "alpha", {pixels}, dtype), last = take(call, "last", {pixels}, at::kInt),
                   state = take(call, "state", {0}, dtype), v_out = take(call, "v_out", {pixels, 3}, dtype),
                   v_extra = take(call, call.next_name(), extra_shape, dtype),
                   v_alpha = take(call, "v_alpha", {pixels}, dtype);
  const auto options = in.columns[0].options();
  const int64_t entries = in.tile_offsets.template const_data_ptr<int32_t>()[in.list.tiles];
  at::Tensor by_entry = at::zeros({entries, kGradients}, options), by_row = at::zeros({rows, kGradients}, options);
  std::vector<at::Tensor> found = zeros_of<RowColumns>(rows, options);
  AT_DISPATCH_FLOATING_TYPES(dtype, "rasterize_backward", [&] {
    using T = scalar_t;
    const T *colored = out.const_data_ptr<T>(), *more = extra.const_data_ptr<T>(), *covered = alpha.const_data_ptr<T>(),
            *v_colored = v_out.const_data_ptr<T>(), *v_more = v_extra.const_data_ptr<T>(),
            *v_covered = v_alpha.const_data_ptr<T>();
    const int32_t* ends = last.const_data_ptr<int32_t>();
    T* entry = by_entry.mutable_data_ptr<T>();
    for_pixels<Primitive, T>(in, [&](int64_t first, const auto& splats, int64_t pixel, T px, T py) {
      T total[kSums], v[kSums];
      const T before[kSums] = {};
      for (int d = 0; d < kSums; ++d) {
        total[d] = d < 3 ? colored[3 * pixel + d] : more[kExtra * pixel + d - 3];
        v[d] = d < 3 ? v_colored[3 * pixel + d] : v_more[kExtra * pixel + d - 3];
      }
      auto walk = Primitive::begin(total, v, covered[pixel], v_covered[pixel], T(1), before);
      for (int64_t i = 0; first + i <= ends[pixel] && i < int64_t(splats.size()); ++i) {
        auto sight = Primitive::look(splats[i], px, py);
        if (!sight.may) continue;
        Primitive::find_alpha(splats[i], sight);
        T(&sums)[kGradients] = *reinterpret_cast<T(*)[kGradients]>(entry + kGradients * (first + i));
        if (sight.raw > T(0)) Primitive::pass(splats[i], sight, first + i == ends[pixel], walk, sums);
      }
    });
    const int32_t* ids = in.row_ids.template const_data_ptr<int32_t>();
    T* row = by_row.mutable_data_ptr<T>();
    for (int64_t i = 0; i < entries; ++i)
      for (int c = 0; c < kGradients; ++c) row[kGradients * ids[i] + c] += entry[kGradients * i + c];
    const auto to = pointers<RowColumns, T>(found);
    for (int64_t i = 0; i < rows; ++i) {
      T numbers[RowColumns::kNumbers];
      Primitive::gradients(in.template splat<T>(i), *reinterpret_cast<T(*)[kGradients]>(row + kGradients * i), numbers);
      RowColumns::store(to, i, numbers);
    }
  });
  give(call, found);
}

template <typename Primitive>
void bind(torch::Library& m) {
  const std::string name = Primitive::kName;
  m.impl(("project_" + name).c_str(), boxed<BoxedCall, project<Primitive>>());
  m.impl(("project_" + name + "_backward").c_str(), boxed<BoxedCall, project_backward<Primitive>>());
  m.impl(("rasterize_" + name).c_str(), boxed<BoxedCall, rasterize<Primitive>>());
  m.impl(("rasterize_" + name + "_backward").c_str(), boxed<BoxedCall, rasterize_backward<Primitive>>());
}

}  // namespace
}  // namespace nsmg::primitives_cpu

TORCH_LIBRARY_IMPL(ns_multigpu, CPU, m) {
  nsmg::primitives_cpu::bind<nsmg::SurfelTraits>(m);
  nsmg::primitives_cpu::bind<nsmg::ConvexTraits>(m);
}
