// convolution and convolution_backward, in two dimensions and without groups.
//
//     result           weight (outputs x patch) times patches (patch x positions)
//     weight gradient  gradient (outputs x positions) times patches', image after image
//     input gradient   weight' times gradient, whose elements are added to the pixels
//
// See unfolding.h. The order of a sum is that of the matrices: (channel, i, j) in the result, and
// (image, row, column) in the weight gradient.
#include <ATen/CompositeExplicitAutogradFunctions.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include "gemm.h"
#include "lane_convolutions.h"
#include "portable_kernels.h"
#include "segment_sums.h"
#include "tensors.h"
#include "unfolding.h"

namespace lockstep {

constexpr int64_t kPiece = 1 << 14;   // elements to copy for which a thread is worth starting
constexpr int64_t kColumns = 512;     // of a matrix of patches
constexpr int64_t kMatrix = 1 << 17;  // elements of a matrix, which then stays in the L2 cache
constexpr int64_t kTransposed = 16;   // numbers of each image at once
constexpr int64_t kFewPositions = 64, kFewChannels = 16;
constexpr int64_t kMatrixScratch = 3, kGatheredScratch = 4, kPlanesScratch = 5;

using at::IntArrayRef;
using at::Tensor;

struct Arguments {
  IntArrayRef stride, padding, dilation;
  bool transposed;
  int64_t groups;
};

// Returns the shape, or none if torch has to do it: also for wrong arguments.
static std::optional<ConvolutionShape> find_shape(const Tensor& input, const Tensor& weight,
                                                  const Arguments& arguments) {
  const auto is_covered = [&](const Tensor& tensor) {
    return tensor.dim() == 4 && tensor.numel() && tensor.device().is_cpu() &&
           tensor.layout() == at::kStrided && !tensor.is_neg() &&
           tensor.scalar_type() == input.scalar_type();
  };
  if ((input.scalar_type() != at::kFloat && input.scalar_type() != at::kDouble) ||
      !is_covered(input) || !is_covered(weight) || input.size(1) != weight.size(1) ||
      arguments.transposed || arguments.groups != 1)
    return std::nullopt;
  ConvolutionShape shape{input.size(0), input.size(1), input.size(2), input.size(3),
                         weight.size(0)};
  for (int i = 0; i < 2; ++i) {
    const auto pick = [i](IntArrayRef values) { return values[values.size() == 1 ? 0 : i]; };
    for (const IntArrayRef values : {arguments.stride, arguments.padding, arguments.dilation})
      if (values.size() != 1 && values.size() != 2) return std::nullopt;
    shape.kernel[i] = weight.size(2 + i), shape.stride[i] = pick(arguments.stride);
    shape.padding[i] = pick(arguments.padding), shape.dilation[i] = pick(arguments.dilation);
    if (shape.stride[i] < 1 || shape.padding[i] < 0 || shape.dilation[i] < 1) return std::nullopt;
    const int64_t room =
        input.size(2 + i) + 2 * shape.padding[i] - shape.dilation[i] * (shape.kernel[i] - 1) - 1;
    if (room < 0) return std::nullopt;
    (i ? shape.columns : shape.rows) = room / shape.stride[i] + 1;
  }
  return shape;
}

// How many of some equal tasks a thread takes at least.
static int64_t find_grain(const ConvolutionShape& shape, int64_t tasks) {
  const int64_t work = shape.images * shape.positions() * shape.outputs * shape.channels *
                       shape.taps() / std::max<int64_t>(1, tasks);
  return std::max<int64_t>(1, kParallelWork / std::max<int64_t>(1, work));
}

// The result positions of some images, or some rows of one.
struct Part {
  int64_t image, images, row, end;
  int64_t columns(const ConvolutionShape& shape) const {
    return images * (end - row) * shape.columns;
  }
};

static std::vector<Part> divide(const ConvolutionShape& shape) {
  std::vector<Part> parts;
  const int64_t images = std::max<int64_t>(1, kColumns / shape.positions());
  const int64_t rows = std::max<int64_t>(1, kColumns / shape.columns);
  const int64_t step = images > 1 ? shape.rows : rows;
  for (int64_t image = 0; image < shape.images; image += images)
    for (int64_t row = 0; row < shape.rows; row += step)
      parts.push_back({image, std::min(images, shape.images - image), row,
                       images > 1 ? shape.rows : std::min(row + rows, shape.rows)});
  return parts;
}

template <typename T>
static T* get_scratch(int64_t use, int64_t count) {
  return static_cast<T*>(get_scratch(static_cast<int>(use), count * sizeof(T)));
}

template <typename T>
static constexpr DataType kType = std::is_same_v<T, float> ? DataType::f32 : DataType::f64;

// Computes or continues the sums of a product.
template <typename T>
static void multiply(int64_t m, int64_t n, int64_t k, const Operand& a, const Operand& b,
                     const Operand& sums, bool continues = false, const Gaps& gaps = {}) {
  portable_gemm().multiply({kType<T>, m, n, k, a, b, {}, sums, 1, 0, continues, gaps});
}

// Copies between [image][channel][position] and [channel][image, position].
template <typename T>
static void copy_positions(const ConvolutionShape& shape, const Part& part, T* images, T* matrix,
                           bool gather) {
  const int64_t count = (part.end - part.row) * shape.columns;
  for (int64_t output = 0; output < shape.outputs; ++output)
    for (int64_t image = 0; image < part.images; ++image, matrix += count) {
      T* place = images + ((part.image + image) * shape.outputs + output) * shape.positions() +
                 part.row * shape.columns;
      std::copy_n(gather ? place : matrix, count, gather ? matrix : place);
    }
}

// Returns the gradient of the result as a matrix.
template <typename T>
static Operand gather_outputs(const ConvolutionShape& shape, const Part& part, const T* gradient) {
  const int64_t positions = shape.positions(), columns = part.columns(shape);
  const int64_t first = part.image * shape.outputs * positions + part.row * shape.columns;
  if (part.images == 1) return {gradient + first, positions, 1};
  T* gathered = get_scratch<T>(kGatheredScratch, shape.outputs * columns);
  copy_positions(shape, part, const_cast<T*>(gradient), gathered, true);
  return {gathered, columns, 1};
}

// Returns the patches of the channels from `channel` on, as a matrix.
template <typename T>
static Operand unfold_part(const ConvolutionShape& shape, const Part& part, const T* input,
                           int64_t channel, int64_t channels) {
  const int64_t pixels = shape.pixels(), columns = part.columns(shape);
  const T* first = input + (part.image * shape.channels + channel) * pixels;
  if (shape.is_pointwise() && part.images == 1)
    return {first + part.row * shape.columns, pixels, 1};
  T* matrix = get_scratch<T>(kMatrixScratch, channels * shape.taps() * columns);
  for (int64_t image = 0; image < part.images; ++image)
    unfold(shape, first + image * shape.channels * pixels, channels, part.row, part.end,
           matrix + image * (part.end - part.row) * shape.columns, columns);
  return {matrix, columns, 1};
}

// Transposes `count` numbers of each image, which lie `pitch` apart, to and from [number][image].
template <typename T>
static void interleave(int64_t images, int64_t count, const T* from, int64_t pitch, T* to) {
  for (int64_t first = 0; first < count; first += kTransposed)
    for (int64_t image = 0; image < images; ++image)
      for (int64_t i = first; i < std::min(first + kTransposed, count); ++i)
        to[i * images + image] = from[image * pitch + i];
}

template <typename T>
static void separate(int64_t images, int64_t count, const T* from, T* to, int64_t pitch) {
  for (int64_t first = 0; first < count; first += kTransposed)
    for (int64_t image = 0; image < images; ++image)
      for (int64_t i = first; i < std::min(first + kTransposed, count); ++i)
        to[image * pitch + i] = from[i * images + image];
}

// The bits of the elements of the kernel that lie on the image, for each result position, or of
// these positions for each element.
static std::vector<uint64_t> find_reach(const ConvolutionShape& shape, bool by_tap = false) {
  std::vector<uint64_t> reach(static_cast<size_t>(by_tap ? shape.taps() : shape.positions()));
  for (int64_t tap = 0; tap < shape.taps(); ++tap) {
    const Tap positions(shape, tap / shape.kernel[1], tap % shape.kernel[1], 0, shape.rows);
    for (int64_t row = positions.first_row; row < positions.end_row; ++row)
      for (int64_t column = positions.first; column < positions.end; ++column) {
        const int64_t position = row * shape.columns + column;
        reach[static_cast<size_t>(by_tap ? tap : position)] |= uint64_t{1}
                                                               << (by_tap ? position : tap);
      }
  }
  return reach;
}

// Returns the smallest exponent of a number other than 0, as it is stored, or a negative number if
// one is not finite.
template <typename T>
static int find_exponent(const T* values, int64_t count) {
  using Bits = std::conditional_t<std::is_same_v<T, float>, uint32_t, uint64_t>;
  constexpr Bits infinite = 2 * std::numeric_limits<T>::max_exponent - 1;
  Bits smallest = infinite, largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Bits bits = std::bit_cast<Bits>(values[i]) << 1;
    const Bits exponent = bits >> std::numeric_limits<T>::digits;
    smallest = std::min(smallest, bits ? exponent : infinite);
    largest = std::max(largest, exponent);
  }
  return largest < infinite ? static_cast<int>(smallest) : -2 * static_cast<int>(infinite);
}

// Whether all numbers are finite. It is an addition that overflows into the sign, so that the loop
// needs vectors only.
template <typename T>
static bool are_finite(const T* values, int64_t count) {
  using Bits = std::conditional_t<std::is_same_v<T, float>, uint32_t, uint64_t>;
  constexpr Bits exponent = std::bit_cast<Bits>(std::numeric_limits<T>::infinity());
  constexpr Bits sign = ~(~Bits{0} >> 1);
  Bits overflowed = 0;
  for (int64_t i = 0; i < count; ++i)
    overflowed |= (std::bit_cast<Bits>(values[i]) & exponent) + (sign - exponent);
  return !(overflowed & sign);
}

// Whether leaving out the padding saves much.
static bool has_much_padding(const ConvolutionShape& shape) {
  if (shape.taps() > 64 || shape.positions() > kFewPositions) return false;
  int64_t filled = 0;
  for (const uint64_t taps : find_reach(shape)) filled += __builtin_popcountll(taps);
  return 10 * filled <= 9 * shape.positions() * shape.taps();
}

// Whether there are enough images for the lanes of vectors. The matrix of a pointwise kernel is the
// image, which is faster.
template <typename T>
static bool fills_lanes(const ConvolutionShape& shape) {
  return !shape.is_pointwise() && portable_gemm().direct.choose_lanes(kType<T>, shape.images) > 0;
}

template <typename T>
static void convolve(const ConvolutionShape& shape, const T* input, const T* weight, T* result) {
  const int64_t patch = shape.channels * shape.taps(), positions = shape.positions();
  const bool has_padding = shape.padding[0] || shape.padding[1];
  // The products of the padding are zeros if the weights are finite.
  if (fills_lanes<T>(shape) && (!has_padding || are_finite(weight, shape.outputs * patch))) {
    const int64_t images =
        convolve_lanes(shape, input, weight, result, has_padding, at::get_num_threads());
    if (images == shape.images) return;
    if (images > 0) {
      ConvolutionShape rest = shape;
      rest.images -= images;
      return convolve(rest, input + images * shape.channels * shape.pixels(), weight,
                      result + images * shape.outputs * positions);
    }
  }
  const std::vector<Part> parts = divide(shape);
  const auto tasks = static_cast<int64_t>(parts.size());
  run_parallel(tasks, find_grain(shape, tasks), [&](int64_t number) {
    const Part& part = parts[static_cast<size_t>(number)];
    const int64_t columns = part.columns(shape);
    T* place = result + part.image * shape.outputs * positions + part.row * shape.columns;
    T* gathered =
        part.images > 1 ? get_scratch<T>(kGatheredScratch, shape.outputs * columns) : nullptr;
    const Operand sums = gathered ? Operand{gathered, columns, 1} : Operand{place, positions, 1};
    const int64_t block = std::max<int64_t>(1, kMatrix / (columns * shape.taps()));
    for (int64_t channel = 0; channel < shape.channels; channel += block) {
      const int64_t channels = std::min(block, shape.channels - channel);
      const Operand patches = unfold_part(shape, part, input, channel, channels);
      multiply<T>(shape.outputs, columns, channels * shape.taps(),
                  {weight + channel * shape.taps(), patch, 1}, patches, sums, channel > 0);
    }
    if (gathered) copy_positions(shape, part, result, gathered, false);
  });
  // Zeros have no sign, so that those of the padding may be added or not.
  const int64_t each = shape.outputs * positions;
  if (has_padding)
    run_parallel(shape.images, std::max<int64_t>(1, kPiece / each), [&](int64_t image) {
      for (int64_t i = image * each; i < (image + 1) * each; ++i) result[i] += 0;
    });
}

// Returns how many channels a thread takes at once: about as many each time, and whole vectors.
static int64_t divide_channels(const ConvolutionShape& shape, int64_t tasks, int64_t most) {
  const int64_t threads = std::max<int64_t>(1, at::get_num_threads() / tasks);
  const int64_t even = (shape.channels + threads - 1) / threads;
  const int64_t times = (even - 1) / std::max<int64_t>(1, most) + 1;
  return std::min(((even - 1) / times + 8) / 8 * 8, even);
}

// The same sums without the products of the padding, where no sum is rounded to 0: adding zeros
// would change the sign of -0. The channels are the innermost dimension, so that the columns of a
// vector belong to one element of the kernel.
template <typename T>
static void compute_weight_gradient_without_padding(const ConvolutionShape& shape, int64_t segments,
                                                    const T* gradient, const T* input, T* result) {
  const int64_t positions = shape.positions(), pixels = shape.pixels(), taps = shape.taps();
  const int64_t terms = shape.images * positions;
  const bool is_exact = find_exponent(gradient, shape.outputs * terms) +
                            find_exponent(input, shape.images * shape.channels * pixels) >=
                        std::numeric_limits<T>::max_exponent + std::numeric_limits<T>::digits;
  const std::vector<uint64_t> reach = find_reach(shape, true);
  const int64_t each = shape.images / segments;
  const int64_t together = std::clamp<int64_t>(kColumns / positions, 1, each);
  const int64_t most = std::max(together * positions, shape.outputs);
  const int64_t block = divide_channels(shape, 1, kMatrix / (most * taps));
  const int64_t blocks = (shape.channels + block - 1) / block;
  // [output][image][position]
  const std::unique_ptr<T[]> outputs(new T[shape.outputs * terms]);
  run_parallel(shape.outputs, std::max<int64_t>(1, kPiece / terms), [&](int64_t output) {
    for (int64_t image = 0; image < shape.images; ++image) {
      const T* from = gradient + (image * shape.outputs + output) * positions;
      std::copy(from, from + positions, outputs.get() + output * terms + image * positions);
    }
  });
  run_parallel(blocks, find_grain(shape, blocks), [&](int64_t number) {
    const int64_t channel = number * block, channels = std::min(block, shape.channels - channel);
    const int64_t columns = taps * channels;
    const int64_t size = shape.outputs * columns;
    T* sums = get_scratch<T>(kGatheredScratch, (1 + count_waiting(segments)) * size);
    T* planes = get_scratch<T>(kPlanesScratch, pixels * channels);
    T* matrix = get_scratch<T>(kMatrixScratch, together * positions * columns);
    std::fill(matrix, matrix + together * positions * columns, T(0));
    const auto compute = [&](int64_t segment, T* place, int64_t) {
      const int64_t end = (segment + 1) * each;
      for (int64_t first = segment * each; first < end; first += together) {
        const int64_t images = std::min(together, end - first);
        for (int64_t image = 0; image < images; ++image) {
          interleave(channels, pixels,
                     input + ((first + image) * shape.channels + channel) * pixels, pixels, planes);
          unfold_interleaved(shape, planes, 1, channels, matrix + image * positions * columns,
                             channels, columns);
        }
        multiply<T>(shape.outputs, columns, images * positions,
                    {outputs.get() + first * positions, terms, 1}, {matrix, columns, 1},
                    {place, columns, 1}, first > segment * each,
                    {is_exact ? reach.data() : nullptr, channels, positions});
      }
    };
    sum_segments(segments, shape.outputs, columns, sums, columns, sums + size, compute);
    for (int64_t output = 0; output < shape.outputs; ++output)
      separate(channels, taps, sums + output * columns,
               result + (output * shape.channels + channel) * taps, taps);
  });
}

template <typename T>
static void compute_weight_gradient(const ConvolutionShape& shape, int64_t segments,
                                    const T* gradient, const T* input, T* result) {
  if (has_much_padding(shape) && shape.channels >= kFewChannels)
    return compute_weight_gradient_without_padding(shape, segments, gradient, input, result);
  ConvolutionShape own = shape;
  own.images /= segments;
  const std::vector<Part> parts = divide(own);
  const int64_t patch = shape.channels * shape.taps();
  const int64_t block = divide_channels(shape, 1, kMatrix / (kColumns * shape.taps()));
  const int64_t blocks = (shape.channels + block - 1) / block;
  run_parallel(blocks, find_grain(shape, blocks), [&](int64_t number) {
    const int64_t channel = number * block, channels = std::min(block, shape.channels - channel);
    const int64_t columns = channels * shape.taps();
    const auto compute = [&](int64_t segment, T* place, int64_t pitch) {
      for (Part part : parts) {
        const bool is_first = part.image == 0 && part.row == 0;
        part.image += segment * own.images;
        const Operand patches = unfold_part(shape, part, input, channel, channels);
        multiply<T>(shape.outputs, columns, part.columns(shape),
                    gather_outputs(shape, part, gradient),
                    {patches.data, patches.column_stride, patches.row_stride}, {place, pitch, 1},
                    !is_first);
      }
    };
    T* waiting = get_scratch<T>(kPlanesScratch, count_waiting(segments) * shape.outputs * columns);
    sum_segments(segments, shape.outputs, columns, result + channel * shape.taps(), patch, waiting,
                 compute);
  });
}

template <typename T>
static void compute_input_gradient(const ConvolutionShape& shape, const T* gradient,
                                   const T* weight, T* result) {
  const int64_t positions = shape.positions(), taps = shape.taps();
  const int64_t images =
      fills_lanes<T>(shape)
          ? compute_input_gradient_lanes(shape, gradient, weight, result, at::get_num_threads())
          : 0;
  if (images == shape.images) return;
  if (images > 0) {
    ConvolutionShape rest = shape;
    rest.images -= images;
    return compute_input_gradient(rest, gradient + images * shape.outputs * positions, weight,
                                  result + images * shape.channels * shape.pixels());
  }
  // Images with few positions share a product.
  const int64_t together = std::clamp<int64_t>(kColumns / positions, 1, shape.images);
  const int64_t groups = (shape.images + together - 1) / together;
  const int64_t block = divide_channels(shape, groups, kMatrix / (together * positions * taps));
  const int64_t blocks = (shape.channels + block - 1) / block;
  run_parallel(groups * blocks, find_grain(shape, groups * blocks), [&](int64_t number) {
    const int64_t first = number / blocks * together, channel = number % blocks * block;
    const int64_t channels = std::min(block, shape.channels - channel);
    const Part part{first, std::min(together, shape.images - first), 0, shape.rows};
    const int64_t columns = part.columns(shape), rows = channels * taps;
    T* place = result + (first * shape.channels + channel) * shape.pixels();
    const bool is_direct = shape.is_pointwise() && part.images == 1;
    T* matrix = is_direct ? place : get_scratch<T>(kMatrixScratch, rows * columns);
    multiply<T>(rows, columns, shape.outputs, {weight + channel * taps, 1, shape.channels * taps},
                gather_outputs(shape, part, gradient), {matrix, columns, 1});
    if (is_direct) {
      // As with several images, where products are added to zeros: -0 becomes 0.
      for (int64_t i = 0; i < rows * columns; ++i) place[i] += 0;
      return;
    }
    for (int64_t image = 0; image < part.images; ++image)
      fold(shape, matrix + image * positions, columns, channels,
           place + image * shape.channels * shape.pixels());
  });
}

// Whether torch returns results with the channels last.
static bool has_channels_last(const Tensor& input, const Tensor& weight) {
  return input.suggest_memory_format() == at::MemoryFormat::ChannelsLast ||
         weight.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
}

// Copies a tensor, also one with dimensions of size 1, whose strides fit both formats.
static Tensor with_channels_last(const Tensor& plain) {
  const auto options = plain.options().memory_format(at::MemoryFormat::ChannelsLast);
  const Tensor copied = at::detail::empty_cpu(plain.sizes(), options);
  return copied.copy_(plain);
}

// Whether oneDNN would need instructions that portable bits leave out: without them it takes some
// 100 times as long. These types are computed in float32.
static bool is_short(const Tensor& input, const Tensor& weight) {
  const at::ScalarType type = input.scalar_type();
  return (type == at::kBFloat16 || type == at::kHalf) && weight.scalar_type() == type &&
         input.device().is_cpu() && weight.device().is_cpu() && input.layout() == at::kStrided &&
         weight.layout() == at::kStrided;
}

static Tensor convolution(const Tensor& input, const Tensor& weight,
                          const std::optional<Tensor>& bias, IntArrayRef stride,
                          IntArrayRef padding, IntArrayRef dilation, bool transposed,
                          IntArrayRef output_padding, int64_t groups) {
  const bool has_bias = bias && bias->defined();
  if (is_short(input, weight) && (!has_bias || bias->scalar_type() == input.scalar_type())) {
    const auto wide_bias = has_bias ? std::optional(bias->to(at::kFloat)) : std::nullopt;
    return lockstep::convolution(input.to(at::kFloat), weight.to(at::kFloat), wide_bias, stride,
                                 padding, dilation, transposed, output_padding, groups)
        .to(input.scalar_type());
  }
  const auto shape = find_shape(input, weight, {stride, padding, dilation, transposed, groups});
  if (!shape || (has_bias && (bias->dim() != 1 || bias->size(0) != shape->outputs ||
                              bias->scalar_type() != input.scalar_type()))) {
    const OneThread guard;  // oneDNN may divide sums among threads
    return at::compositeexplicitautograd::convolution(input, weight, bias, stride, padding,
                                                      dilation, transposed, output_padding, groups);
  }
  Tensor result = at::detail::empty_cpu(
      {shape->images, shape->outputs, shape->rows, shape->columns}, input.options());
  const Tensor plain_input = input.contiguous(), plain_weight = weight.contiguous();
  AT_DISPATCH_FLOATING_TYPES(input.scalar_type(), "convolution", [&] {
    convolve(*shape, plain_input.const_data_ptr<scalar_t>(),
             plain_weight.const_data_ptr<scalar_t>(), result.mutable_data_ptr<scalar_t>());
  });
  if (has_bias) result.add_(bias->view({1, -1, 1, 1}));
  return has_channels_last(input, weight) ? with_channels_last(result) : result;
}

// As above, also for the gradient of the result.
static std::optional<ConvolutionShape> find_shape(const Tensor& gradient, const Tensor& input,
                                                  const Tensor& weight,
                                                  const Arguments& arguments) {
  const auto shape = find_shape(input, weight, arguments);
  if (!shape || gradient.scalar_type() != input.scalar_type() || gradient.is_neg() ||
      gradient.sizes() != IntArrayRef({shape->images, shape->outputs, shape->rows, shape->columns}))
    return std::nullopt;
  return shape;
}

static Tensor find_input_gradient(const ConvolutionShape& shape, const Tensor& outputs,
                                  const Tensor& input, const Tensor& weight) {
  Tensor result = at::detail::empty_cpu(input.sizes(), input.options());
  const Tensor plain = weight.contiguous();
  AT_DISPATCH_FLOATING_TYPES(input.scalar_type(), "convolution_backward", [&] {
    compute_input_gradient(shape, outputs.const_data_ptr<scalar_t>(),
                           plain.const_data_ptr<scalar_t>(), result.mutable_data_ptr<scalar_t>());
  });
  return has_channels_last(input, weight) ? with_channels_last(result) : result;
}

// `segments`: the number of micro-batches, whose gradients are added along the tree.
static Tensor find_weight_gradient(const ConvolutionShape& shape, int64_t segments,
                                   const Tensor& outputs, const Tensor& input,
                                   const Tensor& weight) {
  Tensor result = at::detail::empty_cpu(weight.sizes(), weight.options());
  const Tensor plain = input.contiguous();
  AT_DISPATCH_FLOATING_TYPES(input.scalar_type(), "convolution_backward", [&] {
    compute_weight_gradient(shape, segments, outputs.const_data_ptr<scalar_t>(),
                            plain.const_data_ptr<scalar_t>(), result.mutable_data_ptr<scalar_t>());
  });
  // In float64 torch unfolds the images, and reshapes the product of a pointwise kernel.
  const bool is_reshaped = input.scalar_type() == at::kDouble && shape.taps() == 1;
  return has_channels_last(input, weight) && !is_reshaped ? with_channels_last(result) : result;
}

static std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight,
    at::OptionalIntArrayRef bias_sizes, IntArrayRef stride, IntArrayRef padding,
    IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> output_mask) {
  if (is_short(input, weight) && gradient.scalar_type() == input.scalar_type()) {
    const at::ScalarType type = input.scalar_type();
    auto [of_input, of_weight, of_bias] = lockstep::convolution_backward(
        gradient.to(at::kFloat), input.to(at::kFloat), weight.to(at::kFloat), bias_sizes, stride,
        padding, dilation, transposed, output_padding, groups, output_mask);
    const auto narrow = [type](const Tensor& wide) {
      return wide.defined() ? wide.to(type) : wide;
    };
    return {narrow(of_input), narrow(of_weight), narrow(of_bias)};
  }
  const auto shape =
      find_shape(gradient, input, weight, {stride, padding, dilation, transposed, groups});
  if (!shape) {
    const OneThread guard;
    return at::compositeexplicitautograd::convolution_backward(
        gradient, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding,
        groups, output_mask);
  }
  const Tensor outputs = gradient.contiguous();
  Tensor of_input, of_weight, of_bias;
  if (output_mask[0]) of_input = find_input_gradient(*shape, outputs, input, weight);
  if (output_mask[1]) of_weight = find_weight_gradient(*shape, 1, outputs, input, weight);
  if (output_mask[2]) of_bias = outputs.sum({0, 2, 3});
  return {of_input, of_weight, of_bias};
}

std::vector<Tensor> try_convolution_segments(const c10::IValue* arguments, int64_t segments) {
  const Tensor &gradient = arguments[0].toTensor(), &input = arguments[1].toTensor(),
               &weight = arguments[2].toTensor();
  const std::vector<int64_t> stride = arguments[4].toIntVector(),
                             padding = arguments[5].toIntVector(),
                             dilation = arguments[6].toIntVector();
  const auto shape =
      find_shape(gradient, input, weight,
                 {stride, padding, dilation, arguments[7].toBool(), arguments[9].toInt()});
  const c10::List<bool> mask = arguments[10].toBoolList();
  if (!shape) return {};
  const Tensor outputs = gradient.contiguous();
  std::vector<Tensor> results(3);
  if (mask[0]) results[0] = find_input_gradient(*shape, outputs, input, weight);
  if (mask[1]) results[1] = find_weight_gradient(*shape, segments, outputs, input, weight);
  return results;
}

void register_convolutions(torch::Library& library) {
  library.impl("convolution", &convolution);
  library.impl("convolution_backward", &convolution_backward);
}

}  // namespace lockstep
