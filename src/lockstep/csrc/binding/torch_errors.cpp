#include "torch_errors.h"

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace lockstep {

static PyObject* argument_error = nullptr;
static PyObject* backend_error = nullptr;
static PyObject* lost_error = nullptr;

void set_error_types(PyObject* argument, PyObject* backend, PyObject* lost) {
  argument_error = argument;
  backend_error = backend;
  lost_error = lost;
}

static const char* const loss_names[] = {"", "ended", "left", "unopened", "closed"};

const char* loss_name(Loss loss) {
  const auto index = static_cast<size_t>(loss);
  return index < std::size(loss_names) ? loss_names[index] : "";
}

Loss loss_of(const std::string& name) {
  for (size_t index = 0; index < std::size(loss_names); ++index)
    if (name == loss_names[index]) return static_cast<Loss>(index);
  throw_argument_error("nothing observed of a lost rank is called " + name);
}

PyObject* TorchError::python_type() {
  PyObject* const type = failure.loss == Loss::none ? backend_error : lost_error;
  return type ? type : PyExc_RuntimeError;
}

void TorchError::raise_in_python() const {
  auto* const type = const_cast<TorchError*>(this)->python_type();
  py::object error = py::reinterpret_borrow<py::object>(type)(what());
  error.attr("operation") = operation;
  error.attr("reason") = failure.text();
  error.attr("hint") = failure.hint;
  if (failure.loss != Loss::none) {
    error.attr("observed") = loss_name(failure.loss);
    if (failure.rank >= 0) error.attr("rank") = failure.rank;
  }
  PyErr_SetObject(type, error.ptr());
}

void throw_argument_error(const std::string& message) {
  py::gil_scoped_acquire lock;
  PyErr_SetString(argument_error ? argument_error : PyExc_ValueError, message.c_str());
  throw py::error_already_set();
}

std::exception_ptr to_torch_error() {
  try {
    throw;
  } catch (const CommError& error) {
    return std::make_exception_ptr(TorchError(error));
  } catch (const UsageError& error) {
    try {
      throw_argument_error(error.what());
    } catch (...) {
      return std::current_exception();
    }
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace lockstep
