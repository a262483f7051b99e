// A simulated accelerator for tests: devices, memory that the host cannot read, streams that run late.
//
//   streams.cpp   queues of jobs, the schedules that run them, host syncs counted and refused
//   memory.cpp    device memory, pinned host memory, tensors as a job sees them
//   device.cpp    what torch asks of a device: guard, events, hooks, generators
//   tensors.cpp   kernels of its own: empty, copy_, views, item, record_stream
//   fallback.cpp  every other op: shapes from the Meta kernel now, numbers from the CPU kernel later
//   sparse.cpp    sparse COO tensors
//   autocast.cpp  torch's autocast lists
//   group.cpp     a process group whose collectives are delivered late
//   module.cpp    the Python module
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace sim {

// The library registers itself as PrivateUse1, or under CUDA's name where SIM_NAME=cuda when it is
// loaded: for code that looks at that name.
bool asCuda();
inline c10::DeviceType deviceType() {
  return asCuda() ? c10::DeviceType::CUDA : c10::DeviceType::PrivateUse1;
}
inline c10::DispatchKey denseKey() {
  return asCuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::PrivateUse1;
}
inline bool isSim(const at::Tensor& t) {
  return t.defined() && t.device().type() == deviceType();
}

// -- streams.cpp --------------------------------------------------------------------------------

struct Queue;

// A place in a queue: reached when every job pushed before it has run.
struct Mark {
  Queue* queue = nullptr;
  uint64_t at = 0;
};

// Runs a function, or waits for a place in another queue.
struct Job {
  std::function<void()> run;
  Mark after;
  std::function<bool()> ready; // whether it can run without waiting for another process
};

// One stream of one device.
struct Queue {
  int device;
  int64_t id;
  uint64_t pushed = 0, done = 0;
  std::deque<Job> jobs;
};

// When jobs run: all but `eager` and `random` wait for a host that waits. Then `late` runs first what
// the awaited stream itself waits for, and `late_others` last. `random` does one or the other.
enum class Schedule { late, late_others, eager, random };
enum Sync { ITEM, D2H, H2D, STREAM, EVENT, DEVICE, DATA_DEPENDENT, NO_META, SYNC_KINDS };
extern const char* const sync_names[SYNC_KINDS];

// Guards queues and memory. Jobs run while it is locked, and never need Python's lock.
extern std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

int deviceCount();
int currentDevice();
void setDevice(int device);
c10::Stream currentStream(int device);
c10::Stream exchangeStream(c10::Stream stream);
c10::Stream nextStream(int device); // from the device's pool, in turn

Queue& queueOf(const c10::Stream& stream);
Queue& currentQueue(int device);
Mark endOf(Queue& queue);
bool reached(const Mark& mark);

void push(Queue& queue, std::function<void()> run, std::function<bool()> ready = nullptr);
void pushWait(Queue& queue, Mark mark); // as cudaStreamWaitEvent
void runUntil(Mark mark);               // lets time pass; by itself not a host sync
void runDevice(int device);
bool letTimePass(Mark mark); // one job on the way to the mark, for a host that polls; true if there

// A host sync: counted by kind, and refused where a test asks for it.
void countSync(Sync kind, const std::string& what);
void syncUntil(Sync kind, const std::string& what, Mark mark);
// The first error of a job, such as a failed collective, comes out at the next host sync.
void raiseJobErrors();

void setSchedule(const std::string& name, uint64_t seed);
void refuse(unsigned kinds);
std::map<std::string, int64_t> takeCounts();
int64_t pendingJobs();

// -- memory.cpp ---------------------------------------------------------------------------------

c10::Allocator* deviceAllocator();
c10::Allocator* pinnedAllocator();
int deviceOf(const void* pointer); // -1 if it is no device memory
bool isPinned(const void* pointer);
void recordStream(const c10::DataPtr& data, const c10::Stream& stream);
void usePinned(const void* pointer, Mark until); // it is not given back before

// The device tensor's memory as a CPU tensor, for use in a job. It holds no reference: memory that
// is freed too early is used again by others, as on a GPU.
at::Tensor hostView(const at::Tensor& t);
// The same for a CPU tensor that outlives the job by other means (pinned memory).
at::Tensor borrowed(const at::Tensor& t);
// Where a kernel finds what device code calls `pointer`.
void* backing(void* pointer);

// -- device.cpp ---------------------------------------------------------------------------------

const at::Generator& defaultGenerator(int device);

// -- tensors.cpp --------------------------------------------------------------------------------

// While it lives nothing of the thread's state counts: no autograd, autocast or Python modes. Jobs
// run in whichever thread lets time pass.
struct Neutral {
  Neutral();
  ~Neutral();
  struct Guards;
  std::unique_ptr<Guards> guards;
};

at::Tensor newLike(const at::Tensor& shape, c10::Device device);
void resizeStorage(const at::Tensor& t, at::IntArrayRef sizes);

} // namespace sim
