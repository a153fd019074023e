// The Python module lockstep.comm._native.
#include <torch/extension.h>
#include <pthread.h>
#include <pybind11/chrono.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif
#include <unistd.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "backend.h"
#include "failure.h"
#include "word.h"

namespace py = pybind11;

namespace lockstep {

static PyObject* where_function = nullptr;  // set once, never freed: threads may ask late

static bool finalizing() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Asks Python where a thread is; called from threads without the interpreter's lock.
static std::string where(unsigned long thread) {
  if (!where_function || !Py_IsInitialized() || finalizing()) return "";
  py::gil_scoped_acquire lock;
  try {
    return py::str(py::handle(where_function)(thread));
  } catch (const std::exception&) {
    return "";
  }
}

// Python handles signals in its main thread, and only while that is in Python. Asked every
// 20 ms by whoever waits, it takes the interpreter's lock five times a second at most:
// another thread may hold that for long, and the wait may be over meanwhile.
static void hear() {
  static Clock::time_point next{};
#if defined(__linux__)
  if (syscall(SYS_gettid) != getpid()) return;
#else
  if (!pthread_main_np()) return;
#endif
  const auto now = Clock::now();
  if (now < next || !Py_IsInitialized() || finalizing()) return;
  next = now + std::chrono::milliseconds(200);
  py::gil_scoped_acquire lock;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

static c10::intrusive_ptr<LockstepBackend> create(const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank, int size,
                                                  std::chrono::milliseconds timeout,
                                                  std::string name, std::vector<int> ranks) {
  return c10::make_intrusive<LockstepBackend>(store, rank, size, timeout, std::move(name),
                                              std::move(ranks), &where, &hear);
}

static at::Tensor empty(const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  try {
    return shared_empty(sizes, dtype);
  } catch (const Failure& error) {
    throw std::runtime_error(error.what());
  }
}

static bool is_shared(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.layout() == at::kStrided &&
         Heap::here().find(tensor.data_ptr(), tensor.nbytes()).shared();
}

using Pairs = std::vector<std::pair<int, int>>;

static WorkPtr start_exact_sum(LockstepBackend& backend, at::Tensor packed, at::Tensor result,
                         at::Tensor present, size_t length,
                         std::vector<std::pair<size_t, size_t>> members,
                         std::vector<Pairs> holders, int leaves, double divisor,
                         std::vector<size_t> cuts, bool scatter, std::optional<at::Tensor> own) {
  ExactBucket bucket;
  bucket.length = length;
  bucket.members = std::move(members);
  bucket.holders = std::move(holders);
  bucket.leaves = leaves;
  bucket.divisor = divisor;
  bucket.cuts = std::move(cuts);
  bucket.scatter = scatter;
  return backend.exact_sum(std::move(bucket), packed, result, present, std::move(own));
}

}  // namespace lockstep

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace lockstep;
  module.doc() = "The backend lockstep: collectives over shared memory.";
  py::module_::import("torch.distributed");
  py::class_<LockstepBackend, c10d::Backend, c10::intrusive_ptr<LockstepBackend>>(
      module, "LockstepBackend")
      .def("exact_sum", &start_exact_sum, py::arg("packed"), py::arg("result"), py::arg("present"),
           py::arg("length"), py::arg("members"), py::arg("holders"), py::arg("leaves"),
           py::arg("divisor"), py::arg("cuts") = std::vector<size_t>(), py::arg("scatter") = false,
           py::arg("own") = std::nullopt, py::call_guard<py::gil_scoped_release>())
      .def("share", &LockstepBackend::share, py::arg("bytes"),
           py::call_guard<py::gil_scoped_release>());
  module.def("load", &load_word, py::arg("tensor"), py::arg("index"));
  module.def("store", &store_word, py::arg("tensor"), py::arg("index"), py::arg("value"));
  module.def("compare_exchange", &compare_exchange, py::arg("tensor"), py::arg("index"),
             py::arg("expected"), py::arg("desired"));
  module.def("create", &create, py::arg("store"), py::arg("rank"), py::arg("size"),
             py::arg("timeout"), py::arg("name"), py::arg("ranks"),
             py::call_guard<py::gil_scoped_release>());
  // New memory takes seconds a gigabyte.
  module.def("empty", &empty, py::arg("sizes"), py::arg("dtype"),
             py::call_guard<py::gil_scoped_release>());
  module.def("is_shared", &is_shared, py::arg("tensor"));
  module.def("heap_bytes", [] { return Heap::here().used(); });
  module.def("kernels", [] { return std::string(kernels().name); });
  module.def("set_where", [](py::object function) { where_function = function.release().ptr(); });
}
