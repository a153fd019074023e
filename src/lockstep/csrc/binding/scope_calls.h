// What a step does around each call of a scope of the model, without a frame of Python: as the
// functions of `lockstep.kernel.rng_scopes` and `lockstep.model.call_interception` do it.
//
//     module(inputs) ──> make_module_call: before()   make_scope_hook: seeds the scope
//                                          module._call_impl(inputs)
//                                          after()    make_scope_hook: seeds what follows it
#pragma once

#include <pybind11/pybind11.h>

namespace lockstep {

// Returns a function that calls `before`, the module and `after`; None for nothing.
pybind11::object make_module_call(pybind11::object module, pybind11::object before,
                                  pybind11::object after);

// Returns a function that seeds a scope at its first call in a micro-batch, with call number
// `call`, and calls `again` for the others; if `call` is None, one that seeds what follows the
// model with the number of the last call of the first scope.
//
// `seeder` is a `ScopeSeeder`, and `scopes` has the calls of the micro-batch as `_now`.
pybind11::object make_scope_hook(pybind11::object seeder, pybind11::object scopes,
                                 pybind11::object again, pybind11::object scope,
                                 pybind11::object call);

}  // namespace lockstep
