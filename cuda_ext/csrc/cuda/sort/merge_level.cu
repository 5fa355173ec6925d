// One level of the merges: each rank makes its own piece of the merged run, reading what it is made of where it lies.
//
// The merge of two runs is a path through the grid of their elements; its crossing of the d-th diagonal gives how many
// of the first d merged elements are of the left run, and a binary search finds that (Green et al., section 3). The
// piece is cut into tiles of kTile elements. A first kernel searches all tiles' beginnings at once, in the memory of the
// peers; then a block a tile fetches its part of both runs, and its threads search and merge in shared memory. Of equal
// keys the left run's come first: that is stability.
#include "cuda/sort/merge_device.h"

namespace nsmg {
namespace {

// An odd number of elements a thread: threads that walk through shared memory side by side then meet in no bank.
constexpr int kThreads = 256, kItems = 11, kTile = kThreads * kItems;
constexpr int kSearchThreads = 128;

// The part of the merged run that is made here, [begin, end).
struct Piece {
  int64_t begin, end;
};

__device__ __forceinline__ Piece own_piece(const MergePlace& place, const int64_t* counts, int capacity) {
  const int64_t length = run_length(counts, place.first, place.end);
  const int ranks = place.end - place.first, mine = place.rank - place.first;
  const int64_t begin = piece_start(length, ranks, mine), end = piece_start(length, ranks, mine + 1);
  return {begin, end - begin < capacity ? end : begin + capacity};
}

// One thread a diagonal: starts[t] is how many elements of the left run come before tile t.
__global__ void __launch_bounds__(kSearchThreads)
    search_kernel(const __grid_constant__ PairAddresses addresses, MergePlace place, const int64_t* counts,
                  int capacity, int64_t* starts, int64_t* result) {
  __shared__ Run left, right;
  lay_out(left, counts, place.first, place.middle);
  lay_out(right, counts, place.middle, place.end);
  __syncthreads();
  const Piece piece = own_piece(place, counts, capacity);
  const int64_t tile = int64_t(blockIdx.x) * kSearchThreads + threadIdx.x;
  if (tile == 0) *result = piece.end - piece.begin;
  // A tile's end is the next one's beginning, so one beyond the last is searched; there is always the first.
  if (tile > 0 && piece.begin + (tile - 1) * kTile >= piece.end) return;
  const int64_t whole = piece.begin + tile * kTile, diagonal = whole < piece.end ? whole : piece.end;
  const int64_t in_left = left.starts[place.middle - place.first], in_right = right.starts[place.end - place.middle];
  int64_t low = diagonal > in_right ? diagonal - in_right : 0, high = diagonal < in_left ? diagonal : in_left;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (key_at(addresses, left, middle) <= key_at(addresses, right, diagonal - 1 - middle))
      low = middle + 1;
    else
      high = middle;
  }
  starts[tile] = low;
}

__global__ void __launch_bounds__(kThreads)
    merge_kernel(const __grid_constant__ PairAddresses addresses, MergePlace place, const int64_t* counts,
                 int capacity, const int64_t* starts, int64_t* out_keys, int32_t* out_values) {
  __shared__ int64_t keys[kTile];
  __shared__ int32_t values[kTile];
  __shared__ Run left, right;
  const Piece piece = own_piece(place, counts, capacity);
  const int64_t offset = int64_t(blockIdx.x) * kTile, begin = piece.begin + offset;
  if (begin >= piece.end) return;
  lay_out(left, counts, place.first, place.middle);
  lay_out(right, counts, place.middle, place.end);
  const int64_t left_begin = starts[blockIdx.x], left_end = starts[blockIdx.x + 1], right_begin = begin - left_begin;
  const int size = int(piece.end - begin < kTile ? piece.end - begin : kTile);
  const int from_left = int(left_end - left_begin), from_right = size - from_left;
  __syncthreads();

  int64_t key[kItems];
  int32_t value[kItems];
  const int left_piece = from_left > 0 ? piece_of(left, left_begin) : 0;
  const int right_piece = from_right > 0 ? piece_of(right, right_begin) : 0;
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const int i = threadIdx.x + k * kThreads;
    if (i < size) {
      const bool of_left = i < from_left;
      const Run& run = of_left ? left : right;
      const int64_t position = of_left ? left_begin + i : right_begin + (i - from_left);
      const int j = piece_of(run, position, of_left ? left_piece : right_piece), rank = run.first + j;
      const int64_t at = position - run.starts[j];
      key[k] = addresses.keys[rank][at];
      value[k] = addresses.values[rank][at];
    }
  }
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const int i = threadIdx.x + k * kThreads;
    if (i < size) {
      keys[i] = key[k];
      values[i] = value[k];
    }
  }
  __syncthreads();

  // The left part lies in front of the right one. This thread merges elements [first, first + kItems) of the tile.
  const int first = int(threadIdx.x) * kItems < size ? int(threadIdx.x) * kItems : size;
  int low = first > from_right ? first - from_right : 0, high = first < from_left ? first : from_left;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (keys[middle] <= keys[from_left + first - 1 - middle])
      low = middle + 1;
    else
      high = middle;
  }
  int a = low, b = from_left + first - low;  // next of the left part; next of the right one, which ends at `size`
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    if (first + k < size) {
      const bool take_left = a < from_left && (b >= size || keys[a] <= keys[b]);
      const int source = take_left ? a++ : b++;
      key[k] = keys[source];
      value[k] = values[source];
    }
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    if (first + k < size) {
      keys[first + k] = key[k];
      values[first + k] = value[k];
    }
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const int i = threadIdx.x + k * kThreads;
    if (i < size) {
      out_keys[offset + i] = keys[i];
      out_values[offset + i] = values[i];
    }
  }
}

__global__ void publish_kernel(const int64_t* count, int64_t limit, const __grid_constant__ CountAddresses addresses,
                               int ranks) {
  const int rank = threadIdx.x;
  if (rank >= ranks) return;
  const int64_t number = *count;
  *addresses.places[rank] = number < limit ? number : limit;
  __threadfence_system();
}

}  // namespace

cudaError_t publish_count(const int64_t* count, int64_t limit, const CountAddresses& addresses, int ranks,
                          cudaStream_t stream) {
  publish_kernel<<<1, kMostRanks, 0, stream>>>(count, limit, addresses, ranks);
  return cudaGetLastError();
}

int64_t merge_tiles(int capacity) { return (int64_t(capacity) + kTile - 1) / kTile; }

cudaError_t merge_level(const PairAddresses& addresses, const MergePlace& place, const int64_t* counts, int capacity,
                        int64_t* starts, int64_t* out_keys, int32_t* out_values, int64_t* result, cudaStream_t stream) {
  const int64_t tiles = merge_tiles(capacity);
  const int searches = int((tiles + kSearchThreads) / kSearchThreads);  // tiles + 1 threads
  search_kernel<<<searches, kSearchThreads, 0, stream>>>(addresses, place, counts, capacity, starts, result);
  if (tiles > 0)
    merge_kernel<<<int(tiles), kThreads, 0, stream>>>(addresses, place, counts, capacity, starts, out_keys, out_values);
  return cudaGetLastError();
}

}  // namespace nsmg
