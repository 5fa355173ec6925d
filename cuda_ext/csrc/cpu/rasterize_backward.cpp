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

#include "splat.h"

namespace ns_multigpu {
namespace {

constexpr int kMoments = 6;  // then the channels, then the two absolute sums where asked for

// Where each intersection's record lies: those of a row side by side, in the order of the intersections. Those behind
// the last one that reached any pixel of their tile have none.
struct RecordPlan {
  std::vector<int32_t> reached;     // [T] end of the intersections of each tile that have a record
  std::vector<int64_t> row_begin;   // [M+1]
  std::vector<int32_t> slot;        // [I]

  template <typename T>
  RecordPlan(const SplatTable<T>& table, const std::vector<Tile>& tiles, const int32_t* last)
      : reached(tiles.size()), row_begin(table.rows + 1, 0), slot(table.intersections) {
    at::parallel_for(0, int64_t(tiles.size()), 16, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        int32_t deepest = -1;
        for (int row = 0; row < tiles[t].y1 - tiles[t].y0; ++row)
          for (int column = 0; column < tiles[t].x1 - tiles[t].x0; ++column)
            deepest = std::max(deepest, last[tiles[t].pixel + row * tiles[t].pitch + column]);
        reached[t] = std::max(table.tile_offsets[t], deepest + 1);
      }
    });
    for (size_t t = 0; t < tiles.size(); ++t)
      for (int32_t i = table.tile_offsets[t]; i < reached[t]; ++i) ++row_begin[table.row_ids[i] + 1];
    for (int64_t row = 0; row < table.rows; ++row) row_begin[row + 1] += row_begin[row];
    std::vector<int32_t> next(row_begin.begin(), row_begin.end() - 1);
    for (size_t t = 0; t < tiles.size(); ++t)
      for (int32_t i = table.tile_offsets[t]; i < reached[t]; ++i) slot[i] = next[table.row_ids[i]]++;
  }
};

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
      : table_(table), grid_(tile_size), channels_(kChannels > 0 ? kChannels : int(table.channels)),
        transmittance_(size_t(tile_size) * grid_.blocks), behind_(transmittance_.size()),
        v_alpha_(transmittance_.size()), last_(transmittance_.size()), v_out_(transmittance_.size() * channels_),
        row_last_(tile_size), feature_sums_(channels_) {}

  void walk(const Tile& tile, const PixelGradients<T>& pixels, int32_t first, int32_t end, const int32_t* slots,
            T* records, int record_size) {
    if (first == end) return;
    load(tile, pixels);
    for (int32_t i = end - 1; i >= first; --i) {
      if (i - 8 >= first) __builtin_prefetch(&table_.splats[table_.row_ids[i - 8]]);
      splat(tile, table_.row_ids[i], Id(i), records + int64_t(slots[i]) * record_size);
    }
  }

 private:
  void load(const Tile& tile, const PixelGradients<T>& pixels) {
    grid_.place(tile);
    const int columns = tile.x1 - tile.x0;
    for (int row = 0; row < tile.y1 - tile.y0; ++row) {
      row_last_[row] = -1;
      for (int column = 0; column < grid_.pitch; ++column) {
        const int block = row * grid_.blocks + column / kWidth, lane = column % kWidth;
        const int64_t pixel = tile.pixel + row * tile.pitch + std::min(column, columns - 1);
        const int32_t last = column < columns ? pixels.last[pixel] : -1;
        row_last_[row] = std::max<Id>(row_last_[row], last);
        last_[block][lane] = last;
        transmittance_[block][lane] = T(1) - pixels.alpha[pixel];
        behind_[block][lane] = T(0);
        v_alpha_[block][lane] = pixels.v_alpha[pixel];
        for (int d = 0; d < channels_; ++d) v_out_[block * channels_ + d][lane] = pixels.v_out[pixel * channels_ + d];
      }
    }
  }

  void splat(const Tile& tile, int64_t splat_row, Id position, T* record) {
    const Splat<T>& s = table_.splats[splat_row];
    const T* feature = table_.features + splat_row * table_.channels;
    const Reach reach = reach_in_tile(s.ellipse, tile);
    V m0{}, mx{}, mxx{}, my{}, mxy{}, myy{}, abs_x{}, abs_y{};
    V constant_sums[kChannels > 0 ? kChannels : 1] = {};
    V* feature_sums = kChannels > 0 ? constant_sums : feature_sums_.data();
    for (int d = 0; d < channels_; ++d) feature_sums[d] = V{};
    for (int k = reach.block_first; k < reach.block_last; ++k) {
      const V dx = s.ellipse.mean_x - grid_.x[k];
      V sum0{}, sum1{}, sum2{};  // over the rows of v_sigma, v_sigma dy and v_sigma dy^2
      for (int row = reach.row_first; row < reach.row_last; ++row) {
        if (row_last_[row] < position) continue;
        const T dy = s.ellipse.mean_y - (T(tile.y0 + row) + T(0.5));
        const int block = row * grid_.blocks + k;
        V raw = SplatRow<T>(s, dy).alpha(dx);
        raw = last_[block] >= position ? raw : V{};
        const V alpha = raw < kAlphaMax<T> ? raw : V{} + kAlphaMax<T>;
        const V ratio = T(1) / (T(1) - alpha);
        const V before = transmittance_[block] * ratio;
        const V weight = alpha * before;
        transmittance_[block] = before;
        const V* v_out = &v_out_[size_t(block) * channels_];
        V value = v_alpha_[block];  // d loss / d weight: alpha itself is the sum of the weights
        for (int d = 0; d < channels_; ++d) {
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
          abs_x += absolute(v_sigma * (T(2) * s.half_a * dx + s.b * dy));
          abs_y += absolute(v_sigma * (s.b * dx + T(2) * s.half_c * dy));
        }
      }
      m0 += sum0;
      mx += sum0 * dx;
      mxx += sum0 * dx * dx;
      my += sum1;
      mxy += sum1 * dx;
      myy += sum2;
    }
    const V moments[kMoments] = {m0, mx, my, mxx, mxy, myy};
    for (int k = 0; k < kMoments; ++k) record[k] = lane_sum<T>(moments[k]);
    for (int d = 0; d < channels_; ++d) record[kMoments + d] = lane_sum<T>(feature_sums[d]);
    if constexpr (kAbs) {
      record[kMoments + channels_] = lane_sum<T>(abs_x);
      record[kMoments + channels_ + 1] = lane_sum<T>(abs_y);
    }
  }

  const SplatTable<T>& table_;
  TileGrid<T> grid_;
  const int channels_;
  std::vector<V> transmittance_, behind_, v_alpha_;  // [row, block]; behind: what the splats further back add
  std::vector<Ids> last_;                            // [row, block]
  std::vector<V> v_out_;                             // [row, block, channel]
  std::vector<Id> row_last_;                         // [row]
  std::vector<V> feature_sums_;                      // [channel]
};

struct Gradients {
  at::Tensor means2d, conics, row_opacities, features, means2d_abs;
};

// Adds each row's records and turns the moments into gradients.
template <typename T>
void sum_rows(const SplatTable<T>& table, const RecordPlan& plan, const T* records, int record_size, bool absgrad,
              const Gradients& grads) {
  T* v_mean = grads.means2d.mutable_data_ptr<T>();
  T* v_conic = grads.conics.mutable_data_ptr<T>();
  T* v_opacity = grads.row_opacities.mutable_data_ptr<T>();
  T* v_feature = grads.features.mutable_data_ptr<T>();
  T* v_abs = absgrad ? grads.means2d_abs.mutable_data_ptr<T>() : nullptr;
  const int64_t channels = table.channels;
  at::parallel_for(0, table.rows, 2048, [&](int64_t begin, int64_t end) {
    std::vector<T> sum(record_size);
    for (int64_t r = begin; r < end; ++r) {
      std::fill(sum.begin(), sum.end(), T(0));
      for (int64_t slot = plan.row_begin[r]; slot < plan.row_begin[r + 1]; ++slot)
        for (int k = 0; k < record_size; ++k) sum[k] += records[slot * record_size + k];
      const Splat<T>& s = table.splats[r];
      v_mean[2 * r] = T(2) * s.half_a * sum[1] + s.b * sum[2];
      v_mean[2 * r + 1] = s.b * sum[1] + T(2) * s.half_c * sum[2];
      v_conic[3 * r] = T(0.5) * sum[3];
      v_conic[3 * r + 1] = sum[4];
      v_conic[3 * r + 2] = T(0.5) * sum[5];
      v_opacity[r] = plan.row_begin[r] < plan.row_begin[r + 1] && s.opacity > T(0) ? -sum[0] / s.opacity : T(0);
      std::copy_n(sum.data() + kMoments, channels, v_feature + r * channels);
      if (absgrad) std::copy_n(sum.data() + kMoments + channels, 2, v_abs + 2 * r);
    }
  });
}

template <typename T, int kChannels, bool kAbs>
void walk_all(const SplatTable<T>& table, const PatchList& list, const std::vector<Tile>& tiles,
              const RecordPlan& plan, const PixelGradients<T>& pixels, T* records, int record_size) {
  for_each_task(list.tiles, [&] {
    return [&, gradient = TileGradient<T, kChannels, kAbs>(table, list.tile_size)](int64_t t) mutable {
      gradient.walk(tiles[t], pixels, table.tile_offsets[t], plan.reached[t], plan.slot.data(), records, record_size);
    };
  });
}

template <typename T>
Gradients backward_as(const SplatTable<T>& table, const PatchList& list, const PixelGradients<T>& pixels, bool absgrad,
                      const at::TensorOptions& options) {
  const std::vector<Tile> tiles = list.cut();
  const RecordPlan plan(table, tiles, pixels.last);
  const int record_size = kMoments + int(table.channels) + (absgrad ? 2 : 0);
  // Uninitialised: every record in the plan is written.
  const std::unique_ptr<T[]> records(new T[plan.row_begin.back() * record_size]);
  const auto walk = [&](auto channels, auto abs) {
    walk_all<T, decltype(channels)::value, decltype(abs)::value>(table, list, tiles, plan, pixels, records.get(),
                                                                 record_size);
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
  sum_rows(table, plan, records.get(), record_size, absgrad, grads);
  return grads;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> rasterize_backward(
    const at::Tensor& means2d_, const at::Tensor& conics_, const at::Tensor& row_opacities_,
    const at::Tensor& features_, const at::Tensor& tile_offsets_, const at::Tensor& row_ids_, at::IntArrayRef patches,
    int64_t tile_size, const at::Tensor& alpha_, const at::Tensor& last_, const at::Tensor& v_out_,
    const at::Tensor& v_alpha_, bool absgrad) {
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

}  // namespace
}  // namespace ns_multigpu

TORCH_LIBRARY_IMPL(ns_multigpu, CPU, m) { m.impl("rasterize_backward", &ns_multigpu::rasterize_backward); }
