// Streams are queues of jobs. No thread works on them: a job runs when a schedule says so, or when
// somebody waits for it.
#include "sim.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <random>

namespace sim {

bool asCuda() {
  static const bool yes = [] {
    const char* name = std::getenv("SIM_NAME");
    return name && !std::strcmp(name, "cuda");
  }();
  return yes;
}

std::recursive_mutex mutex;

namespace {

// As many as CUDA keeps for a device; streams are handed out in turn.
constexpr int64_t kStreams = 33; // the default stream and a pool of 32
// A queue that grows beyond this is run at its front, so that memory does not grow for ever.
constexpr size_t kLongQueue = 4096;

struct Streams {
  std::vector<std::unique_ptr<Queue>> queues;
  int64_t next = 0;
};

std::vector<Streams>& devices() {
  static auto* all = [] {
    const char* count = std::getenv("SIM_DEVICES");
    auto* made = new std::vector<Streams>(count ? std::atoi(count) : 2);
    for (size_t d = 0; d < made->size(); d++)
      for (int64_t id = 0; id < kStreams; id++)
        (*made)[d].queues.push_back(std::unique_ptr<Queue>(new Queue{static_cast<int>(d), id}));
    return made;
  }();
  return *all;
}

Schedule schedule = Schedule::late;
std::mt19937_64 chance;
std::exception_ptr job_error;

thread_local int this_device = 0;
thread_local std::vector<int64_t> this_stream;

int64_t& streamId(int device) {
  this_stream.resize(deviceCount(), 0);
  return this_stream.at(device);
}
int orCurrent(int device) {
  return device < 0 ? this_device : device;
}

bool advance(Mark mark, bool may_wait);

// Runs the first job. False if it waits for another process and `may_wait` is not given. Waits only
// ever point at jobs that were pushed earlier, so this comes to an end.
bool step(Queue& queue, bool may_wait) {
  Job& first = queue.jobs.front();
  if (!advance(first.after, may_wait)) return false;
  if (!may_wait && first.ready && !first.ready()) return false;
  Job job = std::move(first);
  queue.jobs.pop_front();
  try {
    if (job.run) job.run();
  } catch (...) {
    if (!job_error) job_error = std::current_exception();
  }
  queue.done++;
  return true;
}

// Whatever this stretch of the queue is going to wait for goes first, before everything here that it
// does not wait for itself.
void advanceOthers(Mark mark, bool may_wait) {
  Queue& queue = *mark.queue;
  for (uint64_t i = queue.done; i < mark.at; i = std::max(i + 1, queue.done)) {
    Mark after = queue.jobs[i - queue.done].after;
    if (!reached(after)) advance(after, may_wait);
  }
}

bool advance(Mark mark, bool may_wait) {
  if (reached(mark)) return true;
  if (schedule == Schedule::late || (schedule == Schedule::random && chance() % 2)) advanceOthers(mark, may_wait);
  while (!reached(mark))
    if (!step(*mark.queue, may_wait)) return false;
  return true;
}

// What happens by itself when a job was pushed.
void afterPush(Queue& queue) {
  if (schedule == Schedule::eager) advance(endOf(queue), false);
  if (schedule == Schedule::random) {
    auto& queues = devices()[chance() % devices().size()].queues;
    // Most streams of a pool are idle: choose among the queues that hold something.
    std::vector<Queue*> busy;
    for (auto& each : queues)
      if (!each->jobs.empty()) busy.push_back(each.get());
    if (!busy.empty()) {
      Queue& chosen = *busy[chance() % busy.size()];
      for (auto n = chance() % 4; n && !chosen.jobs.empty() && step(chosen, false); n--) {}
    }
  }
  while (queue.jobs.size() > kLongQueue && step(queue, false)) {}
}

} // namespace

int deviceCount() {
  return static_cast<int>(devices().size());
}
int currentDevice() {
  return this_device;
}
void setDevice(int device) {
  TORCH_CHECK(device >= 0 && device < deviceCount(), "sim: there is no device ", device, " of ", deviceCount());
  this_device = device;
}
c10::Stream currentStream(int device) {
  device = orCurrent(device);
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(deviceType(), device), streamId(device));
}
c10::Stream exchangeStream(c10::Stream stream) {
  auto before = currentStream(stream.device_index());
  streamId(orCurrent(stream.device_index())) = stream.id();
  return before;
}
c10::Stream nextStream(int device) {
  Lock lock(mutex);
  device = orCurrent(device);
  auto& streams = devices().at(device);
  int64_t id = 1 + streams.next++ % (kStreams - 1);
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(deviceType(), device), id);
}
Queue& queueOf(const c10::Stream& stream) {
  return *devices().at(orCurrent(stream.device_index())).queues.at(stream.id());
}
Queue& currentQueue(int device) {
  return queueOf(currentStream(device));
}
Mark endOf(Queue& queue) {
  return {&queue, queue.pushed};
}
bool reached(const Mark& mark) {
  return !mark.queue || mark.queue->done >= mark.at;
}

void push(Queue& queue, std::function<void()> run, std::function<bool()> ready) {
  Lock lock(mutex);
  queue.jobs.push_back({std::move(run), {}, std::move(ready)});
  queue.pushed++;
  afterPush(queue);
}
void pushWait(Queue& queue, Mark mark) {
  Lock lock(mutex);
  if (mark.queue == &queue || reached(mark)) return;
  queue.jobs.push_back({nullptr, mark, nullptr});
  queue.pushed++;
  afterPush(queue);
}
void runUntil(Mark mark) {
  Lock lock(mutex);
  advance(mark, true);
}
void runDevice(int device) {
  Lock lock(mutex);
  auto& queues = devices().at(orCurrent(device)).queues;
  for (auto queue = queues.rbegin(); queue != queues.rend(); ++queue) advance(endOf(**queue), true);
}
bool letTimePass(Mark mark) {
  Lock lock(mutex);
  if (reached(mark)) return true;
  step(*mark.queue, false);
  return false;
}

// -- host syncs -----------------------------------------------------------------------------------

const char* const sync_names[SYNC_KINDS] = {
    "item", "d2h", "h2d", "stream", "event", "device", "data_dependent", "no_meta"};
static std::array<std::atomic<int64_t>, SYNC_KINDS> counts;
static std::atomic<unsigned> refused{0};

void countSync(Sync kind, const std::string& what) {
  counts[kind]++;
  TORCH_CHECK(!(refused & (1u << kind)), "sim: host sync refused: ", sync_names[kind], " in ", what);
}
void syncUntil(Sync kind, const std::string& what, Mark mark) {
  countSync(kind, what);
  runUntil(mark);
  raiseJobErrors();
}
void raiseJobErrors() {
  std::exception_ptr error;
  {
    Lock lock(mutex);
    std::swap(error, job_error);
  }
  if (error) std::rethrow_exception(error);
}

// -- for the Python module --------------------------------------------------------------------------

void setSchedule(const std::string& name, uint64_t seed) {
  Lock lock(mutex);
  static const std::map<std::string, Schedule> named = {{"late", Schedule::late},
                                                        {"late_others", Schedule::late_others},
                                                        {"eager", Schedule::eager},
                                                        {"random", Schedule::random}};
  TORCH_CHECK_VALUE(named.count(name), "sim: a schedule is 'late', 'late_others', 'eager' or 'random', not '", name, "'");
  for (int d = 0; d < deviceCount(); d++) runDevice(d);
  schedule = named.at(name);
  chance.seed(seed);
}
void refuse(unsigned kinds) {
  refused = kinds;
}
std::map<std::string, int64_t> takeCounts() {
  std::map<std::string, int64_t> taken;
  for (int kind = 0; kind < SYNC_KINDS; kind++)
    if (auto n = counts[kind].exchange(0)) taken[sync_names[kind]] = n;
  return taken;
}
int64_t pendingJobs() {
  Lock lock(mutex);
  int64_t n = 0;
  for (auto& device : devices())
    for (auto& queue : device.queues) n += static_cast<int64_t>(queue->jobs.size());
  return n;
}

} // namespace sim
