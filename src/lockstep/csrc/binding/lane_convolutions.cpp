#include "lane_convolutions.h"

#include <algorithm>
#include <memory>
#include <type_traits>
#include <vector>

#include "gemm.h"
#include "portable_kernels.h"
#include "tap_groups.h"

namespace lockstep {
namespace lanes {

constexpr int64_t kPlanes = 1 << 24;  // bytes of the planes of the images of a vector
constexpr int64_t kSums = 1 << 18;    // bytes of the sums that a thread computes at once
constexpr int64_t kLargestKernel = 32;
constexpr int64_t kLeastRows = 6;  // so many sums at once hide how long an addition takes
constexpr int64_t kFewPlaces = 16;
constexpr int64_t kCopied = 1 << 14;  // elements to copy for which a thread is worth starting
constexpr int64_t kLine = 64;         // bytes of a line of the cache
constexpr int64_t kNearPlanes = 5 << 17, kNearFactors = 1 << 19;  // bytes in the L2 cache
constexpr int kSumsScratch = 3, kFactorsScratch = 4;

// What is convolved: images, or gradients of results.
struct Pass {
  bool of_input;
  int64_t terms, pixels;    // channels of the source, and of each its pixels
  int64_t rows, positions;  // of the result
  FactorStrides strides;

  Pass(const ConvolutionShape& shape, bool of_input_)
      : of_input(of_input_),
        terms(of_input ? shape.outputs : shape.channels),
        pixels(of_input ? shape.positions() : shape.pixels()),
        rows(of_input ? shape.channels : shape.outputs),
        positions(of_input ? shape.pixels() : shape.positions()),
        strides{of_input ? shape.taps() : shape.channels * shape.taps(),
                of_input ? shape.channels * shape.taps() : shape.taps()} {}
};

// Memory that begins with a line of the cache.
template <typename T>
class Lines {
 public:
  explicit Lines(int64_t count) : data_(new T[static_cast<size_t>(count) + kLine / sizeof(T)]) {}
  T* get() const {
    const auto address = reinterpret_cast<uintptr_t>(data_.get());
    return data_.get() + (kLine - address % kLine) % kLine / sizeof(T);
  }

 private:
  std::unique_ptr<T[]> data_;
};

static int64_t divide_up(int64_t count, int64_t by) { return (count + by - 1) / by; }

// The elements from one plane to the next: an odd number of lines, so that the planes do not share
// the sets of a cache.
template <typename T>
static int64_t find_plane(int64_t pixels, int64_t lanes) {
  constexpr int64_t line = kLine / sizeof(T);
  return (divide_up(pixels * lanes, line) | 1) * line;
}

template <typename T>
static int64_t convolve_images(const ConvolutionShape& shape, bool of_input, const T* source,
                               const T* weight, T* result, bool adds_zero, int64_t threads) {
  const DirectConvolution& direct = portable_gemm().direct;
  constexpr DataType type = std::is_same_v<T, float> ? DataType::f32 : DataType::f64;
  const Pass pass(shape, of_input);
  const int64_t lanes = direct.choose_lanes(type, shape.images);
  if (lanes == 0 || std::max(shape.kernel[0], shape.kernel[1]) > kLargestKernel ||
      (of_input && pass.rows < kLeastRows))
    return 0;
  const int64_t plane = find_plane<T>(pass.pixels, lanes);
  if (pass.terms * plane * int64_t{sizeof(T)} > kPlanes) return 0;
  const int64_t whole = shape.images / lanes;
  const bool takes_rest = direct.choose_lanes(type, shape.images - whole * lanes) == lanes;
  const int64_t vectors = whole + takes_rest;
  const int64_t images = std::min(vectors * lanes, shape.images);

  DirectProduct product{};
  product.type = type, product.lanes = lanes;
  product.adds_taps = of_input, product.adds_zero = adds_zero;
  product.height = direct.find_height(pass.rows);
  product.rows = pass.rows, product.terms = pass.terms, product.taps = shape.taps();
  product.plane = plane;

  const int64_t tiles = divide_up(pass.rows, product.height);
  const int64_t tile_size = direct.count_factors(pass.terms, shape.taps());
  const auto pack = [&](int64_t number, int64_t place, T* to) {
    DirectProduct tile = product;
    tile.first_row = number * product.height;
    tile.rows = std::min(product.height, pass.rows - tile.first_row);
    direct.pack_factors(tile, place, weight, pass.strides, to);
  };
  // Few positions need the same taps: then two vectors of images are computed together. Chunks of
  // positions are divided further, by rows, if there are more threads.
  const int64_t joint = pass.positions <= kFewPlaces && vectors % 2 == 0 ? 2 : 1;
  const int64_t distance = pass.terms * plane;
  // Where the planes stay in the L2 cache, and the factors would not, each tile is packed when it
  // is needed.
  const bool packs_late = joint * distance * int64_t{sizeof(T)} <= kNearPlanes &&
                          tiles * tile_size * int64_t{sizeof(T)} > kNearFactors;
  product.tiles = packs_late ? 1 : tiles;
  const Lines<T> factors(packs_late ? 0 : tiles * tile_size);
  if (!packs_late)
    run_parallel(tiles, std::max<int64_t>(1, kCopied / tile_size),
                 [&](int64_t number) { pack(number, number, factors.get()); });
  product.factors = factors.get();

  const int64_t rows_at_once = packs_late ? product.height : pass.rows;
  const int64_t place = rows_at_once * lanes * joint * int64_t{sizeof(T)};
  const int64_t chunks = divide_up(pass.positions, std::max<int64_t>(8, kSums / place));
  const int64_t each = divide_up(divide_up(pass.positions, chunks), 8) * 8;
  std::vector<TapGroups> groups;
  for (int64_t first = 0; first < pass.positions; first += each)
    groups.emplace_back(shape, of_input, first, std::min(first + each, pass.positions), lanes,
                        joint, distance);
  const int64_t together = std::min(vectors, threads * joint);  // with planes in memory
  const int64_t per_vector = std::ssize(groups);
  const int64_t parts =
      packs_late ? tiles
                 : std::clamp<int64_t>(divide_up(threads, together / joint * per_vector), 1, tiles);
  const int64_t part_rows = divide_up(tiles, parts) * product.height;
  const int64_t work =
      joint * lanes * pass.positions * pass.rows * pass.terms * shape.taps() / (per_vector * parts);

  const Lines<T> planes(together * distance);
  for (int64_t begin = 0; begin < vectors; begin += together) {
    const int64_t count = std::min(together, vectors - begin);
    const auto first_image = [&](int64_t vector) { return (begin + vector) * lanes; };
    const auto count_images = [&](int64_t vector) {
      return std::min(lanes, images - first_image(vector));
    };
    const auto prepare = [&](int64_t number) {
      const int64_t vector = number / pass.terms, term = number % pass.terms;
      direct.interleave(type, lanes, count_images(vector), pass.pixels,
                        source + (first_image(vector) * pass.terms + term) * pass.pixels,
                        pass.terms * pass.pixels, planes.get() + number * plane);
    };
    const auto compute = [&](int64_t number) {
      const int64_t vector = number / parts / per_vector * joint;
      const TapGroups& chunk = groups[static_cast<size_t>(number / parts % per_vector)];
      const int64_t places = chunk.end - chunk.first;
      DirectProduct part = product;
      part.first_row = number % parts * part_rows;
      part.rows = std::min(part_rows, pass.rows - part.first_row);
      if (part.rows <= 0) return;
      const int64_t first_row = part.first_row;
      if (packs_late) {
        T* const own =
            static_cast<T*>(get_scratch(kFactorsScratch, tile_size * int64_t{sizeof(T)}));
        pack(number % parts, 0, own);
        part.factors = own, part.first_row = 0;
      }
      part.planes = planes.get() + vector * distance;
      part.groups = chunk.groups.data(), part.group_count = std::ssize(chunk.groups);
      part.pitch = find_plane<T>(places * joint, lanes);
      T* const sums =
          static_cast<T*>(get_scratch(kSumsScratch, part.rows * part.pitch * int64_t{sizeof(T)}));
      part.sums = sums;
      direct.multiply(part);
      for (int64_t i = 0; i < joint; ++i)
        for (int64_t row = 0; row < part.rows; ++row) {
          const int64_t number_of_row = first_image(vector + i) * pass.rows + first_row + row;
          direct.separate(type, lanes, count_images(vector + i), places,
                          sums + row * part.pitch + i * places * lanes,
                          result + number_of_row * pass.positions + chunk.first,
                          pass.rows * pass.positions);
        }
    };
    run_parallel(count * pass.terms, std::max<int64_t>(1, kCopied / plane), prepare);
    run_parallel(count / joint * per_vector * parts,
                 std::max<int64_t>(1, kParallelWork / std::max<int64_t>(1, work)), compute);
  }
  return images;
}

}  // namespace lanes

template <typename T>
int64_t convolve_lanes(const ConvolutionShape& shape, const T* input, const T* weight, T* result,
                       bool adds_zero, int64_t threads) {
  return lanes::convolve_images(shape, false, input, weight, result, adds_zero, threads);
}

template <typename T>
int64_t compute_input_gradient_lanes(const ConvolutionShape& shape, const T* gradient,
                                     const T* weight, T* result, int64_t threads) {
  return lanes::convolve_images(shape, true, gradient, weight, result, false, threads);
}

template int64_t convolve_lanes(const ConvolutionShape&, const float*, const float*, float*, bool,
                                int64_t);
template int64_t convolve_lanes(const ConvolutionShape&, const double*, const double*, double*,
                                bool, int64_t);
template int64_t compute_input_gradient_lanes(const ConvolutionShape&, const float*, const float*,
                                              float*, int64_t);
template int64_t compute_input_gradient_lanes(const ConvolutionShape&, const double*, const double*,
                                              double*, int64_t);

}  // namespace lockstep
