// Operators of the pretend accelerator: the host's kernels, run later.
#include "runtime.h"

#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>

namespace pretend {

at::Generator own_generator(const std::optional<at::Generator>& given, c10::DeviceIndex device);

namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

std::atomic<uint64_t> operators{0};
std::atomic<uint64_t> waits{0}; // of the host for a device, where CUDA has it wait

bool makes_the_host_wait(const std::string& name) {
  for (const char* known : {"aten::bincount", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal",
                            "aten::repeat_interleave", "aten::unique_dim", "aten::unique_consecutive"})
    if (name == known) return true;
  return false;
}

bool is_ours(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kKind; }

// ---- making tensors

Tensor empty(
    IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device && device->has_index() ? device : std::nullopt);
  return at::detail::empty_generic(
      size, c10::GetAllocator(kKind), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device && device->has_index() ? device : std::nullopt);
  return at::detail::empty_strided_generic(
      size, stride, c10::GetAllocator(kKind), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

Tensor over(const Tensor& like, IntArrayRef size, IntArrayRef stride, int64_t offset, caffe2::TypeMeta dtype) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(like.storage()), like.key_set(), dtype);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return made;
}

Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return over(self, size, stride, offset.value_or(self.storage_offset()), self.dtype());
}

Tensor view(const Tensor& self, IntArrayRef size) {
  auto shape = at::infer_size_dv(size, self.numel());
  auto stride = at::detail::computeStride(self.sizes(), self.strides(), shape);
  TORCH_CHECK(stride.has_value(), "view size is not compatible with input tensor's size and stride");
  return over(self, shape, *stride, self.storage_offset(), self.dtype());
}

Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return over(self, size, stride, self.storage_offset(), self.dtype());
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  int64_t before = self.storage().nbytes();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  int64_t needed = (self.storage_offset() + self.numel()) * self.element_size();
  if (needed > before) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.size() == size.size()) impl->set_sizes_and_strides(size, stride);
  else impl->set_sizes_contiguous(size);
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  int64_t count = source.nbytes() / self.element_size();
  return set_storage(self, std::move(source), 0, {count}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_empty(Tensor& self) {
  auto nothing = at::detail::empty_generic(
      {0}, c10::GetAllocator(kKind), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), self.scalar_type(), {});
  return set_storage(self, nothing.storage(), 0, {0}, {1});
}

// ---- copies

// A tensor of the host over memory that nothing keeps alive but whoever asked for the copy.
Tensor unowned(const Tensor& tensor) {
  auto data = c10::DataPtr(tensor.storage().mutable_data(), c10::Device(c10::kCPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data), nullptr, false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

Tensor& copy_(Tensor& self, const Tensor& given, bool non_blocking) {
  if (self.numel() == 0) return self;
  Tensor source = given.sizes() == self.sizes() ? given : given.expand(self.sizes());
  bool to = is_ours(self), from = is_ours(source);
  if (to && from) {
    auto here = current_stream(self.device().index()), there = current_stream(source.device().index());
    if (!(here == there)) { // as CUDA: each waits for the other
      finish(there);
      finish(here);
    }
    Tensor a = host_view(self), b = host_view(source);
    enqueue(here, [a, b]() mutable { a.copy_(b); });
    if (!(here == there)) finish(here);
    return self;
  }
  auto stream = current_stream((to ? self : source).device().index());
  const Tensor& host = to ? source : self;
  TORCH_CHECK(host.device().is_cpu(), "a copy between an npu and ", host.device());
  Tensor device_side = host_view(to ? self : source);
  bool pinned = is_pinned(host.storage().data());
  if (!non_blocking || !pinned) {
    if (to && non_blocking) { // memory that is not page-locked is read at once, and arrives later
      Tensor staged = unowned(host).clone();
      enqueue(stream, [device_side, staged]() mutable { device_side.copy_(staged); });
      return self;
    }
    ++waits;
    finish(stream);
    Tensor own = unowned(host);
    if (to) device_side.copy_(own); else own.copy_(device_side);
    return self;
  }
  Tensor own = unowned(host);
  if (to) enqueue(stream, [device_side, own]() mutable { device_side.copy_(own); });
  else enqueue(stream, [device_side, own]() mutable { own.copy_(device_side); });
  used_on(host.storage().data(), stream);
  return self;
}

Tensor copy_from(const Tensor& source, const Tensor& to, bool non_blocking) {
  Tensor target = to;
  copy_(target, source, non_blocking);
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& to) {
  if (to.sizes() != source.sizes()) to.resize_(source.sizes());
  return copy_from(source, to, false);
}

at::Scalar local_scalar(const Tensor& self) {
  ++waits;
  finish(current_stream(self.device().index()));
  return host_view(self).item();
}

// torch asks before it puts a tensor of one device in the place of another's.
bool may_replace(const Tensor& self, const Tensor& from) {
  auto dense = [](const Tensor& t) { return t.layout() == at::kStrided && (is_ours(t) || t.device().is_cpu()); };
  return dense(self) && dense(from);
}

void record_stream(Tensor& self, at::Stream stream) { used_on(self.storage().data(), stream); }

// ---- every other operator

struct Call {
  const c10::OperatorHandle& op;
  std::vector<std::pair<Tensor, Tensor>> pairs; // ours, and its view of the host
  c10::DeviceIndex device = -1;
  bool any = false;

  Tensor host(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!is_ours(tensor)) {
      if (tensor.device().is_cpu()) {
        const auto& name = op.schema().name();
        TORCH_CHECK(
            tensor.dim() == 0 || tensor.numel() == 0 || name.find("index") != std::string::npos,
            "Expected all tensors to be on the same device, but ", name, " got one on the CPU of shape ", tensor.sizes());
      }
      return tensor;
    }
    auto index = tensor.device().index();
    TORCH_CHECK(
        !any || device == index || tensor.dim() == 0,
        "Expected all tensors to be on the same device, but ", op.schema().name(), " got npu:", int(device), " and npu:", int(index));
    if (!any) device = index;
    any = true;
    // Without elements it may be what the result is to be written into, of whatever size.
    Tensor made = tensor.numel() ? host_view(tensor) : at::empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type());
    pairs.emplace_back(tensor, made);
    return made;
  }

  IValue convert(const IValue& value) {
    if (value.isTensor()) return host(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& tensor : value.toTensorVector()) made.push_back(host(tensor));
      return made;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> made;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
        made.push_back(tensor ? std::optional<Tensor>(host(*tensor)) : std::nullopt);
      return made;
    }
    if (value.isDevice() && value.toDevice().type() == kKind) {
      if (!any && value.toDevice().has_index()) device = value.toDevice().index();
      return c10::Device(c10::kCPU);
    }
    return value;
  }

  // A result of the host as one of ours: a tensor that was given, a view of one, or a new one, filled later.
  Tensor back(const Tensor& result) {
    if (!result.defined() || !result.device().is_cpu()) return result;
    for (auto& [ours, own] : pairs)
      if (own.is_same(result)) return ours;
    for (auto& [ours, own] : pairs)
      if (result.numel() && is_ours(ours) && own.storage().data() == result.storage().data()) {
        Tensor view = over(ours, result.sizes(), result.strides(), result.storage_offset(), result.dtype());
        view._set_conj(result.is_conj());
        view._set_neg(result.is_neg());
        return view;
      }
    c10::DeviceGuard guard(c10::Device(kKind, device));
    Tensor dense = result.is_non_overlapping_and_dense() ? result : result.contiguous();
    Tensor made = empty_strided(
        dense.sizes(), dense.strides(), dense.scalar_type(), {}, c10::Device(kKind, device), {});
    if (dense.numel()) {
      Tensor to = host_view(made);
      enqueue(current_stream(device), [to, dense]() mutable { to.copy_(dense); });
    }
    return made;
  }
};

bool all_written(const c10::FunctionSchema& schema) {
  bool writes = false;
  for (const auto& argument : schema.arguments())
    writes = writes || (argument.alias_info() && argument.alias_info()->isWrite());
  for (const auto& result : schema.returns())
    if (!result.alias_info() || !result.alias_info()->isWrite()) return false;
  return writes;
}

const at::Tag kRandom = at::Tag::nondeterministic_seeded;

void run(const c10::OperatorHandle& op, Stack* stack) {
  ++operators;
  if (makes_the_host_wait(op.schema().name())) ++waits;
  const auto& schema = op.schema();
  size_t count = schema.arguments().size(), begin = stack->size() - count;
  std::vector<IValue> given(stack->begin() + begin, stack->end());
  Call call{op};
  std::vector<IValue> own;
  own.reserve(count);
  for (const IValue& value : given) own.push_back(call.convert(value));
  if (call.device < 0) call.device = current_device();
  auto stream = current_stream(call.device);

  bool takes_generator = false;
  const bool random = op.hasTag(kRandom);
  for (size_t i = 0; i < count; ++i) {
    if (schema.arguments()[i].name() != "generator") continue;
    takes_generator = true;
    own[i] = own_generator(
        given[i].isNone() ? std::nullopt : std::optional<at::Generator>(given[i].toGenerator()), call.device);
  }

  // A device has it for integers, too.
  const bool counts = op.schema().name() == "aten::histc" && own[0].isTensor() && !own[0].toTensor().is_floating_point();
  const auto counted = counts ? own[0].toTensor().scalar_type() : at::kFloat;
  if (counts) {
    finish(stream);
    own[0] = own[0].toTensor().to(at::kFloat);
  }

  bool later = all_written(schema) && !random && !takes_generator;
  std::vector<IValue> results;
  if (later) {
    for (size_t i = 0; i < count && later; ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      bool out = alias && alias->isWrite() && schema.arguments()[i].kwarg_only();
      if (out && given[i].isTensor() && given[i].toTensor().numel() == 0) later = false; // to be given its size
    }
  }
  if (later) {
    for (auto& value : own) { // numbers of the host are taken as they are now
      if (value.isTensor() && value.toTensor().defined()) {
        const Tensor& tensor = value.toTensor();
        bool view = false;
        for (auto& pair : call.pairs) view = view || pair.second.is_same(tensor);
        if (!view && tensor.numel()) value = unowned(tensor).clone();
      }
    }
    for (const auto& result : schema.returns())
      for (size_t i = 0; i < count; ++i) {
        const auto* alias = schema.arguments()[i].alias_info();
        if (alias && alias->beforeSets() == result.alias_info()->beforeSets()) {
          results.push_back(given[i]);
          break;
        }
      }
    enqueue(stream, [op, own = std::move(own)]() mutable {
      Stack arguments(std::move(own));
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments);
    });
  } else {
    finish(stream);
    Stack arguments(own);
    {
      std::lock_guard<std::recursive_mutex> guard(lock());
      at::Tensor before;
      at::Generator host = at::detail::getDefaultCPUGenerator(), mine = own_generator(std::nullopt, call.device);
      const bool swap = random && !takes_generator;
      if (swap) {
        before = host.get_state();
        host.set_state(mine.get_state());
      }
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments);
      if (swap) {
        mine.set_state(host.get_state());
        host.set_state(before);
      }
    }
    for (auto& [ours, view] : call.pairs)
      if (view.sizes() != ours.sizes()) { // an output that got its size
        ours.resize_(view.sizes());
        host_view(ours).copy_(view);
      }
    if (counts) arguments[0] = arguments[0].toTensor().to(counted);
    for (IValue& value : arguments) {
      if (value.isTensor()) {
        results.emplace_back(call.back(value.toTensor()));
      } else if (value.isTensorList()) {
        c10::List<Tensor> made;
        for (const Tensor& tensor : value.toTensorVector()) made.push_back(call.back(tensor));
        results.emplace_back(std::move(made));
      } else {
        results.push_back(std::move(value));
      }
    }
  }
  stack->erase(stack->begin() + begin, stack->end());
  for (auto& value : results) stack->push_back(std::move(value));
}

// Of these torch has one for all backends, which says that theirs is missing.
void convolution(const c10::OperatorHandle& op, Stack* stack) {
  size_t begin = stack->size() - op.schema().arguments().size();
  std::vector<IValue> a(stack->begin() + begin, stack->end());
  Call call{op};
  for (auto& value : a) value = call.convert(value);
  finish(current_stream(call.device));
  Tensor result = at::convolution(
      a[0].toTensor(), a[1].toTensor(), a[2].isNone() ? std::nullopt : std::optional<Tensor>(a[2].toTensor()),
      a[3].toIntVector(), a[4].toIntVector(), a[5].toIntVector(), a[6].toBool(), a[7].toIntVector(), a[8].toInt());
  stack->erase(stack->begin() + begin, stack->end());
  stack->emplace_back(call.back(result));
}

void convolution_backward(const c10::OperatorHandle& op, Stack* stack) {
  size_t begin = stack->size() - op.schema().arguments().size();
  std::vector<IValue> a(stack->begin() + begin, stack->end());
  Call call{op};
  for (auto& value : a) value = call.convert(value);
  finish(current_stream(call.device));
  auto mask = a[9].toBoolList();
  std::vector<int64_t> outputs{a[0].toTensor().size(1)};
  auto made = at::convolution_backward(
      a[0].toTensor(), a[1].toTensor(), a[2].toTensor(), IntArrayRef(outputs), a[3].toIntVector(), a[4].toIntVector(),
      a[5].toIntVector(), a[6].toBool(), a[7].toIntVector(), a[8].toInt(), {mask[0], mask[1], mask[2]});
  stack->erase(stack->begin() + begin, stack->end());
  stack->emplace_back(call.back(std::get<0>(made)));
  stack->emplace_back(call.back(std::get<1>(made)));
  stack->emplace_back(call.back(std::get<2>(made)));
}

} // namespace

uint64_t operator_count() { return operators; }
uint64_t wait_count() { return waits; }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_empty);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &may_replace);
  // Torch's general one cannot read channels_last, which convolutions of some processors return.
  m.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&run>());
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

} // namespace pretend
