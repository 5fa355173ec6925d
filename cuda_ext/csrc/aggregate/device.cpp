// The backend's registration: device guard, hooks, creation, views, and the fallback that serves all other operators.
#include "operators.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace aggregate {
namespace {

const c10::Device kOurs(c10::kPrivateUse1, 0);

// One device with one stream: the first member's order is the order of all.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::kPrivateUse1> {
  c10::Device exchangeDevice(c10::Device) const override { return kOurs; }
  c10::Device getDevice() const override { return kOurs; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, kOurs); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kOurs); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, kOurs); }
  void synchronizeStream(const c10::Stream&) const override { synchronize(); }
  void synchronizeDevice(c10::DeviceIndex) const override { synchronize(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

REGISTER_ALLOCATOR(c10::kPrivateUse1, allocator());

const at::AcceleratorHooksInterface& of_cuda() {
  return at::globalContext().getAcceleratorHooksInterface(at::kCUDA);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return is_started() || at::hasCUDA(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return kOurs; }
  // Memory that is page-locked for GPUs.
  bool isPinnedPtr(const void* data) const override { return at::hasCUDA() && of_cuda().isPinnedPtr(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return of_cuda().getPinnedMemoryAllocator(); }
  // The first member draws all numbers, so its generators are the device's.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    count();
    return at::globalContext().defaultGenerator(device(0));
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    count();
    return device(0).is_cpu()
        ? at::detail::createCPUGenerator()
        : at::globalContext().getAcceleratorHooksInterface(device(0).type()).getNewGenerator(device(0).index());
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const auto options = at::TensorOptions().dtype(at::kByte).device(kOurs);
    const auto kept = static_cast<int64_t>(std::min(bytes, storage.nbytes()));
    const Tensor larger = at::empty({static_cast<int64_t>(bytes)}, options);
    if (kept > 0) {
      Tensor old = at::empty({0}, options);
      at::native::set_storage_cpu_(old, storage, 0, {kept});
      copy_tensor(old, larger.narrow(0, 0, kept));
    }
    storage.set_data_ptr_noswap(larger.storage().set_data_ptr({nullptr, kOurs}));
    storage.set_nbytes(bytes);
  }
};
const bool registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

// Without `use` the first tensor chooses all GPUs: Python knows how.
void ensure_started() {
  if (!is_started()) c10::Dispatcher::singleton().findSchemaOrThrow("multigpu::use_all", "").typed<void()>().call();
}

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  ensure_started();
  return at::detail::empty_generic(size, allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  ensure_started();
  return at::detail::empty_strided_generic(size, stride, allocator(), kKeys, c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  check_not_forked();
  copy_tensor(self, to, non_blocking && self.is_cpu()); // to the CPU it always waits
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  at::native::resize_output(to, self.sizes());
  copy_tensor(self, to);
  return to;
}

std::vector<int64_t> shards_of(const Tensor& tensor) {
  return shards(tensor.storage().data(), tensor.storage().nbytes());
}

// The tensor as each member addresses it: plain tensors of the members on the same memory.
std::vector<Tensor> member_views(const Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_privateuseone(), "member_views: need a tensor of multigpu, not of ", tensor.device());
  std::vector<Tensor> views;
  for (int member = 0; member < count(); ++member) views.push_back(plain(tensor, member));
  return views;
}

void start_members(at::IntArrayRef gpus, int64_t host_members, int64_t host_bytes, int64_t small) {
  std::vector<c10::Device> members(host_members, c10::Device(c10::kCPU));
  for (int64_t gpu : gpus) members.emplace_back(c10::kCUDA, static_cast<c10::DeviceIndex>(gpu));
  calls().assign(members.size(), 0);
  start(
      members,
      gpus.empty() ? host_memory(static_cast<int>(host_members), host_bytes)
                   : cuda_memory(std::vector<int>(gpus.begin(), gpus.end())),
      small);
}

} // namespace
} // namespace aggregate

TORCH_LIBRARY(multigpu, m) {
  m.def("start(int[] gpus, int host_members, int host_bytes, int small) -> ()", &aggregate::start_members);
  m.def("use_all() -> ()");
  m.def("shards(Tensor tensor) -> int[]", &aggregate::shards_of);
  m.def("member_views(Tensor tensor) -> Tensor[]", &aggregate::member_views);
  m.def("calls() -> int[]", [] { return aggregate::calls(); });
  m.def("memory() -> int[]", &aggregate::memory_stats);
  m.def("empty_cache() -> ()", &aggregate::empty_cache);
  m.def("synchronize() -> ()", &aggregate::synchronize);
  m.def("is_host() -> bool", [] { return aggregate::device(0).is_cpu(); });
  m.def("forked() -> bool", &aggregate::forked);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&aggregate::fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &aggregate::empty);
  m.impl("empty_strided", &aggregate::empty_strided);
  m.impl("_copy_from", &aggregate::copy_from);
  m.impl("_copy_from_and_resize", &aggregate::copy_from_and_resize);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("is_set_to", &at::native::is_set_to);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  // torch composes these of others; on shards its own kernels are faster.
  for (const char* name :
       {"convolution_overrideable", "convolution_backward_overrideable", "native_group_norm", "native_layer_norm"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&aggregate::fallback>());
  }
}
