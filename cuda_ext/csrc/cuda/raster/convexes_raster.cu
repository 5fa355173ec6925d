// Compositing of 3D convexes, forward and backward: a thread a pixel, blocks of 256 of a tile. A warp reads each packed
// row with one broadcast, and what its pixels add to the row's gradient is summed over the warp before it is added in
// memory: the order of those additions is not fixed.

#include "common/convex_pixel.h"
#include "cuda/raster/convexes.h"
#include "cuda/common/rows.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256;
constexpr unsigned kWarp = 0xffffffffu;

__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ ConvexRaster in, float4* table) {
  const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= in.rows) return;
  const float *l = in.lines + 3 * kCorners * row, *c = in.colors + 3 * row;
  float4* to = table + kConvexQuads * row;
  to[0] = make_float4(in.means2d[2 * row], in.means2d[2 * row + 1], in.sharpness[row], in.opacities[row]);
  to[1] = make_float4(l[0], l[1], l[2], l[3]);
  to[2] = make_float4(l[4], l[5], l[6], l[7]);
  to[3] = make_float4(l[8], l[9], l[10], l[11]);
  to[4] = make_float4(l[12], l[13], l[14], l[15]);
  to[5] = make_float4(l[16], l[17], in.depths[row], 0.0f);
  to[6] = make_float4(c[0], c[1], c[2], 0.0f);
}

// Without colour, which only pixels that the splat counts at need.
__device__ __forceinline__ ConvexSplat<float> shape_of(const float4* __restrict__ row) {
  const float4 h = row[0], a = row[1], b = row[2], c = row[3], d = row[4], e = row[5];
  ConvexSplat<float> splat;
  splat.x = h.x;
  splat.y = h.y;
  splat.sharpness = h.z;
  splat.opacity = h.w;
  splat.lines[0] = {a.x, a.y, a.z};
  splat.lines[1] = {a.w, b.x, b.y};
  splat.lines[2] = {b.z, b.w, c.x};
  splat.lines[3] = {c.y, c.z, c.w};
  splat.lines[4] = {d.x, d.y, d.z};
  splat.lines[5] = {d.w, e.x, e.y};
  splat.color = {0.f, 0.f, 0.f};
  splat.depth = e.z;
  return splat;
}

__device__ __forceinline__ void add_color(const float4* __restrict__ row, ConvexSplat<float>& splat) {
  const float4 c = row[6];
  splat.color = {c.x, c.y, c.z};
}

struct Place {
  bool exists;
  float x, y;
  int64_t pixel;
  int first, end;  // of the tile's part of row_ids
};

// The thread's pixel: block b of a tile has its pixels [256 b, 256 b + 256), row-major.
__device__ __forceinline__ Place place_of(const PatchGroup& group, const ConvexRaster& in, int tile, int block) {
  int low = 0, high = group.count - 1;  // the last patch that starts at or before the tile
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (group.entries[middle].first_tile <= tile) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const PatchEntry& patch = group.entries[low];
  const int local = tile - patch.first_tile, pitch = patch.x1 - patch.x0;
  const int index = block * kThreads + threadIdx.x;
  const int column = local % patch.tiles_x * in.tile_size + index % in.tile_size;
  const int line = local / patch.tiles_x * in.tile_size + index / in.tile_size;
  Place place;
  place.exists = index < in.tile_size * in.tile_size && column < pitch && line < patch.y1 - patch.y0;
  place.x = float(patch.x0 + column) + 0.5f;
  place.y = float(patch.y0 + line) + 0.5f;
  place.pixel = patch.first_pixel + int64_t(line) * pitch + column;
  // Whatever tile_offsets says, no thread leaves its buffers.
  place.first = min(max(in.tile_offsets[tile], 0), in.intersections);
  place.end = in.rows > 0 ? min(max(in.tile_offsets[tile + 1], place.first), in.intersections) : place.first;
  return place;
}

__device__ __forceinline__ int row_at(const ConvexRaster& in, int entry) {
  return min(max(in.row_ids[entry], 0), in.rows - 1);
}

__global__ void __launch_bounds__(kThreads)
    forward_kernel(const __grid_constant__ PatchGroup group, const __grid_constant__ ConvexRaster in,
                   const float4* __restrict__ table, const __grid_constant__ ConvexImage image, int blocks) {
  const Place place = place_of(group, in, group.first_tile + int(blockIdx.x) / blocks, blockIdx.x % blocks);
  if (!place.exists) return;  // no thread waits for another here
  ConvexSums<float> sums = no_convexes<float>();
  int last = -1;
  for (int i = place.first; i < place.end && !sums.closed; ++i) {
    const float4* row = table + int64_t(kConvexQuads) * row_at(in, i);
    ConvexSplat<float> splat = shape_of(row);
    const ConvexPlace<float> m = place_in(splat, place.x, place.y);
    if (!(m.raw > 0.0f)) continue;
    add_color(row, splat);
    if (blend_convex(splat, m.raw, sums)) last = i;
  }
  float* out = image.out + 3 * place.pixel;
  out[0] = sums.color.x;
  out[1] = sums.color.y;
  out[2] = sums.color.z;
  image.depth[place.pixel] = sums.depth;
  image.alpha[place.pixel] = sums.closed ? -sums.weight : sums.weight;
  image.last[place.pixel] = last;
}

// Where number c of a row's gradient is added.
__device__ __forceinline__ float* sum_of(const ConvexRowSums& sums, int64_t row, int c) {
  if (c < 2) return sums.means2d + 2 * row + c;
  if (c < 20) return sums.lines + 18 * row + (c - 2);
  if (c < 21) return sums.sharpness + row;
  if (c < 22) return sums.opacities + row;
  if (c < 25) return sums.colors + 3 * row + (c - 22);
  return sums.depths + row;
}

__global__ void __launch_bounds__(kThreads)
    backward_kernel(const __grid_constant__ PatchGroup group, const __grid_constant__ ConvexRaster in,
                    const float4* __restrict__ table, const __grid_constant__ ConvexImageGradients image,
                    const __grid_constant__ ConvexRowSums sums, int blocks) {
  const Place place = place_of(group, in, group.first_tile + int(blockIdx.x) / blocks, blockIdx.x % blocks);
  const int lane = threadIdx.x % 32;
  ConvexWalk<float> walk = {};
  int last = -1;
  if (place.exists) {
    last = image.last[place.pixel];
    walk = begin_convex_walk(image.out + 3 * place.pixel, image.depth[place.pixel], image.alpha[place.pixel],
                             image.v_out + 3 * place.pixel, image.v_depth[place.pixel], image.v_alpha[place.pixel]);
  }
  const int end = min(place.end, __reduce_max_sync(kWarp, last) + 1);  // one for the warp: all of it stays together
  for (int i = place.first; i < end; ++i) {
    const int row = row_at(in, i);
    const float4* packed = table + int64_t(kConvexQuads) * row;
    ConvexSplat<float> splat = shape_of(packed);
    const ConvexPlace<float> m = place_in(splat, place.x, place.y);
    const bool counts = i <= last && m.raw > 0.0f;
    if (!__any_sync(kWarp, counts)) continue;
    float g[kConvexFloats] = {};
    if (counts) {
      add_color(packed, splat);
      walk_convex(splat, m, walk, g);
    }
    float mine = 0.0f;
#pragma unroll
    for (int c = 0; c < kConvexFloats; ++c) {
      const float sum = warp_sum(g[c]);
      if (lane == c) mine = sum;
    }
    if (lane < kConvexFloats && mine != 0.0f) atomicAdd(sum_of(sums, row, lane), mine);
  }
}

int blocks_per_tile(const ConvexRaster& in) { return (in.tile_size * in.tile_size + kThreads - 1) / kThreads; }

}  // namespace

cudaError_t pack_convexes(const ConvexRaster& in, float4* table, cudaStream_t stream) {
  if (in.rows == 0) return cudaSuccess;
  pack_kernel<<<unsigned((int64_t(in.rows) + kThreads - 1) / kThreads), kThreads, 0, stream>>>(in, table);
  return cudaGetLastError();
}

cudaError_t rasterize_convexes(const PatchGroup& group, const ConvexRaster& in, const float4* table,
                              const ConvexImage& image, cudaStream_t stream) {
  const int blocks = blocks_per_tile(in);
  forward_kernel<<<unsigned(group.tiles * blocks), kThreads, 0, stream>>>(group, in, table, image, blocks);
  return cudaGetLastError();
}

cudaError_t rasterize_convexes_backward(const PatchGroup& group, const ConvexRaster& in, const float4* table,
                                       const ConvexImageGradients& image, const ConvexRowSums& sums,
                                       cudaStream_t stream) {
  if (in.rows == 0) return cudaSuccess;
  const int blocks = blocks_per_tile(in);
  backward_kernel<<<unsigned(group.tiles * blocks), kThreads, 0, stream>>>(group, in, table, image, sums, blocks);
  return cudaGetLastError();
}

}  // namespace nsmg
