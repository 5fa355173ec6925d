#include "operators.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty_strided.h>

#include <mutex>
#include <sstream>
#include <unordered_map>

namespace aggregate {
namespace {

enum class Kind {
  kPointwise, // shards of the result's largest stride, inputs broadcast
  kFixed, // the letters say which dimension
  kKept, // the first or last dimension that "dim" does not name; else `custom`, or reduce_all
  kCustom,
  kAlone, // the first member, by intention
  kOther, // the first member, with a warning
};

struct Rule {
  Kind kind = Kind::kOther;
  std::string letters = "", outs = "";
  int64_t dim = 0; // that "s" of kFixed means
  int rows = -1; // the argument that repeats the number of rows
  int64_t min_dims = 1; // of the first tensor
  bool reduces = false; // kKept: reduce_all serves where nothing is kept
};

const std::unordered_map<std::string, Rule>& rules() {
  static const auto* all = [] {
    auto* made = new std::unordered_map<std::string, Rule>;
    const auto add = [&](const Rule& rule, std::initializer_list<const char*> names) {
      for (const char* name : names) (*made)[name] = rule;
    };
    add({Kind::kFixed, "ala"}, {"mm.out"});
    add({Kind::kFixed, "aala"}, {"addmm.out"});
    add({Kind::kFixed, "bbb"}, {"bmm.out"});
    add({Kind::kFixed, "bbbb"}, {"baddbmm.out"});
    add({Kind::kFixed, "00.0"}, {"addmv.out"});
    add({Kind::kFixed, "s.", "s", -1}, {"embedding_dense_backward"});
    add({Kind::kFixed, "0..", "000", 0, 3}, {"native_group_norm"});
    add({Kind::kFixed, "0000.", "0++", 0, 5}, {"native_group_norm_backward"});
    add({Kind::kFixed, "10000", "100", 0, -1, 2}, {"native_batch_norm"}); // a channel's statistics are of the batch
    add({Kind::kFixed, "1100000", "100", 0, -1, 2}, {"native_batch_norm_backward"});
    add({Kind::kFixed, "000", "", 0, -1, 3}, {"linalg_inv_ex.inverse"});
    add({Kind::kFixed, "0.", "0"}, {"bucketize.Tensor"});
    add({Kind::kFixed, "0", "0"}, {"reflection_pad2d"});
    add({Kind::kFixed, "00", "0"}, {"reflection_pad2d_backward"});
    add({Kind::kFixed, "00"}, {"upsample_nearest2d.out", "upsample_bilinear2d.out", "avg_pool2d.out"});
    add({Kind::kFixed, "00", "", 0, 2},
        {"upsample_nearest2d_backward.grad_input", "upsample_bilinear2d_backward.grad_input"});
    add({Kind::kFixed, "000"}, {"avg_pool2d_backward.grad_input", "max_pool2d_with_indices.out"});
    add({Kind::kFixed, "0000"}, {"max_pool2d_with_indices_backward.grad_input"});
    add({Kind::kKept, "ss"},
        {"cumsum.out", "cumprod.out", "argmax.out", "argmin.out", "mean.out", "linalg_vector_norm.out", "_softmax.out",
         "_log_softmax.out"});
    add({Kind::kKept, "ss", "", 0, -1, 1, true},
        {"sum.IntList_out", "amax.out", "amin.out", "any.out", "any.all_out", "all.out", "all.all_out",
         "prod.int_out"});
    add({Kind::kKept, "s", "s", 0, -1, 1, true}, {"max", "min", "prod", "any.dims", "all.dims"});
    add({Kind::kKept, "s", "s"}, {"var.correction", "std.correction", "flip", "roll"});
    add({Kind::kKept, "s", "ss"}, {"var_mean.correction"});
    add({Kind::kKept, "sss"},
        {"topk.values", "sort.values_stable", "max.dim_max", "min.dim_min", "linalg_cross.out", "scatter.value_out",
         "_softmax_backward_data.out", "_log_softmax_backward_data.out"});
    add({Kind::kKept, "ssss"}, {"scatter_add.out", "scatter.src_out", "scatter_reduce.two_out"});
    add({Kind::kKept, "s.ss"}, {"index_add.out", "index_copy.out"});
    add({Kind::kKept, "s."}, {"index_fill_.int_Scalar"});
    // Element by element, though torch has not tagged them.
    add({Kind::kPointwise},
        {"fill_.Scalar", "fill_.Tensor", "zero_", "copy_", "where.self_out", "masked_fill_.Scalar",
         "masked_fill_.Tensor", "floor_divide", "gelu.out", "gelu_backward.grad_input", "softplus.out",
         "softplus_backward.grad_input", "threshold.out", "threshold_backward.grad_input", "leaky_relu.out",
         "leaky_relu_backward.grad_input", "elu.out", "elu_backward.grad_input", "hardtanh.out",
         "hardtanh_backward.grad_input", "hardswish.out", "mish.out"});
    add({Kind::kAlone},
        {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "bincount", "repeat_interleave.Tensor",
         "arange.start_out", "linspace.out", "eye.out", "eye.m_out"});
    add({Kind::kFixed, "......00", "00000"}, {"ns_multigpu::project"}); // rows
    add({Kind::kFixed, "....00", "0"}, {"ns_multigpu::sh_colors"});
    return made;
  }();
  return *all;
}

// An operator, how it is split, and whether that has been warned of.
struct Plan {
  explicit Plan(const c10::OperatorHandle& handle) : op(handle) {
    const auto& name = handle.operator_name();
    const bool aten = name.name.rfind("aten::", 0) == 0;
    const std::string dot = name.overload_name.empty() ? "" : ".";
    const std::string key = name.name.substr(aten ? 6 : 0) + dot + name.overload_name;
    whole = custom(key);
    const auto& returns = handle.schema().returns();
    const bool tensors = std::all_of(returns.begin(), returns.end(), [](const c10::Argument& result) {
      return result.type()->kind() == c10::TypeKind::TensorType;
    });
    const auto found = rules().find(key);
    if (found != rules().end()) {
      rule = found->second;
    } else if (whole) {
      rule.kind = Kind::kCustom;
    } else if (handle.hasTag(at::Tag::nondeterministic_seeded)) {
      rule.kind = Kind::kAlone; // one member draws: the same numbers for every number of members
    } else if (handle.hasTag(at::Tag::pointwise) && tensors && !returns.empty()) {
      rule.kind = Kind::kPointwise;
    }
    if (rule.kind == Kind::kPointwise) {
      rule.letters = std::string(op.letter_of.size(), 's');
      rule.outs = std::string(returns.size(), 's');
    }
  }
  Operator op;
  Rule rule;
  Custom whole = nullptr;
  bool warned = false;
};

Plan& plan_of(const c10::OperatorHandle& handle) {
  static auto* plans = new std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<Plan>>;
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  auto& plan = (*plans)[&handle.schema()];
  if (!plan) plan = std::make_unique<Plan>(handle);
  return *plan;
}

template <typename Function>
void for_tensors(const Operator& op, const Stack& arguments, Function function) {
  for (size_t k = 0; k < arguments.size(); ++k) {
    if (!op.is_tensor(k)) continue;
    if (arguments[k].isTensor()) {
      if (arguments[k].toTensor().defined()) function(k, arguments[k].toTensor());
    } else if (arguments[k].isTensorList()) {
      for (const Tensor& tensor : arguments[k].toTensorVector()) function(k, tensor);
    } else if (arguments[k].isOptionalTensorList()) {
      for (const std::optional<Tensor>& tensor : arguments[k].toOptionalTensorVector()) {
        if (tensor && tensor->defined()) function(k, *tensor);
      }
    }
  }
}

void check_devices(const Operator& op, const Stack& arguments) {
  const bool indexes = op.handle.operator_name().name.find("index") != std::string::npos;
  for_tensors(op, arguments, [&](size_t k, const Tensor& tensor) {
    TORCH_CHECK(
        tensor.is_privateuseone() ||
            (tensor.is_cpu() && (tensor.dim() == 0 || (indexes && arguments[k].isOptionalTensorList()))),
        "Expected all tensors to be on the same device, but found at least two devices, multigpu:0 and ",
        tensor.device(), "! (when checking argument for argument ", op.handle.schema().arguments()[k].name(),
        " in method ", op.handle.operator_name(), ")");
  });
}

// Gives empty `out` arguments the sizes that the operator's meta kernel finds.
void fit_outs(const Operator& op, const Stack& arguments) {
  if (std::none_of(op.outs.begin(), op.outs.end(), [&](size_t k) { return arguments[k].toTensor().numel() == 0; })) {
    return;
  }
  const auto has = [&](c10::DispatchKey key) { return op.handle.hasKernelForDispatchKey(key); };
  if (!has(c10::DispatchKey::Meta) && !has(c10::DispatchKey::CompositeExplicitAutograd) &&
      !has(c10::DispatchKey::CompositeExplicitAutogradNonFunctional)) {
    return; // call_alone sizes them
  }
  const auto meta = [](const Tensor& tensor) {
    return tensor.defined() && tensor.is_privateuseone()
        ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta))
        : tensor;
  };
  Stack stack = arguments;
  for (auto& value : stack) {
    if (value.isTensor()) {
      value = meta(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(meta(tensor));
      value = std::move(list);
    } else if (value.isOptionalTensorList()) {
      return; // masks have no sizes without their values: index has sized its result
    }
  }
  const Stack metas = stack;
  op.handle.callBoxed(&stack);
  for (size_t k : op.outs) at::native::resize_output(arguments[k].toTensor(), metas[k].toTensor().sizes());
}

bool pointwise(const Plan& plan, const Stack& arguments, Stack& results) {
  const Operator& op = plan.op;
  c10::DimVector sizes;
  Tensor lead;
  for_tensors(op, arguments, [&](size_t k, const Tensor& tensor) {
    if (std::find(op.outs.begin(), op.outs.end(), k) == op.outs.end()) {
      sizes = at::infer_size_dimvector(sizes, tensor.sizes());
    }
  });
  for_tensors(op, arguments, [&](size_t k, const Tensor& tensor) {
    if (std::find(op.outs.begin(), op.outs.end(), k) != op.outs.end()) at::native::resize_output(tensor, sizes);
    lead = tensor.sizes() == at::IntArrayRef(sizes) ? tensor : lead;
  });
  int64_t best = -1;
  const auto dims = static_cast<int64_t>(sizes.size());
  for (int64_t k = 0; k < dims; ++k) { // with the largest stride of those with rows for all members, else the longest
    const auto rank = [&](int64_t d) {
      return std::pair(std::min<int64_t>(sizes[d], count()), lead.defined() ? lead.stride(d) : dims - d);
    };
    best = best < 0 || rank(k) > rank(best) ? k : best;
  }
  if (best < 0) return false;
  call_shards(op, arguments, plan.rule.letters, plan.rule.outs, {best - dims, sizes[best]}, -1, results);
  return true;
}

bool fixed(const Plan& plan, const Stack& arguments, Stack& results) {
  Cut cut{plan.rule.dim, 0};
  bool first = true, enough = true;
  for_tensors(plan.op, arguments, [&](size_t k, const Tensor& tensor) {
    enough = enough && (!first || tensor.dim() >= plan.rule.min_dims);
    first = false;
    const int64_t dim = split_dim(plan.rule.letters[plan.op.letter_of[k]], {cut.dim, 1}, tensor);
    cut.size = dim >= 0 ? std::max(cut.size, tensor.size(dim)) : cut.size;
  });
  if (!enough || cut.size == 0) return false;
  call_shards(plan.op, arguments, plan.rule.letters, plan.rule.outs, cut, plan.rule.rows, results);
  return true;
}

bool kept(const Plan& plan, const Stack& arguments, Stack& results) {
  const Operator& op = plan.op;
  const Tensor self = arguments[0].toTensor();
  const int64_t last = self.dim() - 1;
  if (last < 0) return false;
  std::vector<int64_t> named;
  const c10::IValue none, &dims = op.dim_argument < 0 ? none : arguments[op.dim_argument];
  if (dims.isInt()) {
    named = {dims.toInt()};
  } else if (dims.isIntList()) {
    named = dims.toIntVector();
  }
  const auto is_kept = [&](int64_t dim) {
    const auto same = [&](int64_t one) { return (one < 0 ? one + last + 1 : one) == dim; };
    return !named.empty() && std::none_of(named.begin(), named.end(), same);
  };
  int64_t dim = -1, below = 0; // the first that is kept, unless another has rows for more members
  for (int64_t other = 0; other <= last; ++other) {
    const bool more = dim < 0 || (self.size(dim) < count() && self.size(other) > self.size(dim));
    dim = is_kept(other) && more ? other : dim;
  }
  if (dim < 0) {
    return plan.whole ? plan.whole(op, arguments, results) : plan.rule.reduces && reduce_all(op, arguments, results);
  }
  for (int64_t other = 0; other < dim; ++other) {
    below += op.keepdim_argument >= 0 && !arguments[op.keepdim_argument].toBool() && !is_kept(other);
  }
  const Cut cut{dim, self.size(dim)};
  const char out = static_cast<char>('0' + dim - below);
  std::string letters = plan.rule.letters, outs = plan.rule.outs;
  std::replace(outs.begin(), outs.end(), 's', out);
  bool equal = true;
  for_tensors(op, arguments, [&](size_t k, const Tensor& tensor) {
    char& letter = letters[op.letter_of[k]];
    if (std::find(op.outs.begin(), op.outs.end(), k) != op.outs.end()) {
      letter = out;
    } else if (letter != '.') {
      equal = equal && tensor.dim() > dim && tensor.size(dim) == cut.size;
    }
  });
  if (!equal) return false;
  call_shards(op, arguments, letters, outs, cut, -1, results);
  return true;
}

bool distributed(const Plan& plan, const Stack& arguments, Stack& results) {
  switch (plan.rule.kind) {
    case Kind::kPointwise:
      return pointwise(plan, arguments, results);
    case Kind::kFixed:
      return fixed(plan, arguments, results);
    case Kind::kKept:
      return kept(plan, arguments, results);
    case Kind::kCustom:
      return plan.whole(plan.op, arguments, results);
    default:
      return false;
  }
}

} // namespace

size_t largest(const Operator& op, const Stack& arguments) {
  size_t bytes = 0;
  for_tensors(op, arguments, [&](size_t, const Tensor& tensor) {
    bytes = tensor.numel() > 1 ? std::max(bytes, tensor.nbytes()) : bytes;
  });
  return bytes;
}

void copy_tensor(const Tensor& from, const Tensor& to, bool non_blocking) {
  static Plan plan(c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", ""));
  const Stack arguments{to, from, non_blocking};
  Stack results;
  const bool one_gpu = from.is_cuda() || to.is_cuda();
  if (one_gpu || largest(plan.op, arguments) < small() || !pointwise(plan, arguments, results)) {
    call_alone(plan.op, arguments, results);
  }
}

void fallback(const c10::OperatorHandle& handle, c10::DispatchKeySet, Stack* stack) {
  check_not_forked();
  at::AutoDispatchBelowADInplaceOrView guard;
  Plan& plan = plan_of(handle);
  const Stack arguments = torch::jit::pop(*stack, plan.op.letter_of.size());
  check_devices(plan.op, arguments);
  Stack results;
  if (plan.rule.kind != Kind::kAlone) fit_outs(plan.op, arguments);
  const bool always = plan.op.handle.operator_name().name.find("overrideable") != std::string::npos;
  const bool large = largest(plan.op, arguments) >= small();
  if ((!large && !always) || !distributed(plan, arguments, results)) {
    if (large && count() > 1 && plan.rule.kind != Kind::kAlone && !plan.warned) {
      plan.warned = true;
      TORCH_WARN(
          handle.operator_name(), " is not distributed over the members of multigpu with these arguments: "
          "the first member computes it alone, and holds its result. This warning appears once.");
    }
    call_alone(plan.op, arguments, results);
  }
  for (auto& result : results) stack->push_back(std::move(result));
}

} // namespace aggregate
