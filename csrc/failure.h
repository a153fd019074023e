// What can go wrong in the core. Every text is one sentence for the person who
// runs the program; the torch layer turns these into Python exceptions.
#pragma once

#include <stdexcept>
#include <string>

namespace lockstep {

// The group cannot go on, or this call cannot: a dead rank, a deadline, a disagreement.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// This call cannot work. All ranks know and throw, and the group can go on.
struct Refusal : Failure {
  using Failure::Failure;
};

// The same, because the ranks called different things.
struct Disagreement : Refusal {
  using Refusal::Refusal;
};

// The caller asked for something that cannot work; the group is untouched.
struct Misuse : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

}  // namespace lockstep
