// The Python module lockstep.comm._native.
#include <pthread.h>
#include <pybind11/chrono.h>  // torch passes timeouts as timedelta
#include <pybind11/stl.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif
#include <unistd.h>

// Not torch/extension.h, which doubles the time of compilation.
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "activity.h"
#include "backend.h"
#include "errors.h"
#include "microbatch.h"
#include "portable_kernels.h"
#include "recorded_calls.h"
#include "scope_calls.h"
#include "segmented_calls.h"
#include "segmented_loss.h"
#include "torch_errors.h"

namespace py = pybind11;

namespace lockstep {

// Set once, never freed: threads may use them late.
static PyObject* locate_function = nullptr;
static PyObject* connect_function = nullptr;

static bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Asks Python where a thread is. Called from threads without the interpreter's lock.
static std::string locate_thread(unsigned long thread) {
  if (!locate_function || !Py_IsInitialized() || is_finalizing()) return "";
  py::gil_scoped_acquire lock;
  try {
    return py::str(py::handle(locate_function)(thread));
  } catch (const std::exception&) {
    return "";
  }
}

// Python handles signals in its main thread, and only while that thread runs Python code.
// Waiting threads call this every 20 ms, but it takes the interpreter's lock at most five
// times per second: another thread may hold that for long, and the wait may end meanwhile.
static void poll_signals() {
  static Clock::time_point next{};
#if defined(__linux__)
  if (syscall(SYS_gettid) != getpid()) return;
#else
  if (!pthread_main_np()) return;
#endif
  const auto now = Clock::now();
  if (now < next || !Py_IsInitialized() || is_finalizing()) return;
  next = now + std::chrono::milliseconds(200);
  py::gil_scoped_acquire lock;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// Lets Python connect the ranks of a group over Gloo, whose headers torch does not install.
static c10::intrusive_ptr<c10d::Backend> connect_gloo(const c10::intrusive_ptr<c10d::Store>& store,
                                                      int rank, int size,
                                                      std::chrono::milliseconds timeout) {
  if (!connect_function || !Py_IsInitialized() || is_finalizing())
    throw CommError("Python is exiting");
  const py::gil_scoped_acquire lock;
  try {
    const py::object gloo = py::handle(connect_function)(store, rank, size, timeout);
    return c10::intrusive_ptr<c10d::Backend>::reclaim_copy(gloo.cast<c10d::Backend*>());
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;  // a signal handler
    throw CommError(error.what());
  }
}

static c10::intrusive_ptr<LockstepBackend> create(const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank, int size,
                                                  std::chrono::milliseconds timeout,
                                                  std::string name, std::vector<int> ranks) {
  return c10::make_intrusive<LockstepBackend>(store, rank, size, timeout, std::move(name),
                                              std::move(ranks), &locate_thread, &poll_signals,
                                              &connect_gloo);
}

static at::Tensor empty(const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  try {
    return shared_empty(sizes, dtype);
  } catch (const CommError& error) {
    throw std::runtime_error(error.what());
  }
}

static bool is_shared(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.layout() == at::kStrided &&
         Heap::instance().find(tensor.data_ptr(), tensor.nbytes()).is_shared();
}

// ---- atomic words ----
//
// An int64 element of a tensor in shared memory (`share`) that several ranks read and write at
// once, for decisions that must be made once: a step is committed, or it is not.
//
//     rank a   write the data, then compare_exchange(open -> committed)
//     rank b   load() == committed: sees all that rank a wrote before
//
// Stores release and loads acquire.

static int64_t* word_at(const at::Tensor& tensor, int64_t index) {
  check_tensor("a word", tensor);
  CHECK_ARGUMENT(tensor.scalar_type() == at::kLong && is_plain(tensor),
                 "a word is an element of a contiguous int64 tensor");
  TORCH_CHECK_INDEX(index >= 0 && index < tensor.numel(), "there is no word ", index, " in ",
                    tensor.numel());
  int64_t* word = static_cast<int64_t*>(tensor.data_ptr()) + index;
  CHECK_ARGUMENT(reinterpret_cast<uintptr_t>(word) % sizeof(int64_t) == 0,
                 "a word must be aligned to 8 bytes");
  return word;
}

static int64_t load_word(const at::Tensor& tensor, int64_t index) {
  return __atomic_load_n(word_at(tensor, index), __ATOMIC_ACQUIRE);
}

static void store_word(const at::Tensor& tensor, int64_t index, int64_t value) {
  __atomic_store_n(word_at(tensor, index), value, __ATOMIC_RELEASE);
}

// Writes `desired` if the word equals `expected`. Returns the previous value in either case.
static int64_t compare_exchange(const at::Tensor& tensor, int64_t index, int64_t expected,
                                int64_t desired) {
  __atomic_compare_exchange_n(word_at(tensor, index), &expected, desired, false, __ATOMIC_ACQ_REL,
                              __ATOMIC_ACQUIRE);
  return expected;
}

static Bucket make_bucket(at::ScalarType dtype, size_t length,
                          std::vector<std::pair<size_t, size_t>> members,
                          std::vector<std::vector<std::pair<int, int>>> holders, int leaves,
                          std::vector<size_t> cuts, bool scatter) {
  return {data_type_of(dtype), length, std::move(members), std::move(holders), leaves,
          std::move(cuts),     scatter};
}

// Adds a small bucket that the messages of all ranks end with: see
// collectives/reproducible_all_reduce.h. `present` is as in `reproducible_all_reduce`.
static void add_packed_nodes(const Bucket& bucket, const std::vector<py::bytes>& messages,
                             const at::Tensor& result, const at::Tensor& present) {
  CHECK_ARGUMENT(is_plain(result) && data_type_of(result.scalar_type()) == bucket.type &&
                     is_plain(present) && result.numel() >= static_cast<int64_t>(bucket.length) &&
                     present.nbytes() >= bucket.members.size(),
                 "add_packed: a buffer is too small, or does not fit the bucket");
  const std::vector<std::string_view> views(messages.begin(), messages.end());
  std::vector<bool> is_new;
  try {
    is_new = add_packed(bucket, views, static_cast<char*>(result.data_ptr()));
  } catch (...) {
    std::rethrow_exception(to_torch_error());
  }
  write_flags(present, is_new);
}

// Returns the digest of a bucket, with which a message that ends with its nodes ends.
static py::bytes digest_of(const Bucket& bucket) {
  const uint64_t digest = bucket.digest();
  return py::bytes(reinterpret_cast<const char*>(&digest), sizeof digest);
}

// Returns the messages of all ranks.
static std::vector<py::bytes> gather_bytes(LockstepBackend& backend, const py::bytes& message) {
  std::string mine = message;
  std::vector<std::string> everyone;
  {
    const py::gil_scoped_release release;
    everyone = backend.all_gather_bytes(std::move(mine));
  }
  std::vector<py::bytes> messages;
  for (const std::string& each : everyone) messages.emplace_back(each);
  return messages;
}

}  // namespace lockstep

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace lockstep;
  module.doc() = "The backend lockstep: collectives over shared memory.";
  py::module_::import("torch.distributed");
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const TorchError& known) {
      known.raise_in_python();
    }
  });
  py::class_<Bucket>(module, "Bucket")
      .def(py::init(&make_bucket), py::arg("dtype"), py::arg("length"), py::arg("members"),
           py::arg("holders"), py::arg("leaves"), py::arg("cuts") = std::vector<size_t>(),
           py::arg("scatter") = false)
      .def_property_readonly("digest", &digest_of);
  py::class_<LockstepBackend, c10d::Backend, c10::intrusive_ptr<LockstepBackend>>(module,
                                                                                  "LockstepBackend")
      .def("reproducible_all_reduce", &LockstepBackend::reproducible_all_reduce, py::arg("bucket"),
           py::arg("packed"), py::arg("result"), py::arg("present"), py::arg("own") = std::nullopt,
           py::arg("in_steps") = false, py::call_guard<py::gil_scoped_release>())
      .def("all_gather_bytes", &gather_bytes, py::arg("message"))
      .def_property_readonly("longest_message", &LockstepBackend::longest_message)
      .def("advance", &LockstepBackend::advance, py::call_guard<py::gil_scoped_release>())
      // In place of torch's method, which calls `allocateTensor`: FSDP2 expects the dtype it names.
      .def(
          "allocate_tensor",
          [](LockstepBackend&, int64_t size, at::ScalarType dtype, const at::Device&) {
            return LockstepBackend::allocate(size, dtype);
          },
          py::arg("size"), py::kw_only(), py::arg("dtype"), py::arg("device"),
          py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("options", &LockstepBackend::getBackendOptions)
      .def(
          "_abort_because",
          [](LockstepBackend& backend, const std::string& reason, const std::string& observed,
             int rank) { backend.abort_because({reason, loss_of(observed), rank}); },
          py::arg("reason"), py::arg("observed") = "", py::arg("rank") = -1,
          py::call_guard<py::gil_scoped_release>())
      // As ProcessGroupGloo has it; applies to the calls that follow.
      .def("_set_default_timeout", &LockstepBackend::setTimeout, py::arg("timeout"),
           py::call_guard<py::gil_scoped_release>())
      .def("share", &LockstepBackend::share, py::arg("bytes"),
           py::call_guard<py::gil_scoped_release>());
  py::class_<ScopeSeeder>(module, "ScopeSeeder")
      .def(py::init<std::vector<int64_t>, py::function, py::function>(), py::arg("scopes"),
           py::arg("get_numpy"), py::arg("seed_others"))
      .def("seed", &ScopeSeeder::seed, py::arg("prefix"), py::arg("scope"), py::arg("call") = 0)
      .def("begin", &ScopeSeeder::begin, py::arg("prefix"), py::arg("scope"))
      .def("know_others", &ScopeSeeder::know_others, py::arg("python"), py::arg("python_address"),
           py::arg("numpy"), py::arg("numpy_address"), py::arg("second_address"))
      .def("read_others", &ScopeSeeder::read_others)
      .def("write_others", &ScopeSeeder::write_others, py::arg("states"));
  module.def("takes_elements", &takes_elements, py::arg("samples"));
  module.def("make_module_call", &make_module_call, py::arg("module"), py::arg("before"),
             py::arg("after"));
  module.def("make_scope_hook", &make_scope_hook, py::arg("seeder"), py::arg("scopes"),
             py::arg("again"), py::arg("scope"), py::arg("call"));
  py::class_<CallTensor>(module, "CallTensor")
      .def_readonly("sizes", &CallTensor::sizes)
      .def_readonly("strides", &CallTensor::strides)
      .def_readonly("element_size", &CallTensor::element_size)
      .def_readonly("is_floating_point", &CallTensor::is_floating_point)
      .def_readonly("is_dense", &CallTensor::is_dense);
  py::class_<RecordedCalls, std::shared_ptr<RecordedCalls>>(module, "RecordedCalls")
      .def(py::init<bool, bool, bool, std::shared_ptr<const RecordedCalls>>(), py::arg("restores"),
           py::arg("keeps"), py::arg("joins_losses"), py::arg("first"))
      .def("run", &RecordedCalls::run, py::arg("body"))
      .def("begin", &RecordedCalls::begin)
      .def("end", &RecordedCalls::end)
      .def("seed", &RecordedCalls::seed, py::arg("prefixes"), py::arg("scope"), py::arg("call"))
      .def("finish", &RecordedCalls::finish, py::arg("parameters"))
      .def("note_samples", &RecordedCalls::note_samples, py::arg("tensors"))
      .def("is_in_order", &RecordedCalls::is_in_order, py::arg("tensor"))
      .def_readonly("orders", &RecordedCalls::orders)
      .def_readonly("calls", &RecordedCalls::calls);
  py::class_<SegmentRule>(module, "SegmentRule")
      .def(py::init([](std::vector<std::pair<size_t, int64_t>> slices, std::vector<int64_t> results,
                       std::vector<std::pair<size_t, int64_t>> sizes, bool draws, int64_t turns,
                       bool keeps_parts) {
             return SegmentRule{
                 std::move(slices), std::move(results), std::move(sizes), draws, turns,
                 keeps_parts};
           }),
           py::arg("slices"), py::arg("results"), py::arg("sizes"), py::arg("draws"),
           py::arg("turns"), py::arg("keeps_parts"));
  py::class_<SegmentedCalls, std::shared_ptr<SegmentedCalls>>(module, "SegmentedCalls")
      .def(py::init<const std::vector<SegmentedCalls::Expected>&, int64_t, bool>(),
           py::arg("calls"), py::arg("segments"), py::arg("joins_losses"))
      .def("run", &SegmentedCalls::run, py::arg("body"))
      .def("begin", &SegmentedCalls::begin)
      .def("end", &SegmentedCalls::end)
      .def("restart", &SegmentedCalls::restart)
      .def("seed", &SegmentedCalls::seed, py::arg("prefixes"), py::arg("scope"), py::arg("call"))
      .def("finish", &SegmentedCalls::finish, py::arg("parameters"))
      .def("find_statistics", &SegmentedCalls::find_statistics, py::arg("running"))
      .def_property_readonly("statistics", &SegmentedCalls::count_statistics)
      .def_property_readonly("reads_statistics", &SegmentedCalls::reads_statistics)
      .def("find_difference", &SegmentedCalls::find_difference);
  module.def("accumulate_gradients", &accumulate_gradients, py::arg("parameters"), py::arg("nodes"),
             py::arg("node"), py::arg("siblings"), py::arg("destinations"));
  module.def("compute_norms", &compute_norms, py::arg("gradients"),
             py::call_guard<py::gil_scoped_release>());
  // The calls and waits of a group across hosts, as `lockstep.comm.activity` reads them.
  module.def("publish_call", [](const std::string& op, int peer, uint64_t number, uint64_t count,
                                const std::string& group) {
    publish_call(op.c_str(), peer, number, count, group, Clock::now());
  });
  module.def("publish_microbatch", &publish_microbatch, py::arg("step"), py::arg("microbatch"));
  module.def(
      "begin_wait",
      [](const std::string& what, int awaited) { begin_wait(what, Clock::now(), awaited); },
      py::arg("what"), py::arg("awaited") = kNotSaid);
  module.def("end_wait", [] { end_wait(); });
  module.def("load", &load_word, py::arg("tensor"), py::arg("index"));
  module.def("store", &store_word, py::arg("tensor"), py::arg("index"), py::arg("value"));
  module.def("compare_exchange", &compare_exchange, py::arg("tensor"), py::arg("index"),
             py::arg("expected"), py::arg("desired"));
  module.def("create", &create, py::arg("store"), py::arg("rank"), py::arg("size"),
             py::arg("timeout"), py::arg("name"), py::arg("ranks"),
             py::call_guard<py::gil_scoped_release>());
  // The first touch of new memory takes seconds per gigabyte: let other threads run.
  module.def("empty", &empty, py::arg("sizes"), py::arg("dtype"),
             py::call_guard<py::gil_scoped_release>());
  module.def("add_packed", &add_packed_nodes, py::arg("bucket"), py::arg("messages"),
             py::arg("result"), py::arg("present"));
  module.def("is_shared", &is_shared, py::arg("tensor"));
  module.def("heap_bytes", [] { return Heap::instance().used_bytes(); });
  module.def("kernels", [] { return std::string(kernels().name); });
  module.def("use_portable_kernels", &use_portable_kernels, py::arg("enabled"),
             py::arg("kernels") = "");
  module.def("take_unportable", &take_unportable);
  module.def("take_bfloat16", &take_bfloat16);
  module.def("set_activity_page", &set_activity_page, py::arg("address"));
  module.def(
      "set_error_types",
      [](py::object argument, py::object backend, py::object lost) {
        set_error_types(argument.release().ptr(), backend.release().ptr(), lost.release().ptr());
      },
      py::arg("argument"), py::arg("backend"), py::arg("lost"));
  module.def("set_refusal", &set_refusal, py::arg("reason"));
  module.def("set_where", [](py::object function) { locate_function = function.release().ptr(); });
  module.def("set_connect_gloo",
             [](py::object function) { connect_function = function.release().ptr(); });
}
