// Noise on means, and the moves of points that densification asks for, on CUDA.

#include "cuda/bind/call.h"
#include "cuda/densify/noise.h"
#include "cuda/densify/relocation.h"

#include <algorithm>

namespace nsmg {
namespace densify_bind {

void add_noise(Call& call) {
  const int points = call.count("means", "points");
  float* means = call.in_place<float>("means", {points, 3});
  NoiseInputs in = {};
  in.quats = call.floats("quats", {points, 4}, 16);
  in.log_scales = call.floats("log_scales", {points, 3});
  in.logits = call.floats("logits", {points});
  in.rows = call.in_or_null<int64_t>("rows", {points});
  in.taken = call.in_or_null<float>("taken", {});
  in.first = call.integer("first");
  in.start = static_cast<uint64_t>(call.integer("start"));
  in.steepness = call.real("steepness");
  in.threshold = call.real("threshold");
  in.scale = call.number("scale");
  in.points = points;
  NSMG_CUDA_CHECK(nsmg::add_noise(in, means, call.stream()));
}

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

void draw_sources(Call& call) {
  const int points = call.count("sums", "points");
  DrawInputs in = {};
  in.sums = call.longs("sums", {points});
  in.empty = call.in<bool>("empty", {points});
  in.slots = call.longs("slots", {points});
  in.start = static_cast<uint64_t>(call.integer("start"));
  in.taken = call.in_or_null<bool>("taken", {});
  in.points = points;
  int32_t* sources = call.out<int32_t>({points});
  int32_t* copies = call.out_zeros<int32_t>({points});
  NSMG_CUDA_CHECK(draw_sources_launch(in, sources, copies, call.stream()));
}

void share_out(Call& call) {
  const int points = call.count("logits", "points"), axes = call.count("log_scales", "axes", 1);
  float* logits = call.in_place<float>("logits", {points});
  float* log_scales = call.in_place<float>("log_scales", {points, axes});
  const ShareInputs in = {call.ints("copies", {points}),
                          call.in<double>("coefficients", {kMostCopies, kMostCopies + 1}), call.number("min_opacity"),
                          points, axes};
  NSMG_CUDA_CHECK(
      share_out_launch(in, logits, log_scales, row_arrays(call, "cleared", points), call.stream()));
}

void copy_rows(Call& call) {
  const int points = call.count("sources", "points");
  const int32_t* sources = call.ints("sources", {points});
  NSMG_CUDA_CHECK(copy_rows_launch(row_arrays(call, "tensors", points), sources, points, call.stream()));
}

void take_rows(Call& call) {
  const int taken = call.count("index", "rows");
  const int64_t* index = call.longs("index", {taken});
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
    NSMG_CUDA_CHECK(take_rows_launch(arrays, to, index, taken, call.stream()));
  }
  call.result(std::move(out));
}

void turn(Call& call) {
  const int points = call.count("quats", "points"), sets = call.count("vectors", "sets of vectors");
  const float* quats = call.floats("quats", {points, 4}, 16);
  const float* vectors = call.floats("vectors", {sets, points, 3});
  NSMG_CUDA_CHECK(turn_launch(quats, vectors, points, sets, call.out<float>({sets, points, 3}), call.stream()));
}

}  // namespace densify_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  namespace bind = nsmg::densify_bind;
  m.impl("add_noise", nsmg::bound<bind::add_noise>());
  m.impl("draw_sources", nsmg::bound<bind::draw_sources>());
  m.impl("share_out", nsmg::bound<bind::share_out>());
  m.impl("copy_rows", nsmg::bound<bind::copy_rows>());
  m.impl("take_rows", nsmg::bound<bind::take_rows>());
  m.impl("turn", nsmg::bound<bind::turn>());
}
