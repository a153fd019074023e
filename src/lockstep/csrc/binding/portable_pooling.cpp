// max_pool2d_with_indices, whose bits are torch's: torch's kernel compares one number at a time,
// and took 4% of the step of a ResNet-18.
#include <ATen/CPUFunctions.h>
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <vector>

#include "portable_kernels.h"

namespace lockstep {
namespace pooling {

using at::IntArrayRef;
using at::Tensor;

struct Window {
  int64_t size, stride, padding, dilation;
  int64_t pixels, results;  // along this dimension

  // The first result for which element i of the window is on the image, and the end.
  int64_t first(int64_t i) const {
    const int64_t missing = padding - i * dilation;
    return missing > 0 ? std::min((missing + stride - 1) / stride, results) : 0;
  }
  int64_t end(int64_t i) const {
    const int64_t room = pixels - 1 + padding - i * dilation;
    return room < 0 ? first(i) : std::clamp(room / stride + 1, first(i), results);
  }
  int64_t source(int64_t result, int64_t i) const {
    return result * stride - padding + i * dilation;
  }
  // The first pixel of a result.
  int64_t begin(int64_t result) const {
    const int64_t missing = padding - result * stride;
    return missing > 0 ? source(result, (missing + dilation - 1) / dilation) : source(result, 0);
  }
};

// Returns the window along a dimension, or none if torch has to do it: also for wrong arguments.
static std::optional<Window> find_window(const Tensor& input, int64_t dimension, IntArrayRef size,
                                         IntArrayRef stride, IntArrayRef padding,
                                         IntArrayRef dilation) {
  const auto pick = [dimension](IntArrayRef values) {
    return values[values.size() == 1 ? 0 : static_cast<size_t>(dimension)];
  };
  for (const IntArrayRef values : {size, padding, dilation})
    if (values.size() != 1 && values.size() != 2) return std::nullopt;
  if (stride.size() > 2) return std::nullopt;
  Window window{pick(size),
                pick(stride.empty() ? size : stride),
                pick(padding),
                pick(dilation),
                input.size(dimension + 2),
                0};
  const int64_t room = window.pixels + 2 * window.padding - window.dilation * (window.size - 1) - 1;
  if (window.size < 1 || window.stride < 1 || window.dilation < 1 || window.padding < 0 ||
      2 * window.padding > window.size || room < 0)
    return std::nullopt;
  window.results = room / window.stride + 1;
  return window;
}

// The results in a row for which an element of the window is on the image, and what it is for the
// first of them.
struct Span {
  int64_t first, count, source;
};

static std::vector<Span> list_spans(const Window& columns) {
  std::vector<Span> spans;
  for (int64_t j = 0; j < columns.size; ++j) {
    const int64_t first = columns.first(j), count = columns.end(j) - first;
    if (count > 0) spans.push_back({first, count, columns.source(first, j)});
  }
  return spans;
}

// Compares one number of the window of each result of a row with the largest so far. NaN is the
// largest, and the last one counts.
template <int64_t kStride>
static void compare(const float* line, int64_t stride, int32_t number, int64_t count, float* values,
                    int32_t* indices) {
  const int64_t step = kStride ? kStride : stride;
  for (int64_t x = 0; x < count; ++x) {
    const float value = line[x * step];
    const bool is_larger = (value > values[x]) | (value != value);
    values[x] = is_larger ? value : values[x];
    indices[x] = is_larger ? number + static_cast<int32_t>(x * step) : indices[x];
  }
}

// `begins`: the column of the first pixel of each result in a row.
static void pool_plane(const Window& rows, const Window& columns, const std::vector<Span>& spans,
                       const std::vector<int32_t>& begins, const float* plane, float* values,
                       int64_t* results, int32_t* indices) {
  const auto compare_all = columns.stride == 1   ? compare<1>
                           : columns.stride == 2 ? compare<2>
                                                 : compare<0>;
  for (int64_t row = 0; row < rows.results; ++row) {
    std::fill_n(values, columns.results, -std::numeric_limits<float>::infinity());
    const auto begin = static_cast<int32_t>(rows.begin(row) * columns.pixels);
    for (size_t x = 0; x < begins.size(); ++x) indices[x] = begin + begins[x];
    for (int64_t i = 0; i < rows.size; ++i) {
      const int64_t source = rows.source(row, i);
      if (source < 0 || source >= rows.pixels) continue;
      for (const Span& span : spans) {
        const int64_t number = source * columns.pixels + span.source;
        compare_all(plane + number, columns.stride, static_cast<int32_t>(number), span.count,
                    values + span.first, indices + span.first);
      }
    }
    for (int64_t x = 0; x < columns.results; ++x) results[x] = indices[x];
    values += columns.results, results += columns.results;
  }
}

static std::tuple<Tensor, Tensor> max_pool2d_with_indices(const Tensor& input, IntArrayRef size,
                                                          IntArrayRef stride, IntArrayRef padding,
                                                          IntArrayRef dilation, bool ceil_mode) {
  const bool is_plain = input.scalar_type() == at::kFloat && input.dim() == 4 &&
                        input.numel() > 0 && input.is_contiguous() && !input.is_neg() &&
                        input.suggest_memory_format() == at::MemoryFormat::Contiguous;
  std::array<std::optional<Window>, 2> windows;
  for (int64_t i = 0; is_plain && !ceil_mode && i < 2; ++i)
    windows[static_cast<size_t>(i)] = find_window(input, i, size, stride, padding, dilation);
  if (!windows[0] || !windows[1] ||
      input.size(2) * input.size(3) > std::numeric_limits<int32_t>::max())
    return at::cpu::max_pool2d_with_indices(input, size, stride, padding, dilation, ceil_mode);
  const auto [rows, columns] = std::pair(*windows[0], *windows[1]);
  const std::array<int64_t, 4> shape = {input.size(0), input.size(1), rows.results,
                                        columns.results};
  Tensor values = at::detail::empty_cpu(shape, input.options());
  Tensor indices = at::detail::empty_cpu(shape, input.options().dtype(at::kLong));
  const auto* from = input.const_data_ptr<float>();
  auto* to = values.mutable_data_ptr<float>();
  auto* numbers = indices.mutable_data_ptr<int64_t>();
  const int64_t pixels = rows.pixels * columns.pixels, results = rows.results * columns.results;
  const int64_t work = std::max<int64_t>(1, results * rows.size * columns.size);
  const std::vector<Span> spans = list_spans(columns);
  std::vector<int32_t> begins;
  for (int64_t x = 0; x < columns.results; ++x)
    begins.push_back(static_cast<int32_t>(columns.begin(x)));
  run_parallel(shape[0] * shape[1], std::max<int64_t>(1, kParallelWork / work),
               [&, &rows = rows, &columns = columns](int64_t plane) {
                 std::vector<int32_t> row(static_cast<size_t>(columns.results));
                 pool_plane(rows, columns, spans, begins, from + plane * pixels,
                            to + plane * results, numbers + plane * results, row.data());
               });
  return {values, indices};
}

}  // namespace pooling

void register_pooling(torch::Library& library) {
  library.impl("max_pool2d_with_indices", &pooling::max_pool2d_with_indices);
}

}  // namespace lockstep
