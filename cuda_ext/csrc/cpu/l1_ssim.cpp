// CPU twin of `l1_ssim`: L1 and SSIM (Wang et al. 2004, equation 13; 11x11 Gaussian window, sigma 1.5) of a patch, with
// the gradient of the SSIM sum in the same call.
//
// Pixels stay interleaved (r, g, b, r, ...): a filter along the row then reads every third number, and all loops run
// over plain contiguous floats, which the compiler vectorises.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

namespace nsmg {
namespace {

constexpr int kTaps = 11, kHalf = 5, kChannels = 3;
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

template <typename T>
inline void filter_along_row(const Window<T>& window, const T* __restrict__ in, int64_t n, T* __restrict__ out) {
  for (int64_t i = 0; i < n; ++i) {
    T sum = 0;
    for (int k = 0; k < kTaps; ++k) sum += window.weight[k] * in[i + kChannels * k];
    out[i] = sum;
  }
}

template <typename T>
struct Maps {
  std::vector<T> d_mu, d_xx, d_xy;  // [rows of centres, row_numbers]
  explicit Maps(int64_t numbers) : d_mu(numbers), d_xx(numbers), d_xy(numbers) {}
};

template <typename T>
void ssim_forward(const T* pred, const T* target, int64_t pitch, const Centres& centres, const Window<T>& window,
                  Maps<T>& maps, std::vector<double>& row_sums) {
  const int64_t n = centres.row_numbers(), wide = n + 2 * kHalf * kChannels;
  at::parallel_for(0, centres.rows(), kRowGrain, [&](int64_t begin, int64_t end) {
    std::vector<T> columns(5 * wide), filtered(5 * n);
    T* __restrict__ x = columns.data();
    T *__restrict__ y = x + wide, *__restrict__ xx = y + wide, *__restrict__ yy = xx + wide, *__restrict__ xy = yy + wide;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t start = (centres.y0 + row - kHalf) * pitch + (centres.x0 - kHalf) * kChannels;
      for (int64_t i = 0; i < wide; ++i) {
        T sx = 0, sy = 0, sxx = 0, syy = 0, sxy = 0;
        for (int k = 0; k < kTaps; ++k) {
          const T p = pred[start + k * pitch + i], t = target[start + k * pitch + i], w = window.weight[k];
          sx += w * p;
          sy += w * t;
          sxx += w * (p * p);
          syy += w * (t * t);
          sxy += w * (p * t);
        }
        x[i] = sx, y[i] = sy, xx[i] = sxx, yy[i] = syy, xy[i] = sxy;
      }
      for (int map = 0; map < 5; ++map) filter_along_row(window, x + map * wide, n, filtered.data() + map * n);
      const T* f = filtered.data();
      row_sums[row] = ssim_row(f, f + n, f + 2 * n, f + 3 * n, f + 4 * n, n, maps.d_mu.data() + row * n,
                               maps.d_xx.data() + row * n, maps.d_xy.data() + row * n);
    }
  });
}

// The adjoint: spreads the derivatives at the centres back over their windows.
template <typename T>
void ssim_gradient(const T* pred, const T* target, int64_t pitch, const Centres& centres, const Window<T>& window,
                   const Maps<T>& maps, T* gradient) {
  const int64_t n = centres.row_numbers(), border = 2 * kHalf * kChannels, wide = n + border;
  at::parallel_for(centres.y0 - kHalf, centres.y0 + centres.rows() + kHalf, kRowGrain, [&](int64_t begin, int64_t end) {
    std::vector<T> padded(3 * (n + 2 * border), T(0)), spread(3 * wide);
    for (int64_t y = begin; y < end; ++y) {
      const int64_t first = std::max(y - kHalf, centres.y0) - centres.y0;
      const int64_t last = std::min(y + kHalf + 1, centres.y0 + centres.rows()) - centres.y0;
      const T* sources[3] = {maps.d_mu.data(), maps.d_xx.data(), maps.d_xy.data()};
      for (int map = 0; map < 3; ++map) {
        T* __restrict__ sum = padded.data() + map * (n + 2 * border) + border;
        std::fill(sum, sum + n, T(0));
        for (int64_t row = first; row < last; ++row) {
          const T w = window.weight[row + centres.y0 - y + kHalf];
          const T* __restrict__ source = sources[map] + row * n;
          for (int64_t i = 0; i < n; ++i) sum[i] += w * source[i];
        }
        filter_along_row(window, sum - border, wide, spread.data() + map * wide);
      }
      const int64_t start = y * pitch + (centres.x0 - kHalf) * kChannels;
      const T *mu = spread.data(), *xx = mu + wide, *xy = xx + wide;
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
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CPU, m) { m.impl("l1_ssim", &nsmg::l1_ssim); }
