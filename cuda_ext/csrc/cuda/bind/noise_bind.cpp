// ns_multigpu::add_noise on CUDA.

#include "cuda/densify/noise.h"

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <optional>

#include "cuda/bind/check.h"

namespace nsmg {
namespace noise_bind {

void move_means(at::Tensor means, const at::Tensor& quats_, const at::Tensor& log_scales_, const at::Tensor& logits_,
                const std::optional<at::Tensor>& rows_, int64_t first, int64_t start, double scale,
                const std::optional<at::Tensor>& taken_, double steepness, double threshold) {
  const c10::cuda::CUDAGuard guard(means.device());
  const int points = cuda_count(means.size(0), "points");
  TORCH_CHECK_VALUE(means.is_contiguous(), "means must be contiguous: they are moved in place.");
  cuda_floats(means, "means", {points, 3}, means);
  const at::Tensor quats = aligned(cuda_floats(quats_, "quats", {points, 4}, means));
  const at::Tensor log_scales = cuda_floats(log_scales_, "log_scales", {points, 3}, means);
  const at::Tensor logits = cuda_floats(logits_, "logits", {points}, means);
  at::Tensor rows, taken;
  if (rows_.has_value()) rows = cuda_checked(*rows_, "rows", {points}, at::kLong, means);
  if (taken_.has_value()) taken = cuda_floats(*taken_, "taken", {}, means);
  const NoiseInputs in = {quats.const_data_ptr<float>(),
                          log_scales.const_data_ptr<float>(),
                          logits.const_data_ptr<float>(),
                          rows.defined() ? rows.const_data_ptr<int64_t>() : nullptr,
                          taken.defined() ? taken.const_data_ptr<float>() : nullptr,
                          first,
                          static_cast<uint64_t>(start),
                          steepness,
                          threshold,
                          static_cast<float>(scale),
                          points};
  NSMG_CUDA_CHECK(add_noise(in, means.mutable_data_ptr<float>(), c10::cuda::getCurrentCUDAStream()));
}

}  // namespace noise_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) { m.impl("add_noise", &nsmg::noise_bind::move_means); }
