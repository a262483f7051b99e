// Sparse COO tensors. What only handles their parts is torch's own code, which asks nothing of the
// device; everything else runs at once, on sparse tensors of the CPU.
#include "sim.h"

#include <ATen/ATen.h>
#include <ATen/NativeFunctions.h>
#include <ATen/native/SparseTensorUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

bool isSparse(const Tensor& t) {
  return t.defined() && t.is_sparse();
}

Tensor toHost(const Tensor& t) {
  if (!isSim(t)) return t;
  if (!isSparse(t)) return hostView(t);
  auto indices = hostView(t._indices()).clone(), values = hostView(t._values()).clone();
  return at::_sparse_coo_tensor_unsafe(indices, values, t.sizes())._coalesced_(t.is_coalesced());
}
Tensor toDevice(const Tensor& t, c10::Device device) {
  if (!isSparse(t)) return t.to(device, /*non_blocking=*/true);
  auto indices = t._indices().to(device, true), values = t._values().to(device, true);
  return at::_sparse_coo_tensor_unsafe(indices, values, t.sizes())._coalesced_(t.is_coalesced());
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  auto last = torch::jit::last(*stack, count);
  const std::vector<IValue> given(last.begin(), last.end());
  std::optional<c10::Device> device;
  for (auto& value : given)
    if (value.isTensor() && isSim(value.toTensor())) device = value.toTensor().device();
  TORCH_CHECK(device, "sim: no sparse tensor in ", schema.name());
  countSync(schema.name() == "aten::_coalesce" ? DATA_DEPENDENT : NO_META, schema.name());
  runUntil(endOf(currentQueue(device->index())));

  Stack host;
  for (auto& value : given) {
    if (value.isTensor()) host.push_back(toHost(value.toTensor()));
    else if (value.isDevice() && value.toDevice().type() == deviceType()) host.push_back(c10::Device(c10::kCPU));
    else host.push_back(value);
  }
  const Stack arguments = host;
  {
    Neutral neutral;
    op.callBoxed(&host);
  }
  torch::jit::drop(*stack, count);
  for (size_t r = 0; r < schema.returns().size(); r++) {
    auto* alias = schema.returns()[r].alias_info();
    size_t from = 0;
    while (alias && from < count && !(schema.arguments()[from].alias_info() && schema.arguments()[from].alias_info()->isWrite())) from++;
    if (!alias || from == count) {
      stack->push_back(host[r].isTensor() ? IValue(toDevice(host[r].toTensor(), *device)) : host[r]);
      continue;
    }
    auto self = given[from].toTensor();
    if (isSparse(self)) { // a dense one was written to in place
      auto changed = toDevice(arguments[from].toTensor(), *device);
      at::sparse::alias_into_sparse(self, changed._indices(), changed._values());
      self._coalesced_(changed.is_coalesced());
    }
    stack->push_back(self);
  }
}

const bool registered = [] {
  auto key = asCuda() ? c10::DispatchKey::SparseCUDA : c10::DispatchKey::SparsePrivateUse1;
  static torch::Library all(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  all.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  static torch::Library coo(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  coo.impl("_sparse_coo_tensor_with_dims_and_tensors", at::native::new_with_dims_and_tensor_sparse_symint);
  coo.impl("_sparse_coo_tensor_with_dims", at::native::new_with_dims_sparse);
  coo.impl("_indices", at::native::_indices_sparse);
  coo.impl("indices", at::native::indices_sparse);
  coo.impl("values", at::native::values_sparse);
  coo.impl("_values", at::native::_values_sparse);
  coo.impl("sparse_dim", at::native::sparse_dim_sparse);
  coo.impl("dense_dim", at::native::dense_dim_sparse);
  coo.impl("_nnz", at::native::_nnz_sparse);
  coo.impl("is_coalesced", at::native::is_coalesced_sparse);
  coo.impl("_coalesced_", at::native::_coalesced_sparse_);
  return true;
}();

} // namespace
} // namespace sim
