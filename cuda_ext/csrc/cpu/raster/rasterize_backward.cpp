// CPU twin of `rasterize_backward`: walks every tile back to front and leaves one record an intersection; the records
// of a row are then added in the order of its intersections. So the result has the same bits on any number of threads.
//
// With v_sigma = d loss / d sigma of a pixel and (dx, dy) = mean - pixel, all geometric gradients of a splat are linear
// in the six moments of v_sigma over its pixels: 1, dx, dy, dx^2, dx dy, dy^2.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <tuple>
#include <type_traits>
#include <vector>

#include "cpu/raster/records.h"
#include "cpu/raster/splat.h"

namespace nsmg::rasterize_backward_cpu {
namespace {

template <typename T>
struct PixelGradients {
  const T *alpha, *v_out, *v_alpha;
  const int32_t* last;
};

template <typename T, int kChannels, bool kAbs>
class TileGradient {
  static constexpr int kWidth = Lanes<T>::kWidth;
  using V = Vec<T>;
  using Ids = typename Lanes<T>::Ids;
  using Id = typename Lanes<T>::Id;

 public:
  TileGradient(const SplatTable<T>& table, int tile_size)
      : table_(table), grid_(tile_size), dynamic_channels_(int(table.channels)),
        transmittance_(size_t(tile_size) * grid_.blocks), behind_(transmittance_.size()),
        v_alpha_(transmittance_.size()), last_(transmittance_.size()), v_out_(transmittance_.size() * channels()),
        row_last_(tile_size), sums_(record_vectors<T>(channels(), kAbs) * kWidth) {}

  // Intersections [first, end) of the tile, which must all have a record.
  void walk(const Tile& tile, const PixelGradients<T>& pixels, int32_t first, int32_t end, const int32_t* slots,
            V* records) {
    if (first == end) return;
    load(tile, pixels);
    TileOverlaps<T> overlaps;
    for (int32_t stop = end; stop > first; stop -= std::min(kBatch, stop - first)) {
      const int32_t start = std::max(first, stop - kBatch);
      overlaps.find(table_, table_.row_ids + start, stop - start, tile);
      for (int32_t i = stop - 1; i >= start; --i) {
        for (V& sum : sums_) sum = V{};
        for (int k = overlaps.block_first[i - start]; k < overlaps.block_last[i - start]; ++k)
          gather(tile, table_.row_ids[i], Id(i), k, overlaps.row_first[i - start], overlaps.row_last[i - start]);
        const int vectors = record_vectors<T>(channels(), kAbs);
        for (int v = 0; v < vectors; ++v) {
          sum_lanes<T>(&sums_[v * kWidth]);
          records[int64_t(slots[i]) * vectors + v] = sums_[v * kWidth];
        }
      }
    }
  }

 private:
  int channels() const { return kChannels > 0 ? kChannels : dynamic_channels_; }

  void load(const Tile& tile, const PixelGradients<T>& pixels) {
    grid_.place(tile);
    const int columns = tile.x1 - tile.x0;
    for (int row = 0; row < tile.y1 - tile.y0; ++row) {
      row_last_[row] = -1;
      for (int column = 0; column < grid_.blocks * kWidth; ++column) {
        const int block = row * grid_.blocks + column / kWidth, lane = column % kWidth;
        const int64_t pixel = tile.pixel + row * tile.pitch + std::min(column, columns - 1);
        const int32_t last = column < columns ? pixels.last[pixel] : -1;
        row_last_[row] = std::max<Id>(row_last_[row], last);
        last_[block][lane] = last;
        transmittance_[block][lane] = T(1) - std::abs(pixels.alpha[pixel]);
        behind_[block][lane] = T(0);
        v_alpha_[block][lane] = pixels.v_alpha[pixel];
        for (int d = 0; d < channels(); ++d)
          v_out_[block * channels() + d][lane] = pixels.v_out[pixel * channels() + d];
      }
    }
  }

  // Adds what one splat gets from rows [row, row_end) of block k to sums_, lane by lane.
  inline void gather(const Tile& tile, int64_t splat_row, Id position, int k, int row, int row_end) {
    const TableSplat<T> splat = table_.splats[splat_row];
    const T* feature = kChannels > 0 ? splat.features : table_.features + splat_row * channels();
    const V dx = splat.ellipse.mean_x - grid_.x[k];
    V sum0{}, sum1{}, sum2{};  // over the rows, of v_sigma, v_sigma dy and v_sigma dy^2
    V abs_x{}, abs_y{};
    V fixed_sums[kChannels > 0 ? kChannels : 1] = {};
    V* __restrict__ feature_sums = kChannels > 0 ? fixed_sums : &sums_[kMoments];
    for (; row < row_end; ++row) {
      if (row_last_[row] < position) continue;
      const T dy = splat.ellipse.mean_y - (T(tile.y0 + row) + T(0.5));
      const int block = row * grid_.blocks + k;
      V raw = raw_alpha(splat, dx, dy);
      raw = last_[block] >= position ? raw : V{};
      const V alpha = raw < kAlphaMax<T> ? raw : V{} + kAlphaMax<T>;
      const V ratio = T(1) / (T(1) - alpha);
      const V before = transmittance_[block] * ratio;
      const V weight = alpha * before;
      transmittance_[block] = before;
      const V* __restrict__ v_out = &v_out_[size_t(block) * channels()];
      V value = v_alpha_[block];  // d loss / d weight: alpha itself is the sum of the weights
      for (int d = 0; d < channels(); ++d) {
        value += v_out[d] * feature[d];
        feature_sums[d] += weight * v_out[d];
      }
      const V slope = before * value - behind_[block] * ratio;  // d loss / d alpha
      behind_[block] += weight * value;
      const V v_sigma = raw <= kAlphaMax<T> ? -raw * slope : V{};
      sum0 += v_sigma;
      sum1 += v_sigma * dy;
      sum2 += v_sigma * (dy * dy);
      if constexpr (kAbs) {
        abs_x += absolute<T>(v_sigma * (T(2) * splat.half_a * dx + splat.ellipse.b * dy));
        abs_y += absolute<T>(v_sigma * (splat.ellipse.b * dx + T(2) * splat.half_c * dy));
      }
    }
    sums_[0] += sum0;
    sums_[1] += sum0 * dx;
    sums_[2] += sum1;
    sums_[3] += sum0 * dx * dx;
    sums_[4] += sum1 * dx;
    sums_[5] += sum2;
    if constexpr (kChannels > 0)
      for (int d = 0; d < kChannels; ++d) sums_[kMoments + d] += fixed_sums[d];
    if constexpr (kAbs) {
      sums_[kMoments + channels()] += abs_x;
      sums_[kMoments + channels() + 1] += abs_y;
    }
  }

  const SplatTable<T>& table_;
  TileGrid<T> grid_;
  const int dynamic_channels_;
  std::vector<V> transmittance_, behind_, v_alpha_;  // [row, block]; behind: what the splats further back add
  std::vector<Ids> last_;                            // [row, block]
  std::vector<V> v_out_;                             // [row, block, channel]
  std::vector<Id> row_last_;                         // [row]
  std::vector<V> sums_;                              // one splat's record, lane by lane
};

struct Gradients {
  at::Tensor means2d, conics, row_opacities, features, means2d_abs;
};

// Adds each row's records and turns the moments into gradients.
template <typename T>
void sum_rows(const SplatTable<T>& table, const RecordPlan& plan, const Vec<T>* records, bool absgrad,
              const Gradients& grads) {
  T* v_mean = grads.means2d.mutable_data_ptr<T>();
  T* v_conic = grads.conics.mutable_data_ptr<T>();
  T* v_opacity = grads.row_opacities.mutable_data_ptr<T>();
  T* v_feature = grads.features.mutable_data_ptr<T>();
  T* v_abs = absgrad ? grads.means2d_abs.mutable_data_ptr<T>() : nullptr;
  const int64_t channels = table.channels;
  const int vectors = record_vectors<T>(int(channels), absgrad);
  at::parallel_for(0, table.rows, 2048, [&](int64_t begin, int64_t end) {
    std::vector<Vec<T>> total(vectors);
    const auto sum = [&](int64_t k) { return total[k / Lanes<T>::kWidth][k % Lanes<T>::kWidth]; };
    for (int64_t r = begin; r < end; ++r) {
      std::fill(total.begin(), total.end(), Vec<T>{});
      for (int64_t slot = plan.row_begin[r]; slot < plan.row_begin[r + 1]; ++slot)
        for (int v = 0; v < vectors; ++v) total[v] += records[slot * vectors + v];
      const TableSplat<T>& s = table.splats[r];
      v_mean[2 * r] = T(2) * s.half_a * sum(1) + s.ellipse.b * sum(2);
      v_mean[2 * r + 1] = s.ellipse.b * sum(1) + T(2) * s.half_c * sum(2);
      v_conic[3 * r] = T(0.5) * sum(3);
      v_conic[3 * r + 1] = sum(4);
      v_conic[3 * r + 2] = T(0.5) * sum(5);
      v_opacity[r] = plan.row_begin[r] < plan.row_begin[r + 1] && s.opacity > T(0) ? -sum(0) / s.opacity : T(0);
      for (int64_t d = 0; d < channels; ++d) v_feature[r * channels + d] = sum(kMoments + d);
      for (int64_t d = 0; absgrad && d < 2; ++d) v_abs[2 * r + d] = sum(kMoments + channels + d);
    }
  });
}

template <typename T, int kChannels, bool kAbs>
void walk_all(const SplatTable<T>& table, const PatchList& list, const std::vector<Tile>& tiles,
              const RecordPlan& plan, const PixelGradients<T>& pixels, Vec<T>* records) {
  for_each_task(list.tiles, [&] {
    return [&, gradient = TileGradient<T, kChannels, kAbs>(table, list.tile_size)](int64_t t) mutable {
      gradient.walk(tiles[t], pixels, table.tile_offsets[t], plan.reached[t], plan.slot.data(), records);
    };
  });
}

template <typename T>
Gradients backward_as(const SplatTable<T>& table, const PatchList& list, const PixelGradients<T>& pixels, bool absgrad,
                      const at::TensorOptions& options) {
  const std::vector<Tile> tiles = list.cut();
  const RecordPlan plan(table, tiles, pixels.last);
  // Uninitialised: every record in the plan is written.
  const int64_t size = plan.row_begin.back() * record_vectors<T>(int(table.channels), absgrad);
  const std::unique_ptr<Vec<T>[]> records(new Vec<T>[size]);
  const auto walk = [&](auto channels, auto abs) {
    walk_all<T, decltype(channels)::value, decltype(abs)::value>(table, list, tiles, plan, pixels, records.get());
  };
  const auto walk_channels = [&](auto abs) {
    if constexpr (std::is_same_v<T, float>) {
      if (table.channels == 3) return walk(std::integral_constant<int, 3>{}, abs);
      if (table.channels == 4) return walk(std::integral_constant<int, 4>{}, abs);
    }
    walk(std::integral_constant<int, 0>{}, abs);
  };
  absgrad ? walk_channels(std::true_type{}) : walk_channels(std::false_type{});
  Gradients grads{at::empty({table.rows, 2}, options), at::empty({table.rows, 3}, options),
                  at::empty({table.rows}, options), at::empty({table.rows, table.channels}, options),
                  at::empty({absgrad ? table.rows : 0, 2}, options)};
  sum_rows(table, plan, records.get(), absgrad, grads);
  return grads;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> rasterize_backward(
    const at::Tensor& means2d_, const at::Tensor& conics_, const at::Tensor& row_opacities_,
    const at::Tensor& features_, const at::Tensor& tile_offsets_, const at::Tensor& row_ids_, at::IntArrayRef patches,
    int64_t tile_size, const at::Tensor& alpha_, const at::Tensor& last_, const at::Tensor& /* state: empty here */,
    const at::Tensor& /* out */, const at::Tensor& v_out_, const at::Tensor& v_alpha_, bool absgrad) {
  const PatchList list(patches, tile_size);
  const at::Tensor means2d = means2d_.contiguous(), conics = conics_.contiguous(),
                   row_opacities = row_opacities_.contiguous(), features = features_.contiguous(),
                   tile_offsets = tile_offsets_.contiguous(), row_ids = row_ids_.contiguous(),
                   alpha = alpha_.contiguous(), last = last_.contiguous(), v_out = v_out_.contiguous(),
                   v_alpha = v_alpha_.contiguous();
  TORCH_CHECK(v_out.sizes() == at::IntArrayRef({list.pixels, features.size(1)}) &&
                  alpha.sizes() == at::IntArrayRef({list.pixels}) && last.sizes() == alpha.sizes() &&
                  v_alpha.sizes() == alpha.sizes(),
              "rasterize_backward: alpha, last, v_alpha must be [S] and v_out [S,D] with the S = ", list.pixels,
              " pixels of the patches");
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    const SplatTable<T> table(means2d, conics, row_opacities, features, tile_offsets, row_ids, list);
    const PixelGradients<T> pixels{alpha.const_data_ptr<T>(), v_out.const_data_ptr<T>(), v_alpha.const_data_ptr<T>(),
                                   last.const_data_ptr<int32_t>()};
    const Gradients g = backward_as(table, list, pixels, absgrad, means2d.options());
    return std::make_tuple(g.means2d, g.conics, g.row_opacities, g.features, g.means2d_abs);
  };
  if (means2d.scalar_type() == at::kDouble) return run(double{});
  TORCH_CHECK(means2d.scalar_type() == at::kFloat, "rasterize_backward: float32 or float64, got ",
              means2d.scalar_type());
  return run(float{});
}

// Adds the gradients of row r, as 16 floats, to the record at sinks[owners[r]] + 64 slots[r] bytes.
void rasterize_backward_into(const at::Tensor& means2d, const at::Tensor& conics, const at::Tensor& row_opacities,
                             const at::Tensor& features, const at::Tensor& tile_offsets, const at::Tensor& row_ids,
                             at::IntArrayRef patches, int64_t tile_size, const at::Tensor& alpha,
                             const at::Tensor& last, const at::Tensor& state, const at::Tensor& out,
                             const at::Tensor& v_out, const at::Tensor& v_alpha, bool absgrad,
                             const at::Tensor& sinks_, const at::Tensor& owners_, const at::Tensor& slots_,
                             bool /* system_scope: one memory here */) {
  const int64_t rows = means2d.size(0), channels = features.size(1);
  TORCH_CHECK_TYPE(means2d.scalar_type() == at::kFloat, "rasterize_backward_into: records are float32, the inputs ",
                   means2d.scalar_type());
  TORCH_CHECK_VALUE(channels <= 4, "rasterize_backward_into: a record holds 4 channels, features has ", channels);
  TORCH_CHECK_VALUE(owners_.sizes() == at::IntArrayRef({rows}) && slots_.sizes() == owners_.sizes(),
                    "rasterize_backward_into: owners and slots must be [M] = [", rows, "], got ", owners_.sizes(),
                    " and ", slots_.sizes());
  const at::Tensor sinks = sinks_.contiguous(), owners = owners_.contiguous(), slots = slots_.contiguous();
  const int64_t* bases = sinks.const_data_ptr<int64_t>();
  const int32_t* owner = owners.const_data_ptr<int32_t>();
  const int32_t* slot = slots.const_data_ptr<int32_t>();
  const auto [v_means2d, v_conics, v_opacities, v_features, v_abs] =
      rasterize_backward(means2d, conics, row_opacities, features, tile_offsets, row_ids, patches, tile_size, alpha,
                         last, state, out, v_out, v_alpha, absgrad);
  const float *mean = v_means2d.const_data_ptr<float>(), *conic = v_conics.const_data_ptr<float>(),
              *opacity = v_opacities.const_data_ptr<float>(), *feature = v_features.const_data_ptr<float>(),
              *abs = absgrad ? v_abs.const_data_ptr<float>() : nullptr;
  std::vector<char> named(rows, 0);  // by an intersection: the others may have no owner
  const at::Tensor listed = row_ids.contiguous();
  const int32_t* ids = listed.const_data_ptr<int32_t>();
  const int64_t first = tile_offsets[0].item<int32_t>(), used = tile_offsets[-1].item<int32_t>();
  for (int64_t i = first; i < used; ++i) named[ids[i]] = 1;
  for (int64_t r = 0; r < rows; ++r) {
    if (!named[r]) continue;
    TORCH_CHECK_VALUE(owner[r] >= 0 && owner[r] < sinks.size(0), "rasterize_backward_into: row ", r, " has owner ",
                      owner[r], ", and there are ", sinks.size(0), " sinks");
    float* record = reinterpret_cast<float*>(bases[owner[r]]) + 16 * int64_t(slot[r]);
    for (int d = 0; d < 2; ++d) record[d] += mean[2 * r + d];
    for (int d = 0; d < 3; ++d) record[2 + d] += conic[3 * r + d];
    record[5] += opacity[r];
    for (int64_t d = 0; d < channels; ++d) record[6 + d] += feature[r * channels + d];
    for (int d = 0; absgrad && d < 2; ++d) record[10 + d] += abs[2 * r + d];
  }
}

}  // namespace
}  // namespace nsmg::rasterize_backward_cpu

TORCH_LIBRARY_IMPL(ns_multigpu, CPU, m) {
  m.impl("rasterize_backward", &nsmg::rasterize_backward_cpu::rasterize_backward);
  m.impl("rasterize_backward_into", &nsmg::rasterize_backward_cpu::rasterize_backward_into);
}
