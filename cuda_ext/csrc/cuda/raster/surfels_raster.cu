// Compositing of 2D Gaussians, forward and backward: a thread a pixel, blocks of 256 of a tile. A warp reads each packed
// row with one broadcast, and what its pixels add to the row's gradient is summed over the warp before it is added in
// memory: the order of those additions is not fixed.

#include "common/surfel_pixel.h"
#include "cuda/common/rows.h"
#include "cuda/raster/surfels.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256;
constexpr unsigned kWarp = 0xffffffffu;

__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ SurfelRaster in, float4* table) {
  const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= in.rows) return;
  const float *f = in.transforms + 9 * row, *n = in.normals + 3 * row, *c = in.colors + 3 * row;
  float4* to = table + kSurfelQuads * row;
  to[0] = make_float4(in.means2d[2 * row], in.means2d[2 * row + 1], f[0], f[1]);
  to[1] = make_float4(f[2], f[3], f[4], f[5]);
  to[2] = make_float4(f[6], f[7], f[8], in.opacities[row]);
  to[3] = make_float4(n[0], n[1], n[2], in.depths[row]);
  to[4] = make_float4(c[0], c[1], c[2], 0.0f);
}

// Without colour and normal, which only pixels that the splat counts at need.
__device__ __forceinline__ SurfelSplat<float> shape_of(const float4* __restrict__ row) {
  const float4 a = row[0], b = row[1], c = row[2];
  return {a.x, a.y, {a.z, a.w, b.x}, {b.y, b.z, b.w}, {c.x, c.y, c.z}, {0.f, 0.f, 0.f}, c.w, {0.f, 0.f, 0.f}, 0.f};
}

__device__ __forceinline__ void add_looks(const float4* __restrict__ row, SurfelSplat<float>& splat) {
  const float4 n = row[3], c = row[4];
  splat.normal = {n.x, n.y, n.z};
  splat.depth = n.w;
  splat.color = {c.x, c.y, c.z};
}

struct Place {
  bool exists;
  float x, y;
  int64_t pixel;
  int first, end;  // of the tile's part of row_ids
};

// The thread's pixel: block b of a tile has its pixels [256 b, 256 b + 256), row-major.
__device__ __forceinline__ Place place_of(const PatchGroup& group, const SurfelRaster& in, int tile, int block) {
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

__device__ __forceinline__ int row_at(const SurfelRaster& in, int entry) {
  return min(max(in.row_ids[entry], 0), in.rows - 1);
}

__global__ void __launch_bounds__(kThreads)
    forward_kernel(const __grid_constant__ PatchGroup group, const __grid_constant__ SurfelRaster in,
                   const float4* __restrict__ table, const __grid_constant__ SurfelImage image, int blocks) {
  const Place place = place_of(group, in, group.first_tile + int(blockIdx.x) / blocks, blockIdx.x % blocks);
  if (!place.exists) return;  // no thread waits for another here
  SurfelSums<float> sums = no_surfels<float>();
  int last = -1;
  for (int i = place.first; i < place.end && !sums.closed; ++i) {
    const float4* row = table + int64_t(kSurfelQuads) * row_at(in, i);
    SurfelSplat<float> splat = shape_of(row);
    const SurfelMeeting<float> m = meet(splat, place.x, place.y);
    if (!(m.raw > 0.0f)) continue;
    add_looks(row, splat);
    if (blend_surfel(splat, m.raw, sums)) last = i;
  }
  float* out = image.out + 3 * place.pixel;
  out[0] = sums.color.x;
  out[1] = sums.color.y;
  out[2] = sums.color.z;
  float* geometry = image.geometry + kSurfelGeometry * place.pixel;
  geometry[0] = sums.depth;
  geometry[1] = sums.normal.x;
  geometry[2] = sums.normal.y;
  geometry[3] = sums.normal.z;
  geometry[4] = sums.distortion;
  geometry[5] = sums.median;
  image.alpha[place.pixel] = sums.closed ? -sums.weight : sums.weight;
  image.last[place.pixel] = last;
}

// Where number c of a row's gradient is added.
__device__ __forceinline__ float* sum_of(const SurfelRowSums& sums, int64_t row, int c) {
  if (c < 2) return sums.means2d + 2 * row + c;
  if (c < 11) return sums.transforms + 9 * row + (c - 2);
  if (c < 14) return sums.normals + 3 * row + (c - 11);
  if (c < 15) return sums.opacities + row;
  if (c < 18) return sums.colors + 3 * row + (c - 15);
  return sums.depths + row;
}

__global__ void __launch_bounds__(kThreads)
    backward_kernel(const __grid_constant__ PatchGroup group, const __grid_constant__ SurfelRaster in,
                    const float4* __restrict__ table, const __grid_constant__ SurfelImageGradients image,
                    const __grid_constant__ SurfelRowSums sums, int blocks) {
  const Place place = place_of(group, in, group.first_tile + int(blockIdx.x) / blocks, blockIdx.x % blocks);
  const int lane = threadIdx.x % 32;
  SurfelWalk<float> walk = {};
  int last = -1;
  if (place.exists) {
    last = image.last[place.pixel];
    walk = begin_walk(image.out + 3 * place.pixel, image.geometry + kSurfelGeometry * place.pixel,
                      image.alpha[place.pixel], image.v_out + 3 * place.pixel,
                      image.v_geometry + kSurfelGeometry * place.pixel, image.v_alpha[place.pixel]);
  }
  const int end = min(place.end, __reduce_max_sync(kWarp, last) + 1);  // one for the warp: all of it stays together
  for (int i = place.first; i < end; ++i) {
    const int row = row_at(in, i);
    const float4* packed = table + int64_t(kSurfelQuads) * row;
    SurfelSplat<float> splat = shape_of(packed);
    const SurfelMeeting<float> m = meet(splat, place.x, place.y);
    const bool counts = i <= last && m.raw > 0.0f;
    if (!__any_sync(kWarp, counts)) continue;
    float g[kSurfelFloats] = {};
    if (counts) {
      add_looks(packed, splat);
      walk_surfel(splat, m, place.x, place.y, i == last, walk, g);
    }
    float mine = 0.0f;
#pragma unroll
    for (int c = 0; c < kSurfelFloats; ++c) {
      const float sum = warp_sum(g[c]);
      if (lane == c) mine = sum;
    }
    if (lane < kSurfelFloats && mine != 0.0f) atomicAdd(sum_of(sums, row, lane), mine);
  }
}

int blocks_per_tile(const SurfelRaster& in) { return (in.tile_size * in.tile_size + kThreads - 1) / kThreads; }

}  // namespace

cudaError_t pack_surfels(const SurfelRaster& in, float4* table, cudaStream_t stream) {
  if (in.rows == 0) return cudaSuccess;
  pack_kernel<<<unsigned((int64_t(in.rows) + kThreads - 1) / kThreads), kThreads, 0, stream>>>(in, table);
  return cudaGetLastError();
}

cudaError_t rasterize_surfels(const PatchGroup& group, const SurfelRaster& in, const float4* table,
                              const SurfelImage& image, cudaStream_t stream) {
  const int blocks = blocks_per_tile(in);
  forward_kernel<<<unsigned(group.tiles * blocks), kThreads, 0, stream>>>(group, in, table, image, blocks);
  return cudaGetLastError();
}

cudaError_t rasterize_surfels_backward(const PatchGroup& group, const SurfelRaster& in, const float4* table,
                                       const SurfelImageGradients& image, const SurfelRowSums& sums,
                                       cudaStream_t stream) {
  if (in.rows == 0) return cudaSuccess;
  const int blocks = blocks_per_tile(in);
  backward_kernel<<<unsigned(group.tiles * blocks), kThreads, 0, stream>>>(group, in, table, image, sums, blocks);
  return cudaGetLastError();
}

}  // namespace nsmg
