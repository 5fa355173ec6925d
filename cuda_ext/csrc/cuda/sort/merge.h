// Sorting pairs of key and value that are spread over the GPUs of a machine, by merge paths over peer memory (Green, Odeh
// and Birk 2014; over GPUs: torch-dgx, section 4), and the lists for rendering that come of it. Everything runs on the
// given stream, waits for nothing and takes its sizes from the arguments alone: it can be captured in a CUDA graph.
//
// A sorted run lies on consecutive ranks in pieces of equal length: of a run of n on k ranks, the j-th of them holds
// [j n / k, (j + 1) n / k), rounded down. So a run is known by its first rank, its last and its length, which is the sum
// of what those ranks started with.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cuda/intersect/intersect.h"

namespace nsmg {

constexpr int kMostRanks = 32;
constexpr int kOwnerShift = 28;  // a value of the keys of tiles is (owner << 28) | row: 16 owners, 2^28 rows each

// Where each rank's pairs lie. Memory of other GPUs is read as it is.
struct PairAddresses {
  const int64_t* keys[kMostRanks];
  const int32_t* values[kMostRanks];
};

// A merge of two neighbouring runs, the left one on ranks [first, middle) and the right one on [middle, end), and whose
// piece of the result is made here.
struct MergePlace {
  int first, middle, end, rank;
};

// --- the sort of one rank's own pairs ---

// Bytes of temporary storage that pair_sort needs.
cudaError_t pair_sort_bytes(int capacity, int begin_bit, int end_bit, size_t* bytes);

// Sorts the first *count of `capacity` pairs by bits [begin_bit, end_bit) of their keys, stably. The other keys become
// the largest there is and go last.
cudaError_t pair_sort(int64_t* keys, const int32_t* values, const int64_t* count, int capacity, int begin_bit,
                      int end_bit, int64_t* out_keys, int32_t* out_values, void* temporary, size_t bytes,
                      cudaStream_t stream);

// --- the merges of all ranks' pairs ---

struct CountAddresses {
  int64_t* places[kMostRanks];
};

// Writes min(*count, limit) to `ranks` places, which may lie on other GPUs.
cudaError_t publish_count(const int64_t* count, int64_t limit, const CountAddresses& addresses, int ranks,
                          cudaStream_t stream);

// How many pieces a result of up to `capacity` pairs is merged in; `starts` needs one number more.
int64_t merge_tiles(int capacity);

// Makes one rank's piece of a merge. counts [ranks]: what each rank started with, before any merge.
// result: how long the piece is, at most `capacity`.
cudaError_t merge_level(const PairAddresses& addresses, const MergePlace& place, const int64_t* counts, int capacity,
                        int64_t* starts, int64_t* out_keys, int32_t* out_values, int64_t* result, cudaStream_t stream);

// --- rendering ---

// Lists (tile << 32 | bits of the depth, owner << 28 | row) in the order of `order`; unused places get the largest key
// and value -1. `total` is how many pairs there are.
cudaError_t tile_keys(const IntersectRows& rows, const PatchTable& table, const RowOrder& order, const int64_t* total,
                      int capacity, int owner, int64_t* keys, int32_t* values, cudaStream_t stream);

// A stretch of tiles: global ids from `first_tile` on. It is `local_tile`-th of all stretches' tiles that it begins with.
struct TileStretch {
  int32_t first_tile, tiles, local_tile;
};

struct BandTable {
  const TileStretch* bands;  // in device memory
  int count, tiles;          // stretches; tiles in all
};

cudaError_t band_upload(const TileStretch* host, int count, TileStretch* device, cudaStream_t stream);

// Which line of this rank's received rows a value stands for: owner * segment + where[owner * rows + row].
struct ReceivedRows {
  const int32_t* where;
  int owners;
  int64_t rows;
  int segment;
};

// Lists the pairs of some stretches of tiles of the run that all `ranks` hold together.
// places [tiles + count of bands], bases [count of bands + 1]: workspace. offsets [tiles + 1], ids [capacity], total [1].
cudaError_t band_lists(const PairAddresses& addresses, int ranks, const int64_t* counts, const BandTable& table,
                       const ReceivedRows& received, int capacity, int64_t* places, int64_t* bases, int32_t* offsets,
                       int32_t* ids, int64_t* total, cudaStream_t stream);

}  // namespace nsmg
