// Errors as exceptions that torch passes on to Python.
//
//     CommError       DistBackendError, a RuntimeError
//     UsageError      ArgumentError (lockstep.comm.backend): a ValueError and a RuntimeError,
//                     because torch's own backends raise RuntimeError for invalid arguments
#pragma once

#include <Python.h>
#include <c10/util/StringUtil.h>

#include <exception>
#include <string>

namespace lockstep {

// Converts the current exception, if it is an error of the core, to one that torch passes on.
// For use in a catch block.
std::exception_ptr to_torch_error();

// Throws the Python exception for invalid arguments. Takes the interpreter's lock.
[[noreturn]] void throw_argument_error(const std::string& message);
void set_argument_error(PyObject* type);  // ValueError until it is set; never freed

}  // namespace lockstep

#define CHECK_ARGUMENT(condition, ...)                                         \
  do {                                                                         \
    if (!(condition)) ::lockstep::throw_argument_error(c10::str(__VA_ARGS__)); \
  } while (false)
