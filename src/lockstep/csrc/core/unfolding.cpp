#include "unfolding.h"

#include <algorithm>

namespace lockstep {

bool ConvolutionShape::is_pointwise() const {
  return taps() == 1 && stride[0] == 1 && stride[1] == 1 && padding[0] == 0 && padding[1] == 0;
}

Tap::Tap(const ConvolutionShape& shape, int64_t i, int64_t j, int64_t from, int64_t to)
    : stride(shape.stride[1]), offset(j * shape.dilation[1] - shape.padding[1]) {
  const auto limit = [](int64_t& low, int64_t& high, int64_t step, int64_t shift, int64_t length) {
    low = std::clamp(shift >= 0 ? 0 : (-shift + step - 1) / step, low, high);
    high = shift >= length ? low : std::clamp((length - 1 - shift) / step + 1, low, high);
  };
  first = 0, end = shape.columns, first_row = from, end_row = to;
  limit(first, end, stride, offset, shape.width);
  const int64_t shift = i * shape.dilation[0] - shape.padding[0];
  limit(first_row, end_row, shape.stride[0], shift, shape.height);
  line = first_row * shape.stride[0] + shift;
}

namespace {

// Whether the rows of the matrix are planes of the image, shifted: they are moved at once then,
// except for the columns that are beyond an edge.
bool is_shifted(const ConvolutionShape& shape) {
  return shape.stride[0] == 1 && shape.stride[1] == 1 && shape.columns == shape.width;
}

template <typename T>
void clear_edges(const Tap& tap, int64_t columns, T* rows) {
  for (int64_t row = tap.first_row; row < tap.end_row; ++row, rows += columns) {
    for (int64_t x = 0; x < tap.first; ++x) rows[x] = 0;
    for (int64_t x = tap.end; x < columns; ++x) rows[x] = 0;
  }
}

}  // namespace

template <typename T>
void unfold(const ConvolutionShape& shape, const T* image, int64_t channels, int64_t first,
            int64_t end, T* matrix, int64_t pitch) {
  const int64_t columns = shape.columns;
  for (int64_t c = 0; c < channels; ++c, image += shape.pixels())
    for (int64_t i = 0; i < shape.kernel[0]; ++i)
      for (int64_t j = 0; j < shape.kernel[1]; ++j, matrix += pitch) {
        const Tap tap(shape, i, j, first, end);
        T* rows = matrix + (tap.first_row - first) * columns;
        std::fill(matrix, rows, T(0));
        std::fill(matrix + (tap.end_row - first) * columns, matrix + (end - first) * columns, T(0));
        if (is_shifted(shape)) {
          const int64_t begin = tap.line * shape.width + tap.offset;
          const int64_t count = (tap.end_row - tap.first_row) * columns;
          const int64_t skip = std::clamp<int64_t>(-begin, 0, count);
          const int64_t stop = std::clamp(shape.pixels() - begin, skip, count);
          std::copy(image + begin + skip, image + begin + stop, rows + skip);
          clear_edges(tap, columns, rows);
          continue;
        }
        const T* line = image + tap.line * shape.width + tap.offset;
        for (int64_t row = tap.first_row; row < tap.end_row; ++row) {
          for (int64_t x = 0; x < tap.first; ++x) rows[x] = 0;
          for (int64_t x = tap.first; x < tap.end; ++x) rows[x] = line[x * tap.stride];
          for (int64_t x = tap.end; x < columns; ++x) rows[x] = 0;
          rows += columns, line += shape.stride[0] * shape.width;
        }
      }
}

template <typename T>
void unfold_interleaved(const ConvolutionShape& shape, const T* planes, int64_t channels,
                        int64_t images, T* matrix, int64_t pitch, int64_t step) {
  for (int64_t c = 0; c < channels; ++c, planes += shape.pixels() * images)
    for (int64_t i = 0; i < shape.kernel[0]; ++i)
      for (int64_t j = 0; j < shape.kernel[1]; ++j, matrix += pitch) {
        const Tap tap(shape, i, j, 0, shape.rows);
        const T* line = planes + (tap.line * shape.width + tap.offset) * images;
        for (int64_t row = tap.first_row; row < tap.end_row; ++row) {
          for (int64_t x = tap.first; x < tap.end; ++x)
            std::copy(line + x * tap.stride * images, line + (x * tap.stride + 1) * images,
                      matrix + (row * shape.columns + x) * step);
          line += shape.stride[0] * shape.width * images;
        }
      }
}

template <typename T>
void fold(const ConvolutionShape& shape, T* matrix, int64_t pitch, int64_t channels, T* image) {
  const int64_t columns = shape.columns;
  std::fill(image, image + channels * shape.pixels(), T(0));
  for (int64_t c = 0; c < channels; ++c, image += shape.pixels())
    for (int64_t i = 0; i < shape.kernel[0]; ++i)
      for (int64_t j = 0; j < shape.kernel[1]; ++j, matrix += pitch) {
        const Tap tap(shape, i, j, 0, shape.rows);
        T* rows = matrix + tap.first_row * columns;
        if (is_shifted(shape)) {
          clear_edges(tap, columns, rows);
          const int64_t begin = tap.line * shape.width + tap.offset;
          const int64_t count = (tap.end_row - tap.first_row) * columns;
          const int64_t stop = std::min(shape.pixels() - begin, count);
          for (int64_t x = std::max<int64_t>(-begin, 0); x < stop; ++x) image[begin + x] += rows[x];
          continue;
        }
        T* line = image + tap.line * shape.width + tap.offset;
        for (int64_t row = tap.first_row; row < tap.end_row; ++row) {
          for (int64_t x = tap.first; x < tap.end; ++x) line[x * tap.stride] += rows[x];
          rows += columns, line += shape.stride[0] * shape.width;
        }
      }
}

#define INSTANTIATE(T)                                                                             \
  template void unfold(const ConvolutionShape&, const T*, int64_t, int64_t, int64_t, T*, int64_t); \
  template void unfold_interleaved(const ConvolutionShape&, const T*, int64_t, int64_t, T*,        \
                                   int64_t, int64_t);                                              \
  template void fold(const ConvolutionShape&, T*, int64_t, int64_t, T*);
INSTANTIATE(float)
INSTANTIATE(double)

}  // namespace lockstep
