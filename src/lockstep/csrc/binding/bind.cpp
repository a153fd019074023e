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
#include "gradient_places.h"
#include "microbatch.h"
#include "python_host_calls.h"
#include "torch_errors.h"
#include "tree_reduce.h"

namespace py = pybind11;

namespace lockstep {

static PyObject* locate_function = nullptr;  // set once, never freed: threads may use it late

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

static c10::intrusive_ptr<LockstepBackend> create(const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank, int size,
                                                  std::chrono::milliseconds timeout,
                                                  std::string name, std::vector<int> ranks) {
  return c10::make_intrusive<LockstepBackend>(store, rank, size, timeout, std::move(name),
                                              std::move(ranks), &locate_thread, &poll_signals);
}

static c10::intrusive_ptr<HostsBackend> create_across_hosts(py::object calls, int rank, int size,
                                                            std::chrono::milliseconds timeout,
                                                            std::string name,
                                                            std::vector<int> ranks) {
  auto host_calls = std::make_shared<PythonHostCalls>(
      std::move(calls), rank, size, CollectiveBackend::shown_name(name), ranks, &poll_signals);
  return c10::make_intrusive<HostsBackend>(rank, size, timeout, name, ranks, std::move(host_calls));
}

static c10::intrusive_ptr<HostMessageWork> create_message(
    const std::string& op, const at::Tensor& tensor, std::chrono::milliseconds timeout,
    py::function interrupt, py::function fail_late, std::shared_ptr<CallbackPool> callbacks) {
  // Both are called from threads without the interpreter's lock, and freed by them.
  const auto guarded = [](py::function function) {
    return std::shared_ptr<py::function>(new py::function(std::move(function)), [](auto* held) {
      if (!Py_IsInitialized()) return;
      py::gil_scoped_acquire lock;
      delete held;
    });
  };
  auto poll = [interrupt = guarded(std::move(interrupt))] {
    try {
      poll_signals();
    } catch (py::error_already_set&) {
      py::gil_scoped_acquire lock;
      (*interrupt)();
      throw;
    }
  };
  auto fail = [fail_late = guarded(std::move(fail_late))] {
    py::gil_scoped_acquire lock;
    (*fail_late)();
  };
  const auto type = op == "send"   ? c10d::OpType::SEND
                    : op == "recv" ? c10d::OpType::RECV
                                   : c10d::OpType::RECVANYSOURCE;
  return c10::make_intrusive<HostMessageWork>(type, tensor, timeout, std::move(poll),
                                              std::move(fail), std::move(callbacks));
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

// Combines the nodes of a tree, as the collective calls do, into `result`.
//
// `inputs` are vectors with the values of `nodes`, which together cover all leaves; nodes that
// are not `present` (an empty list: all are) are left out. Inputs and the result have the dtype
// `dtype`, or float32 where they are nodes of 16-bit floats that are not rounded yet. Returns
// whether any node is present; the result is not changed otherwise.
static bool combine_nodes(const Tensors& inputs, const std::vector<std::pair<int, int>>& nodes,
                          int leaves, const std::vector<bool>& present, at::ScalarType dtype,
                          int reduction, bool round_each, double divisor,
                          const std::vector<double>& factors, const at::Tensor& result) {
  const char* op = "combine";
  ReductionSpec spec{data_type_of(dtype), static_cast<Reduction>(reduction), round_each, divisor,
                     factors};
  CHECK_ARGUMENT(
      reduction >= 0 && reduction < kReductions && is_supported(spec.reduction, spec.type), op,
      ": the reduction is not defined for ", dtype_name(static_cast<int>(dtype)));
  CHECK_ARGUMENT(inputs.size() == nodes.size() &&
                     (present.empty() || present.size() == nodes.size()) &&
                     (factors.empty() || factors.size() == nodes.size()),
                 op, ": a node needs an input, a flag and a factor");
  const bool has_wide = is_half(spec.type) && !round_each;
  const auto check = [&](const at::Tensor& tensor) {
    check_tensor(op, tensor);
    const at::ScalarType type = tensor.scalar_type();
    CHECK_ARGUMENT(is_plain(tensor) && tensor.numel() == result.numel() &&
                       (type == dtype || (has_wide && type == at::kFloat)),
                   op, ": inputs and the result must be contiguous and alike");
    return type != dtype;
  };
  spec.wide_result = check(result);
  CHECK_ARGUMENT(!spec.wide_result || divisor == 1, op, ": a node is not divided");
  std::vector<const char*> values;
  for (const at::Tensor& input : inputs) {
    spec.wide_inputs.push_back(check(input));
    values.push_back(static_cast<const char*>(input.data_ptr()));
  }
  std::vector<int> steps;
  try {
    steps = tree_steps(nodes, leaves, present);
  } catch (...) {
    std::rethrow_exception(to_torch_error());
  }
  if (steps.empty()) return false;
  if (result.numel())
    TreeReducer(std::move(steps), std::move(spec))
        .run(values, {static_cast<char*>(result.data_ptr())}, static_cast<size_t>(result.numel()));
  return true;
}

static WorkPtr all_reduce_across_hosts(HostsBackend& backend, const at::Tensor& result,
                                       py::object function) {
  // The last reference may go in a thread without the interpreter's lock.
  std::shared_ptr<py::object> held(new py::object(std::move(function)), [](py::object* object) {
    py::gil_scoped_acquire lock;
    delete object;
  });
  py::gil_scoped_release release;
  return backend.reproducible_all_reduce(result, [held = std::move(held)](Executor& executor) {
    static_cast<PythonExecutor&>(executor).reproducible_all_reduce(*held);
  });
}

static Bucket make_bucket(at::ScalarType dtype, size_t length,
                          std::vector<std::pair<size_t, size_t>> members,
                          std::vector<std::vector<std::pair<int, int>>> holders, int leaves,
                          double divisor, std::vector<size_t> cuts, bool scatter) {
  return {data_type_of(dtype), length, std::move(members), std::move(holders), leaves, divisor,
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
  py::class_<Bucket>(module, "Bucket")
      .def(py::init(&make_bucket), py::arg("dtype"), py::arg("length"), py::arg("members"),
           py::arg("holders"), py::arg("leaves"), py::arg("divisor") = 1.0,
           py::arg("cuts") = std::vector<size_t>(), py::arg("scatter") = false)
      .def_property_readonly("digest", &digest_of);
  py::class_<LockstepBackend, c10d::Backend, c10::intrusive_ptr<LockstepBackend>>(module,
                                                                                  "LockstepBackend")
      .def("reproducible_all_reduce", &LockstepBackend::reproducible_all_reduce, py::arg("bucket"),
           py::arg("packed"), py::arg("result"), py::arg("present"), py::arg("own") = std::nullopt,
           py::arg("in_steps") = false, py::call_guard<py::gil_scoped_release>())
      .def("all_gather_bytes", &gather_bytes, py::arg("message"))
      .def_property_readonly("longest_message", &LockstepBackend::longest_message)
      .def("advance", &LockstepBackend::advance, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("options", &LockstepBackend::getBackendOptions)
      .def("_abort_because", &LockstepBackend::abort_because, py::arg("reason"),
           py::call_guard<py::gil_scoped_release>())
      .def("_is_aborted",
           [](LockstepBackend& backend) { return backend.getError() != c10d::ErrorType::SUCCESS; })
      // As ProcessGroupGloo has it; applies to the calls that follow.
      .def("_set_default_timeout", &LockstepBackend::setTimeout, py::arg("timeout"),
           py::call_guard<py::gil_scoped_release>())
      .def("share", &LockstepBackend::share, py::arg("bytes"),
           py::call_guard<py::gil_scoped_release>())
      .def("map_peer", &LockstepBackend::map_peer, py::arg("handle"), py::arg("bytes"),
           py::call_guard<py::gil_scoped_release>());
  py::class_<HostCallInfo>(module, "HostCallInfo")
      .def_property_readonly("op", &HostCallInfo::op)
      .def_property_readonly("reduction", &HostCallInfo::reduction)
      .def_property_readonly("dtype", &HostCallInfo::dtype)
      .def_property_readonly("root", [](const HostCallInfo& call) { return call.info.root; })
      .def_property_readonly("count", [](const HostCallInfo& call) { return call.info.count; })
      .def_property_readonly("factor", [](const HostCallInfo& call) { return call.info.factor; })
      .def_property_readonly("is_uneven",
                             [](const HostCallInfo& call) { return call.info.uneven != 0; })
      .def_readonly("number", &HostCallInfo::number)
      .def_readonly("timeout", &HostCallInfo::timeout)
      .def_readonly("caller", &HostCallInfo::caller);
  py::class_<HostsBackend, c10d::Backend, c10::intrusive_ptr<HostsBackend>>(module, "HostsBackend")
      .def("reproducible_all_reduce", &all_reduce_across_hosts, py::arg("result"),
           py::arg("function"))
      .def_property_readonly("options", &HostsBackend::getBackendOptions)
      // The Python object that makes the calls; None after `shutdown`.
      .def_property_readonly("calls",
                             [](const HostsBackend& backend) -> py::object {
                               const auto* calls =
                                   dynamic_cast<PythonHostCalls*>(backend.host_calls().get());
                               return calls ? calls->object() : py::none();
                             })
      .def("_set_default_timeout", &HostsBackend::setTimeout, py::arg("timeout"),
           py::call_guard<py::gil_scoped_release>());
  py::class_<MessageWork, c10d::Work, c10::intrusive_ptr<MessageWork>>(module, "MessageWork")
      .def("cancel", &MessageWork::cancel, py::call_guard<py::gil_scoped_release>());
  py::class_<CallbackPool, std::shared_ptr<CallbackPool>>(module, "CallbackPool")
      .def(py::init<>())
      .def("stop", &CallbackPool::stop, py::call_guard<py::gil_scoped_release>());
  py::class_<HostMessageWork, c10d::Work, c10::intrusive_ptr<HostMessageWork>>(module,
                                                                               "HostMessageWork")
      .def(py::init(&create_message), py::arg("op"), py::arg("tensor"), py::arg("timeout"),
           py::arg("interrupt"), py::arg("fail_late"), py::arg("callbacks"))
      .def_property_readonly("buffer", &HostMessageWork::buffer)
      .def("finish", &HostMessageWork::finish, py::arg("source"), py::arg("error") = "",
           py::call_guard<py::gil_scoped_release>());
  module.def("create_across_hosts", &create_across_hosts, py::arg("calls"), py::arg("rank"),
             py::arg("size"), py::arg("timeout"), py::arg("name"), py::arg("ranks"));
  py::class_<UnitSeeder>(module, "UnitSeeder")
      .def(py::init<std::vector<int64_t>>(), py::arg("units"))
      .def("seed", &UnitSeeder::seed, py::arg("prefix"), py::arg("unit"), py::arg("call") = 0)
      .def("seed_python", &UnitSeeder::seed_python, py::arg("address"))
      .def("seed_numpy", &UnitSeeder::seed_numpy, py::arg("address"));
  module.def("accumulate_gradients", &accumulate_gradients, py::arg("parameters"),
             py::arg("siblings"), py::arg("outs"), py::call_guard<py::gil_scoped_release>());
  module.def("compute_norms", &compute_norms, py::arg("gradients"),
             py::call_guard<py::gil_scoped_release>());
  py::class_<GradientPlaces>(module, "GradientPlaces")
      .def(py::init<std::vector<std::optional<at::Tensor>>>(), py::arg("places"))
      .def("begin", &GradientPlaces::begin)
      .def("end", &GradientPlaces::end)
      .def("note", &GradientPlaces::note, py::arg("parameter"), py::arg("gradient"))
      .def("is_taken", &GradientPlaces::is_taken, py::arg("parameter"), py::arg("value"));
  // The wait of a thread of Python, as `lockstep.comm.activity` reads it.
  module.def("begin_wait", [](const std::string& what) { begin_wait(what, Clock::now()); });
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
  module.def("combine", &combine_nodes, py::arg("inputs"), py::arg("nodes"), py::arg("leaves"),
             py::arg("present"), py::arg("dtype"), py::arg("reduction"), py::arg("round_each"),
             py::arg("divisor"), py::arg("factors"), py::arg("result"),
             py::call_guard<py::gil_scoped_release>());
  module.def("is_shared", &is_shared, py::arg("tensor"));
  module.def("handle_of", &handle_of, py::arg("tensor"));
  module.def("heap_bytes", [] { return Heap::instance().used_bytes(); });
  module.def("kernels", [] { return std::string(kernels().name); });
  module.def("set_activity_page", &set_activity_page, py::arg("address"));
  module.def("set_argument_error",
             [](py::object type) { set_argument_error(type.release().ptr()); });
  module.def("set_refusal", &set_refusal, py::arg("reason"));
  module.def("set_where", [](py::object function) { locate_function = function.release().ptr(); });
}
