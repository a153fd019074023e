// Lets autograd create gradients where they are added: in a bucket in shared memory.
//
// torch has no option for the memory of a gradient. But a backward pass of the same model makes
// the same allocations in the same order:
//
//     a pass that is watched   the third allocation of 16 MiB became the gradient of w
//     the passes after it      the third allocation of 16 MiB gets the place of w
//
// So torch's allocator of CPU memory is wrapped. Only allocations of the thread between `begin`
// and `end`, of the size of a large gradient, are looked at. If a model makes other allocations
// than before, a place may hold another tensor than its gradient: `is_taken` detects it.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace lockstep {

class GradientPlaces {
 public:
  // `places`: for each parameter a contiguous tensor, in which its gradient should be created.
  explicit GradientPlaces(std::vector<std::optional<at::Tensor>> places);
  ~GradientPlaces();

  // Between the two calls, allocations of this thread get the places.
  void begin();
  void end();

  // Remembers which allocation of this pass is the memory of a gradient, for the next pass, and
  // gives the place of the parameter to no allocation that follows in this pass.
  void note(size_t parameter, const at::Tensor& gradient);

  // Returns whether the place holds another tensor than `value`, or other tensors share the memory
  // of `value` in the place: the place must not be written then.
  bool is_taken(size_t parameter, const std::optional<at::Tensor>& value) const;

 private:
  class Allocator;
  using Allocation = std::pair<size_t, size_t>;  // its bytes, and its number among those

  c10::DataPtr allocate(size_t bytes, c10::Allocator& usual);

  std::vector<std::optional<at::Tensor>> places_;
  std::map<Allocation, size_t> learned_;                 // the parameters whose gradients they are
  std::unordered_map<size_t, Allocation> allocations_;   // the same by parameter
  std::unordered_map<size_t, size_t> counts_;            // this pass: allocations by bytes
  std::unordered_map<const void*, Allocation> by_data_;  // this pass: the last one at an address
  std::vector<bool> is_closed_;                          // this pass
};

}  // namespace lockstep
