// The errors of the core. Each message is one sentence for the person who runs the
// program; the torch layer turns these into Python exceptions (work.h).
#pragma once

#include <stdexcept>
#include <string>

namespace lockstep {

// The call failed, and usually the group with it: a dead rank, a timeout.
struct CommError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The call cannot succeed. All ranks know it and throw, and the group stays usable.
struct CallError : CommError {
  using CommError::CommError;
};

// The same, because the ranks made different calls.
struct MismatchError : CallError {
  using CallError::CallError;
};

// Invalid arguments; the group is not affected.
struct UsageError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

}  // namespace lockstep
