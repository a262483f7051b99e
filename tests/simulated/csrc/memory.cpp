// Device memory the host cannot read, given back to its stream at once; pinned host memory.
#include "sim.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <unordered_map>

namespace sim {
namespace {

// Device pointers lie in pages that nobody may touch: a host that follows one dies at that line.
// Kernels find the numbers at the same place of a second range, right above the first.
constexpr size_t kArena = size_t(4) << 30;

struct Block {
  size_t size;
  Queue* home;               // the stream it was allocated on
  std::vector<Queue*> users; // of record_stream
};
struct Freed {
  char* pointer;
  Block block;
  std::vector<Mark> users; // who may still read it
};
struct Free {
  char* pointer;
  Mark since; // where its stream was then
};
struct Memory {
  char* base = nullptr;
  size_t used = 0;
  std::map<std::pair<Queue*, size_t>, std::vector<Free>> pool;
  std::unordered_map<char*, Block> blocks;
  std::vector<Freed> waiting;
};

std::vector<Memory>& memories() {
  static auto* all = [] {
    auto* made = new std::vector<Memory>(deviceCount());
    for (auto& memory : *made) {
      void* base = mmap(nullptr, 2 * kArena, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      TORCH_CHECK(base != MAP_FAILED, "sim: no address space for a device's memory");
      memory.base = static_cast<char*>(base);
      TORCH_CHECK(!mprotect(memory.base + kArena, kArena, PROT_READ | PROT_WRITE), "sim: mprotect failed");
    }
    return made;
  }();
  return *all;
}

bool allReached(const std::vector<Mark>& marks) {
  for (auto& mark : marks)
    if (!reached(mark)) return false;
  return true;
}

void giveBack(Memory& memory, char* pointer, const Block& block) {
  memory.pool[{block.home, block.size}].push_back({pointer, endOf(*block.home)});
}

// Blocks that other streams were recorded on come back when those have passed.
void reclaim(Memory& memory) {
  auto& waiting = memory.waiting;
  for (size_t i = 0; i < waiting.size();) {
    if (!allReached(waiting[i].users)) {
      i++;
      continue;
    }
    auto& block = waiting[i].block;
    giveBack(memory, waiting[i].pointer, block);
    std::swap(waiting[i], waiting.back());
    waiting.pop_back();
  }
}

void release(void* context) {
  if (!context) return;
  Lock lock(mutex);
  auto* pointer = static_cast<char*>(context);
  auto& memory = memories().at(deviceOf(pointer));
  Block block = memory.blocks.at(pointer);
  memory.blocks.erase(pointer);
  std::vector<Mark> users;
  for (auto* queue : block.users) users.push_back(endOf(*queue));
  if (allReached(users))
    giveBack(memory, pointer, block);
  else
    memory.waiting.push_back({pointer, std::move(block), std::move(users)});
}

void spoil(char* pointer, size_t size) {
  std::memset(backing(pointer), 0xff, size);
}

bool waitsForOthers(const Queue& queue) {
  for (auto& job : queue.jobs)
    if (!reached(job.after)) return true;
  return false;
}

char* take(Memory& memory, int device, Queue* home, size_t size) {
  reclaim(memory);
  auto& free = memory.pool[{home, size}];
  if (free.empty() && memory.used + size > kArena) {
    runDevice(device);
    reclaim(memory);
  }
  if (!free.empty()) {
    Free found = free.back();
    free.pop_back();
    // Where nobody can be at it any more it is spoilt now, so that what another stream takes for a
    // value is not what chanced to lie there: a zero, as likely as not. Streams that this one is yet
    // to wait for may be at it still.
    if (reached(found.since) && !waitsForOthers(*home)) spoil(found.pointer, size);
    return found.pointer;
  }
  TORCH_CHECK_WITH(OutOfMemoryError, memory.used + size <= kArena, "sim: device ", device, " is out of memory");
  char* pointer = memory.base + memory.used;
  memory.used += size;
  spoil(pointer, size);
  return pointer;
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    Lock lock(mutex);
    int device = currentDevice();
    if (!bytes) return {nullptr, nullptr, &release, c10::Device(deviceType(), device)};
    size_t size = (bytes + 511) / 512 * 512;
    Queue& home = currentQueue(device);
    auto& memory = memories().at(device);
    char* pointer = take(memory, device, &home, size);
    memory.blocks[pointer] = {size, &home, {}};
    // What nobody has written yet reads as NaN, once the stream gets there.
    push(home, [pointer, size] { spoil(pointer, size); });
    return {pointer, pointer, &release, c10::Device(deviceType(), device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    push(currentQueue(currentDevice()),
         [=] { std::memcpy(backing(to), backing(const_cast<void*>(from)), bytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { sim::recordStream(data, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};

// -- pinned host memory ---------------------------------------------------------------------------

struct Pinned {
  size_t size;
  std::vector<Mark> uses; // copies under way
  bool freed = false;
};
std::map<char*, Pinned> pinned;

std::map<char*, Pinned>::iterator pinnedBlock(const void* pointer) {
  auto* address = static_cast<char*>(const_cast<void*>(pointer));
  auto next = pinned.upper_bound(address);
  if (next == pinned.begin()) return pinned.end();
  --next;
  return address < next->first + next->second.size ? next : pinned.end();
}

void reclaimPinned() {
  for (auto it = pinned.begin(); it != pinned.end();) {
    if (it->second.freed && allReached(it->second.uses)) {
      std::free(it->first);
      it = pinned.erase(it);
    } else {
      ++it;
    }
  }
}

void releasePinned(void* context) {
  if (!context) return;
  Lock lock(mutex);
  pinned.at(static_cast<char*>(context)).freed = true;
  reclaimPinned();
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    Lock lock(mutex);
    reclaimPinned();
    void* pointer = nullptr;
    if (bytes) {
      TORCH_CHECK(!posix_memalign(&pointer, 64, bytes), "sim: no host memory");
      pinned[static_cast<char*>(pointer)] = {bytes, {}};
    }
    return {pointer, pointer, &releasePinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &releasePinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void* pointer, void*, c10::Stream stream) override {
    usePinned(pointer, endOf(queueOf(stream)));
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

at::Tensor overMemory(void* base, const at::Tensor& t) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(),
                       c10::DataPtr(base, c10::Device(c10::kCPU)), nullptr, false);
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return view;
}

DeviceAllocator* const device_allocator = new DeviceAllocator;
PinnedAllocator* const pinned_allocator = new PinnedAllocator;
const bool registered = [] {
  c10::SetAllocator(deviceType(), device_allocator, 1);
  at::setHostAllocator(deviceType(), pinned_allocator, 1);
  return true;
}();

} // namespace

c10::Allocator* deviceAllocator() {
  return device_allocator;
}
c10::Allocator* pinnedAllocator() {
  return pinned_allocator;
}
int deviceOf(const void* pointer) {
  auto* address = static_cast<const char*>(pointer);
  auto& all = memories();
  for (size_t d = 0; d < all.size(); d++)
    if (address >= all[d].base && address < all[d].base + kArena) return static_cast<int>(d);
  return -1;
}
void* backing(void* pointer) {
  return pointer ? static_cast<char*>(pointer) + kArena : nullptr;
}
bool isPinned(const void* pointer) {
  Lock lock(mutex);
  return pinnedBlock(pointer) != pinned.end();
}
void usePinned(const void* pointer, Mark until) {
  Lock lock(mutex);
  auto block = pinnedBlock(pointer);
  if (block == pinned.end()) return;
  auto& uses = block->second.uses;
  uses.erase(std::remove_if(uses.begin(), uses.end(), reached), uses.end());
  uses.push_back(until);
}
void recordStream(const c10::DataPtr& data, const c10::Stream& stream) {
  Lock lock(mutex);
  auto& blocks = memories().at(data.device().index()).blocks;
  auto found = blocks.find(static_cast<char*>(data.get_context()));
  if (found == blocks.end()) return;
  Queue* queue = &queueOf(stream);
  if (queue != found->second.home) found->second.users.push_back(queue);
}

at::Tensor hostView(const at::Tensor& t) {
  return overMemory(backing(t.storage().unsafeGetStorageImpl()->mutable_data()), t);
}
at::Tensor borrowed(const at::Tensor& t) {
  return overMemory(t.storage().unsafeGetStorageImpl()->mutable_data(), t);
}

} // namespace sim
