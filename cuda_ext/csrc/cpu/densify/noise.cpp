// ns_multigpu::add_noise on CPU.

#include "common/noise.h"

#include <ATen/Dispatch.h>
#include <torch/library.h>

#include <optional>

#include "cpu/common/rows.h"

namespace nsmg::noise_cpu {
namespace {

void add_noise(at::Tensor means, const at::Tensor& quats_, const at::Tensor& log_scales_, const at::Tensor& logits_,
               const std::optional<at::Tensor>& rows_, int64_t first, int64_t start, double scale,
               const std::optional<at::Tensor>& taken, double steepness, double threshold) {
  const int64_t points = means.size(0);
  const auto dtype = means.scalar_type();
  TORCH_CHECK_VALUE(means.is_contiguous(), "means must be contiguous: they are moved in place.");
  checked(means, "means", {points, 3}, dtype);
  const at::Tensor quats = checked(quats_, "quats", {points, 4}, dtype);
  const at::Tensor log_scales = checked(log_scales_, "log_scales", {points, 3}, dtype);
  const at::Tensor logits = checked(logits_, "logits", {points}, dtype);
  const at::Tensor rows = rows_.has_value() ? checked(*rows_, "rows", {points}, at::kLong) : at::Tensor();
  const int64_t* const row = rows_.has_value() ? rows.const_data_ptr<int64_t>() : nullptr;
  const NoiseRule rule = {static_cast<uint64_t>(start), steepness, threshold};
  AT_DISPATCH_FLOATING_TYPES(dtype, "add_noise", [&] {
    using T = scalar_t;
    T* const to = means.mutable_data_ptr<T>();
    const T *const q = quats.const_data_ptr<T>(), *const s = log_scales.const_data_ptr<T>();
    const T* const logit = logits.const_data_ptr<T>();
    const T size = T(scale) * (taken.has_value() ? checked(*taken, "taken", {}, dtype).const_data_ptr<T>()[0] : T(1));
    at::parallel_for(0, points, kChunk, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Vec3<T> by = noise_of<T>(rule, static_cast<uint64_t>(row ? row[i] : first + i),
                                       {q[4 * i], q[4 * i + 1], q[4 * i + 2], q[4 * i + 3]},
                                       {s[3 * i], s[3 * i + 1], s[3 * i + 2]}, logit[i], size);
        to[3 * i] += by.x;
        to[3 * i + 1] += by.y;
        to[3 * i + 2] += by.z;
      }
    });
  });
}

}  // namespace
}  // namespace nsmg::noise_cpu

TORCH_LIBRARY_IMPL(ns_multigpu, CPU, m) { m.impl("add_noise", &nsmg::noise_cpu::add_noise); }
