// A device without hardware: torch's PrivateUse1 with the CPU's memory and kernels, and counters.
//
// What a GPU would do is counted, not timed:
//   operation   a call of an operator with a kernel of its own; a multi-tensor call is one
//   wait        the host needs a result of the device, or waits for its queue
//   copy        bytes between the host's memory and the device's
//   allocation  `empty` and `empty_strided`; memory in use and its peak count every tensor
// Views are nothing of these. Operators run at once, so a missing wait is not seen as a race.

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::Stream;
using torch::jit::Stack;

const Device kDevice(c10::DeviceType::PrivateUse1, 0);

// ---- counters

struct Counters {
  std::mutex mutex;
  std::map<std::string, int64_t> counts;  // by "kind/name"
  std::set<const void*> pinned;           // where pinned memory begins
  int64_t in_use = 0, peak = 0;           // bytes of the device
};

// Never destroyed: tensors of Python's modules are freed later than what is static here.
Counters& counters() {
  static auto& all = *new Counters;
  return all;
}

// While one exists, this thread counts no operations, waits and copies: they belong to a fallback.
struct Uncounted {
  static thread_local int depth;
  Uncounted() { ++depth; }
  ~Uncounted() { --depth; }
};
thread_local int Uncounted::depth = 0;

void count(const std::string& kind, const std::string& name, int64_t number = 1) {
  if (Uncounted::depth > 0) return;
  const std::lock_guard<std::mutex> guard(counters().mutex);
  counters().counts[kind + "/" + name] += number;
}

c10::Dict<std::string, int64_t> counts() {
  c10::Dict<std::string, int64_t> all;
  const std::lock_guard<std::mutex> guard(counters().mutex);
  for (const auto& [name, number] : counters().counts) all.insert(name, number);
  all.insert("memory/in use", counters().in_use);
  all.insert("memory/peak", counters().peak);
  return all;
}

void reset() {
  const std::lock_guard<std::mutex> guard(counters().mutex);
  counters().counts.clear();
  counters().peak = counters().in_use;
}

// ---- memory

struct Block {
  void* memory;
  size_t bytes;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    const std::lock_guard<std::mutex> guard(counters().mutex);
    counters().in_use -= static_cast<int64_t>(block->bytes);
  }
  std::free(block->memory);
  delete block;
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes ? std::malloc(bytes) : nullptr;
    TORCH_CHECK_WITH(
        OutOfMemoryError, memory || !bytes, kDevice, " out of memory: tried to allocate ", bytes,
        " bytes");
    auto* block = new Block{memory, bytes};
    const std::lock_guard<std::mutex> guard(counters().mutex);
    counters().in_use += static_cast<int64_t>(bytes);
    counters().peak = std::max(counters().peak, counters().in_use);
    return {memory, block, &free_block, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

DeviceMemory device_memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_memory);

void free_pinned(void* memory) {
  {
    const std::lock_guard<std::mutex> guard(counters().mutex);
    counters().pinned.erase(memory);
  }
  std::free(memory);
}

bool is_pinned(const void* memory) {
  const std::lock_guard<std::mutex> guard(counters().mutex);
  return counters().pinned.count(memory) > 0;
}

// The host's memory that a device copies from and to without a wait.
struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = std::malloc(std::max<size_t>(bytes, 1));
    const std::lock_guard<std::mutex> guard(counters().mutex);
    counters().pinned.insert(memory);
    return {memory, memory, &free_pinned, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

PinnedMemory pinned_memory;

// ---- what torch asks of a device: one device, one stream, events that have always happened

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }

  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, kDevice); }
  Stream getDefaultStream(Device) const override { return getStream(kDevice); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return getStream(kDevice); }
  Stream getNewStream(Device, int) const override { return getStream(kDevice); }
  Stream exchangeStream(Stream) const override { return getStream(kDevice); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { count("wait", "synchronize"); }
  void synchronizeDevice(DeviceIndex) const override { count("wait", "synchronize"); }

  // an event is true once it has been recorded, and has nothing to free
  void record(void** event, const Stream&, DeviceIndex, c10::EventFlag) const override {
    *event = const_cast<Device*>(&kDevice);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { count("wait", "synchronize"); }
  double elapsedTime(void*, void*, DeviceIndex) const override { return 0.0; }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Draws by the CPU's kernels, which take a generator of the CPU alone: `HostGenerators`.
struct DeviceGenerator final : at::CPUGeneratorImpl {
  DeviceGenerator() {
    device_ = kDevice;
    key_set_ = c10::DispatchKeySet(DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  Device getDeviceFromPtr(void*) const override { return kDevice; }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::make_generator<DeviceGenerator>();
  }
  // the CPU's, so that the same seed gives the same numbers on both
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
};

// ---- operators that are written here: tensors without values, copies, one value

c10::DispatchKeySet device_keys() {
  return c10::DispatchKeySet(DispatchKey::PrivateUse1);
}

at::Tensor empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  count("allocation", "empty");
  return at::detail::empty_generic(
      sizes, &device_memory, device_keys(), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  count("allocation", "empty_strided");
  return at::detail::empty_strided_generic(
      sizes, strides, &device_memory, device_keys(), c10::dtype_or_default(dtype));
}

// A tensor of the CPU with the same memory.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  auto host = at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), at::dtype(tensor.scalar_type()));
  host._set_conj(tensor.is_conj());
  host._set_neg(tensor.is_neg());
  return host;
}

void count_copy(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!from.is_cpu() && !to.is_cpu()) return count("operation", "copy_");
  const std::string name = to.is_cpu() ? "to host" : "to device";
  count("copy", name);
  count("bytes", name, static_cast<int64_t>(from.nbytes()));
  // a copy to the device leaves pageable memory at once, one to the host fills it at its end
  if (!non_blocking || (to.is_cpu() && !is_pinned(to.storage().data()))) {
    count("wait", "copy " + name);
  }
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  count_copy(from, to, non_blocking);
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  count("wait", "item");
  return at::_local_scalar_dense(on_host(tensor));
}

// Torch has these two for devices whose convolutions it does not know.
at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups) {
  count("operation", "convolution");
  const Uncounted uncounted;
  const auto host_bias = bias && bias->defined() ? std::optional(on_host(*bias)) : std::nullopt;
  return at::convolution(
             on_host(input), on_host(weight), host_bias, stride, padding, dilation, transposed,
             output_padding, groups)
      .to(kDevice);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> wanted) {
  count("operation", "convolution_backward");
  const Uncounted uncounted;
  const std::array<int64_t, 1> bias_sizes{gradient.size(1)};
  const auto [of_input, of_weight, of_bias] = at::convolution_backward(
      on_host(gradient), on_host(input), on_host(weight), bias_sizes, stride, padding, dilation,
      transposed, output_padding, groups, wanted);
  const auto on_device = [](const at::Tensor& t) { return t.defined() ? t.to(kDevice) : t; };
  return {on_device(of_input), on_device(of_weight), on_device(of_bias)};
}

// ---- all other operators: their CPU kernels

// Their results have sizes that depend on values, or are values of the host.
const std::set<std::string> kWaits{
    "_unique2", "bincount", "equal", "masked_select", "nonzero", "repeat_interleave",
    "unique_consecutive", "unique_dim", "unique_dim_consecutive"};

bool is_multi_tensor(const std::string& name) {
  return name.rfind("_foreach_", 0) == 0;
}

bool takes_indices(const std::string& name) {
  return name.find("index") != std::string::npos;
}

std::vector<at::Tensor> tensors_of(const c10::IValue& value) {
  std::vector<at::Tensor> found;
  if (value.isTensor()) {
    found.push_back(value.toTensor());
  } else if (value.isTensorList()) {
    found = value.toTensorVector();
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      if (tensor) found.push_back(*tensor);
    }
  }
  found.erase(
      std::remove_if(found.begin(), found.end(), [](const auto& t) { return !t.defined(); }),
      found.end());
  return found;
}

// Whether one multi-tensor kernel can take these lists; GPUs need one layout of each tensor.
bool is_one_kernel(at::ArrayRef<c10::IValue> arguments) {
  std::vector<at::Tensor> first;
  for (const auto& argument : arguments) {
    if (!argument.isTensorList()) continue;
    const auto tensors = argument.toTensorVector();
    if (first.empty()) first = tensors;
    if (tensors.size() != first.size()) return false;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].sizes() != first[i].sizes() || tensors[i].strides() != first[i].strides() ||
          !tensors[i].is_non_overlapping_and_dense()) {
        return false;
      }
    }
  }
  return true;
}

void check_devices(const std::string& name, const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    TORCH_CHECK(
        !tensor.is_cpu() || tensor.dim() == 0 || takes_indices(name),
        name, ": expected all tensors on ", kDevice, ", but one of ", tensor.dim(),
        " dimensions is on the CPU");
  }
}

void count_operator(const std::string& name, at::ArrayRef<c10::IValue> arguments) {
  std::vector<at::Tensor> tensors;
  for (const auto& argument : arguments) {
    const auto more = tensors_of(argument);
    tensors.insert(tensors.end(), more.begin(), more.end());
  }
  check_devices(name, tensors);
  if (is_multi_tensor(name) && !is_one_kernel(arguments)) {
    count("operation", name + ", one by one", arguments[0].toTensorList().size());
  } else {
    count("operation", name);
  }
  const auto waits = [&](const at::Tensor& tensor) {
    const bool is_mask = tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
    return (is_mask && tensor.dim() > 0) || (tensor.is_cpu() && tensor.dim() > 0);
  };
  if (kWaits.count(name) > 0) {
    count("wait", name);
  } else if (takes_indices(name)) {
    for (const auto& argument : arguments) {
      if (!argument.isOptionalTensorList()) continue;
      const auto indices = tensors_of(argument);
      if (std::any_of(indices.begin(), indices.end(), waits)) count("wait", name);
    }
  }
}

// A GPU's multi-tensor kernels bump the versions of what they change; autograd leaves it to them.
void bump_versions(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = op.schema().arguments()[i].alias_info();
    if (!arguments[i].isTensorList() || !alias || !alias->isWrite()) continue;
    for (const auto& tensor : arguments[i].toTensorVector()) {
      if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
}

// Generators of the CPU in the place of the device's; these continue from where they ended.
class HostGenerators {
 public:
  explicit HostGenerators(Stack* arguments) {
    for (auto& argument : *arguments) {
      if (!argument.isGenerator() || argument.toGenerator().device() != kDevice) continue;
      auto ours = argument.toGenerator();
      auto host = at::detail::createCPUGenerator();
      host.set_state(ours.get_state());
      argument = host;
      pairs_.emplace_back(ours, host);
    }
  }
  ~HostGenerators() {
    for (auto& [ours, host] : pairs_) ours.set_state(host.get_state());
  }

 private:
  std::vector<std::pair<at::Generator, at::Generator>> pairs_;
};

// The fallback returns results where the first tensor is: for `1 - x` that is a number of the host.
void put_on_device(const c10::OperatorHandle& op, Stack* stack) {
  const auto& results = op.schema().returns();
  for (size_t i = 0; i < results.size(); ++i) {
    auto& result = (*stack)[stack->size() - results.size() + i];
    if (!result.isTensor() || results[i].alias_info()) continue;
    const auto tensor = result.toTensor();
    if (tensor.defined() && tensor.is_cpu()) result = tensor.to(kDevice);
  }
}

void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  const auto name = op.schema().name().substr(std::strlen("aten::"));
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  count_operator(name, arguments);
  if (is_multi_tensor(name)) bump_versions(op, arguments);
  const Uncounted uncounted;
  const HostGenerators generators(stack);
  at::native::cpu_fallback(op, stack);
  put_on_device(op, stack);
}

// A view, or another change of sizes and strides alone: the CPU's code needs no values.
void run_as_it_is(const c10::OperatorHandle& op, Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
}

bool is_view(const c10::FunctionSchema& schema) {
  const auto& results = schema.returns();
  const bool is_part = std::any_of(results.begin(), results.end(), [](const auto& result) {
    return result.alias_info() && !result.alias_info()->isWrite();
  });
  return is_part || schema.name() == "aten::resize_" || schema.name() == "aten::set_";
}

// Operators of a CPU kernel of their own have one here too; all others are compositions of these.
// Multi-tensor operators are compositions on the CPU, and kernels on GPUs.
bool has_own_kernel(const c10::OperatorHandle& op) {
  if (is_multi_tensor(op.operator_name().name.substr(std::strlen("aten::")))) return true;
  return op.hasKernelForDispatchKey(DispatchKey::CPU) &&
      !op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0 || !has_own_kernel(*op) ||
        op->hasKernelForDispatchKey(DispatchKey::PrivateUse1)) {
      continue;
    }
    m.impl(
        c10::toString(name).c_str(),
        is_view(op->schema()) ? torch::CppFunction::makeFromBoxedFunction<&run_as_it_is>()
                              : torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

// A copy resolves these itself; torch's resolution of them ends in a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

// ---- autocast: the types that it has on CUDA

#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FLOAT32_RESULT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT32_RESULT)
  AT_FORALL_PROMOTE(WIDEST)
}

TORCH_LIBRARY(simulated_device, m) {
  m.def("counts", &counts);
  m.def("reset", &reset);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}
