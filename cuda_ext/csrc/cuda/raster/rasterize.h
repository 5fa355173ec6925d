// Launchers of the rasterization kernels, and what their buffers hold. Nothing here reads the device or depends on its
// data: every launch size follows from shapes, so a CUDA graph can hold all of it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <limits>

namespace nsmg {

constexpr int kFastTile = 16;      // the tile size of the fast kernels; others go through the generic ones
constexpr int kFastChannels = 4;   // the most channels of the fast kernels
constexpr int kChunk = 256;        // splats between two checkpoints, and of one block of the backward pass
constexpr int kSegment = 1024;     // splats of one block of the forward pass, where lists are split
constexpr int kSegmentChunks = kSegment / kChunk;
constexpr int kForwardBlocks = 10;  // of the forward pass of 3D Gaussians at once on a multiprocessor
// Lists of at most so many fair shares are not split. The fair share is the number of intersections divided by the blocks
// that run at once. Long lists are drawn first, so one of a few shares ends before the others; to split it costs a second
// walk. On a garden of 7.93 million Gaussians at 1080p (H200) a step takes 5.00 ms if none is split, 5.18 ms if those
// above one share are.
constexpr int kSplitShares = 3;
constexpr int kRecordFloats = 16;  // a row's gradient record: one 64-byte piece
constexpr int kPatchGroup = 96;    // patches handed over in one launch, by value

struct PatchEntry {
  int x0, y0, x1, y1;
  int first_pixel, first_tile, tiles_x, pad;
};

struct PatchGroup {
  int count, first_tile, tiles, pad;
  PatchEntry entries[kPatchGroup];
};

// 32 bytes: what a block needs to know of its tile. first and end bound the tile's part of row_ids.
struct TileInfo {
  int x0, y0, width, height;  // pixels of the whole view
  int pixel, pitch;           // index of the tile's first pixel; pixels from one row of the patch to the next
  int first, end;
};

struct RasterShape {
  int64_t rows, intersections;  // of the tensors: they may hold padding behind what tile_offsets names
  int64_t tiles;
  int channels, tile_size;
  int quads = 3;       // float4 of a packed splat
  int pixel_sums = 0;  // numbers of a pixel other than its transmittance, of primitives other than 3D Gaussians
  bool fast() const { return tile_size == kFastTile && (pixel_sums > 0 || channels <= kFastChannels); }
  // Numbers of a pixel that the fast kernels are compiled for.
  int packed_channels() const { return pixel_sums > 0 ? pixel_sums : channels == 4 ? 4 : 3; }
  // Chunk k of tile t has the slot first / kChunk + t + k, checkpoint k >= 1 the place first / kChunk + k - 1: distinct
  // for all chunks, as a tile of n splats has at most (first + n) / kChunk - first / kChunk + 1 of them.
  int64_t chunk_slots() const { return fast() ? intersections / kChunk + tiles : 0; }
  int64_t checkpoints() const { return fast() ? intersections / kChunk : 0; }
};

struct RasterInputs {
  const float *means2d, *conics, *opacities, *features;
  const int32_t *tile_offsets, *row_ids;
};

// The op's output `state`, cut up. cuda_ext/rasterization.py computes the same size for the fake kernel.
struct RasterState {
  TileInfo* tiles;     // [T]
  int32_t* reached;    // [T] end of the intersections that touched any pixel
  int32_t* slot_tile;  // [chunk slots] the tile of each, -1 for none
  int32_t* split_above;  // [1] lists of more splats are split; at least 2 kSegment
  float4* table;       // [M,quads] packed splats; (x, y, a, b), (c, log2 opacity, limit, feature 3), features 0 to 2
  float* checkpoints;  // [checkpoints, 1 + channels, 256] transmittance and sums before the chunk, by thread; of a list
                       // that is split, sums before chunks that begin no segment are counted from the segment's start

  // Floats needed in all; sets the pointers from `base`.
  int64_t place(float* base, const RasterShape& shape) {
    int64_t used = 0;
    const auto take = [&](int64_t floats) {
      float* start = base + used;
      used += (floats + 31) / 32 * 32;
      return start;
    };
    tiles = reinterpret_cast<TileInfo*>(take(8 * shape.tiles));
    reached = reinterpret_cast<int32_t*>(take(shape.tiles));
    slot_tile = reinterpret_cast<int32_t*>(take(shape.chunk_slots()));
    split_above = reinterpret_cast<int32_t*>(take(1));
    table = reinterpret_cast<float4*>(take(4 * shape.quads * shape.rows));
    checkpoints = take(shape.checkpoints() * kChunk * (1 + shape.packed_channels()));
    return used;
  }
};

struct RasterOutputs {
  float *out, *alpha;  // alpha is negative where drawing stopped, if `mark_stops`
  int32_t* last;
  bool mark_stops;
};

// alpha as it was written; v_alpha is by its absolute value.
struct RasterGradients {
  const float *out, *alpha, *v_out, *v_alpha;
  const int32_t* last;
};

// Where gradient records go: row r's to sinks[owners[r]] + 64 slots[r], or to local + 64 r where `sinks` is null.
struct RecordTarget {
  float* local;
  const int64_t* sinks;
  const int32_t *owners, *slots;
  bool system_scope;
};

constexpr int kLengthClasses = 16;

// A part of a list that is split.
struct Segment {
  int tile, index;
};

// What is known before the forward pass, in scratch ints.
struct RasterPlan {
  int32_t* order;         // [T] tiles, long lists first
  int32_t* classes;       // [2, length classes] how many tiles there are, and how many have a place
  int32_t* segment_count; // [1]
  // Where lists may be split:
  int32_t* ended;         // [T] how many of a tile's segments have come to their end
  Segment* segments;      // [most] those of a tile side by side
  float* transmittances;  // [most, 256] of a segment alone, by thread; negative where it closes the pixel
  int most;               // 0: no list is split
  int split_above = std::numeric_limits<int>::max();  // the least threshold: launch_order may choose a higher one
  int blocks_at_once = 0;  // of the forward pass on the whole GPU, for the fair share; 0: split_above is the threshold

  // Ints needed in all; sets the pointers from `base`.
  int64_t place(int32_t* base, const RasterShape& shape, bool splits) {
    // A list of n > 2 kSegment splats has at most 1.5 n / kSegment segments.
    most = splits ? int(3 * shape.intersections / (2 * kSegment)) : 0;
    int64_t used = 0;
    const auto take = [&](int64_t ints) {
      int32_t* start = base + used;
      used += (ints + 1) / 2 * 2;
      return start;
    };
    order = take(shape.tiles);
    classes = take(2 * kLengthClasses + 1);
    segment_count = classes + 2 * kLengthClasses;
    ended = take(splits ? shape.tiles : 0);
    segments = reinterpret_cast<Segment*>(take(2 * int64_t(most)));
    transmittances = reinterpret_cast<float*>(take(kChunk * int64_t(most)));
    return used;
  }
};

// Packs the rows into state.table. Must come before the other launches.
cudaError_t launch_pack(const RasterInputs& in, const RasterShape& shape, const RasterState& state,
                        const RasterPlan& plan, cudaStream_t stream);
// Describes the tiles of one group of patches.
cudaError_t launch_describe(const PatchGroup& group, const RasterInputs& in, const RasterShape& shape,
                            const RasterState& state, const RasterPlan& plan, cudaStream_t stream);
// Orders the tiles, long ones first, maps chunk slots to tiles, chooses state.split_above, and lists segments.
cudaError_t launch_order(const RasterInputs& in, const RasterShape& shape, const RasterState& state,
                         const RasterPlan& plan, cudaStream_t stream);
cudaError_t launch_forward(const RasterInputs& in, const RasterShape& shape, const RasterState& state,
                           const RasterPlan& plan, const RasterOutputs& outputs, cudaStream_t stream);
cudaError_t launch_backward(const RasterInputs& in, const RasterShape& shape, const RasterState& state,
                            const RasterGradients& pixels, const RecordTarget& target, bool absgrad,
                            cudaStream_t stream);
// Any tile size and number of channels. Beyond 4 channels the features' gradients go to v_features, not to the records.
cudaError_t launch_forward_generic(const RasterInputs& in, const RasterShape& shape, const RasterState& state,
                                   const RasterOutputs& outputs, cudaStream_t stream);
cudaError_t launch_backward_generic(const RasterInputs& in, const RasterShape& shape, const RasterState& state,
                                    const RasterGradients& pixels, const RecordTarget& target, float* v_features,
                                    bool absgrad, cudaStream_t stream);
// Cuts local records into the op's outputs; v_features or v_abs may be null.
cudaError_t launch_unpack(const float* records, int64_t rows, int channels, float* v_means2d, float* v_conics,
                          float* v_opacities, float* v_features, float* v_abs, cudaStream_t stream);

}  // namespace nsmg
