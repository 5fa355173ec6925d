// ns_multigpu::series and its backward on CPU.

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <tuple>

#include "cpu/common/rows.h"

namespace nsmg::series_cpu {
namespace {

// The checked inputs that forward and backward share.
struct Inputs {
  at::Tensor base, terms, weights, point_ids;
  std::vector<int64_t> starts;  // of each view's rows

  int64_t width() const { return base.size(1); }
  int64_t count() const { return terms.size(1); }
  int64_t rows() const { return point_ids.size(0); }
};

Inputs check_inputs(const at::Tensor& base, const at::Tensor& terms, const at::Tensor& weights,
                    const at::Tensor& view_ids, const at::Tensor& point_ids, int64_t views) {
  const auto dtype = base.scalar_type();
  Inputs in = {checked(base, "base", {-1, -1}, dtype),
               checked(terms, "terms", {base.size(0), -1, base.size(1)}, dtype),
               checked(weights, "weights", {point_ids.size(0), terms.size(1)}, dtype),
               point_ids.contiguous(),
               view_starts(view_ids.contiguous(), point_ids.contiguous(), views, base.size(0))};
  return in;
}

at::Tensor series(const at::Tensor& base, const at::Tensor& terms, const at::Tensor& weights,
                  const at::Tensor& view_ids, const at::Tensor& point_ids, int64_t views) {
  const Inputs in = check_inputs(base, terms, weights, view_ids, point_ids, views);
  at::Tensor result = at::empty({in.rows(), in.width()}, base.options());
  zero_padding(result, in.starts);
  AT_DISPATCH_FLOATING_TYPES(base.scalar_type(), "series", [&] {
    using T = scalar_t;
    T* const out = result.mutable_data_ptr<T>();
    const int32_t* const ids = in.point_ids.const_data_ptr<int32_t>();
    for_chunks(chunks_of(in.starts, 0, views), [&](int64_t, const Chunk& chunk) {
      for (int64_t row = chunk.begin; row < chunk.end; ++row) {
        const T* const weight = in.weights.const_data_ptr<T>() + in.count() * row;
        const T* term = in.terms.const_data_ptr<T>() + in.count() * in.width() * ids[row];
        T* const sum = out + in.width() * row;
        std::copy_n(in.base.const_data_ptr<T>() + in.width() * ids[row], in.width(), sum);
        for (int64_t c = 0; c < in.count(); ++c, term += in.width()) {
          for (int64_t k = 0; k < in.width(); ++k) sum[k] += weight[c] * term[k];
        }
      }
    });
  });
  return result;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> series_backward(const at::Tensor& base, const at::Tensor& terms,
                                                               const at::Tensor& weights, const at::Tensor& view_ids,
                                                               const at::Tensor& point_ids, int64_t views,
                                                               const at::Tensor& v_rows_) {
  const Inputs in = check_inputs(base, terms, weights, view_ids, point_ids, views);
  const at::Tensor v_rows = checked(v_rows_, "v_rows", {in.rows(), in.width()}, base.scalar_type());
  const at::Tensor v_base = at::zeros(in.base.sizes(), base.options());
  const at::Tensor v_terms = at::zeros(in.terms.sizes(), base.options());
  const at::Tensor v_weights = at::empty(in.weights.sizes(), base.options());
  zero_padding(v_weights, in.starts);
  AT_DISPATCH_FLOATING_TYPES(base.scalar_type(), "series_backward", [&] {
    using T = scalar_t;
    T *const g_base = v_base.mutable_data_ptr<T>(), *const g_terms = v_terms.mutable_data_ptr<T>();
    T* const g_weights = v_weights.mutable_data_ptr<T>();
    const int32_t* const ids = in.point_ids.const_data_ptr<int32_t>();
    // One view after the other: within a view each point appears once, so the rows of a view never meet.
    for (int64_t view = 0; view < views; ++view) {
      for_chunks(chunks_of(in.starts, view, view + 1), [&](int64_t, const Chunk& chunk) {
        for (int64_t row = chunk.begin; row < chunk.end; ++row) {
          const T* const g = v_rows.const_data_ptr<T>() + in.width() * row;
          T* const to_base = g_base + in.width() * ids[row];
          for (int64_t k = 0; k < in.width(); ++k) to_base[k] += g[k];
          for (int64_t c = 0; c < in.count(); ++c) {
            const int64_t first = in.width() * (in.count() * ids[row] + c);
            const T* const term = in.terms.const_data_ptr<T>() + first;
            const T weight = in.weights.const_data_ptr<T>()[in.count() * row + c];
            T* const to_term = g_terms + first;
            T sum = 0;
            for (int64_t k = 0; k < in.width(); ++k) {
              sum += term[k] * g[k];
              to_term[k] += weight * g[k];
            }
            g_weights[in.count() * row + c] = sum;
          }
        }
      });
    }
  });
  return {v_base, v_terms, v_weights};
}

}  // namespace
}  // namespace nsmg::series_cpu

TORCH_LIBRARY_IMPL(ns_multigpu, CPU, m) {
  m.impl("series", &nsmg::series_cpu::series);
  m.impl("series_backward", &nsmg::series_cpu::series_backward);
}
