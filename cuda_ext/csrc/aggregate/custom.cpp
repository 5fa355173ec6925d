// Operators that need two rounds over the members, or other operators.
#include "operators.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/bitwise_not.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>
#include <c10/core/DeviceGuard.h>

#include <unordered_map>

namespace aggregate {
namespace {

Tensor aggregate_empty(at::IntArrayRef sizes, const Tensor& like, at::ScalarType type) {
  return at::empty(sizes, like.options().dtype(type));
}

template <typename Function>
void on_each(const std::vector<Part>& parts, Function function) {
  Together together;
  for (const Part& part : parts) {
    c10::DeviceGuard guard(device(part.member));
    ++calls()[part.member];
    function(part);
  }
}

// Shares are scanned; then each member adds the totals of those before it.
bool cumsum(const Operator&, const Stack& arguments, Stack& results) {
  const Tensor self = arguments[0].toTensor(), out = arguments.back().toTensor();
  if (self.dim() != 1) return false;
  const auto parts = parts_of(self.numel());
  const Tensor totals = aggregate_empty({static_cast<int64_t>(parts.size())}, out, out.scalar_type());
  on_each(parts, [&](const Part& part) {
    Tensor shard = plain(out, part.member, 0, part.begin, part.length);
    at::cumsum_out(shard, plain(self, part.member, 0, part.begin, part.length), 0, out.scalar_type());
    plain(totals, part.member, 0, part.member, 1).copy_(shard.narrow(0, part.length - 1, 1));
  });
  on_each(parts, [&](const Part& part) {
    if (part.member > 0) {
      plain(out, part.member, 0, part.begin, part.length)
          .add_(at::sum(plain(totals, part.member, 0, 0, part.member), at::IntArrayRef{0}, true, out.scalar_type()));
    }
  });
  results.emplace_back(out);
  return true;
}

// A shard of the reversed rows is the reversed shard at the other end.
bool flip(const Operator&, const Stack& arguments, Stack& results) {
  const Tensor self = arguments[0].toTensor(), out = at::empty(self.sizes(), self.options());
  on_each(parts_of(self.size(0)), [&](const Part& part) {
    const int64_t begin = self.size(0) - part.begin - part.length;
    plain(out, part.member, 0, part.begin, part.length)
        .copy_(plain(self, part.member, 0, begin, part.length).flip(arguments[1].toIntVector()));
  });
  results.emplace_back(out);
  return true;
}

at::ScalarType key_type(at::ScalarType type) {
  if (!at::isFloatingType(type)) return type == at::kBool ? at::kByte : type;
  return type == at::kDouble ? at::kLong : at::kInt;
}

// Integers in the order that sort has: NaN is the largest, zeros are equal; reversed where the order descends.
Tensor sort_keys(const Tensor& sorted, bool descending) {
  const auto type = key_type(sorted.scalar_type());
  Tensor keys = sorted;
  if (sorted.is_floating_point()) {
    const bool wide = type == at::kLong;
    keys = sorted.to(wide ? at::kDouble : at::kFloat).add(0); // -0 becomes 0
    keys = at::where(keys.isnan(), std::numeric_limits<double>::quiet_NaN(), keys).view(type);
    const auto magnitude = wide ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int32_t>::max();
    keys = keys.bitwise_xor(keys.bitwise_right_shift(wide ? 63 : 31).bitwise_and(magnitude));
  }
  return descending ? at::bitwise_not(keys.to(type)) : keys.to(type);
}

// Members sort their shards, then merge: a row's place is the number of rows before it in every shard.
bool sort(const Operator&, const Stack& arguments, Stack& results) {
  const Tensor self = arguments[0].toTensor(), values = arguments[4].toTensor(), indices = arguments[5].toTensor();
  if (self.dim() != 1 || self.is_complex()) return false;
  const bool descending = arguments[3].toBool();
  const auto parts = parts_of(self.numel());
  const Tensor keys = aggregate_empty(self.sizes(), self, key_type(self.scalar_type()));
  std::vector<Tensor> sorted(parts.size()), origins(parts.size());
  on_each(parts, [&](const Part& part) {
    // By keys: the sorts of members' devices may have orders of their own for special numbers.
    const Tensor rows = plain(self, part.member, 0, part.begin, part.length);
    const auto [ascending, order] = at::sort(sort_keys(rows, descending), /*stable=*/true, 0, false);
    plain(keys, part.member, 0, part.begin, part.length).copy_(ascending);
    sorted[part.member] = rows.index_select(0, order);
    origins[part.member] = order.add(part.begin);
  });
  on_each(parts, [&](const Part& part) {
    const auto of = [&](const Part& other) { return plain(keys, part.member, 0, other.begin, other.length); };
    Tensor place = at::arange(part.length, origins[part.member].options());
    for (const Part& other : parts) { // of equal rows those of earlier members come first
      if (other.member != part.member) {
        place.add_(at::searchsorted(of(other), of(part), false, other.member < part.member));
      }
    }
    plain(values, part.member).scatter_(0, place, sorted[part.member]);
    plain(indices, part.member).scatter_(0, place, origins[part.member]);
  });
  results.emplace_back(values);
  results.emplace_back(indices);
  return true;
}

// The first of the shards' best rows: argmax and argmin of all elements.
bool arg_best(const Operator& op, const Stack& arguments, Stack& results) {
  const Tensor self = arguments[0].toTensor(), out = arguments.back().toTensor();
  if (!self.is_contiguous()) return false;
  const Tensor flat = self.view({-1});
  const auto parts = parts_of(flat.numel());
  const std::vector<int64_t> shape{static_cast<int64_t>(parts.size())};
  const Tensor best = aggregate_empty(shape, self, self.scalar_type());
  const Tensor places = aggregate_empty(shape, self, at::kLong);
  const auto arg = [&](const Tensor& rows) {
    Tensor place = at::empty({}, rows.options().dtype(at::kLong));
    Stack stack{rows, c10::IValue(), false, place};
    op.handle.callBoxed(&stack);
    return place.view({1});
  };
  on_each(parts, [&](const Part& part) {
    const Tensor shard = plain(flat, part.member, 0, part.begin, part.length), place = arg(shard);
    plain(best, part.member, 0, part.member, 1).copy_(shard.index_select(0, place));
    plain(places, part.member, 0, part.member, 1).copy_(place.add(part.begin));
  });
  c10::DeviceGuard guard(device(0));
  plain(out, 0).copy_(plain(places, 0).index_select(0, arg(plain(best, 0))).view(out.sizes()));
  results.emplace_back(out);
  return true;
}

// The sum of all elements, divided.
bool mean(const Operator&, const Stack& arguments, Stack& results) {
  Tensor out = arguments[4].toTensor();
  const Tensor self = arguments[0].toTensor();
  const auto dims = arguments[1].isNone() ? std::vector<int64_t>{} : arguments[1].toIntVector();
  results.emplace_back(at::sum_out(out, self, dims, arguments[2].toBool(), out.scalar_type()).div_(self.numel()));
  return true;
}

bool vector_norm(const Operator& op, const Stack& arguments, Stack& results) {
  return arguments[1].toScalar().toDouble() != 0 && reduce_all(op, arguments, results);
}

// Rows of all tensors, each member its own; along the rows, one tensor after the other.
bool cat(const Operator&, const Stack& arguments, Stack& results) {
  Tensor out = arguments[2].toTensor();
  const int64_t dim = arguments[1].toInt() + (arguments[1].toInt() < 0 ? out.dim() : 0);
  std::vector<Tensor> tensors;
  for (const Tensor& tensor : arguments[0].toTensorVector()) {
    if (tensor.dim() == out.dim()) tensors.push_back(tensor); // torch lets an empty list of one dimension pass
  }
  results.emplace_back(out);
  if (dim > 0) {
    on_each(parts_of(out.size(0)), [&](const Part& part) {
      std::vector<Tensor> rows;
      for (const Tensor& tensor : tensors) rows.push_back(plain(tensor, part.member, 0, part.begin, part.length));
      Tensor place = plain(out, part.member, 0, part.begin, part.length);
      at::cat_out(place, rows, dim);
    });
    return true;
  }
  int64_t begin = 0;
  for (const Tensor& tensor : tensors) {
    out.narrow(dim, begin, tensor.size(dim)).copy_(tensor);
    begin += tensor.size(dim);
  }
  return true;
}

bool mse_loss(const Operator&, const Stack& arguments, Stack& results) {
  const Tensor out = arguments[3].toTensor();
  const Tensor squares = arguments[0].toTensor().sub(arguments[1].toTensor()).square();
  const int64_t reduction = arguments[2].toInt();
  results.emplace_back(out.copy_(reduction == 0 ? squares : reduction == 1 ? squares.mean() : squares.sum()));
  return true;
}

bool mse_loss_backward(const Operator&, const Stack& arguments, Stack& results) {
  const Tensor self = arguments[1].toTensor();
  const double weight = arguments[3].toInt() == 1 ? 2.0 / static_cast<double>(self.numel()) : 2.0;
  const Tensor gradient = self.sub(arguments[2].toTensor()).mul_(weight).mul(arguments[0].toTensor());
  results.emplace_back(arguments.size() > 4 ? arguments[4].toTensor().copy_(gradient) : gradient);
  return true;
}

// Replaces masks by the places of their true elements, and moves all to the device.
std::vector<std::optional<Tensor>> expanded(const Stack& arguments) {
  std::vector<std::optional<Tensor>> indices;
  for (const auto& index : arguments[1].toOptionalTensorVector()) {
    if (!index || !index->defined()) {
      indices.emplace_back();
    } else if (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte) {
      for (const Tensor& places : index->to(arguments[0].toTensor().device()).nonzero().unbind(1)) {
        indices.emplace_back(places);
      }
    } else {
      indices.emplace_back(index->to(arguments[0].toTensor().device()));
    }
  }
  return indices;
}

bool index(const Operator& op, const Stack& arguments, Stack& results) {
  const Tensor out = arguments[2].toTensor();
  const auto indices = expanded(arguments);
  int64_t dims = 0;
  for (const auto& one : indices) dims = std::max(dims, one ? one->dim() : 0);
  if (out.dim() == 0 || indices.empty() || (indices[0] && dims == 0)) return false;
  Stack changed = arguments;
  changed[1] = c10::List<std::optional<Tensor>>(indices);
  // The rows of the result are those of the indices if the first dimension is indexed, else those of self.
  call_shards(op, changed, indices[0] ? ".s0" : "0.0", "0", {indices[0] ? -dims : 0, out.size(0)}, -1, results);
  return true;
}

// Splits the last dimension, if it is not indexed: each member has all rows, so none is written by two.
bool index_put(const Operator& op, const Stack& arguments, Stack& results) {
  const Tensor self = arguments[0].toTensor();
  const auto indices = expanded(arguments);
  if (static_cast<int64_t>(indices.size()) >= self.dim()) return false;
  Stack changed = arguments;
  changed[1] = c10::List<std::optional<Tensor>>(indices);
  call_shards(op, changed, "s.s", "s", {-1, self.size(-1)}, -1, results);
  return true;
}

bool index_select(const Operator& op, const Stack& arguments, Stack& results) {
  const Tensor self = arguments[0].toTensor(), index = arguments[2].toTensor();
  const bool rows = self.dim() < 2 || arguments[1].toInt() % self.dim() == 0;
  if (self.dim() == 0 || index.dim() == 0) return false;
  call_shards(op, arguments, rows ? ".0" : "0.", "0", {0, rows ? index.size(0) : self.size(0)}, -1, results);
  return true;
}

bool gather(const Operator& op, const Stack& arguments, Stack& results) {
  const Tensor self = arguments[0].toTensor(), index = arguments[2].toTensor();
  const bool rows = self.dim() < 2 || arguments[1].toInt() % self.dim() == 0;
  if (index.dim() == 0 || (!rows && self.size(0) != index.size(0))) return false;
  call_shards(op, arguments, rows ? ".00" : "000", "0", {0, index.size(0)}, -1, results);
  return true;
}

bool convolution(const Operator&, const Stack& arguments, Stack& results) {
  static const Operator plain_one(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", ""));
  if (largest(plain_one, arguments) < small()) {
    call_alone(plain_one, arguments, results);
    return true;
  }
  call_shards(plain_one, arguments, "0..", "0", {0, arguments[0].toTensor().size(0)}, -1, results);
  return true;
}

bool convolution_backward(const Operator&, const Stack& arguments, Stack& results) {
  static const Operator plain_one(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", ""));
  const bool transposed = arguments[6].toBool();
  const int64_t channels = arguments[2].toTensor().size(transposed) * (transposed ? arguments[8].toInt() : 1);
  Stack changed = arguments;
  changed.insert(changed.begin() + 3, std::vector<int64_t>{channels}); // the sizes of the bias
  if (largest(plain_one, changed) < small()) {
    call_alone(plain_one, changed, results);
    return true;
  }
  call_shards(plain_one, changed, "00.", "0++", {0, arguments[0].toTensor().size(0)}, -1, results);
  return true;
}

bool layer_norm(const Operator& op, const Stack& arguments, Stack& results) {
  const bool backward = arguments.size() > 5;
  const Tensor input = arguments[backward].toTensor();
  if (static_cast<int64_t>(arguments[backward ? 2 : 1].toIntVector().size()) == input.dim()) return false;
  call_shards(op, arguments, backward ? "0000.." : "0..", backward ? "0++" : "000", {0, input.size(0)}, -1, results);
  return true;
}

// Updates shards of the flattened parameters, all of them in one call for each member.
bool fused_adam(const Operator& op, const Stack& arguments, Stack& results) {
  (void)results;
  const auto parameters = arguments[0].toTensorVector();
  for (int k = 0; k < 5; ++k) {
    const auto list = arguments[k].toTensorVector();
    for (size_t i = 0; i < list.size(); ++i) {
      if (!list[i].is_non_overlapping_and_dense() || list[i].strides() != parameters[i].strides()) return false;
    }
  }
  Together together;
  for (int member = 0; member < count(); ++member) {
    Stack changed = arguments;
    std::vector<Part> mine;
    for (const Tensor& parameter : parameters) {
      const auto parts = parts_of(parameter.nbytes() < small() ? 0 : parameter.numel());
      const bool alone = member == 0 && parts.empty();
      const bool has = member < static_cast<int>(parts.size());
      mine.push_back(has ? parts[member] : Part{member, 0, alone ? parameter.numel() : 0});
    }
    for (int k = 0; k < 6; ++k) {
      c10::List<Tensor> shards;
      const auto list = arguments[k].toTensorVector();
      for (size_t i = 0; i < list.size(); ++i) {
        if (mine[i].length > 0) {
          shards.push_back(
              k == 5 ? list[i]
                     : list[i].as_strided({list[i].numel()}, {1}).narrow(0, mine[i].begin, mine[i].length));
        }
      }
      changed[k] = shards;
    }
    if (changed[0].toTensorVector().empty()) continue;
    call_member(op, changed, "", {0, 0}, {member, 0, 0});
  }
  return true;
}

} // namespace

bool reduce_all(const Operator& op, const Stack& arguments, Stack& results) {
  const Tensor self = arguments[0].toTensor();
  const int64_t dim =
      std::distance(self.sizes().begin(), std::max_element(self.sizes().begin(), self.sizes().end()));
  const auto parts = parts_of(self.size(dim));
  const bool has_out = !op.outs.empty();
  c10::DimVector sizes(self.dim(), 1);
  sizes[0] = static_cast<int64_t>(parts.size());
  Tensor partial = has_out ? at::empty(sizes, arguments.back().toTensor().options()) : Tensor();
  std::vector<Stack> found;
  on_each(parts, [&](const Part& part) {
    Stack changed = arguments;
    changed[0] = self.narrow(dim, part.begin, part.length);
    if (has_out) changed.back() = partial.narrow(0, part.member, 1).view(arguments.back().toTensor().sizes());
    found.push_back(call_member(op, changed, "", {0, 0}, part));
  });
  if (!has_out) {
    partial = empty_like_sizes(found[0][0].toTensor(), sizes);
    on_each(parts, [&](const Part& part) {
      plain(partial, part.member, 0, part.member, 1).copy_(found[part.member][0].toTensor());
    });
  }
  Stack last = arguments;
  last[0] = partial;
  call_alone(op, last, results);
  return true;
}

Custom custom(const std::string& name) {
  static const std::unordered_map<std::string, Custom> all{
      {"cumsum.out", cumsum},
      {"flip", flip},
      {"sort.values_stable", sort},
      {"argmax.out", arg_best},
      {"argmin.out", arg_best},
      {"mean.out", mean},
      {"linalg_vector_norm.out", vector_norm},
      {"cat.out", cat},
      {"mse_loss.out", mse_loss},
      {"mse_loss_backward", mse_loss_backward},
      {"mse_loss_backward.grad_input", mse_loss_backward},
      {"index.Tensor_out", index},
      {"_index_put_impl_", index_put},
      {"index_select", index_select},
      {"gather.out", gather},
      {"convolution_overrideable", convolution},
      {"convolution_backward_overrideable", convolution_backward},
      {"native_layer_norm", layer_norm},
      {"native_layer_norm_backward", layer_norm},
      {"_fused_adam_", fused_adam},
      {"_fused_adam_.tensor_lr", fused_adam},
      {"ns_multigpu::cull", cull},
      {"ns_multigpu::intersect", intersect},
      {"ns_multigpu::l1_ssim", l1_ssim},
      {"ns_multigpu::l1_ssim_backward", l1_ssim_backward},
      {"ns_multigpu::project_backward", project_backward},
      {"ns_multigpu::sh_colors_backward", sh_colors_backward},
      {"ns_multigpu::rasterize", rasterize},
      {"ns_multigpu::rasterize_backward", rasterize_backward},
  };
  const auto found = all.find(name);
  return found == all.end() ? nullptr : found->second;
}

} // namespace aggregate
