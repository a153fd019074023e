#include "scope_calls.h"

#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/graph_task.h>

#include "microbatch.h"

namespace py = pybind11;

namespace lockstep {
namespace {

// Objects that stay until the process ends.
PyObject* interned(const char* text) { return PyUnicode_InternFromString(text); }

py::object get(py::handle object, PyObject* name) {
  PyObject* value = PyObject_GetAttr(object.ptr(), name);
  if (!value) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

// Returns a function whose first argument is `parts`.
py::object make_function(PyMethodDef& definition, const py::tuple& parts) {
  PyObject* function = PyCFunction_New(&definition, parts.ptr());
  if (!function) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(function);
}

bool call_hook(PyObject* hook) {
  if (hook == Py_None) return true;
  PyObject* result = PyObject_CallNoArgs(hook);
  Py_XDECREF(result);
  return result;
}

PyObject* call_module(PyObject* parts, PyObject* const* arguments, Py_ssize_t count,
                      PyObject* names) {
  static PyObject* const call = interned("_call_impl");
  if (!call_hook(PyTuple_GET_ITEM(parts, 1))) return nullptr;
  c10::SmallVector<PyObject*, 8> all{PyTuple_GET_ITEM(parts, 0)};
  all.append(arguments, arguments + count + (names ? PyTuple_GET_SIZE(names) : 0));
  PyObject* output =
      PyObject_VectorcallMethod(call, all.data(), static_cast<size_t>(count) + 1, names);
  if (output && !call_hook(PyTuple_GET_ITEM(parts, 2))) Py_CLEAR(output);
  return output;
}

PyObject* seed_scope(PyObject* parts, PyObject*) {
  HANDLE_TH_ERRORS
  static PyObject *const now_name = interned("_now"), *const last_name = interned("last"),
                         *const states_name = interned("states"),
                         *const prefix_name = interned("prefix"),
                         *const several_name = interned("several");
  static PyObject* const no_state = PyBytes_FromString("");
  const py::object calls = get(PyTuple_GET_ITEM(parts, 1), now_name);
  if (calls.is_none()) Py_RETURN_NONE;
  if (!get(calls, several_name).is_none()) return PyObject_CallNoArgs(PyTuple_GET_ITEM(parts, 2));
  PyObject *scope = PyTuple_GET_ITEM(parts, 3), *given = PyTuple_GET_ITEM(parts, 4);
  const bool is_loss = given == Py_None;
  const int64_t number = PyLong_AsLongLong(scope);
  if (!is_loss) {
    const py::object states = get(calls, states_name);
    if (PyDict_GetItem(states.ptr(), scope) || torch::autograd::get_current_graph_task_id() != -1)
      return PyObject_CallNoArgs(PyTuple_GET_ITEM(parts, 2));
    py::list first(1);
    first[0] = py::handle(no_state);
    if (PyDict_SetItem(states.ptr(), scope, first.ptr()) < 0) return nullptr;
    if (number == 0 && PyObject_SetAttr(calls.ptr(), last_name, given) < 0) return nullptr;
  }
  const int64_t call =
      (is_loss ? get(calls, last_name) : py::reinterpret_borrow<py::object>(given)).cast<int64_t>();
  const py::bytes prefix = get(calls, prefix_name);
  auto& seeder = py::handle(PyTuple_GET_ITEM(parts, 0)).cast<ScopeSeeder&>();
  seeder.seed(static_cast<std::string_view>(prefix), number, call);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace

py::object make_module_call(py::object module, py::object before, py::object after) {
  static PyMethodDef definition{
      "call_module", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_module)),
      METH_FASTCALL | METH_KEYWORDS, nullptr};
  return make_function(definition, py::make_tuple(module, before, after));
}

py::object make_scope_hook(py::object seeder, py::object scopes, py::object again, py::object scope,
                           py::object call) {
  static PyMethodDef definition{"seed_scope", &seed_scope, METH_NOARGS, nullptr};
  return make_function(definition, py::make_tuple(seeder, scopes, again, scope, call));
}

}  // namespace lockstep
