// A run over ranks, on the device: where its pieces begin, and how to read it.
#pragma once

#include <cuda_runtime.h>

#include "cuda/sort/merge.h"

namespace nsmg {

// Lies in shared memory. The piece on rank first + j is [starts[j], starts[j + 1]).
struct Run {
  int first;
  int64_t starts[kMostRanks + 1];
};

__device__ __forceinline__ int64_t run_length(const int64_t* counts, int first, int end) {
  int64_t length = 0;
  for (int rank = first; rank < end; ++rank) length += counts[rank];
  return length;
}

// Where the j-th of `ranks` equal pieces of a run begins.
__device__ __forceinline__ int64_t piece_start(int64_t length, int ranks, int j) { return j * length / ranks; }

// By a whole block of more than kMostRanks threads; they have to meet before the run is read.
__device__ __forceinline__ void lay_out(Run& run, const int64_t* counts, int first, int end) {
  const int ranks = end - first, j = threadIdx.x;
  if (j <= ranks) run.starts[j] = piece_start(run_length(counts, first, end), ranks, j);
  if (j == 0) run.first = first;
}

// Which piece holds the element at `position`, which must be of the run; looks from `piece` on.
__device__ __forceinline__ int piece_of(const Run& run, int64_t position, int piece = 0) {
  while (position >= run.starts[piece + 1]) ++piece;
  return piece;
}

__device__ __forceinline__ int64_t key_at(const PairAddresses& addresses, const Run& run, int64_t position) {
  const int piece = piece_of(run, position);
  return addresses.keys[run.first + piece][position - run.starts[piece]];
}

}  // namespace nsmg
