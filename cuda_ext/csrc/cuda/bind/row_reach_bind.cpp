// `reach_counts` on CUDA.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cuda/bind/check.h"
#include "cuda/exchange/row_reach.h"

namespace nsmg {
namespace row_reach_bind {

at::Tensor reach_counts(const at::Tensor& view_ids_, const at::Tensor& count_, const at::Tensor& means2d_,
                        const at::Tensor& radii_, at::IntArrayRef numbers) {
  const int rows = cuda_count(means2d_.size(0), "rows");
  const at::Tensor means2d = cuda_floats(means2d_, "means2d", {rows, 2}, means2d_),
                   view_ids = cuda_ints(view_ids_, "view_ids", {rows}, means2d_),
                   radii = cuda_ints(radii_, "radii", {rows, 2}, means2d_),
                   count = cuda_checked(count_, "count", {1}, at::kLong, means2d_);
  TORCH_CHECK_VALUE(numbers.size() % 5 == 0, "patches holds 5 integers a patch (view, x0, y0, x1, y1), got ",
                    numbers.size(), " in all.");
  std::vector<RankPatch> patches;
  for (size_t k = 0; k < numbers.size(); k += 5) {
    const int64_t* n = numbers.data() + k;
    patches.push_back({int32_t(n[0]), int32_t(k / 5), int32_t(n[1]), int32_t(n[2]), int32_t(n[3]), int32_t(n[4])});
  }
  std::stable_sort(patches.begin(), patches.end(),
                   [](const RankPatch& a, const RankPatch& b) { return a.view < b.view; });
  const c10::cuda::CUDAGuard guard(means2d.device());
  const at::TensorOptions longs = count.options();
  const at::Tensor table = at::empty({int64_t(patches.size() * sizeof(RankPatch))}, longs.dtype(at::kByte));
  at::Tensor counts = at::empty({int64_t(patches.size())}, longs);
  const RouteRows lines{view_ids.const_data_ptr<int32_t>(), count.const_data_ptr<int64_t>(),
                        means2d.const_data_ptr<float>(), radii.const_data_ptr<int32_t>(), rows, 0, rows};
  NSMG_CUDA_CHECK(reach_launch(lines, patches.data(), cuda_count(patches.size(), "patches"),
                               static_cast<RankPatch*>(table.mutable_data_ptr()), counts.mutable_data_ptr<int64_t>(),
                               c10::cuda::getCurrentCUDAStream()));
  return counts;
}

}  // namespace row_reach_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) { m.impl("reach_counts", &nsmg::row_reach_bind::reach_counts); }
