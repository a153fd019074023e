// Whether an operator treats the rows of micro-batches separately, also for other values than those
// of a step, which may be alike: a sum over samples of zeros has the rows that it should have.
#pragma once

#include "call_tensors.h"

namespace lockstep {

// Calls an operator with random numbers in the place of the floats among its arguments, and for
// those of the first and of the last micro-batch; returns false if the rows of the results have
// other bits. If it has only integers, they become 0 and 1. True if it cannot be called like this,
// and for operators that compute each element by itself or belong to other libraries.
//
// `alone`: its arguments in the pass over the first micro-batch.
bool are_rows_free(const c10::OperatorHandle& op, const Stack& given, const CallArguments& alone);

}  // namespace lockstep
