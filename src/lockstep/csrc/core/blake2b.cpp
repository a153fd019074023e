#include "blake2b.h"

#include <bit>
#include <cstring>

#include "errors.h"

namespace lockstep {

namespace {

constexpr uint64_t kInitial[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b,
                                  0xa54ff53a5f1d36f1, 0x510e527fade682d1, 0x9b05688c2b3e6c1f,
                                  0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

// The order in which a round reads the words of the message; rounds 10 and 11 repeat 0 and 1.
constexpr uint8_t kOrder[10][16] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
                                    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
                                    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
                                    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
                                    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
                                    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
                                    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
                                    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
                                    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

constexpr int kRounds = 12;

// The four words that each of the eight mixings of a round changes: columns, then diagonals.
constexpr uint8_t kMixings[8][4] = {{0, 4, 8, 12},  {1, 5, 9, 13},  {2, 6, 10, 14}, {3, 7, 11, 15},
                                    {0, 5, 10, 15}, {1, 6, 11, 12}, {2, 7, 8, 13},  {3, 4, 9, 14}};

inline void mix(uint64_t& a, uint64_t& b, uint64_t& c, uint64_t& d, uint64_t first,
                uint64_t second) {
  a += b + first;
  d = std::rotr(d ^ a, 32);
  c += d;
  b = std::rotr(b ^ c, 24);
  a += b + second;
  d = std::rotr(d ^ a, 16);
  c += d;
  b = std::rotr(b ^ c, 63);
}

}  // namespace

uint64_t blake2b_64(const void* message, size_t bytes) {
  static_assert(std::endian::native == std::endian::little);
  if (bytes > kBlake2bBlock) throw UsageError("a key has at most 128 bytes");
  uint64_t words[16] = {};
  std::memcpy(words, message, bytes);
  // The parameters of an unkeyed digest of 8 bytes: its length, no key, one tree of depth 1.
  const uint64_t first = kInitial[0] ^ 0x01010008;
  uint64_t state[16] = {first};
  for (int i = 1; i < 8; ++i) state[i] = kInitial[i];
  for (int i = 0; i < 8; ++i) state[8 + i] = kInitial[i];
  state[12] ^= bytes;      // the length of the message
  state[14] = ~state[14];  // this is the last block
  for (int round = 0; round < kRounds; ++round) {
    const uint8_t* order = kOrder[round % 10];
    for (int i = 0; i < 8; ++i) {
      const uint8_t* at = kMixings[i];
      mix(state[at[0]], state[at[1]], state[at[2]], state[at[3]], words[order[2 * i]],
          words[order[2 * i + 1]]);
    }
  }
  return first ^ state[0] ^ state[8];
}

}  // namespace lockstep
