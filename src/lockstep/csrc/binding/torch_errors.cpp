#include "torch_errors.h"

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include "errors.h"

namespace lockstep {

static PyObject* argument_error = nullptr;

void set_argument_error(PyObject* type) { argument_error = type; }

void throw_argument_error(const std::string& message) {
  pybind11::gil_scoped_acquire lock;
  PyErr_SetString(argument_error ? argument_error : PyExc_ValueError, message.c_str());
  throw pybind11::error_already_set();
}

std::exception_ptr to_torch_error() {
  try {
    throw;
  } catch (const CommError& error) {
    try {
      C10_THROW_ERROR(DistBackendError, error.what());
    } catch (...) {
      return std::current_exception();
    }
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
