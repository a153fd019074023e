// Errors as exceptions that torch passes on to Python.
//
//     CommError       BackendError, a DistBackendError, and so a RuntimeError; PeerLostError if
//                     another rank is lost (lockstep.comm.backend_errors)
//     UsageError      ArgumentError (lockstep.comm.backend): a ValueError and a RuntimeError,
//                     because torch's own backends raise RuntimeError for invalid arguments
#pragma once

#include <Python.h>
#include <c10/util/StringUtil.h>

#include <torch/csrc/Exceptions.h>

#include <exception>
#include <string>

#include "errors.h"

namespace lockstep {

// A CommError on its way to Python. torch asks for its type where it raises it, with the
// interpreter's lock: the threads of the core never take that lock to make an exception.
struct TorchError : torch::PyTorchError {
  explicit TorchError(const CommError& error)
      : torch::PyTorchError(error.what()), failure(error.failure), operation(error.operation) {}
  PyObject* python_type() override;
  // Raises it in Python, with what is known about it. pybind11 calls this; other parts of torch
  // make an exception of the type from the message alone.
  void raise_in_python() const;

  Failure failure;
  std::string operation;
};

// Converts the current exception, if it is an error of the core, to one that torch passes on.
// For use in a catch block.
std::exception_ptr to_torch_error();

// Throws the Python exception for invalid arguments. Takes the interpreter's lock.
[[noreturn]] void throw_argument_error(const std::string& message);

// Sets the Python exceptions, which are never freed: `argument` for invalid arguments, `backend`
// for CommError, `lost` for the loss of a rank. Until then these are exceptions of Python.
void set_error_types(PyObject* argument, PyObject* backend, PyObject* lost);

// Returns the name that Python has for what was observed of a lost rank; "" for none.
const char* loss_name(Loss loss);
// Returns what has this name; throws the exception for invalid arguments if nothing has.
Loss loss_of(const std::string& name);

}  // namespace lockstep

#define CHECK_ARGUMENT(condition, ...)                                         \
  do {                                                                         \
    if (!(condition)) ::lockstep::throw_argument_error(c10::str(__VA_ARGS__)); \
  } while (false)
