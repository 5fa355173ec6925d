// ns_multigpu::patch_counts: how many points of each label each patch of each view shows, by their centres.
//
// Points come in groups of neighbours with a box each. Boxes of 64 groups are tested first, then those of their groups;
// only points of boxes that a view's frustum may touch are projected. A task is a view, which writes its own counts, so
// that results do not depend on the number of threads.

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace nsmg::patch_counts_cpu {
namespace {

constexpr int64_t kBlock = 64;   // groups under one box
constexpr int64_t kPoints = 64;  // projected at once
constexpr int kPlanes = 6;
constexpr float kError = 1e-5f;  // of float32 sums, relative to their terms

// Boxes as centre and half extent along x, y, z, each [count].
struct Boxes {
  const float* columns[6];
  int64_t count;
};

struct Plane {
  float n[3], d;  // inside where n x + d >= 0
};

struct Frustum {
  Plane planes[kPlanes];
  float r[9], t[3], fx, fy, cx, cy, near_plane, far_plane;
};

Frustum frustum(const float* pose, const float* lens, float width, float height, float near_plane, float far_plane) {
  Frustum f;
  for (int i = 0; i < 3; ++i) {
    for (int k = 0; k < 3; ++k) f.r[3 * i + k] = pose[4 * i + k];
    f.t[i] = pose[4 * i + 3];
  }
  f.fx = lens[0], f.fy = lens[1], f.cx = lens[2], f.cy = lens[3];
  f.near_plane = near_plane, f.far_plane = far_plane;
  const float of_camera[kPlanes][4] = {{f.fx, 0, f.cx, 0},           {-f.fx, 0, width - f.cx, 0}, {0, f.fy, f.cy, 0},
                                       {0, -f.fy, height - f.cy, 0}, {0, 0, 1, -near_plane},      {0, 0, -1, far_plane}};
  for (int p = 0; p < kPlanes; ++p) {
    const float* n = of_camera[p];
    for (int k = 0; k < 3; ++k) f.planes[p].n[k] = n[0] * f.r[k] + n[1] * f.r[3 + k] + n[2] * f.r[6 + k];
    f.planes[p].d = n[0] * f.t[0] + n[1] * f.t[1] + n[2] * f.t[2] + n[3];
  }
  return f;
}

// Of boxes [first, first + n), n <= kBlock: which the frustum may touch.
void may_show(const Frustum& f, const Boxes& boxes, int64_t first, int64_t n, uint8_t* keep) {
  const float *x = boxes.columns[0] + first, *y = boxes.columns[1] + first, *z = boxes.columns[2] + first,
              *hx = boxes.columns[3] + first, *hy = boxes.columns[4] + first, *hz = boxes.columns[5] + first;
  std::fill(keep, keep + n, uint8_t{1});
  for (const Plane& p : f.planes) {
    const float ax = std::abs(p.n[0]), ay = std::abs(p.n[1]), az = std::abs(p.n[2]), d = std::abs(p.d);
    for (int64_t i = 0; i < n; ++i) {
      const float most = p.n[0] * x[i] + p.n[1] * y[i] + p.n[2] * z[i] + p.d + ax * hx[i] + ay * hy[i] + az * hz[i];
      const float size = ax * (std::abs(x[i]) + hx[i]) + ay * (std::abs(y[i]) + hy[i]) +
                         az * (std::abs(z[i]) + hz[i]) + d;
      keep[i] &= most >= -kError * size;
    }
  }
}

// Boxes around each kBlock boxes.
std::vector<float> around(const Boxes& boxes, int64_t blocks) {
  std::vector<float> out(6 * blocks);
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t first = b * kBlock, end = std::min(first + kBlock, boxes.count);
    for (int axis = 0; axis < 3; ++axis) {
      const float *middle = boxes.columns[axis], *half = boxes.columns[3 + axis];
      float low = middle[first] - half[first], high = middle[first] + half[first];
      for (int64_t i = first + 1; i < end; ++i) {
        low = std::min(low, middle[i] - half[i]), high = std::max(high, middle[i] + half[i]);
      }
      out[axis * blocks + b] = 0.5f * low + 0.5f * high;
      out[(3 + axis) * blocks + b] = 0.5f * high - 0.5f * low;
    }
  }
  return out;
}

// Of each pixel along a side of a view, the parts that hold it, with their halo: a bit each.
class Side {
 public:
  void cut(const int32_t* cuts, int64_t parts, int32_t halo) {
    if (halo == halo_ && cuts_.size() == static_cast<size_t>(parts + 1) && std::equal(cuts_.begin(), cuts_.end(), cuts)) {
      return;  // as the view before
    }
    cuts_.assign(cuts, cuts + parts + 1), halo_ = halo;
    of_pixel_.assign(std::max(length(), 0), 0);
    for (int64_t k = 0; k < parts; ++k) {
      if (cuts[k] >= cuts[k + 1]) continue;
      const int32_t end = std::min(cuts[k + 1] + halo, length());
      for (int32_t at = std::max(cuts[k] - halo, 0); at < end; ++at) of_pixel_[at] |= uint32_t{1} << k;
    }
  }
  int32_t length() const { return cuts_.back(); }
  uint32_t parts(float at) const { return of_pixel_[static_cast<int32_t>(at)]; }

 private:
  std::vector<int32_t> cuts_;
  std::vector<uint32_t> of_pixel_;
  int32_t halo_ = -1;
};

struct View {
  Frustum f;
  Side across, down;
  int64_t parts;
};

// Adds points [first, end) of one label to the counts [parts * parts, labels] of their patches.
void count_points(const View& view, const float* const points[3], int64_t first, int64_t end, int32_t* out,
                  int64_t labels) {
  const Frustum& f = view.f;
  const auto width = static_cast<float>(view.across.length()), height = static_cast<float>(view.down.length());
  float u[kPoints], v[kPoints];
  uint8_t seen[kPoints];
  for (int64_t base = first; base < end; base += kPoints) {
    const int64_t n = std::min(kPoints, end - base);
    const float *x = points[0] + base, *y = points[1] + base, *z = points[2] + base;
    for (int64_t i = 0; i < n; ++i) {
      const float cx = f.r[0] * x[i] + f.r[1] * y[i] + f.r[2] * z[i] + f.t[0],
                  cy = f.r[3] * x[i] + f.r[4] * y[i] + f.r[5] * z[i] + f.t[1],
                  depth = f.r[6] * x[i] + f.r[7] * y[i] + f.r[8] * z[i] + f.t[2];
      u[i] = f.fx * cx / depth + f.cx;
      v[i] = f.fy * cy / depth + f.cy;
      seen[i] = (depth >= f.near_plane) & (depth <= f.far_plane) & (u[i] >= 0) & (u[i] < width) & (v[i] >= 0) &
                (v[i] < height);
    }
    for (int64_t i = 0; i < n; ++i) {
      if (!seen[i]) continue;
      if (view.parts == 1) {
        ++*out;
        continue;
      }
      for (uint32_t down = view.down.parts(v[i]); down != 0; down &= down - 1) {
        for (uint32_t across = view.across.parts(u[i]); across != 0; across &= across - 1) {
          ++out[(__builtin_ctz(down) * view.parts + __builtin_ctz(across)) * labels];
        }
      }
    }
  }
}

at::Tensor patch_counts(const at::Tensor& points_, int64_t size, const at::Tensor& boxes_, const at::Tensor& labels_,
                        int64_t labels, const at::Tensor& viewmats_, const at::Tensor& lenses_,
                        const at::Tensor& columns_, const at::Tensor& rows_, const at::Tensor& halos_,
                        double near_plane, double far_plane) {
  const at::Tensor points = points_.contiguous(), boxes = boxes_.contiguous(), of_group = labels_.contiguous(),
                   viewmats = viewmats_.contiguous(), lenses = lenses_.contiguous(), columns = columns_.contiguous(),
                   rows = rows_.contiguous(), halos = halos_.contiguous();
  const int64_t count = points.size(1), groups = boxes.size(1), views = viewmats.size(0), parts = columns.size(1) - 1;
  const float* const xyz[3] = {points.const_data_ptr<float>(), points.const_data_ptr<float>() + count,
                               points.const_data_ptr<float>() + 2 * count};
  Boxes inner{{}, groups};
  for (int k = 0; k < 6; ++k) inner.columns[k] = boxes.const_data_ptr<float>() + k * groups;
  const int64_t blocks = (groups + kBlock - 1) / kBlock;
  const std::vector<float> outer_boxes = around(inner, blocks);
  Boxes outer{{}, blocks};
  for (int k = 0; k < 6; ++k) outer.columns[k] = outer_boxes.data() + k * blocks;
  const int64_t* label = of_group.const_data_ptr<int64_t>();
  const at::Tensor counts = at::zeros({views, parts * parts, labels}, points.options().dtype(at::kInt));
  int32_t* const out = counts.mutable_data_ptr<int32_t>();
  at::parallel_for(0, views, 1, [&](int64_t begin, int64_t stop) {
    uint8_t of_blocks[kBlock], of_groups[kBlock];
    View view;
    view.parts = parts;
    for (int64_t v = begin; v < stop; ++v) {
      const int32_t halo = halos.const_data_ptr<int32_t>()[v];
      view.across.cut(columns.const_data_ptr<int32_t>() + v * (parts + 1), parts, halo);
      view.down.cut(rows.const_data_ptr<int32_t>() + v * (parts + 1), parts, halo);
      view.f = frustum(viewmats.const_data_ptr<float>() + 16 * v, lenses.const_data_ptr<float>() + 4 * v,
                       static_cast<float>(view.across.length()), static_cast<float>(view.down.length()),
                       static_cast<float>(near_plane), static_cast<float>(far_plane));
      for (int64_t b0 = 0; b0 < blocks; b0 += kBlock) {
        const int64_t some = std::min(kBlock, blocks - b0);
        may_show(view.f, outer, b0, some, of_blocks);
        for (int64_t b = 0; b < some; ++b) {
          if (!of_blocks[b]) continue;
          const int64_t first = (b0 + b) * kBlock, n = std::min(kBlock, groups - first);
          may_show(view.f, inner, first, n, of_groups);
          for (int64_t g = 0; g < n; ++g) {
            const int64_t group = first + g;
            if (of_groups[g]) {
              count_points(view, xyz, group * size, std::min((group + 1) * size, count),
                           out + v * parts * parts * labels + label[group], labels);
            }
          }
        }
      }
    }
  });
  return counts;
}

}  // namespace
}  // namespace nsmg::patch_counts_cpu

TORCH_LIBRARY_IMPL(ns_multigpu, CPU, m) {
  m.impl("patch_counts", &nsmg::patch_counts_cpu::patch_counts);
}
