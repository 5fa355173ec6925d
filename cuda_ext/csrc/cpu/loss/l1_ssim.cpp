// CPU twin of `l1_ssim`: L1 and SSIM (Wang et al. 2004, equation 13; 11x11 Gaussian window, sigma 1.5) of a patch, with
// the gradient of the SSIM sum in the same call.
//
// Pixels stay interleaved (r, g, b, r, ...): a filter along the row then reads every third number, and all loops run
// over plain contiguous floats, a vector at a time.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <tuple>
#include <type_traits>
#include <vector>

#include "cpu/common/simd.h"

namespace nsmg::l1_ssim_cpu {
namespace {

constexpr int kTaps = 11, kHalf = 5, kChannels = 3;
constexpr int64_t kBorder = 2 * kHalf * kChannels;  // numbers by which a row of windows is wider than its centres
constexpr int64_t kRowGrain = 8;

template <typename T>
struct Window {
  T weight[kTaps];
  Window() {
    double exact[kTaps], sum = 0;
    for (int k = 0; k < kTaps; ++k) sum += exact[k] = std::exp(-(k - kHalf) * (k - kHalf) / (2 * 1.5 * 1.5));
    for (int k = 0; k < kTaps; ++k) weight[k] = T(exact[k] / sum);
  }
};

// The window centres that count: inner pixels whose whole window lies in the patch.
struct Centres {
  int64_t x0, y0, x1, y1;
  Centres(const int64_t* inner, int64_t width, int64_t height)
      : x0(std::max<int64_t>(inner[0], kHalf)), y0(std::max<int64_t>(inner[1], kHalf)),
        x1(std::max(x0, std::min(inner[2], width - kHalf))), y1(std::max(y0, std::min(inner[3], height - kHalf))) {}
  int64_t row_numbers() const { return (x1 - x0) * kChannels; }
  int64_t rows() const { return x1 > x0 ? y1 - y0 : 0; }
};

// SSIM at the window centres of one row, and its derivatives by the filtered pred, pred^2 and pred * target.
template <typename T>
T ssim_row(const T* __restrict__ mu_x, const T* __restrict__ mu_y, const T* __restrict__ xx, const T* __restrict__ yy,
           const T* __restrict__ xy, int64_t n, T* __restrict__ d_mu, T* __restrict__ d_xx, T* __restrict__ d_xy) {
  const T c1 = T(0.01 * 0.01), c2 = T(0.03 * 0.03);
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    const T inv_mean = T(1) / (mu_x[i] * mu_x[i] + mu_y[i] * mu_y[i] + c1);
    const T inv_var = T(1) / ((xx[i] - mu_x[i] * mu_x[i]) + (yy[i] - mu_y[i] * mu_y[i]) + c2);
    const T luminance = (2 * mu_x[i] * mu_y[i] + c1) * inv_mean;
    const T contrast = (2 * (xy[i] - mu_x[i] * mu_y[i]) + c2) * inv_var;
    sum += luminance * contrast;
    d_xy[i] = 2 * luminance * inv_var;
    d_xx[i] = -luminance * contrast * inv_var;
    d_mu[i] = 2 * contrast * inv_mean * (mu_y[i] - mu_x[i] * luminance) - mu_y[i] * d_xy[i] - 2 * mu_x[i] * d_xx[i];
  }
  return sum;
}

// Calls at(i) for vectors that start at i and together cover [0, n), n at least a vector; the last may overlap.
template <typename T, typename At>
inline void for_vectors(int64_t n, const At& at) {
  constexpr int64_t kWidth = Lanes<T>::kWidth;
  for (int64_t i = 0; i + kWidth <= n; i += kWidth) at(i);
  if (n % kWidth != 0) at(n - kWidth);
}

// Capacity for n numbers in whole vectors.
template <typename T>
inline int64_t padded(int64_t n) {
  return (n + Lanes<T>::kWidth - 1) / Lanes<T>::kWidth * Lanes<T>::kWidth;
}

// out[i] for i in [0, padded n); `in` must extend 10 pixels further.
template <typename T>
inline void filter_along_row(const Window<T>& window, const T* in, int64_t n, T* out) {
  for_vectors<T>(padded<T>(n), [&](int64_t i) {
    Vec<T> sum{};
    for (int k = 0; k < kTaps; ++k) sum += window.weight[k] * load(in + i + kChannels * k);
    store(out + i, sum);
  });
}

template <typename T>
struct Maps {
  std::unique_ptr<T[]> d_mu, d_xx, d_xy;  // [rows of centres, row_numbers], not initialised
  explicit Maps(int64_t numbers) : d_mu(new T[numbers]), d_xx(new T[numbers]), d_xy(new T[numbers]) {}
};

template <typename T>
void ssim_forward(const T* pred, const T* target, int64_t pitch, const Centres& centres, const Window<T>& window,
                  Maps<T>& maps, std::vector<double>& row_sums) {
  const int64_t n = centres.row_numbers(), wide = n + kBorder;
  at::parallel_for(0, centres.rows(), kRowGrain, [&](int64_t begin, int64_t end) {
    const int64_t stride = padded<T>(n) + kBorder, narrow = padded<T>(n);
    std::vector<T> columns(5 * stride, T(0)), filtered(5 * narrow);
    T *x = columns.data(), *y = x + stride, *xx = y + stride, *yy = xx + stride, *xy = yy + stride;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t start = (centres.y0 + row - kHalf) * pitch + (centres.x0 - kHalf) * kChannels;
      for_vectors<T>(wide, [&](int64_t i) {
        Vec<T> sx{}, sy{}, sxx{}, syy{}, sxy{};
        for (int k = 0; k < kTaps; ++k) {
          const Vec<T> p = load(pred + start + k * pitch + i), t = load(target + start + k * pitch + i);
          const Vec<T> wp = window.weight[k] * p, wt = window.weight[k] * t;
          sx += wp;
          sy += wt;
          sxx += wp * p;
          syy += wt * t;
          sxy += wp * t;
        }
        store(x + i, sx), store(y + i, sy), store(xx + i, sxx), store(yy + i, syy), store(xy + i, sxy);
      });
      T* f = filtered.data();
      for (int map = 0; map < 5; ++map) filter_along_row(window, x + map * stride, n, f + map * narrow);
      row_sums[row] = ssim_row(f, f + narrow, f + 2 * narrow, f + 3 * narrow, f + 4 * narrow, n,
                               maps.d_mu.get() + row * n, maps.d_xx.get() + row * n, maps.d_xy.get() + row * n);
    }
  });
}

// The adjoint: spreads the derivatives at the centres back over their windows.
template <typename T>
void ssim_gradient(const T* pred, const T* target, int64_t pitch, const Centres& centres, const Window<T>& window,
                   const Maps<T>& maps, T* gradient) {
  const int64_t n = centres.row_numbers(), wide = n + kBorder;
  at::parallel_for(centres.y0 - kHalf, centres.y0 + centres.rows() + kHalf, kRowGrain, [&](int64_t begin, int64_t end) {
    const int64_t stride = kBorder + padded<T>(wide) + kBorder, out = padded<T>(wide);
    std::vector<T> columns(3 * stride, T(0)), spread(3 * out);
    const T* sources[3] = {maps.d_mu.get(), maps.d_xx.get(), maps.d_xy.get()};
    for (int64_t y = begin; y < end; ++y) {
      const int64_t first = std::max(y - kHalf, centres.y0) - centres.y0;
      const int64_t last = std::min(y + kHalf + 1, centres.y0 + centres.rows()) - centres.y0;
      for (int map = 0; map < 3; ++map) {
        T* column = columns.data() + map * stride;
        const auto sum_at = [&](int64_t i, auto zero) {
          for (int64_t row = first; row < last; ++row) {
            const T w = window.weight[row + centres.y0 - y + kHalf];
            if constexpr (std::is_same_v<decltype(zero), T>)
              zero += w * sources[map][row * n + i];
            else
              zero += w * load(sources[map] + row * n + i);
          }
          return zero;
        };
        if (n >= Lanes<T>::kWidth)
          for_vectors<T>(n, [&](int64_t i) { store(column + kBorder + i, sum_at(i, Vec<T>{})); });
        else
          for (int64_t i = 0; i < n; ++i) column[kBorder + i] = sum_at(i, T(0));
        filter_along_row(window, column, wide, spread.data() + map * out);
      }
      const int64_t start = y * pitch + (centres.x0 - kHalf) * kChannels;
      const T *mu = spread.data(), *xx = mu + out, *xy = xx + out;
      for (int64_t i = 0; i < wide; ++i)
        gradient[start + i] = mu[i] + 2 * pred[start + i] * xx[i] + target[start + i] * xy[i];
    }
  });
}

template <typename T>
double l1(const T* pred, const T* target, int64_t pitch, const int64_t* inner) {
  const int64_t rows = inner[3] - inner[1], n = (inner[2] - inner[0]) * kChannels;
  std::vector<double> row_sums(rows, 0.0);
  at::parallel_for(0, rows, 4 * kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t start = (inner[1] + row) * pitch + inner[0] * kChannels;
      T sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < n; ++i) sum += std::abs(pred[start + i] - target[start + i]);
      row_sums[row] = sum;
    }
  });
  double total = 0;
  for (const double sum : row_sums) total += sum;
  return total;
}

template <typename T>
std::tuple<at::Tensor, at::Tensor, at::Tensor> run(const at::Tensor& pred_, const at::Tensor& target_,
                                                   const int64_t* inner) {
  const at::Tensor pred = pred_.contiguous(), given = target_.contiguous();
  const int64_t height = pred.size(0), width = pred.size(1), pitch = width * kChannels;
  const T* x = pred.const_data_ptr<T>();
  std::vector<T> converted;
  const T* y;
  if (given.scalar_type() == at::kByte) {
    converted.resize(given.numel());
    const uint8_t* bytes = given.const_data_ptr<uint8_t>();
    at::parallel_for(0, given.numel(), 1 << 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) converted[i] = T(bytes[i]) / T(255);
    });
    y = converted.data();
  } else {
    TORCH_CHECK(given.scalar_type() == pred.scalar_type(), "l1_ssim: target must be uint8 or of pred's type (",
                pred.scalar_type(), "), got ", given.scalar_type());
    y = given.const_data_ptr<T>();
  }
  const Centres centres(inner, width, height);
  const Window<T> window;
  at::Tensor l1_sum = at::empty({}, pred.options()), ssim_sum = at::empty({}, pred.options());
  at::Tensor gradient = at::zeros(pred.sizes(), pred.options());
  double total = 0;
  if (centres.rows() > 0) {
    Maps<T> maps(centres.rows() * centres.row_numbers());
    std::vector<double> row_sums(centres.rows());
    ssim_forward(x, y, pitch, centres, window, maps, row_sums);
    ssim_gradient(x, y, pitch, centres, window, maps, gradient.mutable_data_ptr<T>());
    for (const double sum : row_sums) total += sum;
  }
  *ssim_sum.mutable_data_ptr<T>() = T(total);
  *l1_sum.mutable_data_ptr<T>() = T(l1(x, y, pitch, inner));
  return {l1_sum, ssim_sum, gradient};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> l1_ssim(const at::Tensor& pred, const at::Tensor& target,
                                                       at::IntArrayRef inner) {
  TORCH_CHECK(pred.dim() == 3 && pred.size(2) == kChannels && target.sizes() == pred.sizes(),
              "l1_ssim: need pred and target of one size [h,w,3], got ", pred.sizes(), " and ", target.sizes());
  TORCH_CHECK(inner.size() == 4 && 0 <= inner[0] && inner[0] <= inner[2] && inner[2] <= pred.size(1) &&
                  0 <= inner[1] && inner[1] <= inner[3] && inner[3] <= pred.size(0),
              "l1_ssim: inner is (x0, y0, x1, y1) within the patch, got ", inner);
  if (pred.scalar_type() == at::kDouble) return run<double>(pred, target, inner.data());
  TORCH_CHECK(pred.scalar_type() == at::kFloat, "l1_ssim: float32 or float64, got ", pred.scalar_type());
  return run<float>(pred, target, inner.data());
}

}  // namespace
}  // namespace nsmg::l1_ssim_cpu

TORCH_LIBRARY_IMPL(ns_multigpu, CPU, m) { m.impl("l1_ssim", &nsmg::l1_ssim_cpu::l1_ssim); }
