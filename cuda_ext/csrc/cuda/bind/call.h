// One call of an operator on CUDA: what a launch takes, made from the arguments by a specification.
//
// A specification is a string of items, one for each field of a launch's arguments in their order; the fields' types say
// what is made of an item. Structs are filled field by field.
//   means[N,3]       a tensor of this shape: `const T*` reads it (a contiguous copy where it must be one), `T*` is
//                    written in place and must be contiguous. Null where the argument is None.
//   quats[N,4]@16    copied unless it starts at a multiple of 16 bytes; with !16 refused.
//   rows.3[M,2]      a tensor of a list of tensors, by its place.
//   sizes[2V]        a list of integers or floats, on the host.
//   near, degree     a number or a bool. #capacity: a number of things, which the device counts in int32.
//   N, 3R            a size: letters stand for sizes, and the first shape with a letter sets it. An int is checked.
//   >depths[M]       a result; =V behind it: zeros where V is 0, and =0: always.
//   ~[12VG+1]        scratch memory.
//   -                null or 0.
// A size is a sum of products, as in [P,C+1]; ? accepts any. Values are checked by the wrappers in cuda_ext/ops.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <string>
#include <tuple>
#include <type_traits>

#include "common/boxed_call.h"
#include "cuda/bind/check.h"

namespace nsmg {

template <typename T>
constexpr at::ScalarType scalar_type() {
  return std::is_same_v<T, uint32_t> ? at::kInt : c10::CppTypeToScalarType<T>::value;
}

class Call;

// The items of a specification, of which each conversion takes the next.
class Items {
 public:
  Items(Call& call, std::string items) : call_(call), items_(std::move(items)), left_(items_) {}

  template <typename T>
  T next();
  bool done() const { return left_.find_first_not_of(' ') == std::string_view::npos; }

 private:
  std::string_view item();

  Call& call_;
  const std::string items_;
  std::string_view left_;
};

struct AnyField {
  Items* items;
  template <typename T>
  operator T() const {
    return items->next<T>();
  }
};

// The number of a struct's fields.
template <typename T, typename... Fields>
constexpr auto takes(int, Fields... fields) -> decltype(T{fields...}, true) {
  return true;
}
template <typename T, typename... Fields>
constexpr bool takes(int64_t, Fields...) {
  return false;
}
template <typename T, size_t... k>
constexpr bool takes_fields(std::index_sequence<k...>) {
  return takes<T>(0, (void(k), AnyField{})...);
}
template <typename T, size_t kNumber = 24>
constexpr size_t field_count() {
  if constexpr (takes_fields<T>(std::make_index_sequence<kNumber>())) return kNumber;
  else return field_count<T, kNumber - 1>();
}

// The parameters of a launch function, without its stream.
template <auto kLaunch>
struct Launch;
template <typename... Parameters, cudaError_t (*kLaunch)(Parameters...)>
struct Launch<kLaunch> {
  using Values = std::tuple<std::decay_t<Parameters>...>;
};

class Call : public BoxedCall {
 public:
  using Shape = at::IntArrayRef;  // of an argument: -1 accepts any size

  Call(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
      : BoxedCall(op, stack), like_(first_tensor()), guard_(like_.device()),
        stream_(c10::cuda::getCurrentCUDAStream()) {
    sizes_.fill(-1);
  }

  cudaStream_t stream() const { return stream_; }
  // Where and as what the first tensor among the arguments is.
  const at::Tensor& like() const { return like_; }
  at::TensorOptions options(at::ScalarType dtype) const { return at::TensorOptions(like_.device()).dtype(dtype); }

  // ---- by specification ----
  template <typename T>
  T read(const char* items) {
    Items left(*this, items);
    T made = left.next<T>();
    TORCH_INTERNAL_ASSERT(left.done(), schema_.name(), ": ", items, " has too many items.");
    return made;
  }
  // The size that a letter stands for.
  int64_t size(char letter) const { return sizes_[letter - 'A']; }
  void set(char letter, int64_t size) { sizes_[letter - 'A'] = size; }
  // A sum of products of numbers and letters; -1 where a letter stands for nothing yet, and for `?`.
  int64_t size(std::string_view sum) const {
    int64_t total = 0;
    for (size_t at = 0; at < sum.size(); ++at) {
      int64_t product = 1;
      for (bool digits = false; at < sum.size() && sum[at] != '+'; ++at) {
        const char c = sum[at];
        const bool digit = c >= '0' && c <= '9';
        const int64_t factor = digit ? c - '0' : c == '?' ? -1 : size(c);
        if (factor < 0) return -1;
        product = digit && digits ? 10 * product + factor : product * factor;
        digits = digit;
      }
      total += product;
    }
    return total;
  }
  // Runs a launch function on the call's stream.
  template <typename F, typename... Values>
  void run(const F& launch, Values&&... values) {
    check(launch(std::forward<Values>(values)..., stream_));
  }
  void check(cudaError_t status) const {
    TORCH_CHECK(status == cudaSuccess, "CUDA error in ", schema_.name(), ": ", cudaGetErrorString(status), ".");
  }

  // ---- by names ----
  // The number of `what`, which the device counts in int32: the size of a tensor's dimension, or an integer argument.
  int count(const char* name, const char* what, int64_t dimension = 0) {
    const at::Tensor& of = tensor(name);
    TORCH_CHECK_VALUE(of.dim() > dimension, name, " must have ", dimension + 1, " dimensions at least, not ",
                      of.sizes(), ".");
    return cuda_count(of.size(dimension), what);
  }
  // Contiguous; copied where it is not, or does not start at a multiple of `alignment` bytes.
  at::Tensor checked(const char* name, Shape shape, at::ScalarType dtype, uintptr_t alignment = 1) {
    return hold(aligned(cuda_checked(tensor(name), name, shape, dtype, like_), alignment));
  }
  template <typename T>
  const T* in(const char* name, Shape shape, uintptr_t alignment = 1) {
    return static_cast<const T*>(checked(name, shape, scalar_type<T>(), alignment).const_data_ptr());
  }
  const float* floats(const char* name, Shape shape) { return in<float>(name, shape); }
  // An argument that is written in place, which a copy must not be.
  template <typename T>
  T* in_place(const char* name, Shape shape) {
    return written<T>(tensor(name), name, shape);
  }
  template <typename T>
  T* written(const at::Tensor& given, const char* name, Shape shape) const {
    TORCH_CHECK_VALUE(given.is_contiguous(), name, " must be contiguous: it is written in place.");
    return static_cast<T*>(cuda_checked(given, name, shape, scalar_type<T>(), like_).mutable_data_ptr());
  }
  template <typename T>
  T* out(Shape shape, bool zeros = false, std::string_view name = {}) {
    const at::TensorOptions kind = options(scalar_type<T>());
    const at::Tensor made = zeros ? at::zeros(shape, kind) : at::empty(shape, kind);
    result(made, name);
    return static_cast<T*>(made.mutable_data_ptr());
  }
  template <typename T>
  T* scratch(int64_t number) {
    return reinterpret_cast<T*>(scratch_bytes(number * int64_t(sizeof(T))));
  }
  void* scratch_bytes(int64_t bytes) { return hold(at::empty({bytes}, options(at::kByte))).mutable_data_ptr(); }
  // Scratch memory for a copy of a table of the host's.
  template <typename Row>
  Row* scratch_for(const std::vector<Row>& rows) {
    return scratch<Row>(int64_t(rows.size()));
  }

  // Keeps a tensor until the call ends.
  at::Tensor& hold(at::Tensor tensor) { return held_.emplace_back(std::move(tensor)); }

 private:
  friend class Items;

  // The name of an item, and the sizes and the suffix behind it.
  struct Parts {
    std::string name;
    std::vector<std::string_view> sizes;
    char mark = 0;  // @, ! or =
    std::string_view behind;

    explicit Parts(std::string_view item) {
      const size_t open = item.find('['), close = item.find(']');
      TORCH_INTERNAL_ASSERT(open != std::string_view::npos && close != std::string_view::npos, item);
      name = item.substr(0, open);
      for (size_t at = open + 1; at < close;) {
        const size_t end = std::min(item.find(',', at), close);
        sizes.push_back(item.substr(at, end - at));
        at = end + 1;
      }
      if (close + 1 < item.size()) mark = item[close + 1], behind = item.substr(close + 2);
    }
  };

  std::vector<int64_t> shape(const std::vector<std::string_view>& sizes) const {
    std::vector<int64_t> found;
    for (const std::string_view one : sizes) found.push_back(size(one));
    return found;
  }

  template <typename T>
  T* pointer(std::string_view item) {
    using Plain = std::remove_const_t<T>;
    if (item == "-") return nullptr;
    const Parts parts(item[0] == '>' || item[0] == '~' ? item.substr(1) : item);
    const std::vector<int64_t> sizes = shape(parts.sizes);
    if (item[0] == '~') return scratch<Plain>(sizes.at(0));
    if (item[0] == '>') return out<Plain>(sizes, parts.mark == '=' && size(parts.behind) == 0, parts.name);
    const char* name = parts.name.c_str();
    const size_t dot = parts.name.find('.');
    const c10::IValue& given = value(parts.name.substr(0, dot));
    if (given.isNone()) return nullptr;
    if constexpr (std::is_same_v<T, const int64_t>)
      if (given.isIntList()) return listed(integers(name), parts);
    if constexpr (std::is_same_v<T, const double>)
      if (given.isDoubleList()) return listed(numbers(name), parts);
    const at::Tensor tensor = given.isTensor() ? given.toTensor() : given.toTensorVector().at(name[dot + 1] - '0');
    const uintptr_t alignment = parts.mark == 0 ? 1 : uintptr_t(size(parts.behind));
    if (parts.mark == '!') check_aligned(tensor, name, alignment);
    T* found;
    if constexpr (std::is_const_v<T>) {
      const at::Tensor checked = cuda_checked(tensor, name, sizes, scalar_type<Plain>(), like_);
      found = static_cast<T*>(hold(aligned(checked, alignment)).const_data_ptr());
    } else {
      found = written<Plain>(tensor, name, sizes);
    }
    for (size_t k = 0; k < sizes.size(); ++k)
      if (const char letter = parts.sizes[k][0]; sizes[k] < 0 && letter != '?') set(letter, tensor.size(int64_t(k)));
    return found;
  }

  template <typename T>
  const T* listed(at::ArrayRef<T> given, const Parts& parts) const {
    const int64_t wanted = size(parts.sizes.at(0));
    TORCH_CHECK_VALUE(int64_t(given.size()) == wanted, parts.name, " must hold ", wanted, " numbers, not ",
                      given.size(), ".");
    return given.data();
  }

  template <typename T>
  T number(std::string_view item) {
    if (item == "-") return T(0);
    if (item[0] == '#') return T(cuda_count(integer(item.substr(1)), item.substr(1)));
    if (item.find_first_of("abcdefghijklmnopqrstuvwxyz") == std::string_view::npos) {
      const int64_t found = size(item);
      return std::is_same_v<T, int> ? T(cuda_count(found, counted(item))) : T(found);
    }
    const c10::IValue& given = value(item);
    if (!given.isInt()) return given.isBool() ? T(given.toBool()) : T(given.toDouble());
    TORCH_CHECK_VALUE(int64_t(T(given.toInt())) == given.toInt(), item, " is ", given.toInt(), ", which is too large.");
    return T(given.toInt());
  }

  static std::string_view counted(std::string_view item) {
    static constexpr std::string_view kThings[] = {"points N",   "rows M",   "views V",         "ranks R",
                                                   "channels C", "pixels P", "intersections I", "tiles T"};
    for (const std::string_view thing : kThings)
      if (thing.substr(thing.size() - 1) == item) return thing.substr(0, thing.size() - 2);
    return "numbers";
  }

  at::Tensor first_tensor() const {
    for (const c10::IValue& given : arguments_) {
      if (given.isTensor() && given.toTensor().is_cuda()) return given.toTensor();
      if (given.isTensorList()) {
        for (const at::Tensor& one : given.toTensorVector())
          if (one.is_cuda()) return one;
      }
    }
    TORCH_CHECK(false, schema_.name(), " was called without a tensor on CUDA.");
  }

  at::Tensor like_;
  c10::cuda::CUDAGuard guard_;
  cudaStream_t stream_;
  std::array<int64_t, 26> sizes_;  // by letter
  std::deque<at::Tensor> held_;
};

inline std::string_view Items::item() {
  left_.remove_prefix(std::min(left_.find_first_not_of(' '), left_.size()));
  const std::string_view found = left_.substr(0, left_.find(' '));
  TORCH_INTERNAL_ASSERT(!found.empty(), "a specification has too few items");
  left_.remove_prefix(found.size());
  return found;
}

template <typename T>
T Items::next() {
  if constexpr (std::is_same_v<T, cudaStream_t>) {
    return call_.stream();
  } else if constexpr (std::is_pointer_v<T>) {
    return call_.pointer<std::remove_pointer_t<T>>(item());
  } else if constexpr (std::is_arithmetic_v<T>) {
    return call_.number<T>(item());
  } else {
    const auto filled = [this](auto... k) { return T{(void(k), AnyField{this})...}; };
    return std::apply(filled, std::array<int, field_count<T>()>{});
  }
}

template <typename... T>
std::tuple<T...> filled(Items& items, const std::tuple<T...>*) {
  return std::tuple<T...>{items.next<T>()...};
}

// Runs a launch function with what is made of these specifications.
template <auto kLaunch, const char*... kItems>
void launched(Call& call) {
  Items items(call, (std::string() + ... + (std::string(kItems) + " ")));
  const auto values = filled(items, static_cast<typename Launch<kLaunch>::Values*>(nullptr));
  TORCH_INTERNAL_ASSERT(items.done());
  call.check(std::apply(kLaunch, values));
}

// What `m.impl` takes for a binding.
template <void (*kBody)(Call&)>
torch::CppFunction bound() {
  return boxed<Call, kBody>();
}

}  // namespace nsmg
