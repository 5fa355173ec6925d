// Noise on means, and the moves of points that densification asks for, on CUDA.

#include "cuda/bind/call.h"
#include "cuda/densify/noise.h"
#include "cuda/densify/relocation.h"

#include <algorithm>

namespace nsmg {
namespace densify_bind {

constexpr char kNoise[] =
    "quats[N,4]@16 log_scales[N,3] logits[N] rows[N] taken[] first start steepness threshold scale N means[N,3]";
constexpr char kDraw[] =
    "sums[N] slots[N] empty[N] taken[] start N >sources[N] >copies[N]=0";
constexpr char kShare[] = "quats[N,4] copies[N] sources[N] numbers[N] min_opacity N";
constexpr char kTurn[] = "quats[N,4]@16 vectors[S,N,3] N S >[S,N,3]";

// Adds an array of rows of so many bytes, in the largest units that its addresses allow. False for rows of no bytes,
// which are left out.
bool add_rows(RowArrays& arrays, void* rows, int64_t bytes) {
  if (bytes == 0) return false;
  const uintptr_t both = uintptr_t(bytes) | reinterpret_cast<uintptr_t>(rows);
  const int unit = both % 4 == 0 ? 4 : both % 2 == 0 ? 2 : 1;
  arrays.rows[arrays.count] = rows;
  arrays.words[arrays.count] = cuda_count(bytes / unit, "numbers of a row");
  arrays.unit[arrays.count++] = unit;
  return true;
}

void check_device(const at::Tensor& tensor, const at::Tensor& like) {
  TORCH_CHECK_TYPE(tensor.device() == like.device(), "a tensor of rows is on ", tensor.device(), "; it must be on ",
                   like.device(), " like the rest.");
}

RowArrays row_arrays(Call& call, const char* name, int64_t points) {
  const std::vector<at::Tensor> tensors = call.tensors(name);
  TORCH_CHECK_VALUE(tensors.size() <= kMostRowArrays, "there are ", tensors.size(), " tensors of rows; the CUDA ",
                    "operators take up to ", kMostRowArrays, ".");
  RowArrays arrays{};
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.dim() >= 1 && tensor.size(0) == points && tensor.is_contiguous(),
                      "tensors of rows must be contiguous, as they are changed in place, and have ", points,
                      " rows; one is ", tensor.sizes(), ".");
    check_device(tensor, call.like());
    add_rows(arrays, tensor.mutable_data_ptr(), points == 0 ? 0 : int64_t(tensor.nbytes()) / points);
  }
  return arrays;
}

void share_out(Call& call) {
  auto *means = call.read<float*>("means[N,3]"), *log_scales = call.read<float*>("log_scales[N,3]");
  auto* logits = call.read<float*>("logits[N]");
  const auto in = call.read<ShareInputs>(kShare);
  call.run(share_out_launch, in, means, log_scales, logits, row_arrays(call, "cleared", in.points));
}

void copy_rows(Call& call) {
  const auto* sources = call.read<const int32_t*>("sources[N]");
  const int points = call.read<int>("N");
  call.run(copy_rows_launch, row_arrays(call, "tensors", points), sources, points);
}

void take_rows(Call& call) {
  const auto* index = call.read<const int64_t*>("index[M]");
  const int taken = call.read<int>("M");
  c10::List<at::Tensor> out;
  std::vector<at::Tensor> from;
  for (const at::Tensor& tensor : call.tensors("tensors")) {
    TORCH_CHECK_VALUE(tensor.dim() >= 1 && (tensor.size(0) > 0 || taken == 0), "of a tensor without rows, ",
                      tensor.sizes(), ", none can be taken.");
    check_device(tensor, call.tensor("index"));
    auto shape = tensor.sizes().vec();
    shape[0] = taken;
    out.push_back(at::empty(shape, tensor.options()));
    from.push_back(call.hold(tensor.contiguous()));
  }
  for (size_t first = 0; taken > 0 && first < from.size(); first += kMostRowArrays) {
    RowArrays arrays{}, to{};
    for (size_t k = first; k < std::min(from.size(), first + kMostRowArrays); ++k) {
      const at::Tensor made = out.get(k);
      if (add_rows(arrays, const_cast<void*>(from[k].const_data_ptr()), int64_t(made.nbytes()) / taken))
        to.rows[arrays.count - 1] = made.mutable_data_ptr();
    }
    std::copy_n(arrays.words, kMostRowArrays, to.words);
    std::copy_n(arrays.unit, kMostRowArrays, to.unit);
    to.count = arrays.count;
    call.run(take_rows_launch, arrays, to, index, taken);
  }
  call.result(std::move(out));
}

}  // namespace densify_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  using namespace nsmg::densify_bind;
  using nsmg::bound;
  using nsmg::launched;
  m.impl("add_noise", bound<launched<nsmg::add_noise, kNoise>>());
  m.impl("draw_sources", bound<launched<nsmg::draw_sources_launch, kDraw>>());
  m.impl("share_out", bound<share_out>());
  m.impl("copy_rows", bound<copy_rows>());
  m.impl("take_rows", bound<take_rows>());
  m.impl("turn", bound<launched<nsmg::turn_launch, kTurn>>());
}
