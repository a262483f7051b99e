// A process group for device tensors. The numbers go over gloo; what comes of them is delivered on a
// stream of the group's own, as late as its schedule allows.
//
// At the call, what the group's stream depends on is run and the inputs are copied, so that other
// ranks can go on whatever this one waits for, as they could with NCCL. A thread of the group then
// makes one collective after another: first all ranks say which one they are at, and if that is not
// the same everywhere each of them gets an error; then gloo does it.
#include "sim.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <future>
#include <sstream>
#include <thread>

namespace sim {
namespace {

using namespace c10d;
using at::Tensor;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;
using GlooPtr = c10::intrusive_ptr<Backend>;

// A collective on its way: what it is called on every rank, and how gloo is asked for it.
struct Collective {
  uint64_t sequence;
  std::string text;
  std::function<void()> run;
  std::promise<void> done;
};

// One after another, in a thread that takes no lock of the simulator or of Python.
class Line {
 public:
  explicit Line(GlooPtr gloo) : gloo_(std::move(gloo)), thread_([this] { work(); }) {}
  ~Line() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  std::shared_future<void> add(std::string text, std::function<void()> run) {
    std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back({++sequence_, std::move(text), std::move(run), {}});
    changed_.notify_all();
    return waiting_.back().done.get_future().share();
  }
  uint64_t sequence() {
    std::lock_guard<std::mutex> lock(mutex_);
    return sequence_;
  }

 private:
  void work() {
    for (;;) {
      Collective next;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return closed_ || !waiting_.empty(); });
        if (waiting_.empty()) return;
        next = std::move(waiting_.front());
        waiting_.pop_front();
      }
      try {
        if (broken_) std::rethrow_exception(broken_);
        compare(next);
        next.run();
        next.done.set_value();
      } catch (...) {
        broken_ = std::current_exception(); // as an NCCL communicator is of no use after an error
        next.done.set_exception(broken_);
      }
    }
  }

  void compare(const Collective& mine) {
    constexpr int64_t kBytes = 256;
    std::ostringstream text;
    text << mine.sequence << " " << mine.text;
    Tensors in{at::zeros({kBytes}, at::kByte)};
    std::strncpy(static_cast<char*>(in[0].data_ptr()), text.str().c_str(), kBytes - 1);
    std::vector<Tensors> out(1);
    for (int r = 0; r < gloo_->getSize(); r++) out[0].push_back(at::zeros({kBytes}, at::kByte));
    gloo_->allgather(out, in, {})->wait();
    auto of = [&](int r) { // what rank r is at; the error is the same on all
      std::string theirs(static_cast<const char*>(out[0][r].data_ptr()));
      return theirs.substr(theirs.find(' ') + 1);
    };
    for (int r = 1; r < gloo_->getSize(); r++)
      TORCH_CHECK_WITH(DistBackendError, of(r) == of(0), "sim: ranks are not at the same collective: number ",
                       mine.sequence, " of this group is ", of(0), " on rank 0 and ", of(r), " on rank ", r,
                       ". NCCL would hang here, or mix up their values");
  }

  GlooPtr gloo_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Collective> waiting_;
  uint64_t sequence_ = 0;
  bool closed_ = false;
  std::exception_ptr broken_;
  std::thread thread_;
};

// Inputs and outputs live until somebody waits or, where nobody does, until they are done with: as
// with NCCL, whose group keeps what a Work that was dropped has still under way.
struct Kept {
  Mark end;
  std::shared_ptr<Tensors> tensors;
};

// What the caller gets: done when the group's stream has come to `end_`.
struct SimWork : Work {
  SimWork(OpType type, Mark end, c10::Device device, std::shared_ptr<Tensors> kept, Tensors result, bool host_waits)
      : Work(-1, type), end_(end), device_(device), kept_(std::move(kept)), result_(std::move(result)),
        host_waits_(host_waits) {
    // Completed under the group's stream: what is chained to it runs behind the collective.
    future_ = c10::make_intrusive<at::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    future_->markCompleted(at::IValue(result_));
  }
  bool isCompleted() override {
    bool there = letTimePass(end_);
    if (there) raiseJobErrors();
    return there;
  }
  bool isSuccess() const override { return true; }
  void synchronize() override {
    pushWait(currentQueue(device_.index()), end_);
    kept_->clear();
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    if (host_waits_) syncUntil(STREAM, "barrier", end_);
    return true;
  }
  Tensors result() override { return result_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  Mark end_;
  c10::Device device_;
  std::shared_ptr<Tensors> kept_;
  Tensors result_;
  bool host_waits_;
  c10::intrusive_ptr<at::ivalue::Future> future_;
};

std::string described(const Tensors& tensors) {
  std::ostringstream text;
  for (size_t i = 0; i < tensors.size(); i++)
    text << (i ? ", " : "") << c10::toString(tensors[i].scalar_type()) << tensors[i].sizes();
  return text.str();
}
std::string described(const ReduceOp& op) {
  switch (static_cast<ReduceOp::RedOpType>(op)) {
    case ReduceOp::SUM: return "SUM";
    case ReduceOp::AVG: return "AVG";
    case ReduceOp::PRODUCT: return "PRODUCT";
    case ReduceOp::MIN: return "MIN";
    case ReduceOp::MAX: return "MAX";
    default: TORCH_CHECK(false, "sim: NCCL has no such reduction (bitwise ones are gloo's alone)");
  }
}
std::string call(const char* name, const std::string& what) {
  return std::string(name) + "(" + what + ")";
}
std::string rooted(const char* name, int64_t root) {
  return call(name, "root " + std::to_string(root));
}

// gloo moves only some dtypes; what is not summed can go as bytes.
Tensor bytes(const Tensor& t) {
  return at::empty({0}, at::kByte).set_(t.storage(), t.storage_offset() * t.element_size(),
                                        {t.numel() * static_cast<int64_t>(t.element_size())}, {1});
}
Tensors bytes(const Tensors& tensors) {
  Tensors all;
  for (auto& t : tensors) all.push_back(bytes(t));
  return all;
}
void refuseAsNccl(const Tensors& tensors) {
  for (auto& t : tensors)
    TORCH_CHECK_TYPE(t.scalar_type() != at::kShort && t.scalar_type() != at::kUInt16,
                     "Input tensor data type is not supported for NCCL process group: ", t.scalar_type());
}

class Group : public Backend {
 public:
  explicit Group(GlooPtr gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(gloo), line_(std::make_unique<Line>(gloo)) {}

  const std::string getBackendName() const override { return "simccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return line_->sequence(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }

  WorkPtr broadcast(Tensors& t, const BroadcastOptions& o) override {
    return issue(OpType::BROADCAST, call("broadcast", "root " + std::to_string(o.rootRank) + ", " + described(t)), t, t, t,
                 [=, this](Tensors&, Tensors& out) {
                   auto b = bytes(out);
                   gloo_->broadcast(b, o)->wait();
                 });
  }
  WorkPtr allreduce(Tensors& t, const AllreduceOptions& o) override {
    if (t.at(0).is_sparse()) return allreduce_sparse(t, o);
    return issue(OpType::ALLREDUCE, call("all_reduce", described(o.reduceOp) + ", " + described(t)), t, t, t,
                 [=, this](Tensors&, Tensors& out) { sumEach(out, o.reduceOp); });
  }
  WorkPtr allreduce_sparse(Tensors&, const AllreduceOptions&) override {
    TORCH_CHECK(false, "NCCL does not support all_reduce with sparse tensors.");
  }
  WorkPtr allreduce_coalesced(Tensors& t, const AllreduceCoalescedOptions& o) override { return allreduce(t, o); }
  WorkPtr reduce(Tensors& t, const ReduceOptions& o) override {
    // Everybody sums; only the root's tensor gets the result.
    const bool root = o.rootRank == getRank();
    return issue(OpType::REDUCE, call("reduce", described(o.reduceOp) + ", " + described(t)), t, root ? t : Tensors{}, t,
                 [=, this](Tensors& in, Tensors& out) {
                   sumEach(in, o.reduceOp);
                   if (root) out[0].copy_(in[0]);
                 });
  }
  WorkPtr allgather(std::vector<Tensors>& outs, Tensors& ins, const AllgatherOptions&) override {
    TORCH_CHECK(ins.size() == 1 && outs.size() == 1, "sim: one tensor for each rank");
    return issue(OpType::ALLGATHER, call("all_gather", described(ins)), ins, outs[0], outs[0],
                 [this](Tensors& in, Tensors& out) {
                   std::vector<Tensors> o{bytes(out)};
                   auto i = bytes(in);
                   gloo_->allgather(o, i, {})->wait();
                 });
  }
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const AllgatherOptions& o) override {
    Tensors outs{out}, ins{in};
    return allgather_into_tensor_coalesced(outs, ins, o);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const AllgatherOptions&) override {
    return issue(OpType::_ALLGATHER_BASE, call("all_gather_into_tensor", described(ins)), ins, outs, outs,
                 [this](Tensors& in, Tensors& out) {
                   for (size_t k = 0; k < in.size(); k++) {
                     auto o = bytes(out[k]), i = bytes(in[k]);
                     gloo_->_allgather_base(o, i, {})->wait();
                   }
                 });
  }
  WorkPtr reduce_scatter(Tensors& outs, std::vector<Tensors>& ins, const ReduceScatterOptions& o) override {
    TORCH_CHECK(ins.size() == 1 && outs.size() == 1, "sim: one tensor for each rank");
    return issue(OpType::REDUCE_SCATTER, call("reduce_scatter", described(o.reduceOp) + ", " + described(ins[0])), ins[0],
                 outs, outs, [=, this](Tensors& in, Tensors& out) {
                   sumEach(in, o.reduceOp);
                   out[0].copy_(in[getRank()]);
                 });
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in, const ReduceScatterOptions& o) override {
    Tensors outs{out}, ins{in};
    return reduce_scatter_tensor_coalesced(outs, ins, o);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins, const ReduceScatterOptions& o) override {
    return issue(OpType::_REDUCE_SCATTER_BASE,
                 call("reduce_scatter_tensor", described(o.reduceOp) + ", " + described(ins)), ins, outs, outs,
                 [=, this](Tensors& in, Tensors& out) {
                   sumEach(in, o.reduceOp);
                   for (size_t k = 0; k < in.size(); k++) {
                     auto n = out[k].numel();
                     out[k].view(-1).copy_(in[k].view(-1).narrow(0, n * getRank(), n));
                   }
                 });
  }
  WorkPtr alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_splits, std::vector<int64_t>& in_splits,
                        const AllToAllOptions&) override {
    return issue(OpType::ALLTOALL_BASE, call("all_to_all_single", c10::toString(in.scalar_type())), {in}, {out}, {out},
                 [=, this](Tensors& i, Tensors& o) mutable {
                   // In bytes, each row as one element of the first dimension.
                   auto to = rows(o[0]), from = rows(i[0]);
                   gloo_->alltoall_base(to, from, out_splits, in_splits, {})->wait();
                 });
  }
  WorkPtr alltoall(Tensors& outs, Tensors& ins, const AllToAllOptions&) override {
    return issue(OpType::ALLTOALL, call("all_to_all", c10::toString(ins.at(0).scalar_type())), ins, outs, outs,
                 [this](Tensors& in, Tensors& out) {
                   std::vector<int64_t> from, to;
                   for (auto& t : in) from.push_back(t.nbytes());
                   for (auto& t : out) to.push_back(t.nbytes());
                   auto sent = at::cat(bytes(in));
                   int64_t total = 0;
                   for (auto n : to) total += n;
                   auto got = at::empty({total}, at::kByte);
                   auto counts = to; // gloo takes what it is given
                   gloo_->alltoall_base(got, sent, counts, from, {})->wait();
                   auto parts = got.split_with_sizes(to);
                   for (size_t k = 0; k < out.size(); k++) bytes(out[k]).copy_(parts[k]);
                 });
  }
  WorkPtr gather(std::vector<Tensors>& outs, Tensors& ins, const GatherOptions& o) override {
    Tensors mine = outs.empty() ? Tensors{} : outs[0];
    return issue(OpType::GATHER, rooted("gather", o.rootRank), ins, mine, mine, [=, this](Tensors& in, Tensors& out) {
      std::vector<Tensors> all;
      if (!out.empty()) all.push_back(bytes(out));
      auto i = bytes(in);
      gloo_->gather(all, i, o)->wait();
    });
  }
  WorkPtr scatter(Tensors& outs, std::vector<Tensors>& ins, const ScatterOptions& o) override {
    Tensors mine = ins.empty() ? Tensors{} : ins[0];
    return issue(OpType::SCATTER, rooted("scatter", o.rootRank), mine, outs, outs, [=, this](Tensors& in, Tensors& out) {
      std::vector<Tensors> all;
      if (!in.empty()) all.push_back(bytes(in));
      auto to = bytes(out);
      gloo_->scatter(to, all, o)->wait();
    });
  }
  WorkPtr barrier(const BarrierOptions&) override {
    // NCCL's is an all_reduce that the host waits for.
    c10::Device device(deviceType(), static_cast<c10::DeviceIndex>(currentDevice()));
    auto run = line_->add("barrier()", [this] { gloo_->barrier({})->wait(); });
    return deliver(OpType::BARRIER, device, collectives_, {}, {}, run, [] {}, true);
  }

  // Between two ranks the order of calls is checked by nobody, as with NCCL.
  WorkPtr send(Tensors& t, int to, int tag) override {
    auto [device, in, out] = prepare(t, {});
    auto data = std::make_shared<Tensors>(bytes(in));
    auto work = gloo_->send(*data, to, tag);
    return deliver(OpType::SEND, device, sends_, t, t, waited(work, data), [] {}, false);
  }
  WorkPtr recv(Tensors& t, int from, int tag) override {
    auto [device, in, out] = prepare({}, t);
    auto data = std::make_shared<Tensors>(bytes(out));
    auto work = gloo_->recv(*data, from, tag);
    return deliver(OpType::RECV, device, receipts_, t, t, waited(work, data), written(t, out), false);
  }

 private:
  using Streams = std::map<int, c10::Stream>;

  // Memory that a result on its way is going to be written to.
  struct Write {
    Mark end;
    const char *begin, *past;
  };

  // Runs what the collective depends on, and copies the tensors: what the caller's stream holds, and
  // earlier results of this group that it reads.
  std::tuple<c10::Device, Tensors, Tensors> prepare(const Tensors& in, const Tensors& out) {
    auto device = (in.empty() ? out : in).at(0).device();
    for (auto* tensors : {&in, &out})
      for (auto& t : *tensors) {
        TORCH_CHECK(isSim(t), "sim: this group is for tensors of the device, not of ", t.device());
        TORCH_CHECK(t.device() == device, "sim: tensors of several devices in one collective");
        TORCH_CHECK(t.is_contiguous(), "Tensors must be contiguous");
      }
    runUntil(endOf(currentQueue(device.index())));
    Lock lock(mutex);
    writes_.erase(std::remove_if(writes_.begin(), writes_.end(), [](auto& w) { return reached(w.end); }), writes_.end());
    for (auto* tensors : {&in, &out})
      for (auto& t : *tensors)
        for (auto& w : std::vector<Write>(writes_)) {
          auto [begin, past] = range(t);
          if (begin < w.past && w.begin < past) runUntil(w.end);
        }
    Neutral neutral;
    Tensors host_in, host_out;
    for (auto& t : in) host_in.push_back(hostView(t).clone());
    for (auto& t : out) host_out.push_back(hostView(t).clone());
    return {device, host_in, host_out};
  }

  WorkPtr issue(OpType type, std::string text, const Tensors& in, const Tensors& out, const Tensors& result,
                std::function<void(Tensors&, Tensors&)> run) {
    refuseAsNccl(in);
    auto [device, host_in, host_out] = prepare(in, out);
    auto kept = std::make_shared<std::pair<Tensors, Tensors>>(host_in, host_out);
    auto done = line_->add(std::move(text), [kept, run] {
      Neutral neutral;
      run(kept->first, kept->second);
    });
    Tensors all = in;
    all.insert(all.end(), out.begin(), out.end());
    return deliver(type, device, collectives_, all, result, done, written(out, kept->second), false);
  }

  // The job that brings the result, once it is there, on the group's stream.
  WorkPtr deliver(OpType type, c10::Device device, Streams& streams, const Tensors& kept, const Tensors& result,
                  std::shared_future<void> done, std::function<void()> write, bool host_waits) {
    auto on = stream(device, streams);
    Queue& queue = queueOf(on);
    pushWait(queue, endOf(currentQueue(device.index())));
    push(queue, [done, write] {
      done.get();
      write();
    }, [done] { return done.wait_for(std::chrono::seconds(0)) == std::future_status::ready; });
    Kept mine{endOf(queue), std::make_shared<Tensors>(kept)};
    std::vector<Kept> over; // freed behind the lock, not in a job: a tensor may need Python's
    {
      Lock lock(mutex);
      for (auto& t : result) {
        auto [begin, past] = range(t);
        writes_.push_back({mine.end, begin, past});
      }
      kept_.push_back(mine);
      auto still = std::partition(kept_.begin(), kept_.end(), [](auto& k) { return reached(k.end); });
      over.assign(kept_.begin(), still);
      kept_.erase(kept_.begin(), still);
    }
    c10::StreamGuard guard(on);
    return c10::make_intrusive<SimWork>(type, mine.end, device, mine.tensors, result, host_waits);
  }

  static std::pair<const char*, const char*> range(const Tensor& t) {
    auto* begin = static_cast<const char*>(t.storage().unsafeGetStorageImpl()->mutable_data());
    begin += t.storage_offset() * t.element_size();
    return {begin, begin + t.nbytes()};
  }
  static std::function<void()> written(const Tensors& out, const Tensors& from) {
    Tensors to;
    for (auto& t : out) to.push_back(hostView(t));
    return [to, from] {
      Neutral neutral;
      for (size_t k = 0; k < to.size(); k++) to[k].copy_(from[k]);
    };
  }
  static std::shared_future<void> waited(WorkPtr work, std::shared_ptr<Tensors> data) {
    return std::async(std::launch::async, [work, data] { work->wait(); }).share();
  }

  // NCCL's average of floats divides before it sums.
  void sumEach(Tensors& tensors, ReduceOp op) {
    AllreduceOptions options;
    const bool average = op == ReduceOp::AVG;
    options.reduceOp = average ? ReduceOp(ReduceOp::SUM) : op;
    for (auto& t : tensors) {
      if (average && t.is_floating_point()) t.div_(getSize());
      Tensors one{t};
      gloo_->allreduce(one, options)->wait();
      if (average && !t.is_floating_point()) t.floor_divide_(getSize());
    }
  }
  static Tensor rows(const Tensor& t) {
    return t.dim() ? bytes(t).view({t.size(0), -1}) : bytes(t);
  }

  c10::Stream stream(c10::Device device, Streams& streams) {
    auto it = streams.find(device.index());
    if (it == streams.end()) it = streams.emplace(device.index(), nextStream(device.index())).first;
    return it->second;
  }

  GlooPtr gloo_;
  std::unique_ptr<Line> line_;
  Streams collectives_, sends_, receipts_;
  std::vector<Write> writes_;
  std::vector<Kept> kept_;
};

} // namespace

c10::intrusive_ptr<c10d::Backend> makeGroup(c10::intrusive_ptr<c10d::Backend> gloo) {
  return c10::make_intrusive<Group>(std::move(gloo));
}

// DistributedDataParallel keeps times for its logs, and for CUDA finds who takes them here. A device
// that is late has no times of its own: those at which the host came by are told.
struct HostTimer : c10d::Timer {
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    return getTimeRef(end) - getTimeRef(start);
  }
};

[[maybe_unused]] const bool timed = [] {
  if (asCuda()) {
    c10d::TimerRegistry()->Register(
        c10::DeviceType::CUDA, [](c10::Device) { return std::make_unique<HostTimer>(); });
  }
  return asCuda();
}();

} // namespace sim
