// Whether an operator treats the rows of micro-batches separately, also for other values than those
// of a step, which may be alike: a sum over samples of zeros has the rows that it should have.
#pragma once

#include "call_tensors.h"

namespace lockstep {

// What is known of the rows of a tensor, instead of the number of turns by which they alternate.
constexpr int64_t kUnknownTurns = 0;
constexpr int64_t kAnyTurns = -1;    // all rows are equal, such as those of zeros
constexpr int64_t kMixedTurns = -2;  // some of them were written in another order

// How the rows of micro-batches follow each other in the results of an operator.
struct RowTurns {
  bool are_free = false;       // whether each micro-batch has the rows of a pass of its own
  std::vector<int64_t> turns;  // by which they alternate in each result
};

// Calls an operator with random numbers in the place of the floats among its arguments, and for
// those of the first and of the last micro-batch, and compares the rows of the results. If it has
// only integers, they become 0 and 1. Rows are free if it cannot be called like this; operators
// that compute each element by itself, or belong to other libraries, are not called. Rows that
// alternate in different ways are not free.
//
// `alone`: its arguments in the pass over the first micro-batch.
// `given_turns`: by how many turns the rows alternate in each tensor among the arguments.
RowTurns compare_rows(const c10::OperatorHandle& op, const Stack& given, const CallArguments& alone,
                      const std::vector<int64_t>& given_turns);

}  // namespace lockstep
