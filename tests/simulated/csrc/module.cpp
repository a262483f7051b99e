// The Python module: what tests steer and count, and what torch.sim is made of.
#include "sim.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

namespace sim {
extern std::map<std::string, int64_t> without_meta;
c10::intrusive_ptr<c10d::Backend> makeGroup(c10::intrusive_ptr<c10d::Backend> gloo);
} // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  using WithoutGil = py::call_guard<py::gil_scoped_release>;
  py::module::import("torch.distributed");
  m.def("device_count", &deviceCount);
  m.def("current_device", &currentDevice);
  m.def("set_device", &setDevice);
  m.def("default_generator", [](int device) {
    return py::reinterpret_steal<py::object>(THPGenerator_initDefaultGenerator(defaultGenerator(device)));
  });
  m.def("set_schedule", &setSchedule, WithoutGil());
  m.def("run_device", [](int device) { runDevice(device); raiseJobErrors(); }, WithoutGil());
  m.def("refuse", &refuse);
  m.def("take_counts", &takeCounts);
  m.def("pending_jobs", &pendingJobs, WithoutGil());
  m.def("without_meta", [] { return without_meta; });
  m.def("peek", [](const at::Tensor& t) { // what lies there now, whatever is still to come
    Lock lock(mutex);
    Neutral neutral;
    return hostView(t).clone();
  }, WithoutGil());
  m.def("make_group", &makeGroup, WithoutGil());
}
