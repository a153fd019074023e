// Convolutions of several images, of which each has a lane of a vector.
//
//     planes    [channel][pixel][image]         of an image or a gradient, as `interleave` writes
//     factors   [channel][tap], or [tap][channel] for gradients, of the rows of a tile
//     sums      [row][position][image]
//
// What element (i, j) of the kernel multiplies for some position, is a vector of the planes. So no
// patches are copied, and the products of the padding are left out: positions that need the same
// elements of the kernel, its taps, are computed together. The sums are those of gemm.h:
//
//     result           sum = 0;  for each (channel, tap):  sum = fma(factor, pixel, sum)
//     input gradient   total = 0;  for each tap:  total += the sum over the outputs
#pragma once

#include <cstdint>

#include "kernels.h"

namespace lockstep {

// A vector of sums, and the vector of a plane that taps are counted from, as offsets in elements.
struct Place {
  int64_t sums, source;
};

// Places that need the same taps. Tap number taps[i] needs the vector at source + offsets[i].
struct TapGroup {
  const int32_t* taps;
  const int64_t* offsets;
  int64_t tap_count;
  const Place* places;
  int64_t place_count;
};

struct DirectProduct {
  DataType type;  // f32 or f64
  int64_t lanes;
  bool adds_taps;         // as for the gradient of the input
  bool adds_zero;         // to the sums, so that -0 becomes 0; only without `adds_taps`
  int64_t height, tiles;  // rows of a tile, and how many tiles are packed
  int64_t first_row, rows, terms, taps;  // the first row of a tile; a term is a channel of planes
  const void* factors;                   // of all tiles
  const void* planes;
  int64_t plane;  // elements from one plane to the next
  void* sums;     // of these rows
  int64_t pitch;  // elements from one row of the sums to the next
  const TapGroup* groups;
  int64_t group_count;
};

// The elements of a tensor, as rows x terms x taps.
struct FactorStrides {
  int64_t row, term;  // those of a tap are side by side
};

struct DirectConvolution {
  // Returns how many lanes a vector for so many images has; 0 if these are too few.
  int64_t (*choose_lanes)(DataType type, int64_t images);
  // Returns the rows of a tile, of so many rows.
  int64_t (*find_height)(int64_t rows);
  // The elements of the packed factors of a tile.
  int64_t (*count_factors)(int64_t terms, int64_t taps);
  // Packs the factors of the tile that begins with `first_row` as tile `number` of all.
  void (*pack_factors)(const DirectProduct& tile, int64_t number, const void* from,
                       const FactorStrides& strides, void* to);
  // Writes a plane of `images` images whose pixels are `stride` elements apart.
  void (*interleave)(DataType type, int64_t lanes, int64_t images, int64_t pixels, const void* from,
                     int64_t stride, void* to);
  // Writes a row of sums as pixels of images that are `stride` elements apart.
  void (*separate)(DataType type, int64_t lanes, int64_t images, int64_t pixels, const void* from,
                   void* to, int64_t stride);
  void (*multiply)(const DirectProduct& product);
};

}  // namespace lockstep
