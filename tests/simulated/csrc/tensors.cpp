// Kernels that the fallback cannot make of Meta and CPU kernels: allocation, copies, views, item.
#include "sim.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

namespace sim {

using at::Tensor;

struct Neutral::Guards {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
  c10::impl::ExcludeDispatchKeyGuard python{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};
Neutral::Neutral() : guards(new Guards) {}
Neutral::~Neutral() = default;

// -- allocation -----------------------------------------------------------------------------------

static c10::DispatchKeySet keys() {
  return c10::DispatchKeySet(denseKey());
}

static Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), deviceAllocator(), keys(), c10::dtype_or_default(dtype), format);
}

static Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           deviceAllocator(), keys(), c10::dtype_or_default(dtype));
}

Tensor newLike(const Tensor& shape, c10::Device device) {
  c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      shape.sizes(), shape.strides(), deviceAllocator(), keys(), shape.scalar_type());
}

void resizeStorage(const Tensor& t, at::IntArrayRef sizes) {
  c10::DeviceGuard guard(t.device());
  t.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  size_t bytes = at::detail::computeStorageNbytesContiguous(sizes, t.dtype().itemsize(), t.storage_offset());
  auto* storage = t.storage().unsafeGetStorageImpl();
  if (bytes <= storage->nbytes()) return;
  auto fresh = deviceAllocator()->allocate(bytes);
  if (storage->nbytes()) deviceAllocator()->copy_data(fresh.get(), storage->data(), storage->nbytes());
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

static const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() != sizes) resizeStorage(self, sizes);
  return self;
}

// -- copies ---------------------------------------------------------------------------------------

static std::function<void()> copying(Tensor to, Tensor from) {
  return [to, from] {
    Neutral neutral;
    to.copy_(from);
  };
}

static void copyOnDevice(const Tensor& self, const Tensor& src) {
  Queue& here = currentQueue(src.device().index());
  auto job = copying(hostView(self), hostView(src));
  if (self.device() == src.device()) {
    push(here, job);
    return;
  }
  // As on CUDA, the copy runs on the source's stream, and each side waits for the other.
  Queue& there = currentQueue(self.device().index());
  pushWait(here, endOf(there));
  push(here, job);
  pushWait(there, endOf(here));
}

static void copyToDevice(const Tensor& self, const Tensor& src, bool non_blocking) {
  Queue& queue = currentQueue(self.device().index());
  if (non_blocking && isPinned(src.storage().data())) {
    // Read when the stream gets there: whoever writes to it before then changes what arrives.
    push(queue, copying(hostView(self), borrowed(src)));
    usePinned(src.storage().data(), endOf(queue));
    return;
  }
  Tensor staged;
  {
    Neutral neutral;
    staged = src.clone();
  }
  if (!non_blocking) countSync(H2D, "a blocking copy to the device");
  push(queue, copying(hostView(self), staged));
  if (!non_blocking) {
    runUntil(endOf(queue));
    raiseJobErrors();
  }
}

static void copyToHost(const Tensor& self, const Tensor& src, bool non_blocking) {
  Queue& queue = currentQueue(src.device().index());
  // Into memory that is not pinned the driver copies before it returns, whatever was asked.
  if (non_blocking && isPinned(self.storage().data())) {
    if (self.is_non_overlapping_and_dense()) // nobody may look at it before it is there
      std::memset(self.data_ptr(), 0xff, self.numel() * self.element_size());
    push(queue, copying(borrowed(self), hostView(src)));
    usePinned(self.storage().data(), endOf(queue));
    return;
  }
  countSync(D2H, "a blocking copy to the host");
  push(queue, copying(borrowed(self), hostView(src)));
  runUntil(endOf(queue));
  raiseJobErrors();
}

static Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  if (self.is_same(src) || self.numel() == 0) return self;
  Tensor from = src.sizes() == self.sizes() ? src : src.expand_as(self);
  if (isSim(self) && isSim(from)) copyOnDevice(self, from);
  else if (isSim(self)) copyToDevice(self, from, non_blocking);
  else copyToHost(self, from, non_blocking);
  return self;
}
static Tensor _copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  copy_(const_cast<Tensor&>(to), self, non_blocking);
  return to;
}
static Tensor _copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  copy_(const_cast<Tensor&>(to), self, false);
  return to;
}

// -- what the host reads --------------------------------------------------------------------------

static at::Scalar _local_scalar_dense(const Tensor& self) {
  syncUntil(ITEM, "item()", endOf(currentQueue(self.device().index())));
  Neutral neutral;
  return hostView(self).item();
}
static bool equal(const Tensor& self, const Tensor& other) {
  TORCH_CHECK(self.device() == other.device(), "sim: equal: tensors on ", self.device(), " and ", other.device());
  syncUntil(DATA_DEPENDENT, "equal", endOf(currentQueue(self.device().index())));
  Neutral neutral;
  return hostView(self).equal(hostView(other));
}

// -- dropout, whose CPU kernel takes no generator --------------------------------------------------

static std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (train && !*train) return {input.clone(), at::ones_like(input, at::kBool)};
  auto mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0. : 1 / (1 - p)), mask};
}

// -- views and storages ---------------------------------------------------------------------------

static Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<c10::SymInt> offset) {
  std::optional<int64_t> start;
  if (offset) start = offset->guard_int(__FILE__, __LINE__);
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}
static Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
static Tensor _reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
static Tensor& set_storage(Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                           c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto strides = C10_AS_INTARRAYREF_SLOW(stride);
  if (strides.empty() && !sizes.empty()) impl->set_sizes_contiguous(sizes);
  else impl->set_sizes_and_strides(sizes, strides);
  return self;
}
static Tensor& set_whole(Tensor& self, at::Storage storage) {
  auto elements = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(storage), 0, {c10::SymInt(elements)}, {});
}
static Tensor& set_tensor(Tensor& self, const Tensor& other) {
  return set_storage(self, other.storage(), other.sym_storage_offset(), other.sym_sizes(), other.sym_strides());
}
static Tensor& set_none(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, deviceAllocator()->allocate(0), deviceAllocator(), true);
  return set_storage(self, none, 0, {c10::SymInt(0)}, {});
}
static void record_stream(Tensor& self, c10::Stream stream) {
  recordStream(self.storage().data_ptr(), stream);
}

// The keys are known when the library is loaded, so the registrations are not the static ones.
static const bool registered = [] {
  static torch::Library aten(torch::Library::IMPL, "aten", denseKey(), __FILE__, __LINE__);
  aten.impl("empty.memory_format", empty);
  aten.impl("empty_strided", empty_strided);
  aten.impl("resize_", resize_);
  aten.impl("copy_", copy_);
  aten.impl("_copy_from", _copy_from);
  aten.impl("_copy_from_and_resize", _copy_from_and_resize);
  aten.impl("_local_scalar_dense", _local_scalar_dense);
  aten.impl("equal", equal);
  aten.impl("native_dropout", native_dropout);
  aten.impl("as_strided", as_strided);
  aten.impl("view", view);
  aten.impl("_reshape_alias", _reshape_alias);
  aten.impl("unfold", at::native::unfold);
  aten.impl("view_as_real", at::native::view_as_real);
  aten.impl("view_as_complex", at::native::view_as_complex);
  aten.impl("set_.source_Storage_storage_offset", set_storage);
  aten.impl("set_.source_Storage", set_whole);
  aten.impl("set_.source_Tensor", set_tensor);
  aten.impl("set_", set_none);
  aten.impl("record_stream", record_stream);
  return true;
}();

} // namespace sim
