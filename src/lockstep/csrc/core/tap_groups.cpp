#include "tap_groups.h"

#include <algorithm>
#include <map>

namespace lockstep {
namespace {

// For one dimension: the taps that each position needs.
struct Axis {
  std::vector<std::vector<int64_t>> sources;  // by position and tap; -1 if it is not needed
  std::vector<int64_t> kinds;                 // equal for positions that need the same taps
  std::vector<int64_t> examples;              // a position by kind

  Axis(const ConvolutionShape& shape, int dimension, bool of_input) {
    const int64_t pixels = dimension ? shape.width : shape.height;
    const int64_t results = dimension ? shape.columns : shape.rows;
    const int64_t stride = shape.stride[dimension], padding = shape.padding[dimension];
    std::map<std::vector<bool>, int64_t> known;
    for (int64_t position = 0; position < (of_input ? pixels : results); ++position) {
      std::vector<int64_t> own;
      std::vector<bool> needed;
      for (int64_t tap = 0; tap < shape.kernel[dimension]; ++tap) {
        const int64_t shift = tap * shape.dilation[dimension];
        int64_t source = position * stride - padding + shift;
        bool is_needed = source >= 0 && source < pixels;
        if (of_input) {
          const int64_t scaled = position + padding - shift;
          source = scaled / stride;
          is_needed = scaled >= 0 && scaled % stride == 0 && source < results;
        }
        own.push_back(is_needed ? source : -1);
        needed.push_back(is_needed);
      }
      sources.push_back(std::move(own));
      const auto [entry, is_new] = known.emplace(needed, std::ssize(examples));
      if (is_new) examples.push_back(position);
      kinds.push_back(entry->second);
    }
  }

  // The first source of a position, or 0.
  int64_t base(int64_t position) const {
    for (const int64_t source : sources[static_cast<size_t>(position)])
      if (source >= 0) return source;
    return 0;
  }
};

}  // namespace

TapGroups::TapGroups(const ConvolutionShape& shape, bool of_input, int64_t first_, int64_t end_,
                     int64_t lanes, int64_t vectors, int64_t distance)
    : first(first_), end(end_) {
  const Axis rows(shape, 0, of_input), columns(shape, 1, of_input);
  const int64_t width = of_input ? shape.width : shape.columns;
  const int64_t pitch = of_input ? shape.columns : shape.width;
  const int64_t kinds = std::ssize(columns.examples);
  places_.resize(rows.examples.size() * columns.examples.size());
  for (int64_t position = first; position < end; ++position) {
    const int64_t row = position / width, column = position % width;
    const int64_t kind =
        rows.kinds[static_cast<size_t>(row)] * kinds + columns.kinds[static_cast<size_t>(column)];
    const int64_t base = (rows.base(row) * pitch + columns.base(column)) * lanes;
    for (int64_t i = 0; i < vectors; ++i)
      places_[static_cast<size_t>(kind)].push_back(
          {(i * (end - first) + position - first) * lanes, i * distance + base});
  }
  taps_.resize(places_.size());
  offsets_.resize(places_.size());
  for (size_t kind = 0; kind < places_.size(); ++kind) {
    if (places_[kind].empty()) continue;
    const int64_t row = rows.examples[kind / columns.examples.size()];
    const int64_t column = columns.examples[kind % columns.examples.size()];
    for (int64_t i = 0; i < shape.kernel[0]; ++i)
      for (int64_t j = 0; j < shape.kernel[1]; ++j) {
        const int64_t line = rows.sources[static_cast<size_t>(row)][static_cast<size_t>(i)];
        const int64_t place = columns.sources[static_cast<size_t>(column)][static_cast<size_t>(j)];
        if (line < 0 || place < 0) continue;
        taps_[kind].push_back(static_cast<int32_t>(i * shape.kernel[1] + j));
        offsets_[kind].push_back(((line - rows.base(row)) * pitch + place - columns.base(column)) *
                                 lanes);
      }
    groups.push_back({taps_[kind].data(), offsets_[kind].data(), std::ssize(taps_[kind]),
                      places_[kind].data(), std::ssize(places_[kind])});
  }
}

}  // namespace lockstep
