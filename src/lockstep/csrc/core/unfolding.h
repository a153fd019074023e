// A convolution as matrix products: patches of images, as the columns of a matrix.
//
//     row (c, i, j), column (y, x) = image[c][y * stride - padding + i * dilation][x ...]
//
// and 0 beyond the edges. The result of a convolution is weight (outputs x patch) times this
// matrix (patch x positions).
#pragma once

#include <cstdint>

namespace lockstep {

struct ConvolutionShape {
  int64_t images, channels, height, width;  // of the input
  int64_t outputs, rows, columns;           // of the result; outputs are its channels
  int64_t kernel[2], stride[2], padding[2], dilation[2];

  int64_t positions() const { return rows * columns; }
  int64_t taps() const { return kernel[0] * kernel[1]; }
  int64_t pixels() const { return height * width; }
  // Whether the matrix of an image is the image.
  bool is_pointwise() const;
};

// The result positions for which element (i, j) of the kernel lies on the image, among the output
// rows from `from` to `to`. Position (row, column) reads the pixel at
//
//     (line + (row - first_row) * stride, column * stride + offset)
struct Tap {
  int64_t stride, offset;      // of pixels in a line
  int64_t first, end;          // columns
  int64_t first_row, end_row;  // rows
  int64_t line;                // of the first of these rows

  Tap(const ConvolutionShape& shape, int64_t i, int64_t j, int64_t from, int64_t to);
};

// Writes the rows of `channels` channels, which begin at `image`, for the output rows from `first`
// to `end`. `pitch` is the number of elements between two rows of the matrix.
template <typename T>
void unfold(const ConvolutionShape& shape, const T* image, int64_t channels, int64_t first,
            int64_t end, T* matrix, int64_t pitch);

// The same for pixels of several images, [channel][pixel][image]: the columns are (y, x, image).
// `pitch` is the number of elements between two rows, and `step` between two positions. What is
// beyond the edges is not written.
template <typename T>
void unfold_interleaved(const ConvolutionShape& shape, const T* planes, int64_t channels,
                        int64_t images, T* matrix, int64_t pitch, int64_t step);

// Writes for each pixel the sum of its elements in such a matrix of all output rows, in the order
// of (i, j). Elements beyond the edges are set to 0.
template <typename T>
void fold(const ConvolutionShape& shape, T* matrix, int64_t pitch, int64_t channels, T* image);

}  // namespace lockstep
