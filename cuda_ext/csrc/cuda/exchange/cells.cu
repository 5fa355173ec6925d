// One thread a tile, or a row. Sums and products are rounded one by one, never fused: the windows of one tile have to
// follow one another bit for bit, and to be those of a CPU.
#include "cuda/exchange/cells.h"

#include "cuda/common/upload.h"

namespace nsmg {
namespace {

constexpr int kThreads = 128;

__device__ __forceinline__ double plus(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ double minus(double a, double b) { return __dsub_rn(a, b); }
__device__ __forceinline__ double times(double a, double b) { return __dmul_rn(a, b); }

// Along one of the world's axes: where a view's camera is, and what a ray goes for each unit of depth at pixel (0, 0), and
// more for each pixel to the right and down.
struct Ray {
  double start, corner, right, down;
};

__device__ __forceinline__ Ray ray_of(const float* viewmats, const float* Ks, int view, int axis) {
  const float *m = viewmats + int64_t(view) * 16, *K = Ks + int64_t(view) * 9;
  const double x = double(m[axis]), y = double(m[4 + axis]), z = double(m[8 + axis]);
  Ray ray;
  ray.right = __ddiv_rn(x, double(K[0]));
  ray.down = __ddiv_rn(y, double(K[4]));
  ray.corner = minus(minus(z, times(double(K[2]), ray.right)), times(double(K[5]), ray.down));
  ray.start = -plus(plus(times(x, double(m[3])), times(y, double(m[7]))), times(z, double(m[11])));
  return ray;
}

struct Tables {
  const double* planes;
  const int32_t *axes, *paths, *order, *upward, *drawn, *patches;
  int splits, cells, depth, drawn_count, patch_count;
};

struct Stretch {
  double enters, leaves;
};

__device__ Stretch stretch_of(const Tables& t, const Ray* rays, int view, int place, double x, double y) {
  const double end = __longlong_as_double(0x7ff0000000000000ll);
  const int32_t* path = t.paths + int64_t(t.order[view * t.cells + place]) * t.depth;
  Stretch stretch{0.0, end};
  for (int k = 0; k < t.depth; ++k) {
    const int code = path[k];
    if (code < 0) break;
    const int split = code >> 1;
    const bool above = (code & 1) != 0, up = t.upward[view * t.splits + split] != 0;
    const Ray& ray = rays[t.axes[split]];
    const double ahead = plus(plus(ray.corner, times(ray.right, x)), times(ray.down, y));
    const bool crosses = up ? ahead > 0.0 : ahead < 0.0;
    double at = crosses ? __ddiv_rn(minus(t.planes[split], ray.start), ahead) : end;
    at = fmin(fmax(at, stretch.enters), stretch.leaves);
    if (up != above)
      stretch.leaves = at;
    else
      stretch.enters = at;
  }
  return stretch;
}

// Whether a tile is drawn of the cell at this place of the view's order.
__device__ __forceinline__ bool draws(const Tables& t, int view, int place, int column, int line) {
  for (int k = 0; k < t.drawn_count; ++k) {
    const int32_t* d = t.drawn + 6 * k;
    if (d[0] != view || d[1] != place) continue;
    if (column >= d[2] / kCellTile && line >= d[3] / kCellTile && column * kCellTile < d[4] &&
        line * kCellTile < d[5])
      return true;
  }
  return false;
}

__device__ __forceinline__ double middle(double a, double b) { return a == b ? a : times(plus(a, b), 0.5); }

__global__ void __launch_bounds__(kThreads)
    windows_kernel(Tables t, const float* viewmats, const float* Ks, int tiles, double2* windows) {
  const int tile = int(blockIdx.x) * kThreads + int(threadIdx.x);
  if (tile >= tiles) return;
  int first = 0, last = t.patch_count;  // the last patch that begins at this tile or before it
  while (last - first > 1) {
    const int between = (first + last) / 2;
    (t.patches[7 * between] <= tile ? first : last) = between;
  }
  const int32_t* patch = t.patches + 7 * first;
  const int view = patch[1], own = patch[2], columns = (patch[5] - patch[3] + kCellTile - 1) / kCellTile;
  const int within = tile - patch[0];
  const int column = patch[3] / kCellTile + within % columns, line = patch[4] / kCellTile + within / columns;
  const double x = double(column * kCellTile) + 0.5 * kCellTile, y = double(line * kCellTile) + 0.5 * kCellTile;
  const Ray rays[3] = {ray_of(viewmats, Ks, view, 0), ray_of(viewmats, Ks, view, 1), ray_of(viewmats, Ks, view, 2)};
  const Stretch mine = stretch_of(t, rays, view, own, x, y);
  const double end = __longlong_as_double(0x7ff0000000000000ll);
  double2 window = make_double2(-end, end);
  for (int place = own - 1; place >= 0; --place) {
    if (!draws(t, view, place, column, line)) continue;
    window.x = middle(stretch_of(t, rays, view, place, x, y).leaves, mine.enters);
    break;
  }
  for (int place = own + 1; place < t.cells; ++place) {
    if (!draws(t, view, place, column, line)) continue;
    window.y = middle(mine.leaves, stretch_of(t, rays, view, place, x, y).enters);
    break;
  }
  windows[tile] = window;
}

__device__ __forceinline__ double tile_middle(double at) {
  return plus(times(floor(times(at, 1.0 / kCellTile)), double(kCellTile)), 0.5 * kCellTile);
}

__global__ void __launch_bounds__(kThreads)
    reached_kernel(CellRows rows, const float* viewmats, const float* Ks, int views, const double* boxes, int cells,
                   bool* in_cells) {
  const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= rows.count) return;
  const int view = min(max(rows.view_ids[row], 0), views - 1);
  const double depth = double(rows.depths[row]);
  double centre[2], half[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const double mean = double(rows.means2d[2 * row + k]), radius = double(rows.radii[2 * row + k]);
    const double first = tile_middle(minus(mean, radius)), last = tile_middle(plus(mean, radius));
    centre[k] = times(plus(first, last), 0.5);
    half[k] = times(minus(last, first), 0.5);
  }
  double low[3], high[3];
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) {
    const Ray ray = ray_of(viewmats, Ks, view, axis);
    const double along = plus(plus(ray.corner, times(ray.right, centre[0])), times(ray.down, centre[1]));
    const double spread = plus(times(fabs(ray.right), half[0]), times(fabs(ray.down), half[1]));
    const double at = plus(ray.start, times(depth, along));
    const double width = plus(times(times(depth, spread), 1.0 + 1e-6), times(1e-9, fabs(at)));  // depths are rounded
    low[axis] = minus(at, width);
    high[axis] = plus(at, width);
  }
  for (int cell = 0; cell < cells; ++cell) {
    const double* box = boxes + 6 * cell;
    bool inside = true;
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      if (isfinite(box[axis])) inside &= high[axis] >= box[axis];
      if (isfinite(box[3 + axis])) inside &= low[axis] <= box[3 + axis];
    }
    in_cells[int64_t(cell) * rows.count + row] = inside;
  }
}

int blocks_of(int count) { return (count + kThreads - 1) / kThreads; }

}  // namespace

cudaError_t cell_windows_launch(const CellTables& sizes, const uint32_t* host, uint32_t* table, const float* viewmats,
                                const float* Ks, int tiles, double* windows, cudaStream_t stream) {
  if (tiles == 0) return cudaSuccess;
  upload_words(host, 2 * sizes.splits + sizes.integers(), table, stream);
  Tables t;
  t.planes = reinterpret_cast<const double*>(table);
  t.axes = reinterpret_cast<const int32_t*>(table + 2 * sizes.splits);
  t.paths = t.axes + sizes.splits;
  t.order = t.paths + sizes.cells * sizes.depth;
  t.upward = t.order + sizes.views * sizes.cells;
  t.drawn = t.upward + sizes.views * sizes.splits;
  t.patches = t.drawn + 6 * sizes.drawn;
  t.splits = sizes.splits;
  t.cells = sizes.cells;
  t.depth = sizes.depth;
  t.drawn_count = sizes.drawn;
  t.patch_count = sizes.patches;
  windows_kernel<<<blocks_of(tiles), kThreads, 0, stream>>>(t, viewmats, Ks, tiles,
                                                            reinterpret_cast<double2*>(windows));
  return cudaGetLastError();
}

cudaError_t cells_reached_launch(const CellRows& rows, const float* viewmats, const float* Ks, int views,
                                 const double* host_boxes, int cells, double* boxes, bool* in_cells,
                                 cudaStream_t stream) {
  if (rows.count == 0 || cells == 0) return cudaSuccess;
  upload_words(reinterpret_cast<const uint32_t*>(host_boxes), 12 * cells, reinterpret_cast<uint32_t*>(boxes), stream);
  reached_kernel<<<blocks_of(rows.count), kThreads, 0, stream>>>(rows, viewmats, Ks, views, boxes, cells, in_cells);
  return cudaGetLastError();
}

}  // namespace nsmg
