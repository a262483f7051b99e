// What torch asks of a device type: the guard with its streams and events, the hooks, generators.
#include "sim.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace sim {
namespace {

int orCurrent(int device) {
  return device < 0 ? currentDevice() : device;
}

struct Event {
  Mark mark;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return deviceType(); }
  c10::DeviceIndex deviceCount() const noexcept override { return sim::deviceCount(); }
  c10::Device getDevice() const override { return {deviceType(), static_cast<c10::DeviceIndex>(currentDevice())}; }
  void setDevice(c10::Device device) const override {
    if (device.index() >= 0) sim::setDevice(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { setDevice(device); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override { return currentStream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(deviceType(), orCurrent(device.index())));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return nextStream(device.index()); }
  c10::Stream getNewStream(c10::Device device, int) const override { return nextStream(device.index()); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return sim::exchangeStream(stream); }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &queueOf(stream); }
  bool queryStream(const c10::Stream& stream) const override { return letTimePass(endOf(queueOf(stream))); }
  void synchronizeStream(const c10::Stream& stream) const override {
    syncUntil(STREAM, "Stream.synchronize", endOf(queueOf(stream)));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock(mutex);
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->mark = endOf(queueOf(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) pushWait(queueOf(stream), static_cast<Event*>(event)->mark);
  }
  bool queryEvent(void* event) const override { return !event || letTimePass(static_cast<Event*>(event)->mark); }
  void synchronizeEvent(void* event) const override {
    syncUntil(EVENT, "Event.synchronize", event ? static_cast<Event*>(event)->mark : Mark{});
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1.0; }

  void synchronizeDevice(const c10::DeviceIndex device) const override {
    countSync(DEVICE, "synchronize");
    runDevice(device);
    raiseJobErrors();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    recordStream(data, stream);
  }
};

struct GeneratorImpl final : at::CPUGeneratorImpl {
  explicit GeneratorImpl(int device) {
    device_ = c10::Device(deviceType(), static_cast<c10::DeviceIndex>(device));
    key_set_ = c10::DispatchKeySet(denseKey());
  }
};

// What both kinds of hooks answer alike.
template <class Interface>
struct Hooks : Interface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return sim::deviceCount(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { sim::setDevice(device); }
  c10::DeviceIndex getCurrentDevice() const override { return currentDevice(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = currentDevice();
    if (device >= 0) sim::setDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* pointer) const override { return isPinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinnedAllocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return defaultGenerator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<GeneratorImpl>(orCurrent(device));
  }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    int device = deviceOf(pointer);
    TORCH_CHECK(device >= 0, "sim: this pointer is no device memory");
    return {deviceType(), static_cast<c10::DeviceIndex>(device)};
  }
};

struct SimHooks final : Hooks<at::PrivateUse1HooksInterface> {
  // Behind Storage.resize_: FSDP frees and allocates its flat parameters so.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    int device = storage.device().index();
    int before = exchangeDevice(device);
    auto fresh = deviceAllocator()->allocate(bytes);
    void *from = storage.mutable_data(), *to = fresh.get();
    if (size_t kept = std::min(bytes, storage.nbytes()))
      push(currentQueue(device), [=] { std::memcpy(backing(to), backing(from), kept); });
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
    exchangeDevice(before);
  }
};

struct CudaHooks final : Hooks<at::CUDAHooksInterface> {
  explicit CudaHooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  c10::DeviceIndex current_device() const override { return currentDevice(); }
  int getNumGPUs() const override { return sim::deviceCount(); }
  void deviceSynchronize(c10::DeviceIndex device) const override { Guard().synchronizeDevice(device); }
};

const bool registered = [] {
  static Guard guard;
  c10::impl::DeviceGuardImplRegistrar registrar(deviceType(), &guard);
  if (asCuda())
    at::CUDAHooksRegistry()->Register("CUDAHooks", [](at::CUDAHooksArgs args) -> std::unique_ptr<at::CUDAHooksInterface> {
      return std::make_unique<CudaHooks>(args);
    });
  else
    at::RegisterPrivateUse1HooksInterface(new SimHooks);
  return true;
}();

} // namespace

const at::Generator& defaultGenerator(int device) {
  static const auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int d = 0; d < deviceCount(); d++) made->push_back(at::make_generator<GeneratorImpl>(d));
    return made;
  }();
  return all->at(orCurrent(device));
}

} // namespace sim
