// The errors of the core. Each message is one sentence for the person who runs the
// program; the torch layer turns these into Python exceptions (work.h).
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace lockstep {

// What was observed of a rank that is lost.
enum class Loss : uint32_t {
  none,      // no rank is lost
  ended,     // its process has ended
  left,      // it has left the group
  unopened,  // memory that it had published cannot be opened any longer
  closed,    // it has closed its connection: of groups across hosts
};

// Why a call fails, or why a group was aborted.
struct Failure {
  Failure(std::string reason = "", Loss loss = Loss::none, int rank = -1, std::string hint = "")
      : reason(std::move(reason)), loss(loss), rank(rank), hint(std::move(hint)) {}
  std::string text() const { return reason + hint; }

  std::string reason;
  Loss loss;
  int rank;          // the lost one, in the world; -1: unknown
  std::string hint;  // what else may explain it, for the end of the message
};

// The call failed, and usually the group with it: a dead rank, a timeout.
struct CommError : std::runtime_error {
  explicit CommError(const std::string& message) : CommError(message, Failure(message)) {}
  // `operation` is the call that failed, such as "barrier #3".
  CommError(const std::string& message, Failure failure, std::string operation = "")
      : std::runtime_error(message), failure(std::move(failure)), operation(std::move(operation)) {}

  Failure failure;
  std::string operation;
};

// The memory of another process cannot be opened or is no longer there.
struct UnopenedError : CommError {
  using CommError::CommError;
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
