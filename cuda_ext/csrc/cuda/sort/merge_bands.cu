// `band_lists`: a rank's own stretches of tiles out of the run that all ranks hold together, as lists of rows.
//
// Where a tile's pairs begin is searched in the peers' memory, all tiles at once; then each pair finds its own source.
#include "cuda/sort/merge_device.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256;
constexpr int kUpload = 128;  // stretches a launch: well within the 4 KB of kernel parameters

struct BandBatch {
  TileStretch bands[kUpload];
};

__global__ void upload_kernel(const __grid_constant__ BandBatch batch, int count, TileStretch* bands) {
  if (int(threadIdx.x) < count) bands[threadIdx.x] = batch.bands[threadIdx.x];
}

// The last band that begins at or before a place; begin(0) must.
template <typename Begin>
__device__ __forceinline__ int last_band(int count, const Begin& begin) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (begin(middle))
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

// One thread a tile, and one more for each band's end: places[local tile + band] is the first pair of that tile, or of
// the tile behind the band, in the whole run.
__global__ void __launch_bounds__(kThreads)
    places_kernel(const __grid_constant__ PairAddresses addresses, int ranks, const int64_t* counts, BandTable table,
                  int64_t* places) {
  __shared__ Run run;
  lay_out(run, counts, 0, ranks);
  __syncthreads();
  const int64_t index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= int64_t(table.tiles) + table.count) return;
  const int band = last_band(table.count, [&](int k) { return int64_t(table.bands[k].local_tile) + k <= index; });
  const int64_t tile = table.bands[band].first_tile + (index - table.bands[band].local_tile - band);
  const int64_t key = tile << 32;
  int64_t low = 0, high = run.starts[ranks];
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (key_at(addresses, run, middle) < key)
      low = middle + 1;
    else
      high = middle;
  }
  places[index] = low;
}

// One thread: bases[k] is how many pairs the bands before k have.
__global__ void bases_kernel(BandTable table, const int64_t* places, int64_t* bases, int64_t* total) {
  int64_t sum = 0;
  for (int k = 0; k < table.count; ++k) {
    const int64_t first = int64_t(table.bands[k].local_tile) + k;
    bases[k] = sum;
    sum += places[first + table.bands[k].tiles] - places[first];
  }
  bases[table.count] = sum;
  *total = sum;
}

// One thread a tile, and one more.
__global__ void __launch_bounds__(kThreads)
    offsets_kernel(BandTable table, const int64_t* places, const int64_t* bases, int capacity, int32_t* offsets) {
  const int64_t tile = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (tile > table.tiles) return;
  int64_t offset = bases[table.count];
  if (tile < table.tiles) {
    const int band = last_band(table.count, [&](int k) { return table.bands[k].local_tile <= tile; });
    offset = bases[band] + places[tile + band] - places[table.bands[band].local_tile + int64_t(band)];
  }
  offsets[tile] = int32_t(offset < capacity ? offset : capacity);
}

// One thread a pair: where it stands in the whole run, whose row it is, and where that row has been received.
__global__ void __launch_bounds__(kThreads)
    ids_kernel(const __grid_constant__ PairAddresses addresses, int ranks, const int64_t* counts, BandTable table,
               ReceivedRows received, const int64_t* places, const int64_t* bases, int capacity, int32_t* ids) {
  __shared__ Run run;
  const int64_t first = int64_t(blockIdx.x) * kThreads, pairs = bases[table.count];
  if (first < pairs) {  // else there is nothing but padding in this block
    lay_out(run, counts, 0, ranks);
    __syncthreads();
  }
  const int64_t index = first + threadIdx.x;
  if (index >= capacity) return;
  int32_t line = -1;
  if (index < pairs) {
    const int band = last_band(table.count, [&](int k) { return bases[k] <= index; });
    const int64_t position = places[table.bands[band].local_tile + int64_t(band)] + (index - bases[band]);
    const int piece = piece_of(run, position);
    const uint32_t value = uint32_t(addresses.values[run.first + piece][position - run.starts[piece]]);
    const int owner = int(value >> kOwnerShift), last = received.owners - 1;
    const int64_t row = value & ((1u << kOwnerShift) - 1);
    // Where not all rows fitted, some of a list were not received. The step is retried; until then any line will do.
    const int64_t source = owner < last ? owner : last;
    const int place = received.where[source * received.rows + (row < received.rows ? row : received.rows - 1)];
    line = int32_t(source * received.segment + (place < 0 ? 0 : place < received.segment ? place : received.segment - 1));
  }
  ids[index] = line;
}

}  // namespace

cudaError_t band_upload(const TileStretch* host, int count, TileStretch* device, cudaStream_t stream) {
  for (int first = 0; first < count; first += kUpload) {
    BandBatch batch = {};
    const int number = count - first < kUpload ? count - first : kUpload;
    for (int k = 0; k < number; ++k) batch.bands[k] = host[first + k];
    upload_kernel<<<1, kUpload, 0, stream>>>(batch, number, device + first);
  }
  return cudaGetLastError();
}

cudaError_t band_lists(const PairAddresses& addresses, int ranks, const int64_t* counts, const BandTable& table,
                       const ReceivedRows& received, int capacity, int64_t* places, int64_t* bases, int32_t* offsets,
                       int32_t* ids, int64_t* total, cudaStream_t stream) {
  const auto blocks = [](int64_t threads) { return int((threads + kThreads - 1) / kThreads); };
  const int for_places = blocks(int64_t(table.tiles) + table.count);
  places_kernel<<<for_places, kThreads, 0, stream>>>(addresses, ranks, counts, table, places);
  bases_kernel<<<1, 1, 0, stream>>>(table, places, bases, total);
  const int for_offsets = blocks(int64_t(table.tiles) + 1);
  offsets_kernel<<<for_offsets, kThreads, 0, stream>>>(table, places, bases, capacity, offsets);
  if (capacity > 0) {
    const int for_ids = blocks(capacity);
    ids_kernel<<<for_ids, kThreads, 0, stream>>>(addresses, ranks, counts, table, received, places, bases, capacity,
                                                 ids);
  }
  return cudaGetLastError();
}

}  // namespace nsmg
