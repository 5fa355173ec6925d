#include "shards.h"

#include <ATen/Parallel.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sum.h>
#include <c10/core/DeviceGuard.h>

#include <future>

namespace aggregate {
namespace {

bool holds_tensors(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::TensorType) return true;
  const bool wraps = type.kind() == c10::TypeKind::OptionalType || type.kind() == c10::TypeKind::ListType;
  return wraps && holds_tensors(*type.containedTypes()[0]);
}

using StorageRef = c10::intrusive_ptr<c10::StorageImpl>;

// A storage on the same memory for another device; it keeps the memory.
c10::Storage storage_on(const c10::Storage& storage, c10::Device device) {
  auto* owner = new StorageRef(storage.getWeakStorageImpl().lock());
  auto free = [](void* context) { delete static_cast<StorageRef*>(context); };
  return {c10::Storage::use_byte_size_t(), storage.nbytes(), {owner->get()->mutable_data(), owner, +free, device}};
}

Tensor on_device(const Tensor& tensor, c10::Device device, c10::DispatchKey key) {
  Tensor result = at::detail::make_tensor<at::TensorImpl>(
      storage_on(tensor.storage(), device), c10::DispatchKeySet(key), tensor.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return result;
}

} // namespace

Operator::Operator(const c10::OperatorHandle& handle) : handle(handle) {
  const auto& schema = handle.schema();
  int letters = 0;
  for (size_t k = 0; k < schema.arguments().size(); ++k) {
    const auto& argument = schema.arguments()[k];
    letter_of.push_back(holds_tensors(*argument.real_type()) ? letters++ : -1);
    dim_argument = argument.name() == "dim" || argument.name() == "dims" ? static_cast<int>(k) : dim_argument;
    keepdim_argument = argument.name() == "keepdim" ? static_cast<int>(k) : keepdim_argument;
    if (argument.is_out()) outs.push_back(k);
  }
  copies = handle.operator_name().name == "aten::copy_";
  stages = !handle.hasTag(at::Tag::pointwise);
  for (const auto& result : schema.returns()) {
    returned.push_back(-1);
    for (size_t k = 0; result.alias_info() && k < schema.arguments().size(); ++k) {
      const auto* alias = schema.arguments()[k].alias_info();
      if (alias && alias->isWrite() && alias->beforeSets() == result.alias_info()->beforeSets()) {
        returned.back() = static_cast<int>(k);
      }
    }
  }
}

std::vector<Part> parts_of(int64_t size) {
  const int members = count();
  const int64_t shard = (size + members - 1) / members;
  std::vector<Part> parts;
  for (int member = 0; member < members && member * shard < size; ++member) {
    parts.push_back({member, member * shard, std::min(shard, size - member * shard)});
  }
  return parts;
}

int64_t split_dim(char letter, const Cut& cut, const Tensor& tensor) {
  if (letter == '.' || letter == 'l' || !tensor.defined()) return -1;
  int64_t dim = letter == 's' ? cut.dim : letter == 'a' ? -2 : letter == 'b' ? -3 : letter - '0';
  dim += dim < 0 ? tensor.dim() : 0;
  const bool has = dim >= 0 && dim < tensor.dim();
  return has && (tensor.size(dim) > 1 || tensor.size(dim) == cut.size) ? dim : -1;
}

Tensor plain(const Tensor& tensor, int member, int64_t dim, int64_t begin, int64_t length) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return dim < 0 ? tensor : tensor.narrow(dim, begin, length);
  const c10::Device where = device(member);
  Tensor result = on_device(tensor, where, where.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
  if (dim >= 0) {
    auto* impl = result.unsafeGetTensorImpl();
    c10::DimVector sizes(tensor.sizes());
    sizes[dim] = length;
    impl->set_sizes_and_strides(sizes, tensor.strides(), tensor.storage_offset() + begin * tensor.stride(dim));
  }
  return result;
}

void copy_by_kernel(const Tensor& to, const Tensor& from) {
  if (to.is_cuda() && from.device() == to.device() && from.scalar_type() == to.scalar_type()) {
    at::_foreach_copy_({to}, {from});
  } else {
    to.copy_(from);
  }
}

// A copy in the member's memory of a large tensor that lies on several; the tensor itself where that does not fit.
static Tensor copied(const Tensor& tensor, int member) {
  const Tensor result = plain(tensor, member);
  if (!tensor.defined() || !tensor.is_privateuseone() || tensor.nbytes() < small()) return result;
  const auto held = shards(tensor.storage().data(), tensor.storage().nbytes());
  if (held[member] == static_cast<int64_t>(tensor.storage().nbytes())) return result;
  c10::DeviceGuard guard(device(member));
  try {
    const Tensor own = at::empty_like(result);
    copy_by_kernel(own, result);
    return own;
  } catch (const c10::OutOfMemoryError&) {
    return result;
  }
}

Tensor wrapped(const Tensor& plain) {
  if (!plain.defined() || plain.device() != device(0)) return plain;
  return on_device(plain, {c10::kPrivateUse1, 0}, c10::DispatchKey::PrivateUse1);
}

Tensor empty_like_sizes(const Tensor& plain, at::IntArrayRef sizes) {
  const bool same = static_cast<int64_t>(sizes.size()) == plain.dim();
  return at::empty(
      sizes, plain.options().device(c10::kPrivateUse1, 0),
      same ? plain.suggest_memory_format() : at::MemoryFormat::Contiguous);
}

std::vector<int64_t>& calls() {
  static auto* all = new std::vector<int64_t>;
  return *all;
}

Stack call_member(
    const Operator& op, const Stack& arguments, const std::string& letters, const Cut& cut, const Part& part,
    int rows) {
  Stack stack;
  stack.reserve(arguments.size());
  std::vector<std::pair<Tensor, c10::DimVector>> written;
  std::vector<std::pair<Tensor, Tensor>> staged; // results of kernels that write contiguous tensors only
  for (size_t k = 0; k < arguments.size(); ++k) {
    const auto& value = arguments[k];
    const char letter = op.is_tensor(k) && !letters.empty() ? letters.at(op.letter_of[k]) : '.';
    const auto shard = [&](const Tensor& tensor) {
      if (letter == 'l') return copied(tensor, part.member);
      return plain(tensor, part.member, split_dim(letter, cut, tensor), part.begin, part.length);
    };
    if (value.isTensor()) {
      Tensor tensor = shard(value.toTensor());
      const auto* alias = op.handle.schema().arguments()[k].alias_info();
      if (op.stages && !tensor.is_contiguous() && std::find(op.outs.begin(), op.outs.end(), k) != op.outs.end()) {
        c10::DeviceGuard guard(device(part.member));
        staged.emplace_back(at::empty(tensor.sizes(), tensor.options()), tensor);
        tensor = staged.back().first;
      }
      if (alias && alias->isWrite() && tensor.defined() && tensor.numel() > 0) {
        written.emplace_back(tensor, tensor.sizes());
      }
      stack.emplace_back(std::move(tensor));
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(shard(tensor));
      stack.emplace_back(std::move(list));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional(shard(*tensor)) : std::nullopt);
      }
      stack.emplace_back(std::move(list));
    } else if (value.isDevice() && value.toDevice().is_privateuseone()) {
      stack.emplace_back(device(part.member));
    } else if (static_cast<int>(k) == rows && value.isIntList()) {
      auto sizes = value.toIntVector();
      sizes[0] = part.length;
      stack.emplace_back(std::move(sizes));
    } else {
      stack.push_back(static_cast<int>(k) == rows ? c10::IValue(part.length) : value);
    }
  }
  c10::DeviceGuard guard(device(part.member));
  ++calls()[part.member];
  if (op.copies && stack[0].toTensor().sizes() == stack[1].toTensor().sizes()) {
    copy_by_kernel(stack[0].toTensor(), stack[1].toTensor());
    stack.resize(1);
  } else {
    op.handle.callBoxed(&stack);
  }
  for (const auto& [tensor, sizes] : written) {
    TORCH_CHECK(tensor.sizes() == at::IntArrayRef(sizes), op.handle.operator_name(), ": `out` has another shape");
  }
  for (const auto& [from, to] : staged) to.copy_(from);
  return stack;
}

void call_alone(const Operator& op, const Stack& arguments, Stack& results) {
  Stack changed = arguments;
  for (size_t k : op.outs) { // the kernel sizes an empty result, which the memory of another tensor cannot be
    if (changed[k].toTensor().numel() == 0) {
      changed[k] = at::empty({0}, arguments[k].toTensor().options().device(device(0)));
    }
  }
  const Stack found = call_member(op, changed, "", {0, 0}, {0, 0, 0});
  for (size_t k : op.outs) {
    const Tensor sized = changed[k].toTensor(), out = arguments[k].toTensor();
    if (!sized.is_same(out) && sized.sizes() != out.sizes()) {
      at::native::resize_output(out, sized.sizes());
      plain(out, 0).copy_(sized);
    }
  }
  for (size_t k = 0; k < found.size(); ++k) {
    if (op.returned[k] >= 0) {
      results.push_back(arguments[op.returned[k]]);
    } else if (found[k].isTensor()) {
      results.emplace_back(wrapped(found[k].toTensor()));
    } else if (found[k].isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : found[k].toTensorVector()) list.push_back(wrapped(tensor));
      results.emplace_back(std::move(list));
    } else {
      results.push_back(found[k]);
    }
  }
}

void at_once(const std::vector<Part>& parts, const std::function<void(size_t k)>& work) {
  Together together;
  std::vector<std::future<void>> ends;
  for (size_t i = 1; i < parts.size(); ++i) {
    const auto task = std::make_shared<std::packaged_task<void()>>([&work, i] { work(i); });
    ends.push_back(task->get_future());
    at::launch([task] { (*task)(); });
  }
  std::packaged_task<void()> first([&work] { work(0); });
  ends.push_back(first.get_future());
  first();
  for (const auto& end : ends) end.wait(); // before an exception leaves what they use
  for (auto& end : ends) end.get();
}

// It is allocated when the first member's stream is ahead of all: memory that a member's call has freed may be in use
// until then.
Tensor joined(
    const std::vector<Stack>& found, size_t k, char letter, const Cut& cut, const std::vector<Part>& parts) {
  const Tensor first = found[0][k].toTensor();
  if (!first.defined()) return first;
  if (letter == '-') return empty_like_sizes(first, {0});
  const bool add = letter == '+';
  const int64_t dim = add ? 0 : split_dim(letter, {cut.dim, parts[0].length}, first);
  TORCH_CHECK(dim >= 0 || first.numel() == 0, "multigpu: results of shards cannot be joined");
  c10::DimVector sizes(first.sizes());
  if (add) {
    sizes.insert(sizes.begin(), parts.size());
  } else if (dim >= 0) {
    sizes[dim] = cut.size;
  }
  const Tensor all = empty_like_sizes(first, sizes);
  {
    Together together;
    for (size_t i = 0; i < parts.size() && all.numel() > 0; ++i) {
      c10::DeviceGuard guard(device(parts[i].member));
      const Tensor one = found[i][k].toTensor();
      const Tensor place = plain(all, parts[i].member, dim, add ? i : parts[i].begin, add ? 1 : parts[i].length);
      copy_by_kernel(add ? place.squeeze(0) : place, one);
    }
  }
  return add ? at::sum(all, 0) : all;
}

Tensor in_line(
    const std::vector<Stack>& found, size_t k, const std::vector<Part>& parts, const std::vector<int64_t>& added) {
  std::vector<int64_t> begins{0};
  for (const Stack& one : found) begins.push_back(begins.back() + one[k].toTensor().numel());
  const Tensor all = empty_like_sizes(found[0][k].toTensor(), {begins.back()});
  Together together;
  for (size_t i = 0; i < parts.size(); ++i) {
    const Tensor one = found[i][k].toTensor();
    if (one.numel() == 0) continue;
    c10::DeviceGuard guard(device(parts[i].member));
    const Tensor place = plain(all, parts[i].member, 0, begins[i], one.numel());
    copy_by_kernel(place, added[i] == 0 ? one : one.add(added[i]));
  }
  return all;
}

void call_shards(
    const Operator& op, const Stack& arguments, const std::string& letters, const std::string& outs, Cut cut, int rows,
    Stack& results) {
  call_parts(op, arguments, letters, outs, cut, rows, parts_of(cut.size), nullptr, results);
}

void call_parts(
    const Operator& op, const Stack& arguments, const std::string& letters, const std::string& outs, Cut cut, int rows,
    const std::vector<Part>& parts, const Change& change, Stack& results) {
  if (parts.size() < 2) return call_alone(op, arguments, results);
  std::vector<Stack> found;
  {
    Together together;
    for (size_t i = 0; i < parts.size(); ++i) {
      Stack changed = arguments;
      if (change) {
        c10::DeviceGuard guard(device(parts[i].member));
        change(changed, i);
      }
      found.push_back(call_member(op, changed, letters, cut, parts[i], rows));
    }
  }
  for (size_t k = 0; k < op.returned.size(); ++k) {
    results.push_back(
        op.returned[k] >= 0 ? arguments[op.returned[k]] : c10::IValue(joined(found, k, outs.at(k), cut, parts)));
  }
}

} // namespace aggregate
