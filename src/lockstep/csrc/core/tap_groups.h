// Which elements of a kernel, its taps, positions need: positions of the result of a convolution,
// or pixels of the gradient of its input. Those that need the same taps form a group.
#pragma once

#include <cstdint>
#include <vector>

#include "direct_convolution.h"
#include "unfolding.h"

namespace lockstep {

class TapGroups {
 public:
  // The positions from `first` to `end` of `vectors` vectors of images, each of `lanes` elements.
  // The sums of a vector are stored one after another; its planes begin `distance` elements after
  // those of the one before.
  TapGroups(const ConvolutionShape& shape, bool of_input, int64_t first, int64_t end, int64_t lanes,
            int64_t vectors, int64_t distance);
  TapGroups(TapGroups&&) = default;

  int64_t first, end;
  std::vector<TapGroup> groups;

 private:
  std::vector<std::vector<int32_t>> taps_;
  std::vector<std::vector<int64_t>> offsets_;
  std::vector<std::vector<Place>> places_;
};

}  // namespace lockstep
