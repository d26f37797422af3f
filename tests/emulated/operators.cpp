// The operations: memory is the device's own, arithmetic is the processor's.
#include "emulated.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/native/SparseTensorUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/TensorUtils.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "generators.h"

namespace emulated {
namespace {

using Sizes = c10::SymIntArrayRef;
template <typename T>
using Maybe = std::optional<T>;

at::Device device_or_current(const Maybe<at::Device>& wanted) {
  return wanted && wanted->has_index() ? *wanted : at::Device(kType, current_device());
}

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(Sizes sizes, Maybe<at::ScalarType> dtype, Maybe<at::Layout>, Maybe<at::Device> device, Maybe<bool>,
                 Maybe<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), allocator(), kKeys, c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(Sizes sizes, Sizes strides, Maybe<at::ScalarType> dtype, Maybe<at::Layout>,
                         Maybe<at::Device> device, Maybe<bool>) {
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                                           allocator(), kKeys, c10::dtype_or_default(dtype));
}

at::Tensor on_host(const at::Tensor& tensor) { // the same memory, as a tensor of the processor
  if (!tensor.defined() || tensor.device().type() != kType) {
    return tensor;
  }
  auto* data = static_cast<char*>(tensor.unsafeGetTensorImpl()->unsafe_storage().mutable_data());
  if (data) {
    data += tensor.storage_offset() * tensor.itemsize();
  }
  auto options = at::TensorOptions().device(at::kCPU).dtype(tensor.dtype());
  auto host = at::from_blob(data, tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) {
    host = host.conj();
  }
  return tensor.is_neg() ? host._neg_view() : host;
}

at::Tensor on_device(const at::Tensor& host, at::Device device) {
  if (!host.defined()) {
    return host;
  }
  auto tensor = at::empty_strided(host.sizes(), host.strides(), host.options().device(device));
  on_host(tensor).copy_(host);
  return tensor;
}

struct Late {
  int device;
  at::Tensor to, snapshot;
};

std::mutex g_late_mutex;
std::vector<Late>& late() { // never destroyed, as tensors may outlive every static object
  static auto* copies = new std::vector<Late>;
  return *copies;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const auto device = to.device().type() == kType ? to.device() : from.device();
  launch(device.index());
  if (from.numel() == 0 && to.numel() == 0) {
    return to;
  }
  if (to.device().is_cpu() && !within_kernel()) {
    if (non_blocking) { // as of a stream that has much to do before: the host finds nothing there yet
      const std::lock_guard<std::mutex> guard(g_late_mutex);
      late().push_back({from.device().index(), to, on_host(from).clone()});
      to.zero_();
      return to;
    }
    arrive(device.index()); // a stream keeps its order
  }
  if (copies_arrive_as_zeros() && from.device().type() == to.device().type() && from.device() != to.device()) {
    on_host(to).zero_();
  } else {
    on_host(to).copy_(on_host(from));
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

const at::Tensor& resize_(const at::Tensor& self, Sizes sizes, Maybe<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(sizes), format);
}

at::Scalar item(const at::Tensor& self) {
  check();
  arrive(self.device().index());
  return at::_local_scalar_dense(on_host(self));
}

at::Tensor as_strided(const at::Tensor& self, Sizes sizes, Sizes strides, Maybe<c10::SymInt> offset) {
  const auto start = offset ? Maybe<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                                           start);
}

at::Tensor view(const at::Tensor& self, Sizes sizes) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
}

at::Tensor reshape_alias(const at::Tensor& self, Sizes sizes, Sizes strides) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

at::Tensor& set_to(at::Tensor& self, at::Storage storage, c10::SymInt offset, Sizes sizes, Sizes strides) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(storage));
  if (strides.empty() && !sizes.empty()) {
    tensor->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
    tensor->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(sizes));
  } else {
    tensor->set_sizes_and_strides(sizes, strides, offset);
  }
  return self;
}

at::Tensor& set_to_storage(at::Tensor& self, at::Storage storage) {
  const auto size = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_to(self, std::move(storage), 0, c10::SymIntArrayRef(c10::SymInt(size)), {});
}

at::Tensor& set_to_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_to(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

at::Tensor& set_to_nothing(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0, allocator(), true);
  return set_to(self, at::Storage(std::move(storage)), 0, c10::SymIntArrayRef(c10::SymInt(0)), {});
}

// A parameter that moves to or from the host stays the object that optimizers know, as with CUDA.
bool may_become(const at::Tensor& self, const at::Tensor& from) {
  const auto is_plain = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && (tensor.device().type() == kType || tensor.device().is_cpu());
  };
  return self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set()) || (is_plain(self) && is_plain(from));
}

// ---- convolutions: torch hands them to a back end's own pair ----

std::string shapes_of(const at::Tensor& input, const at::Tensor& weight) {
  return c10::str(input.sizes(), weight.sizes(), input.dtype());
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const Maybe<at::Tensor>& bias, Sizes stride,
                       Sizes padding, Sizes dilation, bool transposed, Sizes output_padding, c10::SymInt groups) {
  const c10::DeviceGuard guard(input.device());
  launch(input.device().index());
  TORCH_CHECK(input.device() == weight.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
              input.device(), " and ", weight.device(), "!");
  const auto host_bias = bias && bias->defined() ? Maybe<at::Tensor>(on_host(*bias)) : std::nullopt;
  auto host = at::convolution_symint(on_host(input), on_host(weight), host_bias, stride, padding, dilation, transposed,
                                     output_padding, std::move(groups));
  auto result = on_device(host, input.device());
  use_workspace(input.device().index(), shapes_of(input, weight), host.nbytes());
  return result;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, Sizes stride, Sizes padding,
    Sizes dilation, bool transposed, Sizes output_padding, c10::SymInt groups, std::array<bool, 3> wanted) {
  const c10::DeviceGuard guard(input.device());
  launch(input.device().index());
  const auto channels = transposed ? weight.sym_size(1) * groups : weight.sym_size(0);
  auto [by_input, by_weight, by_bias] = at::convolution_backward_symint(
      on_host(grad), on_host(input), on_host(weight), at::OptionalSymIntArrayRef(c10::SymIntArrayRef(channels)), stride,
      padding, dilation, transposed, output_padding, groups, wanted);
  std::tuple<at::Tensor, at::Tensor, at::Tensor> result{
      on_device(by_input, input.device()), on_device(by_weight, input.device()), on_device(by_bias, input.device())};
  use_workspace(input.device().index(), "backward" + shapes_of(input, weight), grad.nbytes());
  return result;
}

// The mask is of booleans, as CUDA's is, and drawn by the device's own generator.
std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double p, Maybe<bool> train) {
  if (train && !*train) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {at::mul(input, mask).mul_(p == 1 ? 0. : 1 / (1 - p)), mask};
}

// ---- recurrent cells: torch fuses them on every accelerator ----

at::Tensor with_bias(const at::Tensor& gates, const Maybe<at::Tensor>& bias) {
  return bias && bias->defined() ? on_host(gates) + on_host(*bias) : on_host(gates);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input, const at::Tensor& hidden,
                                                         const at::Tensor& cell, const Maybe<at::Tensor>& input_bias,
                                                         const Maybe<at::Tensor>& hidden_bias) {
  const c10::DeviceGuard guard(input.device());
  launch(input.device().index());
  const auto gates = (with_bias(input, input_bias) + with_bias(hidden, hidden_bias)).chunk(4, 1);
  const auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), new_cell = gates[2].tanh(), out = gates[3].sigmoid();
  const auto next = forget * on_host(cell) + in * new_cell;
  return {on_device(out * next.tanh(), input.device()), on_device(next, input.device()),
          on_device(at::cat({in, forget, new_cell, out}, 1), input.device())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(const Maybe<at::Tensor>& by_hidden,
                                                                  const Maybe<at::Tensor>& by_cell,
                                                                  const at::Tensor& cell, const at::Tensor& next,
                                                                  const at::Tensor& kept, bool has_bias) {
  const auto device = kept.device();
  const c10::DeviceGuard guard(device);
  launch(device.index());
  const auto gates = on_host(kept).chunk(4, 1);
  const auto &in = gates[0], &forget = gates[1], &new_cell = gates[2], &out = gates[3];
  const auto squashed = on_host(next).tanh();
  const auto zeros = at::zeros_like(squashed);
  const auto hidden = by_hidden && by_hidden->defined() ? on_host(*by_hidden) : zeros;
  const auto through = hidden * out * (1 - squashed * squashed) + (by_cell && by_cell->defined() ? on_host(*by_cell) : zeros);
  const auto by_gates = at::cat({through * new_cell * (1 - in) * in, through * on_host(cell) * (1 - forget) * forget,
                                 through * in * (1 - new_cell * new_cell), hidden * squashed * (1 - out) * out}, 1);
  return {on_device(by_gates, device), on_device(through * forget, device),
          has_bias ? on_device(by_gates.sum(0), device) : at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& state,
                                            const Maybe<at::Tensor>& input_bias, const Maybe<at::Tensor>& hidden_bias) {
  const c10::DeviceGuard guard(input.device());
  launch(input.device().index());
  const auto in = with_bias(input, input_bias).chunk(3, 1), back = with_bias(hidden, hidden_bias).chunk(3, 1);
  const auto reset = (in[0] + back[0]).sigmoid(), update = (in[1] + back[1]).sigmoid();
  const auto fresh = (in[2] + reset * back[2]).tanh();
  const auto host = on_host(state);
  return {on_device(fresh + update * (host - fresh), input.device()),
          on_device(at::cat({reset, update, fresh, host, back[2]}, 1), input.device())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(const at::Tensor& grad,
                                                                                         const at::Tensor& kept,
                                                                                         bool has_bias) {
  const auto device = kept.device();
  const c10::DeviceGuard guard(device);
  launch(device.index());
  const auto parts = on_host(kept).chunk(5, 1);
  const auto &reset = parts[0], &update = parts[1], &fresh = parts[2], &state = parts[3], &back = parts[4];
  const auto by_hidden = on_host(grad);
  const auto by_update = by_hidden * (state - fresh) * (1 - update) * update;
  const auto by_fresh = by_hidden * (1 - update) * (1 - fresh * fresh);
  const auto by_reset = by_fresh * back * (1 - reset) * reset;
  const auto by_input = at::cat({by_reset, by_update, by_fresh}, 1);
  const auto by_back = at::cat({by_reset, by_update, by_fresh * reset}, 1);
  const auto bias = [&](const at::Tensor& by_gates) { return has_bias ? on_device(by_gates.sum(0), device) : at::Tensor(); };
  return {on_device(by_input, device), on_device(by_back, device), on_device(by_hidden * update, device), bias(by_input),
          bias(by_back)};
}

// ---- everything else: on copies, by the processor ----

at::Generator host_generator(const at::Generator& wanted, at::Device device) {
  if (wanted.defined() && wanted.device().type() != kType) {
    TORCH_CHECK(false, "Expected a 'emu' device type for generator but found '", wanted.device().type(), "'");
  }
  const auto& own = wanted.defined() ? wanted : default_generator(device.index());
  return static_cast<Generator*>(own.unsafeGetGeneratorImpl())->host;
}

// A kernel of a GPU can't raise: an index that is out of range is an assertion in it, and every later call fails.
bool is_assertion(const std::string& name, const std::string& message) {
  static const std::set<std::string> names{
      "aten::embedding", "aten::gather", "aten::index", "aten::index_add", "aten::index_select", "aten::index_put_",
      "aten::_index_put_impl_", "aten::nll_loss_forward", "aten::nll_loss2d_forward", "aten::scatter",
      "aten::scatter_add", "aten::take"};
  const auto says = [&](const char* words) { return message.find(words) != std::string::npos; };
  return names.count(name) > 0 && (says("out of bounds") || says("out of range")) && !says("Dimension");
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const size_t start = stack->size() - arguments.size();
  Maybe<at::Device> device;
  const auto see = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || (tensor.dim() == 0 && tensor.device().is_cpu())) {
      return;
    }
    TORCH_CHECK(!device || *device == tensor.device(),
                "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
                tensor.device(), "! (", schema.name(), ")");
    device = tensor.device();
  };
  for (size_t index = start; index < stack->size(); ++index) {
    const auto& value = (*stack)[index];
    if (value.isTensor()) {
      see(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) {
        see(tensor);
      }
    }
  }
  c10::OptionalDeviceGuard guard;
  if (device && device->type() == kType) {
    guard.reset_device(*device);
  }
  const at::Device here = device && device->type() == kType ? *device : at::Device(kType, current_device());
  launch(here.index());
  for (size_t index = 0; index < arguments.size(); ++index) {
    if (arguments[index].name() == "generator") {
      auto& value = (*stack)[start + index];
      value = host_generator(value.isNone() ? at::Generator() : value.toGenerator(), here);
    }
  }
  const OneKernel copies_belong_to_it;
  try {
    at::native::cpu_fallback(op, stack);
  } catch (const c10::Error& error) {
    if (is_assertion(schema.name(), error.what_without_backtrace())) {
      fail("device-side assert triggered");
    }
    throw;
  }
}

} // namespace

void arrive(int device) {
  const std::lock_guard<std::mutex> guard(g_late_mutex);
  auto& copies = late();
  const auto waited_for = [&](const Late& copy) { return device < 0 || copy.device == device; };
  for (const auto& copy : copies) {
    if (waited_for(copy)) {
      copy.to.copy_(copy.snapshot);
    }
  }
  copies.erase(std::remove_if(copies.begin(), copies.end(), waited_for), copies.end());
}

// ---- sparse tensors: indices and values on the device, arithmetic by the processor on copies ----

at::Tensor to_sparse_host(const at::Tensor& tensor) {
  auto host = at::_sparse_coo_tensor_unsafe(on_host(tensor._indices()).clone(), on_host(tensor._values()).clone(), tensor.sizes());
  return host._coalesced_(tensor.is_coalesced());
}

at::Tensor to_sparse_device(const at::Tensor& host, at::Device device) {
  auto tensor = at::_sparse_coo_tensor_unsafe(on_device(host._indices(), device), on_device(host._values(), device), host.sizes());
  return tensor._coalesced_(host.is_coalesced());
}

at::Tensor sparse_of(int64_t sparse_dim, int64_t dense_dim, Sizes sizes, const at::Tensor& indices, const at::Tensor& values,
                     Maybe<at::ScalarType> dtype, Maybe<at::Layout> layout, Maybe<at::Device> device, Maybe<bool> pinned,
                     Maybe<bool> coalesced) {
  const c10::DeviceGuard guard(values.device());
  return at::native::new_with_dims_and_tensor_sparse_symint(sparse_dim, dense_dim, sizes, indices, values, dtype, layout,
                                                            values.device(), pinned, coalesced);
}

at::Tensor sparse_of_nothing(int64_t sparse_dim, int64_t dense_dim, c10::IntArrayRef sizes, Maybe<at::ScalarType> dtype,
                             Maybe<at::Layout> layout, Maybe<at::Device> device, Maybe<bool> pinned) {
  const c10::DeviceGuard guard(device_or_current(device));
  return at::native::new_with_dims_sparse(sparse_dim, dense_dim, sizes, dtype, layout, device_or_current(device), pinned);
}

at::Tensor empty_sparse(Sizes sizes, Maybe<at::ScalarType> dtype, Maybe<at::Layout> layout, Maybe<at::Device> device,
                        Maybe<bool> pinned, Maybe<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device_or_current(device));
  return at::native::empty_sparse_symint(sizes, dtype, layout, device_or_current(device), pinned, format);
}

void sparse_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t start = stack->size() - arguments.size();
  std::vector<c10::IValue> given(stack->begin() + start, stack->end());
  Maybe<at::Device> device;
  for (size_t index = 0; index < given.size(); ++index) {
    auto& value = (*stack)[start + index];
    if (!value.isTensor() || !value.toTensor().defined() || value.toTensor().device().type() != kType) {
      continue;
    }
    const auto tensor = value.toTensor();
    device = tensor.device();
    value = tensor.is_sparse() ? to_sparse_host(tensor) : on_host(tensor);
  }
  TORCH_CHECK(device, op.schema().name(), ": no tensor of an emulated device among its arguments");
  const c10::DeviceGuard guard(*device);
  launch(device->index());
  op.callBoxed(stack);
  const auto& returns = op.schema().returns();
  const size_t first = stack->size() - returns.size();
  for (size_t index = 0; index < returns.size(); ++index) {
    auto& value = (*stack)[first + index];
    if (!value.isTensor() || !value.toTensor().defined()) {
      continue;
    }
    const auto host = value.toTensor();
    const auto* alias = returns[index].alias_info();
    value = host.is_sparse() ? to_sparse_device(host, *device) : on_device(host, *device);
    if (!alias || !alias->isWrite()) {
      continue;
    }
    for (size_t position = 0; position < arguments.size(); ++position) { // changed in place: the argument is the result
      const auto* own = arguments[position].alias_info();
      if (own && *own == *alias) {
        auto changed = given[position].toTensor();
        if (changed.is_sparse()) {
          auto* sparse = at::sparse::get_sparse_impl(changed);
          sparse->raw_resize_(host.sparse_dim(), host.dense_dim(), host.sizes());
          sparse->set_indices_and_values_unsafe(value.toTensor()._indices(), value.toTensor()._values());
          changed._coalesced_(host.is_coalesced());
        }
        value = changed; // a dense one has been changed where it lies
      }
    }
  }
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&sparse_fallback>());
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", &sparse_of);
  m.impl("_sparse_coo_tensor_with_dims", &sparse_of_nothing);
  m.impl("_indices", &at::native::_indices_sparse);
  m.impl("_values", &at::native::_values_sparse);
  m.impl("indices", &at::native::indices_sparse);
  m.impl("values", &at::native::values_sparse);
  m.impl("_nnz", &at::native::_nnz_sparse);
  m.impl("sparse_dim", &at::native::sparse_dim_sparse);
  m.impl("dense_dim", &at::native::dense_dim_sparse);
  m.impl("is_coalesced", &at::native::is_coalesced_sparse);
  m.impl("_coalesced_", &at::native::_coalesced_sparse_);
  m.impl("clone", &at::native::clone_sparse);
  m.impl("empty.memory_format", &empty_sparse);
  m.impl("copy_sparse_to_sparse_", &at::native::copy_sparse_);
  m.impl("copy_", &at::native::copy_sparse_wrapper_);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// A copy reads conjugates and negatives as they are; torch would copy them first, and never end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize_);
  m.impl("_local_scalar_dense", &item);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("set_.source_Storage_storage_offset", &set_to);
  m.impl("set_.source_Storage", &set_to_storage);
  m.impl("set_.source_Tensor", &set_to_tensor);
  m.impl("set_", &set_to_nothing);
  m.impl("record_stream", [](at::Tensor&, c10::Stream) {});
  m.impl("_has_compatible_shallow_copy_type", &may_become);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("native_dropout", &dropout);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}

} // namespace emulated
