// Every op without a kernel of its own: its shape from the Meta kernel at the call, its numbers from
// the CPU kernel in a job, on the same memory.
#include "sim.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace sim {

std::map<std::string, int64_t> without_meta; // which ops had to run at once for want of a shape

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

// The shape of what these return depends on values: the host must wait, on CUDA too.
const std::unordered_set<std::string> kShapeFromData = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::bincount", "aten::repeat_interleave", "aten::is_nonzero"};
// Index tensors may lie on the host; CUDA copies them, and waits.
const std::unordered_set<std::string> kIndexing = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"};

// Where these take what their forward pass kept, and where what tells its dtype: the first that is
// there. CUDA keeps it in float32 for float16 inputs, and so says the Meta kernel; the CPU kernel
// wants it in the weight's dtype.
struct Norm {
  std::vector<size_t> kept, like;
};
const std::unordered_map<std::string, Norm> kNormBackward = {{"aten::native_layer_norm_backward", {{3, 4}, {5, 1}}},
                                                             {"aten::native_group_norm_backward", {{2, 3}, {4, 1}}},
                                                             {"aten::native_batch_norm_backward", {{5, 6}, {2, 3, 1}}}};

template <class F>
IValue mapTensors(const IValue& value, F f) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(f(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> mapped;
    for (const Tensor& t : value.toTensorVector()) mapped.push_back(t.defined() ? Tensor(f(t)) : t);
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> mapped;
    for (const auto& t : value.toOptionalTensorVector())
      mapped.push_back(t && t->defined() ? std::optional<Tensor>(Tensor(f(*t))) : t);
    return mapped;
  }
  return value;
}
template <class F>
void eachTensor(const IValue& value, F f) {
  mapTensors(value, [&](const Tensor& t) {
    f(t);
    return t;
  });
}
bool isGenerator(const c10::Argument& argument) {
  return argument.type()->str().find("Generator") != std::string::npos;
}
bool returnsTensors(const c10::Argument& result) {
  return result.type()->isSubtypeOf(*c10::TensorType::get()) ||
      result.type()->isSubtypeOf(*c10::ListType::ofTensors());
}
// What a forward pass kept as the CPU kernel of its backward pass wants it.
void convertKept(const std::string& name, Stack& stack) {
  auto found = kNormBackward.find(name);
  if (found == kNormBackward.end()) return;
  auto there = [&](size_t i) { return stack[i].isTensor() && stack[i].toTensor().defined(); };
  auto& like = found->second.like;
  auto dtype = stack[*std::find_if(like.begin(), like.end(), there)].toTensor().scalar_type();
  for (auto i : found->second.kept)
    if (there(i)) stack[i] = stack[i].toTensor().to(dtype);
}
bool isMask(const Tensor& t) {
  return t.scalar_type() == at::kBool || t.scalar_type() == at::kByte;
}

// One call of an op.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack& stack)
      : op_(op), schema_(op.schema()), name_(schema_.name()), stack_(stack), count_(schema_.arguments().size()) {
    auto arguments = torch::jit::last(stack, count_);
    given_.assign(arguments.begin(), arguments.end());
  }

  void run() {
    findDevice();
    c10::DeviceGuard guard(device_);
    queue_ = &currentQueue(device_.index());
    prepareForHost();
    Stack results = mustReadData() ? runNow(DATA_DEPENDENT) : runLater();
    torch::jit::drop(stack_, count_);
    for (auto& result : results) stack_.push_back(std::move(result));
  }

 private:
  void findDevice() {
    std::optional<c10::Device> found;
    for (auto& value : given_)
      eachTensor(value, [&](const Tensor& t) {
        if (!isSim(t)) return;
        TORCH_CHECK(!found || *found == t.device(), "Expected all tensors to be on the same device, but ", name_,
                    " was given tensors on ", *found, " and ", t.device());
        found = t.device();
      });
    for (auto& value : given_)
      if (value.isDevice() && value.toDevice().type() == deviceType()) {
        named_ = true;
        if (!found) found = value.toDevice();
      }
    device_ = found && found->index() >= 0 ? *found : c10::Device(deviceType(), static_cast<c10::DeviceIndex>(currentDevice()));
  }

  // The CPU kernel's arguments: device tensors as the memory behind them, everything else as it is now.
  void prepareForHost() {
    for (size_t i = 0; i < count_; i++) {
      auto& value = given_[i];
      if (value.isDevice() && named_) {
        host_.push_back(IValue(c10::Device(c10::kCPU)));
      } else if (isGenerator(schema_.arguments()[i])) {
        generator_at_ = i;
        host_.push_back(value);
      } else {
        host_.push_back(mapTensors(value, [&](const Tensor& t) { return isSim(t) ? hostView(t) : copyOfHostTensor(t); }));
      }
    }
    if (generator_at_) drawNow();
  }

  Tensor copyOfHostTensor(const Tensor& t) {
    const bool indexing = kIndexing.count(name_);
    TORCH_CHECK(t.dim() == 0 || indexing, "Expected all tensors to be on the same device, but ", name_,
                " was given tensors on ", device_, " and ", t.device());
    if (t.dim() && indexing) countSync(H2D, name_ + " with an index on the host");
    Neutral neutral;
    auto copy = t.clone();
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
  }

  // Random numbers are those of the call, as CUDA takes its offset at the launch, whenever the job
  // runs. The job gets the generator's state; how far that moves on is found on ones of the shape.
  void drawNow() {
    auto& value = given_[*generator_at_];
    if (!value.isNone())
      TORCH_CHECK(value.toGenerator().device().type() == deviceType(), "Expected a '", device_.type(),
                  "' device type for generator but found '", value.toGenerator().device().type(), "'");
    at::Generator own = value.isNone() ? defaultGenerator(device_.index()) : value.toGenerator();
    at::Generator now = at::detail::createCPUGenerator();
    now.set_state(own.get_state());
    Stack trial = host_;
    for (size_t i = 0; i < count_; i++)
      trial[i] = mapTensors(host_[i], [&](const Tensor& t) {
        Neutral neutral;
        return at::detail::empty_strided_cpu(t.sizes(), t.strides(), t.scalar_type()).fill_(1);
      });
    host_[*generator_at_] = IValue(now.clone());
    trial[*generator_at_] = IValue(now);
    Neutral neutral;
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &trial);
    own.set_state(now.get_state());
  }

  bool mustReadData() {
    for (auto& result : schema_.returns())
      if (!returnsTensors(result)) return true;
    if (kShapeFromData.count(name_)) return true;
    bool masks = false;
    if (kIndexing.count(name_)) {
      eachTensor(given_[1], [&](const Tensor& t) { masks |= isMask(t); });
      // A mask and one value is masked_fill.
      if (masks && name_ != "aten::index") masks = given_[2].toTensor().numel() != 1;
    }
    return masks;
  }

  // The tensors that the Meta kernel returns; nothing where there is no such kernel.
  std::optional<Stack> shapes() {
    if (!op_.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return std::nullopt;
    Stack meta;
    for (size_t i = 0; i < count_; i++) {
      auto& value = given_[i];
      if (value.isDevice() && named_) meta.push_back(IValue(c10::Device(c10::kMeta)));
      else if (generator_at_ == i) meta.push_back(IValue());
      else
        meta.push_back(mapTensors(value, [&](const Tensor& t) -> Tensor {
          // Meta kernels in Python take numbers from here.
          if (t.is_cpu() && t.dim() == 0) return t;
          return at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type());
        }));
    }
    const Stack arguments = meta;
    try {
      Neutral neutral;
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &meta);
    } catch (const c10::NotImplementedError&) { // a mere fallback, which counts as a kernel too
      return std::nullopt;
    }
    for (size_t i = 0; i < count_; i++)
      if (schema_.arguments()[i].is_out() && given_[i].isTensor()) {
        auto out = given_[i].toTensor();
        auto sizes = arguments[i].toTensor().sizes();
        if (out.sizes() == sizes) continue;
        resizeStorage(out, sizes);
        host_[i] = hostView(out);
      }
    return meta;
  }

  bool needsShapes() {
    for (auto& result : schema_.returns())
      if (!result.alias_info()) return true;
    for (auto& argument : schema_.arguments())
      if (argument.is_out()) return true;
    return false;
  }

  Stack runLater() {
    std::optional<Stack> meta;
    if (needsShapes()) {
      meta = shapes();
      if (!meta) {
        Lock lock(mutex);
        without_meta[name_ + "." + schema_.overload_name()]++;
        return runNow(NO_META);
      }
    }
    Stack results;
    std::vector<std::optional<IValue>> outputs; // the memory behind the fresh ones
    for (size_t r = 0; r < schema_.returns().size(); r++) {
      if (schema_.returns()[r].alias_info()) {
        results.push_back(argumentBehind(r));
        outputs.push_back(std::nullopt);
      } else {
        results.push_back(mapTensors(meta->at(r), [&](const Tensor& t) { return newLike(t, device_); }));
        outputs.push_back(mapTensors(results.back(), hostView));
      }
    }
    push(*queue_, [op = op_, host = host_, outputs] {
      Stack stack = host;
      Neutral neutral;
      convertKept(op.schema().name(), stack);
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
      for (size_t r = 0; r < outputs.size(); r++) {
        if (!outputs[r]) continue;
        if (outputs[r]->isTensor()) {
          // What the CPU kernel leaves empty nobody needs: batch norms keep nothing in evaluation.
          if (outputs[r]->toTensor().defined() && stack[r].toTensor().numel())
            outputs[r]->toTensor().copy_(stack[r].toTensor());
          continue;
        }
        auto to = outputs[r]->toTensorVector(), from = stack[r].toTensorVector();
        for (size_t i = 0; i < to.size(); i++) to[i].copy_(from[i]);
      }
    });
    return results;
  }

  Stack runNow(Sync kind) {
    syncUntil(kind, name_, endOf(*queue_));
    {
      Neutral neutral;
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &host_);
    }
    Stack results;
    for (size_t r = 0; r < schema_.returns().size(); r++) {
      if (schema_.returns()[r].alias_info()) {
        results.push_back(argumentBehind(r));
        continue;
      }
      results.push_back(mapTensors(host_[r], [&](const Tensor& t) {
        Tensor result = newLike(t, device_);
        push(*queue_, [to = hostView(result), t] {
          Neutral neutral;
          to.copy_(t);
        });
        return result;
      }));
    }
    return results;
  }

  // The argument that a result is, for in-place and out= ops.
  IValue argumentBehind(size_t r) {
    auto* wanted = schema_.returns()[r].alias_info();
    TORCH_CHECK(wanted->isWrite(), "sim: a view op without a kernel: ", name_);
    for (size_t i = 0; i < count_; i++) {
      auto* info = schema_.arguments()[i].alias_info();
      if (info && info->isWrite() && info->beforeSets() == wanted->beforeSets()) return given_[i];
    }
    TORCH_CHECK(false, "sim: no argument for a result of ", name_);
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const std::string& name_;
  Stack& stack_;
  const size_t count_;
  std::vector<IValue> given_;
  Stack host_;
  c10::Device device_{c10::kCPU};
  Queue* queue_ = nullptr;
  bool named_ = false; // whether the op was given the device by name
  std::optional<size_t> generator_at_;
};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Call(op, *stack).run();
}

// CUDA has one kernel for a list of tensors of one device, and takes the tensors one by one elsewhere.
void foreachOp(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  std::optional<c10::Device> first;
  bool alike = true;
  for (auto& value : torch::jit::last(*stack, op.schema().arguments().size()))
    if (value.isTensorList())
      for (const Tensor& t : value.toTensorVector()) {
        alike = alike && isSim(t) && (!first || *first == t.device());
        first = t.device();
      }
  if (alike) Call(op, *stack).run();
  else op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

// What at::convolution asks of a backend it does not know; the composite op says the same.
void convolution(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  Call(op, *stack).run();
}
void convolutionBackward(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  // convolution_backward takes the bias's sizes too, in the place after the weight.
  auto arguments = torch::jit::last(*stack, 10);
  auto weight = arguments[2].toTensor();
  const bool transposed = arguments[6].toBool(), wants_bias = arguments[9].toBoolList().get(2);
  int64_t bias = transposed ? weight.size(1) * arguments[8].toInt() : weight.size(0);
  stack->insert(stack->end() - 7, wants_bias ? IValue(std::vector<int64_t>{bias}) : IValue());
  Call(op, *stack).run();
}

bool makesViews(const c10::FunctionSchema& schema) {
  for (auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

template <void (*function)(const c10::OperatorHandle&, c10::DispatchKeySet, Stack*)>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<function>();
}

const bool registered = [] {
  static torch::Library all(torch::Library::IMPL, "_", denseKey(), __FILE__, __LINE__);
  all.fallback(boxed<&fallback>());
  static torch::Library aten(torch::Library::IMPL, "aten", denseKey(), __FILE__, __LINE__);
  aten.impl("convolution_overrideable", boxed<&convolution>());
  aten.impl("convolution_backward_overrideable", boxed<&convolutionBackward>());
  // Where the CPU has a kernel of its own, CUDA has one too: the composite ones that torch would take
  // before the fallback round otherwise, and some read tensors on the host.
  for (auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || op->hasKernelForDispatchKey(denseKey()) || makesViews(op->schema())) continue;
    const bool each = name.name.rfind("aten::_foreach_", 0) == 0;
    const bool composite = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
    if (!each && !(composite && op->hasKernelForDispatchKey(c10::DispatchKey::CPU))) continue;
    auto overload = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    aten.impl(overload.c_str(), each ? boxed<&foreachOp>() : boxed<&fallback>());
  }
  return true;
}();

} // namespace
} // namespace sim
